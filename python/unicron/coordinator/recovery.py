"""From facts to a plan: who takes each lost role, which replicas leave, what broken connections need.

`settle_recovery` is called after every event that changed facts of a task with an epoch. It waits only for things
that have a timer: a node's verdict, a waiting worker that is getting ready, the diagnosis moment. Then one plan
covers all that is lost (the alternative, a plan per loss, makes everybody regroup several times).
"""

from __future__ import annotations

import msgspec

from unicron.coordinator.accounts import close_healing
from unicron.coordinator.diagnosis import all_wait, deaf_to_plan, is_at_own_work, is_explained, never_freed, stall_root
from unicron.coordinator.fitness import PENDING
from unicron.coordinator.incident import Incident
from unicron.coordinator.journal import RolesPlaced
from unicron.coordinator.lifecycle import ALL_FINISHED, finish_task, stop_task
from unicron.coordinator.narrowing import (
    gone_with_their_node,
    hosts_of,
    may_be_there_still,
    refusal_to_host,
    still_guests,
)
from unicron.coordinator.observing import observe
from unicron.coordinator.placement import free_slots, place_replica
from unicron.coordinator.plans import Decision, end_leavers, publish
from unicron.coordinator.standbys import take_standbys
from unicron.coordinator.starting import nothing_to_restore, restart_all, wait_for_slots
from unicron.coordinator.state import NodeState, Purpose, TaskState, WorkerState, node_order
from unicron.coordinator.step import Step
from unicron.coordinator.transitions import NodePhase, TaskPhase, WorkerPhase
from unicron.coordinator.workers import detected_ms, end_worker, incident_of, start_workers
from unicron.types import EpochPlan, Method, PlanKind, Rank, Severity

ALL_WAIT = "every member waits in a collective"
RECONNECT = "connection"  # the fault of an incident of connections that broke while all their ends live


class Refills(msgspec.Struct):
    """What becomes of the lost roles, as far as it is known."""

    heirs: dict[Rank, str] = {}  # rank -> worker
    leaving: set[int] = set()  # replicas that cannot be refilled
    coming: set[Rank] = set()  # roles whose worker is not ready yet
    to_start: list[tuple[str, Rank, Purpose]] = []


def settle_recovery(step: Step, task: TaskState) -> None:
    plan = task.plan
    assert plan is not None
    if _is_through(step, task, plan):
        if task.phase is TaskPhase.HEALING and task.healed:  # an heir that met nobody, or who had the time to say so
            close_healing(step, task, "the rest of the members finished")
        finish_task(step, task, end_of(task))
        return
    _settle_stalls(step, task)
    if task.is_over or task.is_restarting:
        return
    if task.finished and _all_have_finished(step, task, plan):
        _wait_for_the_last(step, task)
        return
    task.reports = {k: r for k, r in task.reports.items() if not is_explained(task, r)}
    if not task.lost and not task.state_lost and not (task.reports and task.reports_ripe):
        if not task.reports and task.phase is TaskPhase.RECOVERING:
            step.move_task(task, "explained")
        return
    if task.finished and all(_is_given_up(step, task, rank) for rank in task.lost):
        _wait_for_the_last(step, task)
        return
    if task.phase is not TaskPhase.RECOVERING:
        step.move_task(task, "wounded")
        step.cancel_timer("heal", task.name, "a failure during the healing")
    refills = _last_heirs(step, task) if task.finished else _refills(step, task)
    if refills.to_start:
        start_workers(step, task, refills.to_start, "no understudy is there for a lost role")
    if refills.coming and not step.has_timer("ready", task.name):
        step.set_timer("ready", task.name, step.config.ready_ms_max, "a worker gets ready")
    if not refills.coming and not _verdict_pending(step, task, refills.leaving):
        if task.finished:
            _decide_last(step, task, refills)
        else:
            _decide(step, task, refills)


# ------------------------------------------------------------ behind the last iteration


def _is_through(step: Step, task: TaskState, plan: EpochPlan) -> bool:
    """Everybody's script is over, or is lost and nobody would run the rest of it."""
    if not task.finished:
        return False
    holders = (task.holder(rank) for rank in plan.ranks if rank in task.finished)
    is_at_work = any(worker is not None and worker.has_tail for worker in holders)
    return not is_at_work and _all_have_finished(step, task, plan)


def _all_have_finished(step: Step, task: TaskState, plan: EpochPlan) -> bool:
    """Their training, at least, or they are given up."""
    return all(r in task.finished or (r in task.lost and _is_given_up(step, task, r)) for r in plan.ranks)


def end_of(task: TaskState) -> str:
    missed = sorted(task.missed | (set(task.lost) - task.finished))
    if not missed:
        return ALL_FINISHED
    return f"every iteration is over; what the scripts of ranks {missed} do behind their loops was lost with them"


def _is_given_up(step: Step, task: TaskState, rank: Rank) -> bool:
    """Others have finished, and nobody would run the rest of this one's script: its state is lost with its node, or
    heirs were tried in vain."""
    node = step.state.nodes[task.placement[rank]]
    is_tried = task.last_heirs >= step.config.last_heirs_max or task.refills.get(rank, 0) > task.job.restart_max
    return node.phase is NodePhase.LOST or _fails_checks(node) or is_tried


def _wait_for_the_last(step: Step, task: TaskState) -> None:
    """No heir can be had for who is lost, if anybody is: those who are left have their own time for what they do."""
    if not step.has_timer("finish", task.name):
        step.set_timer("finish", task.name, step.config.finish_ms_max, "the last members may finish")


def _last_heirs(step: Step, task: TaskState) -> Refills:
    """For what is left of the scripts of lost ranks: nobody meets these heirs (training/meeting.py)."""
    refills = Refills()
    _find_heirs(step, task, [rank for rank in sorted(task.lost) if not _is_given_up(step, task, rank)], refills)
    return refills


def _decide_last(step: Step, task: TaskState, refills: Refills) -> None:
    former = task.plan
    assert former is not None
    members = {m.rank: refills.heirs.get(m.rank, m.worker) for m in former.members}
    gone = {rank for rank in task.lost if rank not in refills.heirs}
    task.finished |= gone  # they are members of the plan, and nobody waits for them
    task.missed |= gone
    for rank in gone:
        del task.lost[rank]
    task.last_heirs += 1
    reason = f"heirs for what the scripts of ranks {sorted(refills.heirs)} do behind their loops; others have finished"
    publish(step, task, Decision(PlanKind.REPLACE, members, set(refills.heirs), refills.heirs, reason))


# ------------------------------------------------------------ heirs


def _is_hopeless(task: TaskState, rank: Rank, node: NodeState) -> bool:
    """Its node's checks fail, and nobody was there who could take it at once: others go on without it. The last
    replica, and shards that nobody else has, are tried there as often as the job allows."""
    is_last = task.plan is None or len(task.plan.replicas) == 1
    return _fails_checks(node) and rank in task.refills and not is_last and not task.job.layout.sharded


def _fails_checks(node: NodeState) -> bool:
    return node.unfit not in ("", PENDING)


def _refills(step: Step, task: TaskState) -> Refills:
    refills = Refills()
    layout = task.job.layout
    if not task.state_lost:
        if not _waits_for_its_state(step, task):
            take_standbys(step, task)
            if layout.copies_shards:
                _move_homes(step, task)
        if layout.copies_shards:
            _invite_guests(step, task)
    for rank in sorted(task.lost):
        node = step.state.nodes[task.placement[rank]]
        is_gone = node.phase is NodePhase.LOST or _has_shrunk(step, node) or _is_hopeless(task, rank, node)
        is_kept = layout.copies_shards and not task.state_lost  # its node, or slots elsewhere, may come in time
        if (is_gone and not is_kept) or task.refills.get(rank, 0) > task.job.restart_max:
            refills.leaving.add(layout.replica_of(rank))
    staying = [rank for rank in sorted(task.lost) if layout.replica_of(rank) not in refills.leaving]
    _find_heirs(step, task, staying, refills)
    return refills


def _find_heirs(step: Step, task: TaskState, ranks: list[Rank], refills: Refills) -> None:
    """Who waits where the role was, or comes, or has to be started."""
    taken: set[str] = set()
    for rank in ranks:
        if step.state.nodes[task.placement[rank]].phase is NodePhase.LOST:
            refills.coming.add(rank)
            continue
        waiting = [
            w for w in task.workers.values()
            if w.node == task.placement[rank] and w.name not in taken
        ]  # fmt: skip
        heir = _best([w for w in waiting if w.is_candidate], rank)
        coming = _best([w for w in waiting if w.is_coming], rank)
        if heir is not None:
            taken.add(heir.name)
            refills.heirs[rank] = heir.name
        elif coming is not None:
            taken.add(coming.name)
            refills.coming.add(rank)
        else:
            refills.coming.add(rank)
            if step.state.nodes[task.placement[rank]].phase is NodePhase.UP:
                task.refills[rank] = task.refills.get(rank, 0) + 1
                refills.to_start.append((task.placement[rank], rank, Purpose.REFILL))


def _waits_for_its_state(step: Step, task: TaskState) -> bool:
    """Elsewhere its roles would find neither shard nor copy, and go back to a checkpoint. Without one that is the end
    of the task, so what may be whole on a silent node is waited for, as long as a worker may take to come."""
    gone = gone_with_their_node(step.state, task)
    return task.job.layout.copies_shards and nothing_to_restore(task) and may_be_there_still(step.state, task, gone)


def _move_homes(step: Step, task: TaskState) -> None:
    """Roles whose node is gone go where slots are free, when others have their shards, too."""
    layout = task.job.layout
    gone = set(gone_with_their_node(step.state, task))
    free = free_slots(step.state)
    moved: dict[Rank, str] = {}
    for replica in sorted({layout.replica_of(rank) for rank in gone}):
        if gone >= set(layout.replica_ranks(replica)):
            moved.update(place_replica(layout, replica, free) or {})
    if moved:
        reason = f"ranks {sorted(moved)} lost their node, and slots are free on {sorted(set(moved.values()))}"
        step.write(RolesPlaced(task.name, {**task.placement, **moved}, still_guests(task, moved)), reason)


def _invite_guests(step: Step, task: TaskState) -> None:
    """What is left without a slot goes on beside those of others, until the layout is narrower (narrowing.py)."""
    gone = gone_with_their_node(step.state, task)
    task.waits_why = refusal_to_host(step.state, task, gone) if gone else ""
    if not gone or task.waits_why:
        return
    homes = hosts_of(step.state, task, gone)
    nodes = ", ".join(sorted(set(homes.values()), key=node_order))
    reason = f"ranks {sorted(homes)} lost their node, and no slot is free: guests on {nodes} until the task is narrower"
    guests = tuple(sorted({*task.guests, *homes}))
    step.write(RolesPlaced(task.name, {**task.placement, **homes}, guests), reason)


def _has_shrunk(step: Step, node: NodeState) -> bool:
    """Its agent came back with fewer slots than there are roles on it."""
    roles = sum(
        home == node.name for task in step.state.tasks.values() if not task.is_over for home in task.slotted.values()
    )
    return roles > node.slots


def _best(workers: list[WorkerState], rank: Rank) -> WorkerState | None:
    """Who guessed this role needs to rebind least."""
    return min(workers, key=lambda w: (w.purpose is Purpose.STANDBY, w.rank != rank, w.incarnation), default=None)


def _verdict_pending(step: Step, task: TaskState, leaving: set[int]) -> bool:
    """A plan cannot reach a node that does not answer; whether it is gone has its own bound (nodes.py)."""
    assert task.plan is not None
    return any(
        step.state.nodes[m.node].phase in (NodePhase.SUSPECT, NodePhase.AWAITED)
        for m in task.plan.members
        if task.job.layout.replica_of(m.rank) not in leaving
    )


def _decide(step: Step, task: TaskState, refills: Refills) -> None:
    former = task.plan
    assert former is not None
    layout = task.job.layout
    members = {
        m.rank: refills.heirs.get(m.rank, m.worker)
        for m in former.members
        if layout.replica_of(m.rank) not in refills.leaving
    }
    if refills.leaving and layout.sharded:
        reason = f"replicas {sorted(refills.leaving)} left with their shards of the optimizer's state"
        if not task.asked.layout.copies_shards:
            reason += ", of which nobody keeps copies (backup in the job file does, and several optimizer_instances)"
        wait_for_slots(step, task, reason)
        return
    if not members:
        wait_for_slots(step, task, "no whole or refillable replica is left")
        return
    if task.state_lost:
        kind = PlanKind.RESTORE
        if task.checkpoint is None:
            stop_task(step, task, f"{_raised(step, task)}{task.state_lost}; no checkpoint to return to")
            return
    elif refills.leaving:
        kind = PlanKind.SHRINK
    elif refills.heirs:
        kind = PlanKind.REPLACE
    else:
        if not _may_reconnect(step, task, [r.iteration for r in task.reports.values()]):
            return
        kind = PlanKind.RECONNECT
    # Between replicas every new epoch rebuilds everything; only who broke inside a replica wounds
    # it.
    touched = {*task.lost, *(rank for rank, r in task.reports.items() if r.inside)}
    reason = _reason(task, kind, refills)
    publish(step, task, Decision(kind, members, touched, refills.heirs, reason))
    end_leavers(step, task, former)


def _raised(step: Step, task: TaskState) -> str:
    """What the script raised before its state was lost: the cause of the cause, which a person wants to read first."""
    raised = [i for i in step.state.open_incidents(task.name) if i.method is Method.EXCEPTION and i.text]
    return f"rank {raised[0].rank} raised {raised[0].text}; then " if raised else ""


def _reason(task: TaskState, kind: PlanKind, refills: Refills) -> str:
    if kind is PlanKind.RESTORE:
        return task.state_lost
    weighed = f". {task.standby_why}" if task.standby_why else ""
    if kind is PlanKind.SHRINK:
        return f"replicas {sorted(refills.leaving)} leave, heirs for {sorted(refills.heirs)}{weighed}"
    if kind is PlanKind.REPLACE:
        nodes = sorted({task.placement[rank] for rank in refills.heirs}) if task.is_adopted else []
        by = f", by standbys on {', '.join(nodes)}" if nodes else ""
        guests = sorted(set(task.guests) & set(refills.heirs))
        by += f", of them {guests} as guests: no slot is free" if guests else ""
        return f"heirs for ranks {sorted(refills.heirs)}{by}{weighed}"
    return f"connections of ranks {sorted(task.reports)} broke, all ends alive"


def _may_reconnect(step: Step, task: TaskState, iterations: list[int]) -> bool:
    """SEV3 retries in place a few times in one iteration; then the first reporter is replaced (SEV2)."""
    found = step.state.open_incidents(task.name)
    # Whose parameters do not come because of what is being healed has no failure of its own.
    own = [(rank, report) for rank, report in sorted(task.reports.items()) if not (report.late and found)]
    if not own:
        return True
    iteration = max(iterations, default=task.iteration)
    tries = task.reconnects.get(iteration, 0) + 1
    task.reconnects = {iteration: tries}
    if tries <= step.config.reconnect_tries_max:
        # Nor has, in another incident, who was late to tell of the same break (of a group inside another replica, say).
        is_open = any(i.fault == RECONNECT and i.epoch for i in found)
        for rank, report in [] if is_open else own[:1]:
            _open_reconnect(step, task, rank, report.text)
        return True
    rank = min(task.reports)
    worker = task.holder(rank)
    task.reconnects = {}
    task.reports.clear()
    task.reports_ripe = False
    if worker is not None:
        reason = f"its connections broke {tries} times in iteration {iteration}"
        end_worker(step, task, worker, reason)
    return False


def _open_reconnect(step: Step, task: TaskState, rank: Rank, text: str) -> None:
    worker = task.holder(rank)
    step.open_incident(
        Incident(
            id="", task=task.name, fault=RECONNECT, severity=Severity.SEV3,
            node=worker.node if worker else "", rank=rank, method=Method.CONNECTION,
            opened_ms=task.report_ms, cause="a collective failed, nobody died", text=text,
        ),
        f"rank {rank} reported a failed collective that no death explains",
    )  # fmt: skip


def on_ready_timeout(step: Step, task: TaskState) -> None:
    """Workers that should take lost roles are not ready in time: their replicas leave, if others remain."""
    for rank in task.lost:
        if task.placement.get(rank) is not None:
            task.refills[rank] = task.job.restart_max + 1
    for worker in list(task.workers.values()):
        if worker.is_coming:
            end_worker(step, task, worker, "not ready in time for a lost role")
    step.touch(task)


def on_heal_timeout(step: Step, task: TaskState) -> bool:
    """Not every account came. True: the iteration goes on, close with what is known. False: it was escalated."""
    if task.healed or task.iteration > task.heal_iteration + 1:  # one step it may end with what it knew before
        return True
    plan = task.plan
    assert plan is not None
    if any(not _is_heard(step, worker.node) for worker in map(task.holder, task.awaiting) if worker is not None):
        # Who was not heard is not known to stand still: the plan may not have reached it. The node's verdict, or its
        # return, comes first; both have bounds of their own.
        step.set_timer("heal", task.name, step.config.heal_ms_max, "a node that was not heard all the while")
        return False
    if task.finished:
        _end_unmet(step, task, plan)
        return True
    if _end_deaf(step, task, deaf_to_plan(task), f"since epoch {plan.epoch}"):
        return False
    if at_work := _at_own_work(task):
        why = f"the scripts of ranks {at_work} are at work of their own, which has its own bound"
        step.set_timer("heal", task.name, step.config.heal_ms_max, why)
        return False
    if _catches_up(task):
        step.set_timer("heal", task.name, step.config.heal_ms_max, "iterations are done again, and they advance")
        return False
    task.heal_tries += 1
    silent = sorted(task.awaiting)
    if task.heal_tries > step.config.heal_tries_max:
        # All would be ended now. Where some did not move, and the others wait for them, their end may do; once.
        is_first, since = (
            task.heal_tries == step.config.heal_tries_max + 1,
            f"since the last of {task.heal_tries} tries",
        )
        if is_first and _end_deaf(step, task, deaf_to_plan(task, may_be_long=True), since):
            return False
        restart_all(step, task, f"ranks {silent} did not heal in {task.heal_tries} tries")
        return False
    members = {m.rank: m.worker for m in plan.members}
    reason = f"no account of the healing of epoch {plan.epoch} from ranks {silent}"
    publish(step, task, Decision(PlanKind.RECONNECT, members, silent, (), reason))
    return False


def _at_own_work(task: TaskState) -> list[Rank]:
    """Of those awaited. An heir that waits for them at the meeting is patient (training/meeting.py)."""
    found = ((rank, task.holder(rank)) for rank in sorted(task.awaiting))
    return [rank for rank, worker in found if worker is not None and is_at_own_work(worker)]


def _end_deaf(step: Step, task: TaskState, deaf: list[WorkerState], since: str) -> bool:
    for worker in deaf:
        reason = f"its loop did not move in {step.config.heal_ms_max:.0f} ms {since}"
        _end_stalled(step, task, worker, reason)
    if not deaf or task.job.observe_only:
        return False
    step.set_timer("heal", task.name, step.config.heal_ms_max, "their deaths are reported first")
    step.touch(task)
    return True


def _end_unmet(step: Step, task: TaskState, plan: EpochPlan) -> None:
    """The last iteration was over before this plan was met (members held for a move, or met no newcomer any more): its
    heirs wait for somebody who has left, and no new epoch can have everybody."""
    for rank in sorted(task.awaiting & set(plan.heirs) - task.finished):
        worker = task.holder(rank)
        if worker is not None:
            end_worker(step, task, worker, "others finished the last iteration before it could meet them")


def _catches_up(task: TaskState) -> bool:
    """Everybody went back (to a checkpoint, to buddies' copies): that the last of them advances is all there is to ask.
    Without this, what takes longer than a healing may would be interrupted for ever."""
    members = [worker for worker in map(task.holder, task.awaiting) if worker is not None]
    before, task.heal_low = task.heal_low, min((worker.iteration_now for worker in members), default=-1)
    if any(worker.progress == worker.progress_planned for worker in members):
        return False  # the others wait for it
    return before < task.heal_low < task.heal_iteration


def _is_heard(step: Step, name: str) -> bool:
    """Connected for as long as the plan has had to do its work."""
    node = step.state.nodes[name]
    return node.phase is NodePhase.UP and step.now_ms - node.since_ms >= step.config.heal_ms_max


# ------------------------------------------------------------ loops that do not advance


def _settle_stalls(step: Step, task: TaskState) -> None:
    found = stall_root(task)
    if found is not None and found[0].phase is not WorkerPhase.ENDING:
        root, second = found
        assert root.stalled is not None
        stalled = root.stalled
        usual = f"usual {stalled.usual_ms:.0f}, " if stalled.usual_ms else ""
        reason = (
            f"its loop did not advance for {stalled.stalled_ms:.0f} ms in {stalled.stage.name.lower()} "
            f"({usual}budget {stalled.budget_ms:.0f}) and waits for nobody; {second}"
        )
        _end_stalled(step, task, root, reason)
        return
    for worker in never_freed(task):
        if worker.phase is not WorkerPhase.ENDING:
            assert task.plan is not None
            _end_stalled(
                step, task, worker, f"it did not move when epoch {task.plan.epoch} ended what it could wait for"
            )
            return
    ranks = all_wait(task)
    # Who reports a broken connection says more; a coordinator that was away hears both at once.
    if ranks and not task.lost and not task.reports and task.phase in (TaskPhase.RUNNING, TaskPhase.HEALING):
        _free_all(step, task, ranks)


def _free_all(step: Step, task: TaskState, ranks: tuple[Rank, ...]) -> None:
    """Everybody waits in a collective and nobody computes: rebuild every group (SEV3), then start all again."""
    plan = task.plan
    assert plan is not None
    if task.job.observe_only:  # in the end all would be ended and start again
        first = task.holder(ranks[0])
        assert first is not None
        observe(step, first, _all_wait(task, first.node, first.rank))
        return
    tries = task.reconnects.get(task.iteration, 0) + 1
    task.reconnects = {task.iteration: tries}
    reason = ALL_WAIT
    if tries > step.config.reconnect_tries_max:
        restart_all(step, task, reason)
        return
    step.open_incident(_all_wait(task, "", -1), reason)
    members = {m.rank: m.worker for m in plan.members}
    publish(step, task, Decision(PlanKind.RECONNECT, members, ranks, (), reason))


def _all_wait(task: TaskState, node: str, rank: Rank) -> Incident:
    return Incident(
        id="", task=task.name, fault="all wait", severity=Severity.SEV3, node=node, rank=rank,
        method=Method.STATISTICS, opened_ms=0.0, cause=ALL_WAIT,
    )  # fmt: skip


def _end_stalled(step: Step, task: TaskState, worker: WorkerState, reason: str) -> None:
    stalled = worker.stalled
    opened = Incident(
        id="", task=task.name, fault="stalled", severity=Severity.SEV2, node=worker.node,
        rank=worker.rank, method=Method.STATISTICS, worker=worker.name,
        opened_ms=worker.stalled_ms if stalled else step.now_ms,
        incarnation=worker.incarnation, cause=reason,
        text=worker.thread_exception.text if worker.thread_exception else "",
        iteration=stalled.iteration if stalled else worker.iteration,
        micro_batch=stalled.micro_batch if stalled else -1,
        stage=stalled.stage if stalled else worker.stage,
        detect_ms=detected_ms(step, worker.node, stalled.fault_ns, stalled.seen_ns) if stalled else None,
    )  # fmt: skip
    if task.job.observe_only:
        observe(step, worker, opened)
        return
    if incident_of(step, task, worker.name) is None:
        step.open_incident(opened, reason)
    end_worker(step, task, worker, reason)
