"""Slow ranks, stages and links become INFO incidents: who, by how much, since when; nothing is ended for them."""

from __future__ import annotations

import itertools
import random

from machines import Coordinator, running
from unicron.coordinator import events as on
from unicron.coordinator.incident import Incident
from unicron.messages import AgentHeartbeat, EndWorker, PaceSample, WorkerPace
from unicron.types import Layout, Outcome, Severity

COMPUTE_MS = 50.0


class Paced:
    """A running task whose members report every iteration. slow: rank -> factor."""

    def __init__(self, layout: Layout, nodes: int, slots: int) -> None:
        self.driver: Coordinator = running(layout, nodes=nodes, slots=slots)
        self.layout, self.iteration = layout, 0
        self.random = random.Random(7)
        self.sequence = itertools.count(1)

    def run(self, iterations: int, slow: dict[int, float] | None = None, link: dict[int, float] | None = None) -> None:
        """link: rank -> ms that its data-parallel group takes by itself (2 otherwise)."""
        plan = self.driver.task.plan
        assert plan is not None
        for _ in range(iterations):
            self.iteration += 1
            took = {r: COMPUTE_MS * (slow or {}).get(r, 1.0) * self.random.lognormvariate(0, 0.02) for r in plan.ranks}
            for node in sorted({m.node for m in plan.members}):
                paces = []
                for member in (m for m in plan.members if m.node == node):
                    own_ms = (link or {}).get(member.rank, 2.0) * self.random.lognormvariate(0, 0.05)
                    slowest = max(took[rank] for rank in self.peers(member.rank))
                    waits = (0.0, 0.0, slowest - took[member.rank] + own_ms, 0.0)
                    sample = PaceSample(self.iteration, took[member.rank], waits)
                    paces.append(WorkerPace(member.worker, member.rank, (sample,)))
                beat = AgentHeartbeat(node, 1, next(self.sequence), (), tuple(paces))
                self.driver.feed(on.AgentMessage(node, beat), after_ms=200.0)
                assert not self.driver.sent(EndWorker)

    def peers(self, rank: int) -> list[int]:
        """Its data-parallel group."""
        tp, _, pp = self.layout.coords(rank)
        return [self.layout.rank_of(tp, dp, pp) for dp in range(self.layout.dp)]

    @property
    def told(self) -> list[Incident]:
        return list(self.driver.machine.state.incidents.values())


def test_a_straggler_is_named_within_twenty_iterations() -> None:
    """Ten percent, while everybody's iteration takes as long as its own."""
    paced = Paced(Layout(dp=4, num_micro_batches=8), nodes=4, slots=1)
    paced.run(60)
    assert not paced.told
    paced.run(20, slow={2: 1.1})
    (incident,) = paced.told
    assert (incident.fault, incident.severity, incident.rank) == ("slow", Severity.INFO, 2)
    assert incident.outcome is Outcome.UNAFFECTED
    assert abs(incident.iteration - 61) <= 3, "since when"
    assert "rank 2 computes 1" in incident.cause or "rank 2 computes 9 %" in incident.cause
    plan = paced.driver.task.plan
    assert plan is not None and incident.node == plan.members[2].node


def test_one_that_comes_and_goes_stays_one_incident() -> None:
    paced = Paced(Layout(dp=4, num_micro_batches=8), nodes=4, slots=1)
    for _ in range(2):
        paced.run(60)
        paced.run(40, slow={2: 1.2})
    paced.run(60)
    (incident,) = paced.told
    words = [text.partition(":")[0] for _, text in incident.timeline]
    assert [w.split()[0] for w in words] == ["rank", "rank", "again", "rank"]
    assert "is as fast as it was" in incident.timeline[-1][1]


def test_a_slow_stage_is_no_slow_rank() -> None:
    layout = Layout(pp=2, dp=2, num_micro_batches=8)
    paced = Paced(layout, nodes=2, slots=2)
    paced.run(60)
    second = [rank for rank in range(4) if layout.coords(rank)[2] == 1]
    paced.run(40, slow=dict.fromkeys(second, 1.2))
    (incident,) = paced.told
    assert incident.rank == -1 and "stage 1 computes" in incident.cause


def test_a_slow_link_is_named_by_its_ranks() -> None:
    layout = Layout(tp=2, dp=2, num_micro_batches=8)
    paced = Paced(layout, nodes=2, slots=2)
    paced.run(60)
    paced.run(40, link={1: 6.0, 3: 6.0})
    (incident,) = paced.told
    assert "communication in the dp group of ranks 1, 3 takes" in incident.cause


def test_what_slows_everybody_is_a_drift() -> None:
    paced = Paced(Layout(dp=2, num_micro_batches=4), nodes=2, slots=1)
    paced.run(750)
    paced.run(120, slow={0: 1.25, 1: 1.25})
    (incident,) = paced.told
    assert "all ranks compute 2" in incident.cause and "longer than they did" in incident.cause


def test_an_heir_is_no_straggler_for_what_its_predecessor_was() -> None:
    paced = Paced(Layout(dp=4, num_micro_batches=8), nodes=4, slots=1)
    paced.run(60)
    paced.run(20, slow={2: 1.1})
    driver = paced.driver
    plan = driver.task.plan
    assert plan is not None and len(paced.told) == 1
    driver.lost(plan.members[2].worker, "signal 9")
    driver.all_healed()
    paced.run(30)
    assert [incident.fault for incident in paced.told] == ["slow", "worker lost"]
