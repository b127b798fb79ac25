"""What is true after every step, in production too. A violation is a bug: the host crashes and replays."""

from __future__ import annotations

from collections import Counter

from unicron.coordinator.config import CoordinatorConfig
from unicron.coordinator.state import State, TaskState
from unicron.coordinator.transitions import TERMINAL, NodePhase, TaskPhase


def check(state: State, config: CoordinatorConfig) -> None:
    assert len(state.tasks) <= config.tasks_max, f"{len(state.tasks)} tasks, machine.tasks_max is {config.tasks_max}"
    assert len(state.nodes) <= config.nodes_max, f"{len(state.nodes)} nodes, machine.nodes_max is {config.nodes_max}"
    owners: dict[str, str] = {}
    for task in state.tasks.values():
        for name, worker in task.workers.items():
            assert name == worker.name and name not in owners, f"{name} works for two tasks"
            owners[name] = task.name
            node = state.nodes[worker.node]
            assert node.phase is not NodePhase.LOST, f"{name} lives on lost node {node.name}"
        _check_task(state, task)
    _check_slots(state)
    for timer in state.timers:
        kind, _, subject = timer.partition("/")
        if kind in ("end", "stop", "exception", "stall"):
            assert subject in owners, f"timer {timer} of no live worker"


def _check_slots(state: State) -> None:
    """No slot has two roles, guests apart, who are there beside the slots; and what was decided fits."""
    for held in (placed_slots(state), target_slots(state)):
        for node, count in held.items():
            slots = state.nodes[node].slots
            assert count <= slots, f"{count} roles on the {slots} slots of {node}"


def placed_slots(state: State) -> Counter[str]:
    return Counter(
        node
        for task in state.tasks.values()
        if not task.is_over
        for node in task.slotted.values()
        if state.nodes[node].phase is not NodePhase.LOST
    )


def target_slots(state: State) -> Counter[str]:
    roles = state.allocation.targets.values()
    known = state.allocation.nodes
    return Counter(node for target in roles for node in target.values() if state.nodes[node].slots >= known[node])


def _check_task(state: State, task: TaskState) -> None:
    plan = task.plan
    if plan is not None:
        assert plan.epoch == task.epoch, f"plan {plan.epoch}, epoch {task.epoch}"
        ranks = [m.rank for m in plan.members]
        names = {m.worker for m in plan.members}
        assert ranks == sorted(set(ranks)), f"a role has two workers: {ranks}"
        assert len(names) == len(ranks), f"a worker has two roles: {plan.members}"
        expected = sorted(r for d in plan.replicas for r in plan.layout.replica_ranks(d))
        assert ranks == expected, f"members {ranks} are not replicas {plan.replicas}"
        if not task.is_over:
            for member in plan.members:
                gone = member.rank in task.lost or member.rank in task.finished
                live = member.worker in task.workers
                assert live or gone, f"{member.worker} holds rank {member.rank} and is nowhere"
    else:
        assert not task.lost and not task.awaiting
    _check_waits(state, task)


def _check_waits(state: State, task: TaskState) -> None:
    """Every wait has a timer (HEALING, STARTING, exits), or a node whose verdict has one."""
    phase, name = task.phase, task.name
    if phase is TaskPhase.HEALING:
        assert f"heal/{name}" in state.timers, f"{name} heals without a bound"
        assert task.awaiting or task.lost
    elif phase is TaskPhase.STARTING:
        assert f"join/{name}" in state.timers, f"{name} starts without a bound"
    elif phase in (TaskPhase.FINISHING, TaskPhase.STOPPING):
        assert f"finish/{name}" in state.timers, f"{name} ends without a bound"
    elif phase in (TaskPhase.WAITING, TaskPhase.SUSPENDED):
        assert not task.placement, f"{name} is {phase.value} and has roles"
        assert task.is_held == (phase is TaskPhase.SUSPENDED)
    elif phase in TERMINAL:
        assert not any(t.endswith(f"/{name}") for t in state.timers)
    elif phase is TaskPhase.RECOVERING and not task.is_restarting:
        bounded = (
            f"ready/{name}" in state.timers
            or f"diagnose/{name}" in state.timers
            or f"finish/{name}" in state.timers
            or any(n.phase in (NodePhase.SUSPECT, NodePhase.AWAITED) for n in state.nodes.values())
            or any(f"end/{w}" in state.timers for w in task.workers)
        )
        assert bounded, f"{name} recovers without a bound"
    is_moving, is_leaving = task.moving is not None, bool(task.leaving)
    assert not is_moving or task.is_over or f"move/{name}" in state.timers, f"{name} moves without a bound"
    is_bounded = task.is_over or f"leave/{name}" in state.timers or not state.is_started
    assert not is_leaving or is_bounded, f"{name} leaves without a bound"
    for node in state.nodes.values():
        if node.phase in (NodePhase.SUSPECT, NodePhase.AWAITED) and state.is_started:
            assert f"verdict/{node.name}" in state.timers, f"{node.name} is judged by nobody"
