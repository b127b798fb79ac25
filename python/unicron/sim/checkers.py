"""Safety, checked as it happens: every violation names the moment it became true.

* one role, one worker per epoch, and epochs only grow (in the journal too)
* each (iteration, micro-batch) counts exactly once in what is committed
* nothing journaled is forgotten: a replay gives the state that the living coordinator had
* no kill without evidence
* queues stay bounded (the machines assert their own; the journal must not grow while nothing happens)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unicron.coordinator import events as on
from unicron.coordinator.incident import Incident
from unicron.coordinator.journal import Entry, EpochDecided, TaskRestarted, decode_entry
from unicron.coordinator.machine import CoordinatorMachine
from unicron.coordinator.state import State
from unicron.healing.record import CommitResult
from unicron.types import EpochPlan, Outcome, Rank

if TYPE_CHECKING:
    from unicron.sim.cluster import Cluster
    from unicron.sim.worker import SimWorker

REPLAY_EVERY = 400  # steps of the coordinator between two full comparisons


class Checkers:
    def __init__(self, world: Cluster) -> None:
        self.world = world
        self.roles: dict[tuple[int, Rank], str] = {}
        self.epoch = 0
        self.plans: dict[int, EpochPlan] = {}
        self.incidents: dict[str, Incident] = {}
        self.committed = 0  # highest iteration any rank stepped
        self.num_steps = 0
        self._coordinator_steps = 0

    # ------------------------------------------------------------ training

    def role_used(self, plan: EpochPlan, rank: Rank, worker: str) -> None:
        holder = self.roles.setdefault((plan.epoch, rank), worker)
        member = plan.member(rank)
        if holder != worker or member is None or member.worker != worker:
            self.world.violate(f"epoch {plan.epoch}, rank {rank}: {holder} and {worker}")
        if self.plans.get(plan.epoch) != plan:
            self.world.violate(f"epoch {plan.epoch} is not what was journaled")

    def stepped(self, worker: SimWorker, commit: CommitResult) -> None:
        memory = worker.memory
        whole = tuple(range(worker.layout.num_micro_batches))
        if memory.iteration != commit.iteration:
            self.world.violate(f"{worker.name} at {memory.iteration} steps with {commit.iteration}")
        for number, segment in enumerate(memory.segments):
            if segment != whole:
                self.world.violate(
                    f"{worker.name} (rank {worker.rank}) commits iteration {commit.iteration}, "
                    f"segment {number} with micro-batches {segment}"
                )
        self.num_steps += 1
        if commit.iteration > self.committed:
            self.committed = commit.iteration
            if commit.iteration % 10 == 0:
                self.world.log("training", f"iteration {commit.iteration}")

    def killed(self, worker: SimWorker, reason: str) -> None:
        """Evidence is a fault of this very worker, or that the coordinator has no use for it any more."""
        self.world.log(worker.host.node, f"kills {worker.name}: {reason}")
        if worker.faults:
            return
        innocent = (
            "did not advance" in reason
            or "did not move" in reason
            or "stopped for longer" in reason
            or reason.startswith("raised ")
        )
        if innocent:
            self.world.violate(f"{worker.name} killed without evidence: {reason}")

    # ------------------------------------------------------------ coordinator

    def journaled(self, entry: Entry) -> None:
        if isinstance(entry, EpochDecided):
            plan = entry.plan
            if plan.epoch <= self.epoch:
                self.world.violate(f"epoch {plan.epoch} journaled after {self.epoch}")
            self.epoch = plan.epoch
            self.plans[plan.epoch] = plan
            self.world.count(f"plan:{plan.kind}")
            if "no account of the healing" in plan.reason:
                self.world.count("rescue")
            line = f"epoch {plan.epoch} {plan.kind}: {plan.reason}"
            self.world.log("journal", line)
        elif isinstance(entry, TaskRestarted):
            self.world.count("restart_all")
            self.world.log("journal", f"all restart: {entry.reason}")

    def incident(self, incident: Incident) -> None:
        before = self.incidents.get(incident.id)
        self.incidents[incident.id] = incident
        if before is None and incident.fault == "all wait":
            self.world.count("rescue")
        if before is None:
            self.world.count(f"incident:{incident.fault}")
            self.world.log("incident", f"{incident.id} {incident.fault} rank {incident.rank} {incident.cause}")
        if before is not None and before.outcome is not None and incident.outcome is None:
            self.world.violate(f"incident {incident.id} was closed and is open again")
        if incident.outcome is Outcome.HEALED and incident.decide_ms is None and incident.epoch:
            self.world.violate(f"incident {incident.id} healed without a decision")

    def coordinator_stepped(self, machine: CoordinatorMachine) -> None:
        self._coordinator_steps += 1
        if self._coordinator_steps % REPLAY_EVERY == 0:
            self.compare_replay(machine)

    def compare_replay(self, machine: CoordinatorMachine) -> None:
        twin = CoordinatorMachine(machine.config)
        for data in self.world.coordinator.journal:
            twin.step(on.Replayed(decode_entry(data)), 0.0)
        alive, replayed = facts(machine.state), facts(twin.state)
        for name, roles in alive.items():
            if name.startswith("roles "):  # who died is not journaled: its agent's hello says it
                replayed[name] = {n: v for n, v in replayed[name].items() if n in roles}
        if alive != replayed:
            differing = {k for k in alive if alive[k] != replayed[k]}
            self.world.violate(f"replay differs: {[(k, alive[k], replayed[k]) for k in sorted(differing)]}")

    def replayed(self, machine: CoordinatorMachine, journal: list[bytes]) -> None:
        task = machine.state.tasks.get("task")
        if task is not None and task.epoch != self.epoch:
            self.world.violate(f"epoch {self.epoch} was journaled, replay knows {task.epoch}")


def facts(state: State) -> dict[str, Any]:
    """The journaled part of the state, for comparison."""
    found: dict[str, Any] = {
        "term": state.term,
        "incidents": dict(state.incidents),
        "incident_count": state.incident_count,
        "worker_counts": dict(state.worker_counts),
        "nodes": {n.name: (n.incarnation, n.slots, n.store) for n in state.nodes.values()},
    }
    for task in state.tasks.values():
        live = {n: (w.node, w.incarnation, w.rank, w.purpose.value) for n, w in task.workers.items()}
        found[f"task {task.name}"] = (
            task.epoch, task.plan, task.checkpoint, task.restarts, task.restart_count,
            task.is_restarting, task.outcome, task.cause, dict(task.placement),
        )  # fmt: skip
        found[f"roles {task.name}"] = {n: v for n, v in live.items() if task.role_of(n) is not None}
    return found
