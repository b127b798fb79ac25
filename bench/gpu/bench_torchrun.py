"""A rank is killed under plain torchrun, on GPUs: how long until training goes on, and until it is where it was.

The same model, layout and sizes as tests/gpu/managed.py, whose `outside` and `resume` are unicron's. torchrun ends all
ranks and starts all again; they go on from the last checkpoint (one every few iterations, as torch.save writes it), or
from nothing. Kill at the beginning of iteration 8.

    python bench/gpu/bench_torchrun.py --sizes small 350m --every 5
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common
import torchrun_restart
from unicron.types import Layout


def main() -> None:
    parser = common.parser(__doc__.splitlines()[0], runs=1)
    parser.add_argument("--sizes", nargs="*", default=["small", "350m"])
    parser.add_argument("--every", type=int, default=5, help="iterations from checkpoint to checkpoint; 0: none")
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--limit", type=float, default=75.0, help="seconds for a run")
    options = parser.parse_args()
    layout = Layout(dp=options.dp, micro_batch=2, num_micro_batches=4 * options.dp)
    every = f"every {options.every} iterations" if options.every else "none"
    bench = common.Bench(
        "torchrun after a kill", unit="ms", configuration={"dp": options.dp, "checkpoints": every},
    )  # fmt: skip
    for size in options.sizes:
        begun = time.monotonic()
        try:
            environment = {"UNICRON_DEMO_SIZE": size, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
            runs = [
                torchrun_restart.one(layout, options.every, environment, options.limit) for _ in range(options.runs)
            ]
        except torchrun_restart.DidNotComeBack as problem:
            print(f"{size}: {problem}", flush=True)
            bench.configuration[f"{size} failed"] = str(problem).splitlines()[0]
            continue
        print(f"{size}: {runs}, {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
        bench.add(f"{size}: kill to the next commit", [run.again for run in runs])
        bench.add(f"{size}: kill to the commit of the same iteration", [run.caught_up for run in runs])
        bench.add(f"{size}: lost", [run.lost for run in runs])
        bench.add(f"{size}: a usual iteration", [run.usual for run in runs])
    if bench.rows:
        bench.finish(options)
    sys.exit(len(bench.rows) < 4 * len(options.sizes))


if __name__ == "__main__":
    main()
