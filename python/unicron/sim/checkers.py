"""Safety, checked as it happens: every violation names the moment it became true.

* one role, one worker per epoch, and epochs only grow (in the journal too)
* each (iteration, micro-batch) counts exactly once in what is committed
* all gather the parameters late after an iteration of an epoch, or nobody does: their buckets would go in another order
* all of a position reduce under the backward in an iteration of an epoch, or nobody does: they would begin collectives
  in another order
* one life of one coordinator a term: only it journals in it, it sends nothing once a successor began, and no agent
  obeys an older term after a newer one
* nothing journaled is forgotten: a replay gives the state that the living coordinator had
* no kill without evidence
* no slot is given to two tasks (guests of one that lost a node are beside them, until it is narrower), and none to one
  that is suspended or over; a task that left its slots trains no more, and goes on at the very iteration it left (where
  a node was given up for its silence its processes train on until it speaks; in the end nobody does)
* every decision is the planner's: solved again from its inputs it is the same; and none without something new (thrash)
* queues stay bounded (the machines assert their own; the journal must not grow while nothing happens)
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from unicron.coordinator import events as on
from unicron.coordinator.allocation import Allocation
from unicron.coordinator.incident import Incident
from unicron.coordinator.journal import (
    AllocationDecided,
    Entry,
    EpochDecided,
    NodeDeclaredLost,
    RolesPlaced,
    TaskAdmitted,
    TaskRestarted,
    TaskSuspended,
    TermBegan,
    WidthChanged,
    WorkersStarted,
    decode_entry,
)
from unicron.coordinator.machine import CoordinatorMachine
from unicron.coordinator.planned import Planned
from unicron.coordinator.state import ON_SLOTS, State, TaskState, WorkerState
from unicron.coordinator.transitions import TERMINAL, WorkerPhase
from unicron.healing import actions as do
from unicron.healing.machine import Phase
from unicron.healing.record import CommitResult
from unicron.healing.resolve import position_of
from unicron.messages import EndWorker, PublishEpoch
from unicron.planner.planner import Planner
from unicron.types import EpochPlan, Outcome, PlanKind, Rank

if TYPE_CHECKING:
    from unicron.sim.agent_host import AgentHost
    from unicron.sim.cluster import Cluster
    from unicron.sim.coordinator_host import CoordinatorHost
    from unicron.sim.network import Connection
    from unicron.sim.worker_process import WorkerProcess

LEFT = re.compile(r"saved at iteration (\d+)")
WORKERS_PER_ROLE = 8  # of a task: holders, understudies, refills, and those that are ending
TIMERS_MAX = 512
INBOX_MAX = 20_000  # of a coordinator that stands still for seconds
REPLAY_EVERY = 400  # steps of the coordinator between two full comparisons


class TaskChecks:
    """What must be true of one task."""

    def __init__(self, world: Cluster, name: str) -> None:
        self.world = world
        self.name = name
        self.roles: dict[tuple[int, Rank], str] = {}
        self.epoch = 0
        self.plans: dict[int, EpochPlan] = {}
        self.committed = 0  # highest iteration any rank stepped
        self.reached = -1  # the same since the last return to a checkpoint
        self.num_steps = 0
        self.left_at: int | None = None  # iteration at which it gave up its slots
        self.late: dict[tuple[int, int], tuple[bool, str]] = {}  # (epoch, iteration) -> (is it, who)
        self.eager: dict[tuple[int, int, int], tuple[bool, str]] = {}  # (epoch, position, iteration) -> (is it, who)

    def role_used(self, plan: EpochPlan, rank: Rank, worker: str) -> None:
        holder = self.roles.setdefault((plan.epoch, rank), worker)
        member = plan.member(rank)
        if holder != worker or member is None or member.worker != worker:
            self.world.violate(f"{self.name}, epoch {plan.epoch}, rank {rank}: {holder} and {worker}")
        if self.plans.get(plan.epoch) != plan:
            self.world.violate(f"{self.name}: epoch {plan.epoch} is not what was journaled")

    def stepped(self, worker: WorkerProcess, commit: CommitResult) -> None:
        memory = worker.memory
        whole = tuple(range(worker.layout.num_sets))
        if memory.iteration != commit.iteration:
            self.world.violate(f"{worker.name} at {memory.iteration} steps with {commit.iteration}")
        is_untold = self.world.checkers.is_untold(worker)
        is_member = self._is_member(worker)
        # One that stood still (its node froze, say) ends the step that the others ended before they went on without it:
        # what is in it was committed. A step of an iteration that nobody committed is training, whoever does it.
        is_late = not is_member and commit.iteration < (self.left_at or 0)
        if self.left_at is not None and not is_untold and not is_late:
            self.world.violate(f"{worker.name} steps {commit.iteration}, {self.name} left at {self.left_at}")
        for number, segment in enumerate(memory.segments):
            if segment != whole:
                self.world.violate(
                    f"{worker.name} (rank {worker.rank}) commits iteration {commit.iteration}, "
                    f"segment {number} with micro-batches {segment}"
                )
        self.num_steps += 1
        if is_member:  # what others step is not the task's any more: it may have gone back since
            self.reached = max(self.reached, commit.iteration)
        if commit.iteration > self.committed:
            self.committed = commit.iteration
            if commit.iteration % 10 == 0:
                self.world.log("training", f"{self.name}: iteration {commit.iteration}")

    def _is_member(self, worker: WorkerProcess) -> bool:
        """Of the newest plan that was journaled."""
        return any(member.worker == worker.name for member in self.plans[self.epoch].members)

    def computes(self, worker: WorkerProcess) -> None:
        if worker.memory.is_wreck:
            self.world.violate(f"{worker.name} goes on at {worker.memory.iteration}, and its state is torn")

    def reduces_eagerly(self, worker: WorkerProcess, action: do.Compute) -> None:
        """Or not: it computes, and says which."""
        machine = worker.machine
        assert machine is not None
        if machine.pending or machine.plan is None:
            return  # it reduces with nobody before it has met them
        at = machine.plan.epoch, position_of(worker.layout, worker.rank), action.iteration
        first, other = self.eager.setdefault(at, (action.eager, worker.name))
        if first is not action.eager:
            self.world.violate(f"{worker.name} reduces eagerly in {at[2]}: {action.eager}, and {other}: {first}")

    def gathers(self, worker: WorkerProcess, late: bool) -> None:
        """Late or not, as all do: their buckets go in one order, and whose members settle is one replica."""
        machine = worker.machine
        assert machine is not None and machine.plan is not None
        if machine.phase not in (Phase.GATHER, Phase.BEGIN_GATHER):
            return  # at a meeting
        at = machine.plan.epoch, machine.record.iteration
        first, other = self.late.setdefault(at, (late, worker.name))
        if first is not late:
            self.world.violate(f"{worker.name} gathers late at {at[1]}: {late}, and {other}: {first}")

    def saved_last(self, worker: WorkerProcess, saved: set[Rank], plan: EpochPlan) -> None:
        if missing := set(plan.ranks) - saved:
            self.world.violate(f"{worker.name} says that all is saved without the parts of {sorted(missing)}")

    def went_back(self, iteration: int) -> None:
        """One that takes part, with all others."""
        self.reached = iteration - 1

    def planned(self, plan: EpochPlan) -> None:
        if plan.epoch <= self.epoch:
            self.world.violate(f"{self.name}: epoch {plan.epoch} journaled after {self.epoch}")
        self.epoch = plan.epoch
        if plan.kind is PlanKind.RESTORE:
            self.reached = int(plan.restore.rpartition("/")[2]) - 1
        elif plan.kind is PlanKind.START and self.reached >= 0:
            self.world.violate(f"{self.name} committed {self.reached} and begins from scratch")
        self.plans[plan.epoch] = plan
        if self.left_at is not None and int(plan.restore.rpartition("/")[2] or -1) != self.left_at:
            self.world.violate(f"{self.name} left at {self.left_at} and begins from {plan.restore!r}")
        self.left_at = None
        self.world.count(f"plan:{plan.kind}")
        if "no account of the healing" in plan.reason:
            self.world.count("rescue")
        self.world.log("journal", f"{self.name} epoch {plan.epoch} {plan.kind}: {plan.reason}")

    def left(self, reason: str) -> None:
        saved = LEFT.search(reason)
        if saved is None:
            return
        self.left_at = int(saved[1])
        self.world.count("left")
        if self.reached + 1 != self.left_at:
            self.world.violate(f"{self.name} committed {self.reached} and leaves at {self.left_at}")


class Checkers:
    def __init__(self, world: Cluster) -> None:
        self.world = world
        self.tasks: dict[str, TaskChecks] = {}
        self.incidents: dict[str, Incident] = {}
        self._coordinator_steps = 0
        self.term = 0
        self.term_life: tuple[str, int] = ("", 0)  # whose term it is: (coordinator, its life)
        self.admitted: set[str] = set()
        self._obeyed: dict[tuple[str, int], int] = {}  # (node, incarnation) -> newest term
        self._facts: tuple[Any, ...] = ()
        self._targets: dict[str, int] = {}
        self.guests: set[str] = set()  # workers that had a role beside their node's slots
        self._lost: dict[str, int] = {}  # node -> its newest incarnation that was declared lost
        self._told: set[str] = set()  # workers that an agent was told to end, and heard it
        self._guest_roles: dict[str, dict[Rank, str]] = {}  # task -> where those are that were placed beside slots
        self._number = 0  # of the newest allocation

    def of(self, task: str) -> TaskChecks:
        return self.tasks.setdefault(task, TaskChecks(self.world, task))

    @property
    def committed(self) -> int:
        return sum(task.committed for task in self.tasks.values())

    # ------------------------------------------------------------ training

    def killed(self, worker: WorkerProcess, reason: str) -> None:
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

    def is_untold(self, worker: WorkerProcess) -> bool:
        """It may train on: its node is an older life, or was given up for its silence, and nobody can say so before it
        speaks again. Then it is told to end (Cluster.strangers)."""
        host = worker.host
        is_given_up = self._lost.get(host.node, 0) >= host.incarnation and worker.name not in self._told
        return host in self.world.ghosts or is_given_up

    # ------------------------------------------------------------ coordinator

    def journaled(self, entry: Entry, host: CoordinatorHost) -> None:
        """It is durable; host: who wrote it."""
        self.journaled_by(entry, host.life, host.machine)

    def journaled_by(self, entry: Entry, life: tuple[str, int], machine: CoordinatorMachine) -> None:
        if isinstance(entry, TermBegan):
            if entry.term <= self.term:
                self.world.violate(f"{life} begins term {entry.term}, {self.term_life} had term {self.term}")
            self.term, self.term_life = entry.term, life
            self.world.log("journal", f"term {entry.term} of {life[0]} begins")
        elif life != self.term_life:
            self.world.violate(f"{life} journals in term {self.term}, which is of {self.term_life}")
        if isinstance(entry, TaskAdmitted):
            self.admitted.add(entry.task)
        if isinstance(entry, EpochDecided):
            self.of(entry.plan.task).planned(entry.plan)
            self._note_guests(entry.plan)
        elif isinstance(entry, TaskRestarted):
            self.world.count("restart_all")
            self.world.log("journal", f"{entry.task}: all restart: {entry.reason}")
        elif isinstance(entry, TaskSuspended):
            self.world.log("journal", f"{entry.task} waits: {entry.reason}")
            self.of(entry.task).left(entry.reason)
        elif isinstance(entry, AllocationDecided):
            self._decided(entry.allocation, machine.state)
        elif isinstance(entry, NodeDeclaredLost):
            self._lost[entry.node] = entry.incarnation
        elif isinstance(entry, WidthChanged):
            self.world.count("narrowed" if entry.wide is not None else "wide again")
        elif isinstance(entry, RolesPlaced):
            self._note_placed(entry)
        elif isinstance(entry, WorkersStarted):
            self._started(entry, machine.state)

    def _started(self, entry: WorkersStarted, state: State) -> None:
        """No slot twice: processes that hold or are to hold a role, and those told to end whose slot is given on. (One
        that is replaced in place dies beside its heir.)"""
        alive = {w.name for h in self.world.hosts.values() for w in h.workers.values() if w.alive}
        holders = [
            worker.name
            for task in state.tasks.values()
            for worker in task.workers.values()
            if worker.node == entry.node
            and worker.purpose in ON_SLOTS
            and (worker.name in alive or worker.phase is WorkerPhase.STARTED)
            and not (worker.phase is WorkerPhase.ENDING and task.placement.get(worker.rank) == worker.node)
            and not self._is_guest(task, worker)
        ]
        slots = state.nodes[entry.node].slots
        if len(holders) > slots:
            self.world.violate(f"{holders} on the {slots} slots of {entry.node}")

    def _note_guests(self, plan: EpochPlan) -> None:
        """Who leaves is known as one also where nobody was started beside it while it stayed."""
        beside = {} if plan.kind is PlanKind.RESHAPE else self._guest_roles.get(plan.task, {})
        here = [member for member in plan.members if beside.get(member.rank) == member.node]
        self.guests.update(member.worker for member in here)
        self._guest_roles[plan.task] = {member.rank: member.node for member in here}

    def _note_placed(self, entry: RolesPlaced) -> None:
        """Guests, and those who are none any more: there are slots for them where they are."""
        checks = self.of(entry.task)
        plan = checks.plans.get(checks.epoch)
        for member in plan.members if plan is not None else ():
            if member.rank not in entry.guests and entry.placement.get(member.rank) == member.node:
                self.guests.discard(member.worker)
        self._guest_roles[entry.task] = {rank: entry.placement[rank] for rank in entry.guests}
        if entry.guests:
            self.world.count("guests")

    def _is_guest(self, task: TaskState, worker: WorkerState) -> bool:
        """Beside the slots for the moment, or on its way out: told to, or left without a role by a plan that may not
        have reached it (its coordinator ended)."""
        has_role = task.role_of(worker.name) is not None
        if has_role and task.guests.get(worker.rank) == worker.node:
            return True
        return worker.name in self.guests and (worker.phase is WorkerPhase.ENDING or not has_role)

    def _decided(self, allocation: Allocation, state: State) -> None:
        if allocation.number == self._number:  # the same, with the homes that standbys gave to lost roles
            self._targets = {name: len(roles) for name, roles in allocation.targets.items()}
            return
        self._number = allocation.number
        self.world.count("decision:table" if allocation.from_table else "decision:solved")
        self.world.log("journal", f"allocation {allocation.number}, {allocation.trigger}: {allocation.reason}")
        facts = (allocation.nodes, allocation.tasks)
        if facts == self._facts:
            self.world.violate(f"allocation {allocation.number} without anything new: {allocation.trigger}")
        self._facts = facts
        former, self._targets = self._targets, {name: len(roles) for name, roles in allocation.targets.items()}
        for name, count in self._targets.items():
            task = state.tasks[name]
            ends_now = task.is_over and task.phase not in TERMINAL and count <= former.get(name, 0)
            if (task.is_over and not ends_now) or task.is_held:
                self.world.violate(f"{name} is {task.phase.value}, held {task.is_held}, and gets slots")
        planned = state.planned
        if planned is None or planned.number != allocation.number:
            return
        self._solve_again(allocation, planned)

    def solve_again(self, number: int, planned: Planned) -> dict[str, int]:
        """Task -> slots, as planned; found once more without a table. Of equal plans either may come first."""
        plan = Planner(planned.cluster, table=False).solve(planned.events)
        tasks = planned.cluster.tasks
        counts = {task.name: count for task, count in zip(tasks, plan.allocation, strict=True) if count}
        said = {name: count for name, count in planned.counts.items() if count}
        finished = {event.removeprefix("finish:") for event in planned.events}
        held = {task.name: task.current for task in tasks if task.name not in finished}
        moves, others = ({name: abs(c.get(name, 0) - held[name]) for name in held} for c in (said, counts))
        is_equal = math.isclose(planned.reward, plan.reward_flop, rel_tol=1e-9) and sum(moves.values()) == sum(
            others.values()
        )
        if counts != said and not is_equal:
            self.world.violate(f"allocation {number} is {said}, solved again {counts}")
        return said

    def _solve_again(self, allocation: Allocation, planned: Planned) -> None:
        if not planned.cluster.tasks:
            return
        counts = self.solve_again(allocation.number, planned)
        given = {name: len(roles) for name, roles in allocation.targets.items()}
        for name in {*counts, *given}:
            if given.get(name, 0) != counts.get(name, 0):
                self.world.count("unplaced")
                if given.get(name, 0) > counts.get(name, 0):
                    self.world.violate(f"{name} gets {given.get(name)} slots, planned {counts.get(name)}")

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

    def sent(self, message: Any, host: CoordinatorHost, line: Connection) -> None:
        """Journal before send: nobody hears of an epoch that a crash could make us forget. And who was followed says
        nothing more, unless nobody listens."""
        if host.life != self.term_life and line.is_open:
            self.world.violate(f"{host.life} sends after {self.term_life} began term {self.term}")
        if isinstance(message, PublishEpoch) and message.plan.epoch not in self.of(message.plan.task).plans:
            self.world.violate(f"epoch {message.plan.epoch} of {message.plan.task} was sent before it was durable")

    def obeyed(self, host: AgentHost, term: int, life: tuple[str, int], message: Any) -> None:
        """An agent took an order, or a welcome."""
        if isinstance(message, EndWorker):
            self._told.add(message.worker)
        who = (host.node, host.incarnation)
        newest = self._obeyed.setdefault(who, term)
        if term < newest:
            self.world.violate(
                f"{host.node} obeys {type(message).__name__} of {life} in term {term} after term {newest}"
            )
        self._obeyed[who] = max(newest, term)

    def coordinator_stepped(self, host: CoordinatorHost) -> None:
        self._coordinator_steps += 1
        self._bounded(host)
        if self._coordinator_steps % REPLAY_EVERY == 0 and host.is_newest:
            self.compare_replay(host)

    def _bounded(self, host: CoordinatorHost) -> None:
        """Queues and what explains the past; the bounds are the unplanted configuration's."""
        state = host.machine.state
        for task in state.tasks.values():
            if len(task.plans) > host.bounds.plans_kept_max:
                self.world.violate(f"{len(task.plans)} plans of {task.name} are kept")
            if len(task.reports) > task.job.layout.world_size or len(task.workers) > WORKERS_PER_ROLE * 16:
                self.world.violate(f"{len(task.reports)} reports, {len(task.workers)} workers of {task.name} are kept")
        if len(state.timers) > TIMERS_MAX or len(host.timers) > TIMERS_MAX:
            self.world.violate(f"{len(state.timers)} timers are kept")
        if len(host.inbox) > INBOX_MAX:
            self.world.violate(f"{len(host.inbox)} messages wait for {host.name}")

    def compare_replay(self, host: CoordinatorHost) -> None:
        machine, twin = host.machine, CoordinatorMachine(host.machine.config)
        for data in host.journal:
            twin.step(on.Replayed(decode_entry(data)), 0.0)
        alive, replayed = facts(machine.state), facts(twin.state)
        for name, roles in alive.items():
            if name.startswith("roles "):  # who died is not journaled: its agent's hello says it
                replayed[name] = {n: v for n, v in replayed[name].items() if n in roles}
        if alive != replayed:
            differing = {k for k in alive if alive[k] != replayed[k]}
            self.world.violate(f"replay differs: {[(k, alive[k], replayed[k]) for k in sorted(differing)]}")

    def replayed(self, host: CoordinatorHost) -> None:
        """A coordinator that begins knows all that is durable."""
        self.compare_replay(host)
        if host.machine.state.term != self.term:
            self.world.violate(f"term {self.term} was journaled, replay knows {host.machine.state.term}")
        for task in host.machine.state.tasks.values():
            epoch = self.of(task.name).epoch
            if task.epoch != epoch:
                self.world.violate(f"epoch {epoch} of {task.name} was journaled, replay knows {task.epoch}")


def facts(state: State) -> dict[str, Any]:
    """The journaled part of the state, for comparison."""
    found: dict[str, Any] = {
        "term": state.term,
        "incidents": dict(state.incidents),
        "incident_count": state.incident_count,
        "worker_counts": dict(state.worker_counts),
        "nodes": {n.name: (n.incarnation, n.slots, n.store, n.is_drained) for n in state.nodes.values()},
        "allocation": state.allocation,
    }
    for task in state.tasks.values():
        live = {n: (w.node, w.incarnation, w.rank, w.purpose.value) for n, w in task.workers.items()}
        found[f"task {task.name}"] = (
            task.epoch, task.plan, task.checkpoint, task.restarts, task.restart_count,
            task.is_restarting, task.outcome, task.cause, dict(task.placement),
            task.is_held, task.leaving, task.is_pinned, dict(task.measured_s), task.job, task.wide, dict(task.guests),
        )  # fmt: skip
        found[f"roles {task.name}"] = {n: v for n, v in live.items() if task.role_of(n) is not None}
    return found
