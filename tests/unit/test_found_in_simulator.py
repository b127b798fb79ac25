"""What the swarm found in the simulator itself: alarms of its checkers, and workers that did what no real one does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from unicron.coordinator.journal import Entry, EpochDecided, NodeDeclaredLost, TaskSuspended, TermBegan
from unicron.coordinator.transitions import WorkerPhase
from unicron.healing.record import CommitResult
from unicron.messages import ArenaRequest, EndWorker
from unicron.sim.checkers import Checkers
from unicron.sim.memory import Memory
from unicron.sim.worker import SimWorker
from unicron.types import EpochPlan, Layout, Member, PlanKind


def test_a_simulated_worker_s_arena_for_a_layout_that_was_called_off_is_not_its_state() -> None:
    """Seed 700087: its agent stood still, and granted an arena for another layout when the worker had gone back to the
    present one: it took the empty one for its own, and began from nothing in the middle of a healing. A real one's
    request is answered to who asked, in training/reshard."""
    worker = object.__new__(SimWorker)
    worker.name, worker.task, worker.rank, worker.machine = "n0.w0", "t", 0, None
    worker.memory = mine = Memory(iteration=35)
    worker.goes_over = None
    worker.on_arena(Memory(is_torn=True), False, ArenaRequest("t", "n0.w0", 0, 1, "digest", False, (), 4))
    assert worker.memory is mine and worker.machine is None


def test_where_a_node_was_given_up_for_its_silence_its_processes_may_train_on_until_they_are_told() -> None:
    """Seed 400433: an agent stood still, and all of a task lived on its node. The task went on elsewhere from its
    checkpoint and left; what trained on, on the silent node, was taken for a task that does not leave."""
    said: list[str] = []
    world = SimpleNamespace(violate=said.append, count=said.count, log=lambda *_: None, ghosts=[])
    checkers = world.checkers = Checkers(world)  # type: ignore[arg-type]
    task, life, nobody = checkers.of("t"), ("c", 1), SimpleNamespace(state=None)
    layout, home = Layout(num_micro_batches=2), SimpleNamespace(node="n0", incarnation=1)

    def write(*entries: Entry) -> None:
        for entry in entries:
            checkers.journaled_by(entry, life, nobody)  # type: ignore[arg-type]

    def step(name: str, iteration: int) -> list[str]:
        memory = SimpleNamespace(iteration=iteration, segments=[(0, 1)])
        host = SimpleNamespace(node=name[:2], incarnation=1)
        worker = SimpleNamespace(name=name, rank=0, memory=memory, layout=layout, host=host)
        said.clear()
        task.stepped(worker, CommitResult(iteration, 1.0, 1.0, 0.0, 1.0))  # type: ignore[arg-type]
        return said

    write(TermBegan(1), EpochDecided(EpochPlan("t", 1, PlanKind.START, layout, (0,), (Member(0, "n0", "n0.w0"),))))
    assert not step("n0.w0", 9)
    back = EpochPlan("t", 2, PlanKind.RESTORE, layout, (0,), (Member(0, "n1", "n1.w0"),), restore="ckpt/5")
    write(
        NodeDeclaredLost("n0", 1, "silent for 5000 ms"), EpochDecided(back), TaskSuspended("t", "saved at iteration 5")
    )
    assert not said and not step("n0.w0", 10), "nobody can have told it"
    assert step("n1.w0", 5), "its node hears"
    checkers.obeyed(home, 1, life, EndWorker("t", "n0.w0", "no live worker of a known task"))  # type: ignore[arg-type]
    assert step("n0.w0", 11), "now it knows"


def test_a_guest_that_a_narrower_layout_left_without_a_role_is_on_no_slot_though_nobody_told_it_yet() -> None:
    """Seed 23154: a coordinator journaled the layout and ended, a member died, and the next coordinator started its
    heir while the guest did not know yet that it was to leave."""
    checkers = object.__new__(Checkers)
    checkers.guests = {"n1.w2"}

    def is_guest(role: int | None, phase: WorkerPhase = WorkerPhase.READY, name: str = "n1.w2") -> bool:
        task: Any = SimpleNamespace(role_of=lambda worker: role, guests={})
        worker: Any = SimpleNamespace(name=name, rank=0, node="n1", phase=phase)
        return checkers._is_guest(task, worker)

    assert is_guest(None) and is_guest(0, WorkerPhase.ENDING)
    assert not is_guest(0) and not is_guest(None, name="n1.w0")
