"""The same script under plain torchrun: join() finds no agent and gives an unmanaged session.

    torchrun --nproc-per-node 2 examples/torchrun_same.py

Nothing is healed then, and nothing of unicron runs beside it; layout, data and loss are those of
the arguments of join(). So one script serves both, and what unicron does to a run can be measured.
"""

import minimal

if __name__ == "__main__":
    minimal.main()
