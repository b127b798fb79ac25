"""Follows one task on a living cluster, and does to it what its scenario says.

Progress is read from the files the workers write (no load on the coordinator, exact to the
iteration); the coordinator is asked five times a second for incidents and the task's state, and may
be away. Faults are armed as soon as all roles are held, long before their iteration; acts on the
cluster follow the iterations that are seen."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from unicron.demo.results import Tail
from unicron.demo.scenarios import Act, Fault, Scenario

LOOK_S = 0.03  # at the workers' files
ASK_S = 0.2  # the coordinator
TIMEOUT_S = 120.0
TIMEOUT_PER_ITERATION_S = 2.0
END_AHEAD_S = 3.0  # the last iteration is told so long before any rank reaches it
SPREAD_AHEAD = 2  # iterations; a spread fault is armed when training is this close
ARM_AHEAD = 20  # iterations; other faults are armed when training is this close: at once, in most runs
LATE_AT_MOST = 12  # iterations that a node may live beyond the moment at which it is to be started again
SPREAD_MISSED = 5  # iterations after its own; a spread fault that nobody saw by then was armed too late
OVER = ("done", "stopped")


class Cluster(Protocol):
    """What is used of runtime.local_cluster.LocalCluster."""

    nodes: tuple[str, ...]

    def ask(self, verb: str, *, timeout_ms: int = ..., **arguments: Any) -> Any: ...
    def submit(self, job: Any) -> str: ...
    def cancel(self, task: str) -> None: ...
    def agent_pid(self, node: str) -> int: ...
    def wait(self, task: str, timeout_s: float) -> dict[str, Any]: ...
    def wait_for_nodes(self) -> None: ...
    def task(self, task: str) -> dict[str, Any]: ...
    def incidents(self, task: str = ..., after: int = ...) -> list[dict[str, Any]]: ...
    def arm_fault(self, task: str, rank: int, fault: str, point: str, iteration: int, micro_batch: int) -> None: ...
    def is_running(self, daemon: str) -> bool: ...
    def kill_agent(self, node: str) -> None: ...
    def kill_agent_alone(self, node: str) -> None: ...
    def start_agent(self, node: str) -> None: ...
    def drain(self, node: str) -> None: ...
    def undrain(self, node: str) -> None: ...
    def reshape(self, task: str, **layout: int) -> dict[str, Any]: ...
    def kill_coordinator(self) -> None: ...
    def start_coordinator(self) -> None: ...


class Listener(Protocol):
    """Who wants to see it: progress.py."""

    def moved(self, iteration: int, loss: float) -> None: ...
    def workers(self, members: int, waiting: int) -> None: ...
    def happened(self, text: str) -> None: ...
    def incident(self, incident: dict[str, Any]) -> None: ...


class WatchProblem(Exception):
    """The task did not end in its time."""


def failures(incidents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what is only told: a rank that is slow, say, on a machine that is."""
    return [incident for incident in incidents if not incident.get("is_only_told")]


@dataclass
class Seen:
    """What a watch has gathered."""

    view: dict[str, Any] = field(default_factory=dict)  # of the task, newest
    incidents: dict[str, dict[str, Any]] = field(default_factory=dict)
    pids: set[int] = field(default_factory=set)
    replicas: tuple[int, ...] = ()  # newest plan that had any
    iteration: int = -1
    loss: float = 0.0
    marks: list[tuple[int, str]] = field(default_factory=list)  # (iteration, what), for the picture


@dataclass
class _Awaited:
    """A spread fault that is armed and not seen yet."""

    fault: Fault
    incidents: int  # so many there are when it was seen
    until: int  # iteration by which it must have been


class Watch:
    """One task from submit to its end."""

    def __init__(
        self,
        cluster: Cluster,
        task: str,
        folder: Path,
        scenario: Scenario,
        planned: int,
        usual_ms: float,
        listener: Listener,
    ) -> None:
        """planned: iterations of the whole run. usual_ms: of one of them."""
        self._cluster, self._task, self._scenario = cluster, task, scenario
        self._listener, self._planned, self._folder = listener, planned, folder
        self._usual_ms, self._is_told_end = usual_ms, False
        self._tails: dict[Path, Tail] = {}
        self._faults: list[Fault] = list(scenario.faults)
        self._acts: list[Act] = list(scenario.acts)
        self._awaited: _Awaited | None = None
        self._act_due: float | None = None
        self._dp = 0  # that the task shall have; 0: it keeps what it has
        self._homes: dict[int, str] = {}  # replica -> its home when something was first done to that
        self._next_ask = 0.0
        self._running = False
        self.seen = Seen()

    def until_over(self, timeout_s: float | None = None) -> Seen:
        """timeout_s: beside what the iterations take. Raises WatchProblem."""
        deadline = (
            time.monotonic() + (TIMEOUT_S if timeout_s is None else timeout_s) + self._planned * TIMEOUT_PER_ITERATION_S
        )
        while self.seen.view.get("phase") not in OVER:
            if time.monotonic() > deadline:
                view = self.seen.view
                raise WatchProblem(
                    f"{self._task} did not end in its time: iteration {self.seen.iteration}, "
                    f"phase {view.get('phase', 'unknown')} {view.get('why', '')}".rstrip()
                )
            self._look()
            self._maybe_act()
            if time.monotonic() >= self._next_ask:
                self._next_ask = time.monotonic() + ASK_S
                self._ask()
            time.sleep(LOOK_S)
        self._look()
        self._ask()
        return self.seen

    # ---------------------------------------------------------------- eyes

    def _look(self) -> None:
        before = self.seen.iteration
        for path in self._folder.glob("rank_*.jsonl"):
            for line in self._tails.setdefault(path, Tail(path)).read():
                self.seen.pids.add(line["pid"])
                if line["event"] == "iteration" and line["iteration"] > self.seen.iteration:
                    self.seen.iteration, self.seen.loss = line["iteration"], line["loss"]
        if self.seen.iteration > before:
            self._listener.moved(self.seen.iteration, self.seen.loss)

    def _ask(self) -> None:
        """One round of questions; a coordinator that is away is no failure."""
        try:
            view = self._cluster.task(self._task)
            incidents = failures(self._cluster.incidents(self._task))
        except Exception as error:
            if type(error).__name__ != "CoordinatorSilent":
                raise
            return
        self.seen.view = view
        workers = view["workers"]
        self.seen.pids.update(w["pid"] for w in workers if w["pid"])
        self.seen.replicas = tuple(view["replicas"]) or self.seen.replicas
        members = sum(w["is_member"] for w in workers)
        self._listener.workers(members, len(workers) - members)
        width = view["layout"]
        world_size = width["tp"] * width["pp"] * width["dp"]  # lanes are dp indices
        self._running = view["phase"] == "running" and members == world_size
        for incident in incidents:
            self._incident(incident)
        self._maybe_arm()
        self._maybe_reshape(width)
        self._maybe_end()

    def _incident(self, incident: dict[str, Any]) -> None:
        known = self.seen.incidents.get(incident["id"])
        self.seen.incidents[incident["id"]] = incident
        if known is None:
            self.seen.marks.append((max(0, self.seen.iteration + 1), incident["fault"]))
        if known is None or known["outcome"] != incident["outcome"]:
            self._listener.incident(incident)

    # ---------------------------------------------------------------- hands

    def _maybe_arm(self) -> None:
        if not self._running:
            return
        if self._scenario.spread:
            self._arm_next_of_many()
            return
        while self._faults and self._faults[0].iteration <= self.seen.iteration + ARM_AHEAD:
            if not self._arm(self._faults[0], self._faults[0].iteration):
                return
            self._faults.pop(0)

    def _arm_next_of_many(self) -> None:
        """One fault at a time: the next is armed when the one before was seen.

        What is seen here is a look old, so a fault may be armed for an iteration that its rank has left already. Such
        a one never goes off, and is armed once more, for any iteration.
        """
        if self._awaited is not None:
            is_over = len(self.seen.incidents) >= self._awaited.incidents
            if is_over:
                self._awaited = None
            elif self.seen.iteration >= self._awaited.until and self._arm(self._awaited.fault, -1):
                self._awaited.until = self.seen.iteration + SPREAD_MISSED
            return
        if not self._faults or self.seen.iteration < self._faults[0].iteration - SPREAD_AHEAD:
            return
        fault = self._faults[0]
        late = fault.iteration <= self.seen.iteration + 1
        if self._arm(fault, -1 if late else fault.iteration):
            self._faults.pop(0)
            until = max(fault.iteration, self.seen.iteration) + SPREAD_MISSED
            self._awaited = _Awaited(fault, len(self.seen.incidents) + 1, until)

    def _arm(self, fault: Fault, iteration: int) -> bool:
        """Refused while the role is between two holders: the next look tries again."""
        return self._granted(
            self._cluster.arm_fault, self._task, fault.rank, fault.fault, fault.point, iteration, fault.micro_batch
        )

    def _maybe_reshape(self, width: dict[str, int]) -> None:
        """Refused while another change is under way; one that a failure called off is asked for again."""
        if self._dp and self._running and width["dp"] != self._dp:
            self._granted(self._cluster.reshape, self._task, tp=width["tp"], pp=width["pp"], dp=self._dp)

    def _granted(self, ask: Callable[..., Any], *words: Any, **named: Any) -> bool:
        try:
            ask(*words, **named)
        except Exception as error:
            if type(error).__name__ not in ("CoordinatorSilent", "CoordinatorRefused"):
                raise
            return False
        return True

    def _maybe_end(self) -> None:
        """A run that goes on for what takes time need not go on when that is done. All ranks must stop after the same
        iteration, so it is one that none of them has reached.
        """
        wants = self._scenario
        if not wants.extra_s or self._is_told_end or self._faults or self._acts or not self._running:
            return
        if len(self.seen.incidents) < wants.expect.incidents_min:
            return  # what is running is the task as it was before
        if self.seen.view["layout"] != self.seen.view.get("wide", self.seen.view["layout"]):
            return  # what is running is narrower than it shall be
        self._look()
        ahead = 5 + math.ceil(1000 * END_AHEAD_S / self._usual_ms) if self._usual_ms else self._planned
        new = self._folder / "end.new"
        new.write_text(str(max(wants.iterations, self.seen.iteration + ahead)), encoding="utf-8")
        new.rename(self._folder / "end")
        self._is_told_end = True

    def _maybe_act(self) -> None:
        if not self._acts or self.seen.iteration < self._acts[0].after:
            return
        act = self._acts[0]
        if self._is_too_early(act):
            return
        if self._act_due is None:
            self._act_due = time.monotonic() + act.delay_s
        if time.monotonic() < self._act_due:
            return
        self._acts.pop(0)
        self._act_due = None
        words = act.do.replace("_", " ")
        if act.dp:
            self._listener.happened(f"{words} to dp {act.dp}")
            self._dp = act.dp
            if act.fault is not None:
                self._arm(act.fault, act.fault.iteration)
            return
        doing: Callable[..., None] = getattr(self._cluster, act.do)
        if act.node >= 0 or act.replica >= 0:
            node = self._cluster.nodes[act.node] if act.node >= 0 else self._home(act.replica)
            if self._is_there(act.do, node):
                self._listener.happened(f"{node} did not end: nothing to start")
                return
            self._listener.happened(f"{words} of {node}")
            doing(node)
        else:
            self._listener.happened(words)
            doing()
        if act.do.startswith("kill"):
            self.seen.marks.append((self.seen.iteration + 1, words))

    def _is_too_early(self, act: Act) -> bool:
        """Another change of the width is not done yet; or the node that is to come back still lives: what shall end it
        waits for a recovery, maybe."""
        if act.when_dp and self.seen.view.get("layout", {}).get("dp") != act.when_dp:
            return True
        if act.dp:
            return bool(self._dp) and self.seen.view.get("layout", {}).get("dp") != self._dp
        if act.do != "start_agent" or act.node < 0 or self.seen.iteration > act.after + LATE_AT_MOST:
            return False
        is_there = self._is_there(act.do, self._cluster.nodes[act.node])
        if is_there:
            self._act_due = None
        return is_there

    def _home(self, replica: int) -> str:
        """The node of its first rank, the same as long as things are done to it."""
        if replica not in self._homes:
            width = self.seen.view["layout"]
            rank = width["tp"] * replica
            here = [w["node"] for w in self.seen.view["workers"] if w["is_member"] and w["rank"] == rank]
            self._homes[replica] = here[0]
        return self._homes[replica]

    def _is_there(self, act: str, node: str) -> bool:
        """An agent that lives, because what was to end it did not come, is not started."""
        return act == "start_agent" and self._cluster.is_running(node)

    def put_right(self) -> None:
        """Acts that were not reached (the task ended first): the cluster must be whole again."""
        for act in self._acts:
            if act.do == "start_coordinator":
                self._cluster.start_coordinator()
            elif act.do in ("start_agent", "undrain") and (act.node >= 0 or act.replica in self._homes):
                node = self._cluster.nodes[act.node] if act.node >= 0 else self._homes[act.replica]
                if not self._is_there(act.do, node):
                    getattr(self._cluster, act.do)(node)
        self._acts.clear()
