"""CPU ms of the coordinator's machine for clusters of 8 to 8,192 nodes: a start, a dead worker, a drained node, a move.

The real machine with its journal entries, one process, no network: agents and workers are answered for here. A node has
--slots slots, all of one task of one role a slot; one node is free. Said at a switch counts from the moment at which
every participant has its part (phase 1 is over) until the plan is published; no connection is made then, because the
groups of the announced plan stand since phase 1 (training/moving.py).

    python bench/bench_scale.py --nodes 8 64 512 4096 --json
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

import common
from unicron.coordinator import events as on
from unicron.coordinator.actions import Action, SendAgent, WriteJournal
from unicron.coordinator.job import Job
from unicron.coordinator.journal import encode_entry
from unicron.coordinator.machine import CoordinatorMachine
from unicron.coordinator.state import Purpose, TaskState, WorkerState
from unicron.coordinator.transitions import TaskPhase
from unicron.messages import (
    AgentHeartbeat,
    AgentHello,
    FromWorker,
    Healed,
    MoveReady,
    MoveRoles,
    PublishEpoch,
    WorkerLost,
    WorkerStatus,
    WorkerUp,
    encode,
)
from unicron.types import Layout, Stage

TASK = "task"
BEATS = 1000


class Cluster:
    """The machine, and everybody else. spent_ms: of CPU, in its steps since the last look."""

    def __init__(self, nodes: int, slots: int) -> None:
        self.machine = CoordinatorMachine(seed=1)
        self.now_ms, self.spent_ms = 0.0, 0.0
        self.said: list[Action] = []
        self.num_slots = slots
        self.feed(on.Started())
        for index in range(nodes + 1):
            self.join(f"n{index}")

    @property
    def task(self) -> TaskState:
        return self.machine.state.tasks[TASK]

    def feed(self, event: on.Event) -> None:
        self.now_ms += 0.01
        began = time.process_time()
        actions = self.machine.step(event, self.now_ms)
        for action in actions:  # as the process does before it carries them out
            if isinstance(action, WriteJournal):
                encode_entry(action.entry)
        self.spent_ms += (time.process_time() - began) * 1000
        self.said += actions

    def hear(self, node: str, message: Any) -> None:
        self.feed(on.AgentMessage(node, message))

    def tell(self, worker: WorkerState, body: Any) -> None:
        self.hear(worker.node, FromWorker(worker.node, TASK, body, 1))

    def join(self, node: str) -> None:
        self.hear(node, AgentHello(node, 1, self.num_slots, 1, f"tcp://{node}:7000", "key"))

    def take(self) -> tuple[float, list[Action]]:
        found = self.spent_ms, self.said
        self.spent_ms, self.said = 0.0, []
        return found

    def all_up(self) -> None:
        for worker in [w for w in self.task.workers.values() if w.phase.value == "started"]:
            status = WorkerStatus(
                TASK, worker.name, worker.incarnation, 100, worker.rank, worker.purpose is not Purpose.MEMBER, True,
                self.task.epoch, Stage.IDLE, 0,
            )  # fmt: skip
            self.hear(worker.node, WorkerUp(worker.node, status))

    def heal(self) -> None:
        """Every member accounts for its healing, until the task runs."""
        plan = self.task.plan
        assert plan is not None
        for member in plan.members:
            if self.task.phase is not TaskPhase.HEALING:
                break
            healed = Healed(
                member.worker, member.rank, plan.epoch, 10, 9, 1.0, 1.0, 1, (), 0.0, 0, 1, "none_needed", 0, {}
            )
            self.tell(self.task.workers[member.worker], healed)
        if self.task.phase is not TaskPhase.RUNNING:
            raise SystemExit(f"the task is {self.task.phase}")

    def lose(self, worker: WorkerState) -> None:
        self.hear(
            worker.node,
            WorkerLost(
                worker.node, TASK, worker.name, worker.incarnation, worker.rank, "process", "signal 9", "",
                Stage.COMPUTE, 5, 1, 1, 1, "",
            ),
        )  # fmt: skip

    def holder(self, rank: int) -> WorkerState:
        found = self.task.holder(rank)
        assert found is not None
        return found

    def exits(self) -> None:
        for worker in [w for w in self.task.workers.values() if w.phase.value == "ending"]:
            self.lose(worker)


def measure(nodes: int, slots: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    cluster = Cluster(nodes, slots)
    found["join, a node"] = cluster.take()[0] / (nodes + 1)
    layout = Layout(dp=nodes * slots, num_micro_batches=nodes * slots)
    job = Job(TASK, ("train.py",), layout, replicas_min=nodes * slots, checkpoint_dir="/checkpoints")
    cluster.feed(on.TaskSubmitted("r", job))
    found["start: order"] = cluster.take()[0]
    cluster.all_up()
    found["start: all get up, a worker"] = cluster.take()[0] / (nodes * (slots + 1))
    for _ in range(BEATS):
        cluster.hear("n0", AgentHeartbeat("n0", 1, 1))
    found["heartbeat"] = cluster.take()[0] / BEATS
    cluster.lose(cluster.holder(1))
    found["worker dies: plan"] = cluster.take()[0]
    cluster.heal()
    found["worker dies: all heal, a member"] = cluster.take()[0] / (nodes * slots)
    cluster.feed(on.DrainRequested("d", cluster.holder(slots * nodes // 2).node, True))
    found["drain: decision"] = cluster.take()[0]
    return found | move(cluster)


def move(cluster: Cluster) -> dict[str, Any]:
    """The roles of the drained node go to the free one."""
    cluster.all_up()
    found: dict[str, Any] = {"move: announcement": cluster.take()[0]}
    moving, former = cluster.task.moving, cluster.task.plan
    if moving is None or former is None:
        raise SystemExit(f"no move: {cluster.machine.state.allocation.reason}")
    plan = moving.plan
    joiners = tuple(m.worker for m in plan.members if m.rank in plan.heirs)
    participants = [*former.members, *(m for m in plan.members if m.worker in joiners)]
    for member in participants[:-1]:
        cluster.tell(cluster.task.workers[member.worker], MoveReady(member.worker, member.rank, plan.epoch, "prepared",
                                                                    joiners=joiners))  # fmt: skip
    found["move: all prepare, a member"] = cluster.take()[0] / len(participants)
    last = participants[-1]
    last_words = MoveReady(last.worker, last.rank, plan.epoch, "prepared", joiners=joiners)
    cluster.tell(cluster.task.workers[last.worker], last_words)
    for name in joiners:
        worker = cluster.task.workers[name]
        cluster.tell(worker, MoveReady(name, worker.rank, plan.epoch, "moved", 20, joiners))
    found["move: switch"], said = cluster.take()
    if cluster.task.epoch != plan.epoch:
        raise SystemExit("the roles did not move")
    orders = [a for a in said if isinstance(a, SendAgent) and isinstance(a.message, MoveRoles | PublishEpoch)]
    found["messages a node"] = max(Counter(order.node for order in orders).values())
    found["bytes a node"] = sum(len(encode(o.message)) for o in orders if o.node == orders[0].node)
    found["entries"] = sum(isinstance(a, WriteJournal) for a in said)
    return found


def main() -> int:
    parser = common.parser(__doc__.splitlines()[0], runs=3)
    parser.add_argument("--nodes", type=common.positive, nargs="*", default=[8, 64, 512])
    parser.add_argument("--slots", type=common.positive, default=1, help="of a node, each with a role of the task")
    arguments = parser.parse_args()
    bench = common.Bench(
        "scale of the coordinator", unit="CPU ms", baseline="", configuration={"slots": arguments.slots}
    )
    for nodes in arguments.nodes:
        runs = [measure(nodes, arguments.slots) for _ in range(arguments.runs)]
        counts = {name: runs[0].pop(name) for name in ("messages a node", "bytes a node", "entries")}
        for name in runs[0]:
            facts = counts if name == "move: switch" else {}
            bench.add(f"{nodes} nodes: {name}", [run[name] for run in runs], **facts)
    bench.finish(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
