"""Cases of the matrix one after the other in one living task: each is healed before the next is armed.

Every iteration's reduced gradient and state is kept as a digest and compared with an undisturbed run's, so each case
is judged by its own iterations, and whatever a case spoils is found, also when it shows later.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unicron.demo import compare, results
from unicron.demo.matrix_cases import CHECKPOINT_EVERY, EVALUATE_EVERY, Case, node_of
from unicron.demo.runner import Suite
from unicron.demo.scenarios import Expect, Scenario
from unicron.demo.watch import failures
from unicron.runtime.client import CoordinatorRefused
from unicron.types import Layout

LOOK_S = 0.1
READY_S_MAX = 30.0  # until an understudy stands by where the fault will be
SEEN_S_MAX = 30.0  # until an armed fault went off and was healed
AFTER = 2  # iterations after the healed one that belong to the case
ITERATIONS_A_CASE = 8
#: Nothing is broken before it: in the very first everybody computes again (coordinator/plans.py), and what an iteration
#: takes is known from one commit to the next.
FIRST_ITERATION = 3
REPORTED = (
    "fault", "severity", "method", "detect_ms", "decide_ms", "lost_ms", "recompute_ms", "phases_ms", "state_source",
    "micro_batches_recomputed",
)  # fmt: skip


@dataclass
class Tried:
    case: Case
    incidents: list[dict[str, Any]] = field(default_factory=list)
    first: int = 0  # iterations that belong to it
    last: int = 0
    problem: str = ""


class Chain:
    def __init__(
        self, suite: Suite, layout: Layout, cases: Sequence[Case], evaluate_every: int = EVALUATE_EVERY
    ) -> None:
        self._evaluate_every = evaluate_every
        self._suite, self._layout, self._cases = suite, layout, list(cases)
        self._iterations = ITERATIONS_A_CASE * len(cases) + AFTER

    def run(self) -> Iterator[dict[str, Any]]:
        """A verdict for each case. As many tasks as it takes: a run may end before the last case had its turn."""
        reference = self._suite.reference(self._scenario("reference"))
        waiting, attempt = list(enumerate(self._cases)), 0
        while waiting:
            attempt += 1
            run, tried = self._try(f"cases-{attempt}", waiting)
            for one in tried:
                yield self._verdict(one, run, reference)
            waiting = waiting[len(tried) :]
            if not tried:
                for _, case in waiting:
                    yield {"case": case.name, "passed": False, "reasons": ["its task ended before it had a turn"]}
                return

    def _scenario(self, name: str) -> Scenario:
        return Scenario(
            name,
            f"{len(self._cases)} cases, one after the other",
            Expect("healed"),
            iterations=self._iterations,
            checkpoint_every=CHECKPOINT_EVERY,
            evaluate_every=self._evaluate_every,
            window=(),
            digests=True,
        )

    def _try(self, name: str, waiting: list[tuple[int, Case]]) -> tuple[results.Run, list[Tried]]:
        with self._suite.living_task(self._scenario(name)) as (cluster, task, folder):
            eye = _Eye(cluster, task, folder, self._iterations)
            tried: list[Tried] = []
            for turn, case in waiting:
                one = eye.one(case, case.faults(self._layout, turn), self._layout)
                if one is None:
                    break  # the task is over: the rest gets another
                tried.append(one)
                self._suite.say(f"{case.name}: {one.problem or 'healed'}")
                if one.problem:
                    break  # what follows would not be its own
            eye.wait_past(tried[-1].last if tried else 0)
        return results.load(folder), tried

    # ---------------------------------------------------------------- verdict

    def _verdict(self, one: Tried, run: results.Run, reference: results.Run) -> dict[str, Any]:
        again = compare.begun_again(run, self._layout, one.first, one.last)
        reasons = [one.problem] if one.problem else list(self._wrong(one, again, run, reference))
        told = [{name: i.get(name) for name in REPORTED} for i in one.incidents]
        return {
            "case": one.case.name, "iterations": [one.first, one.last], "incidents": told,
            "micro_batches_recomputed": again, "passed": not reasons, "reasons": reasons,
        }  # fmt: skip

    def _wrong(self, one: Tried, again: int, run: results.Run, reference: results.Run) -> Iterator[str]:
        if len(one.incidents) != one.case.incidents():
            yield f"{len(one.incidents)} incidents, must be {one.case.incidents()}"
        for incident in one.incidents:
            if incident["outcome"] != "healed" or incident["iterations_lost"]:
                yield _told(incident)
        allowed = round(one.case.shares_of(self._layout) * self._layout.num_micro_batches / self._layout.num_replicas)
        if again > allowed:
            yield f"{again} micro-batches began again, at most {allowed} may"
        yield from compare.other_digests(run, reference, one.first, min(one.last, self._iterations - 1))


def _told(incident: dict[str, Any]) -> str:
    return (
        f"incident {incident['id']}: {incident['outcome']}, {incident['iterations_lost']} iterations lost; "
        f"{incident['fault']} of {incident['worker']}: {incident['cause']} {incident['text']}"
    )


class _Eye:
    """Looks at the running task, and arms."""

    def __init__(self, cluster: Any, task: str, folder: Path, iterations: int = 0) -> None:
        self._cluster, self._task, self._folder, self._iterations = cluster, task, folder, iterations
        self._known = 0
        self._next = 0  # iteration from which on nothing is judged yet

    def one(self, case: Case, faults: Sequence[Any], layout: Layout) -> Tried | None:
        """None: the task was over before the fault could be armed."""
        nodes = {self._cluster.nodes[node_of(layout, fault.rank)] for fault in faults}
        if not self._await(lambda view: self._is_ready(view, nodes), READY_S_MAX):
            return None if self._is_over() else Tried(case, problem="no understudy stood by in time")
        try:
            for fault in faults:
                self._cluster.arm_fault(self._task, fault.rank, fault.fault, fault.point, -1, fault.micro_batch)
        except CoordinatorRefused as refusal:
            if self._ends():
                return None
            found = failures(self._cluster.incidents(self._task))[self._known :]
            return Tried(case, found, self._next, self._next, f"not armed: {refusal}; {[*map(_told, found)]}")
        wanted = self._known + case.incidents()
        healed = self._await(lambda view: self._is_healed(view, wanted), SEEN_S_MAX)
        incidents = failures(self._cluster.incidents(self._task))[self._known :]
        self._known += len(incidents)
        if (not incidents and self._is_over()) or (self._is_too_late(incidents) and self._ends()):
            return None
        tried = Tried(case, incidents, self._next, self._interrupted(incidents) + AFTER)
        if not healed:
            tried.problem = f"{len(incidents)} incidents, not healed in {SEEN_S_MAX:.0f} s: {self._view()['phase']}"
        self._next = tried.last + 1
        self.wait_past(tried.last)
        return tried

    def _is_too_late(self, incidents: Sequence[dict[str, Any]]) -> bool:
        """The fault went off when the last iteration was over, and nobody needed this worker any more."""
        late = [i for i in incidents if i["outcome"] == "unaffected"]
        return bool(late) and all(incident["iteration"] >= self._iterations - 1 for incident in late)

    def _ends(self) -> bool:
        """Members have finished already, and the others are about to."""
        return self._await(lambda view: view["phase"] in ("done", "stopped"), SEEN_S_MAX)

    def _interrupted(self, incidents: Sequence[dict[str, Any]]) -> int:
        """The last iteration that was. Of connections that broke nobody says which it was: then where it is now."""
        told = [incident["iteration"] for incident in incidents]
        return max([self._next, *told, *([self._view()["iteration"]] if not told or min(told) < 0 else [])])

    def wait_past(self, iteration: int) -> None:
        """Until it is committed, or the task is over."""
        self._await(lambda view: view["iteration"] > iteration, SEEN_S_MAX)

    def _is_ready(self, view: dict[str, Any], nodes: set[str]) -> bool:
        if view["iteration"] < FIRST_ITERATION:
            return False
        standing_by = {w["node"] for w in view["workers"] if not w["is_member"] and w["stage"] == "waiting"}
        return view["phase"] == "running" and not view["open_incidents"] and nodes <= standing_by

    def _is_healed(self, view: dict[str, Any], wanted: int) -> bool:
        outcomes = [incident["outcome"] for incident in failures(self._cluster.incidents(self._task))]
        return len(outcomes) >= wanted and None not in outcomes and view["phase"] in ("running", "done")

    def _is_over(self) -> bool:
        return self._view()["phase"] in ("done", "stopped")

    def _view(self) -> dict[str, Any]:
        return dict(self._cluster.task(self._task))

    def _await(self, is_so: Any, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            view = self._view()
            if is_so(view):
                return True
            if view["phase"] in ("done", "stopped"):
                return False
            time.sleep(LOOK_S)
        return False
