"""A driver of the coordinator's machine for several tasks: workers come up when ordered, and do what they are told."""

from __future__ import annotations

from typing import Any

from machines import Coordinator
from unicron.coordinator import events as on
from unicron.coordinator.actions import Answer
from unicron.coordinator.job import Job
from unicron.coordinator.state import TaskState
from unicron.coordinator.transitions import TaskPhase
from unicron.messages import FromWorker, Healed, MoveReady, Reply, Saved, WorkerLost, WorkerStatus, WorkerUp
from unicron.types import Layout, Stage


class Cluster(Coordinator):
    """Several tasks: workers come up when they are ordered, unless told otherwise."""

    def __init__(self, nodes: int = 2, slots: int = 2) -> None:
        super().__init__()
        for index in range(nodes):
            self.hello(f"n{index}", slots=slots)

    def run(self, name: str, dp: int, **fields: Any) -> Reply:
        fields = {"checkpoint_dir": "ckpt", "replicas_min": 1, "measured": False, **fields}
        layout = fields.pop("layout", Layout(dp=dp, num_micro_batches=8))
        return self.ask(on.TaskSubmitted("r", Job(name, ("train.py",), layout, **fields)))

    def ask(self, event: on.Event) -> Reply:
        self.feed(event)
        replies = [a.reply for a in self.actions if isinstance(a, Answer)]
        self.bring_up()
        return replies[0]

    def tasks(self) -> dict[str, TaskState]:
        return self.machine.state.tasks

    def bring_up(self) -> None:
        """Ordered workers get ready, ended ones die, healings are accounted for, until nothing is left to do."""
        for _ in range(20):
            before = len(self.journal)
            for task in list(self.tasks().values()):
                for worker in list(task.workers.values()):
                    if worker.phase.value == "ending" or task.phase is TaskPhase.STOPPING:
                        self.say_lost(task, worker.name)
                    elif worker.phase.value == "started":
                        self.say_up(task, worker.name)
                self.say_moved(task)
                if task.phase is TaskPhase.HEALING and task.plan is not None:
                    for member in task.plan.members:
                        self.say_healed(task, member.worker)
            if len(self.journal) == before:
                return

    def say_moved(self, task: TaskState) -> None:
        """Everybody prepared a move that was announced; then its joiners have their state."""
        move = task.moving
        if move is None or task.plan is None:
            return
        for phase in ("prepared", "moved"):
            joiners = tuple(m.worker for m in move.plan.members if m.rank in move.plan.heirs)
            for member in (*task.plan.members, *move.plan.members):
                if phase == "prepared" or member.rank in move.plan.heirs:
                    body = MoveReady(member.worker, member.rank, move.plan.epoch, phase, 6, joiners)
                    self.feed(on.AgentMessage(member.node, FromWorker(member.node, task.name, body, 1)))

    def say_up(self, task: TaskState, name: str) -> None:
        worker = task.workers[name]
        status = WorkerStatus(
            task.name, name, worker.incarnation, 100, worker.rank, worker.purpose != "member", True, task.epoch,
            Stage.IDLE, 0,
        )  # fmt: skip
        self.feed(on.AgentMessage(worker.node, WorkerUp(worker.node, status)))

    def say_lost(self, task: TaskState, name: str) -> None:
        worker = task.workers[name]
        lost = WorkerLost(
            worker.node, task.name, name, worker.incarnation, worker.rank, "process", "ended", "", Stage.IDLE, 0, 0,
            0, 1, "",
        )  # fmt: skip
        self.feed(on.AgentMessage(worker.node, lost))

    def say_healed(self, task: TaskState, name: str) -> None:
        worker = task.workers.get(name)
        if worker is None or worker.rank not in task.awaiting:
            return
        body = Healed(name, worker.rank, task.epoch, 6, 5, 300.0, 100.0, 1, (), 1.0, 1, 1, "none_needed", 0, {})
        self.feed(on.AgentMessage(worker.node, FromWorker(worker.node, task.name, body, 1)))

    def say_saved(self, name: str, iteration: int) -> None:
        task = self.tasks()[name]
        assert task.plan is not None
        member = task.plan.members[0]
        body = Saved(member.worker, member.rank, iteration, f"ckpt/{iteration}", task.epoch, final=True)
        self.feed(on.AgentMessage(member.node, FromWorker(member.node, name, body, 1)))
        self.bring_up()

    def lose(self, node: str) -> None:
        self.disconnected(node)
        self.probed(node, "gone")
        self.bring_up()

    def widths(self) -> dict[str, int]:
        """As decided."""
        return {name: len(roles) for name, roles in self.machine.state.allocation.targets.items()}

    def placed(self) -> dict[str, int]:
        """As it is."""
        return {name: len(task.placement) for name, task in self.tasks().items() if task.placement and not task.is_over}
