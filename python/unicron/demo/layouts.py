"""One task goes through five layouts in one run, in memory: tp, pp and dp change between two iterations.

Each move must leave the digest of every global tensor as it was; there is no checkpoint to read; and the loss must be
as near to those of undisturbed runs at the five layouts as these are to each other. With --kill a worker dies in the
middle of the first move, which is then called off, healed in the old layout, and asked for again.

    python -m unicron.demo.layouts --json
    python -m unicron.demo.layouts --optimizer distributed --bf16
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from unicron.coordinator.job import Job
from unicron.demo import results
from unicron.demo.runner import IMPORTS, MICRO_BATCH, SCRIPT
from unicron.demo.variant import Variant
from unicron.runtime.client import CoordinatorSilent
from unicron.runtime.local_cluster import OVER, ClusterProblem, LocalCluster
from unicron.types import Layout

WAY = ((1, 1, 2), (2, 1, 1), (1, 2, 2), (2, 1, 2), (1, 1, 4))
MICRO_BATCHES = 8
SLOTS = 2  # of a node
MOVE_S_MAX = 240.0
RUN_S_MAX = 900.0
LOOK_S = 0.05
ENDLESS = 100_000  # iterations of a run that is ended when it has been everywhere
TAIL = 5  # iterations whose mean loss is compared


class Problem(Exception):
    """The run did not do it; one line."""


def layout_of(tp: int, pp: int, dp: int, *, sharded: bool, instances: int = 1) -> Layout:
    """instances: of the optimizer, as many of them as dp divides into."""
    return Layout(
        tp=tp, pp=pp, dp=dp, micro_batch=MICRO_BATCH, num_micro_batches=MICRO_BATCHES, sharded=sharded,
        instances=math.gcd(instances, dp),
    )  # fmt: skip


class Course:
    """Runs of one script on one living cluster."""

    def __init__(self, options: argparse.Namespace, say: Callable[[str], None]) -> None:
        self._folder: Path = options.folder
        self._variant = Variant(bf16=options.bf16)
        self._sharded = options.optimizer == "distributed"
        self.layouts = [layout_of(*sizes, sharded=self._sharded, instances=options.instances) for sizes in options.way]
        self._leg, self._kill, self._say = options.leg, options.kill, say
        nodes = -(-max(layout.world_size for layout in self.layouts) // SLOTS)
        self._cluster = LocalCluster(
            nodes, SLOTS, understudies=1, imports=IMPORTS, log_dir=(self._folder / "logs" / "cluster").resolve(),
            owner="unicron.demo.layouts",
        )  # fmt: skip

    def __enter__(self) -> Course:
        self._cluster.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.stop()

    # ------------------------------------------------------------ runs

    def _submit(self, name: str, layout: Layout, iterations: int, layouts: list[Layout]) -> tuple[str, Path]:
        folder = self._folder / "runs" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        arguments = ["--iterations", str(iterations), "--results", str(folder.resolve()), *self._variant.arguments()]
        job = Job(
            name=name, command=(sys.executable, *SCRIPT, *arguments), layout=layout, layouts=tuple(layouts),
            cwd=os.getcwd(), log_dir=str((self._folder / "logs").resolve()), stopped_grace_ms=0, understudies=1,
        )  # fmt: skip
        return self._cluster.submit(job), folder

    def undisturbed(self, layout: Layout, iterations: int) -> results.Run:
        name = f"at-{layout.tp}-{layout.pp}-{layout.dp}"
        task, folder = self._submit(name, layout, iterations, [])
        view = self._cluster.wait(task, RUN_S_MAX)
        if view["phase"] != "done":
            raise Problem(f"the undisturbed run {name} did not finish: {view['cause']}")
        return results.load(folder)

    def moving(self) -> tuple[results.Run, dict[str, Any]]:
        """(records, the task's view) of the run that goes through all layouts."""
        task, folder = self._submit("moving", self.layouts[0], ENDLESS, self.layouts)
        self._wait_for(task, self._leg, self.layouts[0])
        if self._kill:
            self._call_off(task, self.layouts[1])
        for layout in self.layouts[1:]:
            self._go_over(task, layout)
        view = self._cluster.task(task)
        self._cluster.cancel(task)
        self._cluster.wait(task, MOVE_S_MAX)
        return results.load(folder), view

    def _go_over(self, task: str, layout: Layout) -> None:
        begun = time.monotonic()
        asked = self._cluster.reshape(task, tp=layout.tp, pp=layout.pp, dp=layout.dp)
        view = self._wait_for(task, 0, layout)
        move = view["layout_changes"][-1]
        self._say(
            f"{move['from']} -> {move['to']} after iteration {move['iteration'] - 1}: held {move['held_s']:.2f} s "
            f"(estimated {asked['estimated_s']:.2f}), {time.monotonic() - begun:.1f} s since it was asked for; "
            f"{move['bytes_own']} bytes stayed, {move['bytes_node']} on the node, {move['bytes_cross']} crossed"
        )
        self._wait_for(task, move["iteration"] + self._leg, layout)

    def _call_off(self, task: str, layout: Layout) -> None:
        """Rank 0 dies when it has fetched its part of the new layout."""
        self._cluster.arm_fault(task, 0, "kill", "layout", -1, 1)
        self._cluster.reshape(task, tp=layout.tp, pp=layout.pp, dp=layout.dp)
        view = self._until(task, lambda v: bool(v["layout_change_refused"]), "the kill to call the move off")
        self._say(f"a kill in the move: {view['layout_change_refused']}")
        self._wait_for(task, view["iteration"] + 2, self.layouts[0])

    def _wait_for(self, task: str, iteration: int, layout: Layout) -> dict[str, Any]:
        """Until it trains in this layout and has come so far."""
        sizes = (layout.tp, layout.pp, layout.dp)

        def there(view: dict[str, Any]) -> bool:
            now = tuple(view["layout"][name] for name in ("tp", "pp", "dp"))
            return now == sizes and view["phase"] == "running" and view["iteration"] >= iteration

        return self._until(task, there, f"iteration {iteration} at {sizes}")

    def _until(self, task: str, good: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        deadline = time.monotonic() + MOVE_S_MAX
        view: dict[str, Any] = {}
        while True:
            with contextlib.suppress(CoordinatorSilent):  # a machine that others keep busy
                view = self._cluster.task(task)
            if view and good(view):
                return view
            refused = "" if self._kill or not view else view["layout_change_refused"]
            if refused or time.monotonic() > deadline or (view and view["phase"] in OVER):
                where = f"{view['phase']} at {view['iteration']}" if view else "no answer"
                raise Problem(f"waited for {what}: {where}, {refused or view.get('cause', '')}")
            time.sleep(LOOK_S)

    def incidents(self, task: str = "moving") -> list[dict[str, Any]]:
        return self._cluster.incidents(task)


# ------------------------------------------------------------ the verdict


def judged(
    run: results.Run, view: dict[str, Any], references: dict[str, results.Run], way: list[Layout]
) -> dict[str, Any]:
    """The JSON object. The loss counts as that of the runs when it is no farther from their mean than they are."""
    last = max(run.losses)
    ends = {name: _tail(reference, last) for name, reference in references.items()}
    mean, own = statistics.fmean(ends.values()), _tail(run, last)
    spread = max(abs(end - mean) for end in ends.values())
    moves = view["layout_changes"]
    reasons = [*run.disagreements]
    if len(moves) != len(way) - 1:
        reasons.append(f"{len(moves)} moves instead of {len(way) - 1}")
    if sorted(run.losses) != list(range(last + 1)):
        reasons.append("iterations are missing")
    if abs(own - mean) > spread:
        reasons.append(f"the loss {own:.6f} is farther from the mean {mean:.6f} of the undisturbed runs than they are")
    first = next(iter(references.values()))
    nearest = {i: abs(run.losses[i] - first.losses[i]) for i in sorted(run.losses)}
    after = [nearest.get(move["iteration"]) for move in moves]  # the first loss in each new layout
    return {
        "passed": not reasons, "reasons": reasons, "iterations": last + 1, "moves": moves,
        "loss": {"last": own, "of_undisturbed": ends, "mean": mean, "spread": spread},
        "difference_to_first_layout": {"at_last": nearest[last], "max": max(nearest.values()), "after_moves": after},
        "checkpoints_read": 0 if view["checkpoint"] is None else None,
        "layouts": [msgspec.structs.asdict(layout) for layout in way],
    }  # fmt: skip


def _tail(run: results.Run, last: int) -> float:
    return statistics.fmean(run.losses[i] for i in range(max(0, last - TAIL + 1), last + 1))


def main() -> int:
    options = parse()
    stream = sys.stderr if options.json else sys.stdout

    def say(text: str) -> None:
        print(text, file=stream, flush=True)

    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        with Course(options, say) as course:
            run, view = course.moving()
            told = course.incidents()
            say(f"{max(run.losses) + 1} iterations in {len(course.layouts)} layouts; now the undisturbed runs")
            references = {
                f"{layout.tp},{layout.pp},{layout.dp}": course.undisturbed(layout, max(run.losses) + 1)
                for layout in course.layouts
            }
    except (Problem, ClusterProblem) as problem:
        print(f"layouts: {problem}; logs: {options.folder / 'logs'}", file=sys.stderr)
        return 1
    result = judged(run, view, references, course.layouts)
    result["incidents"] = [[i["fault"], i["severity"], i["outcome"]] for i in told]
    result["optimizer"], result["bf16"] = options.optimizer, options.bf16
    if options.json:
        print(json.dumps(result))
    say("passed" if result["passed"] else f"not passed: {'; '.join(result['reasons'])}")
    return 0 if result["passed"] else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--way", type=_way, default=WAY, help="layouts in order, e.g. 1,1,2:2,1,1")
    parser.add_argument("--optimizer", choices=("plain", "distributed"), default="plain")
    parser.add_argument("--instances", type=int, default=1, help="of the distributed optimizer, where dp divides")
    parser.add_argument("--bf16", action="store_true", help="parameters in bf16, main state in fp32")
    parser.add_argument("--leg", type=int, default=6, help="iterations in each layout")
    parser.add_argument("--kill", action="store_true", help="a worker dies in the middle of the first move")
    parser.add_argument("--folder", type=Path, default=Path("unicron-demo/layouts"))
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout; progress goes to stderr")
    return parser.parse_args()


def _way(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, one.split(","))) for one in text.split(":"))


if __name__ == "__main__":
    sys.exit(main())
