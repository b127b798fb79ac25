"""Twelve communicators, a dead peer and one hung collective: when is the stream free, when is all of it gone?

Each run: two processes on two GPUs make twelve communicators; one process dies; the other ends all of them at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
import common
from gpu_roles import role

NUM_GROUPS = 12


def one_run() -> dict[str, Any]:
    with (
        role("rank_of_twelve", rank=0, num_groups=NUM_GROUPS, die=False) as survivor,
        role("rank_of_twelve", rank=1, num_groups=NUM_GROUPS, die=True) as victim,
    ):
        for _ in range(NUM_GROUPS):
            identity = survivor.line.receive(90)[0]
            victim.line.receive(90)
            for each in (survivor, victim):
                each.line.send(identity)
        for each in (survivor, victim):
            each.line.receive(90)
        victim.line.send({})
        victim.wait_gone(30)
        survivor.line.send({})
        return survivor.line.receive(90)[0]


def main() -> None:
    options = common.parser(__doc__.splitlines()[0], runs=3).parse_args()
    runs = [one_run() for _ in range(options.runs)]
    bench = common.Bench(
        "ending communicators", unit="ms",
        configuration={"communicators": NUM_GROUPS, "nccl": runs[0]["nccl"]},
    )  # fmt: skip
    bench.add("hung stream free", [ms for run in runs for ms in run["stream_free_ms"]])
    bench.add("all ended", [run["all_ms"] for run in runs])
    bench.add("each one's ending", [ms for run in runs for _, ms in run["ending_ms"]])
    bench.add("made, the first of a process", [run["made_ms"][0] for run in runs])
    bench.add("made, a later one", [ms for run in runs for ms in run["made_ms"][1:]])
    for name, words in (("split", "split"), ("first", "split, first all-reduce"), ("second", "second all-reduce")):
        bench.add(words, [run["by_difference"][name] for run in runs])
    bench.finish(options)


if __name__ == "__main__":
    main()
