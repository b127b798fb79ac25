"""The deterministic simulator: the pure machines under virtual time, faults and checkers (run.py). No I/O."""
