"""Which free nodes stand warm for whom, and whether a standby is worth spending on what was just lost. Pure.

A standby's cost is its slots. The planner gives every slot that earns something as one to the task that earns most with
it, so what stands by is what is left, and costs nobody anything; it goes to the tasks that lose most FLOP/s with a
node. When a node is lost the question is the planner's own (standby | reconfigure), with the standby's price: what it
saves in the next failures until the lost node is back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from unicron._core import UnicronError
from unicron.coordinator.demand import demand_of, throughput_of
from unicron.coordinator.state import State, TaskState, node_order
from unicron.planner.cluster import Cluster, Failures, Node, PlannerProblem, Transitions
from unicron.planner.explain import explain
from unicron.planner.planner import Planner
from unicron.types import Layout, Rank

Standbys = dict[str, tuple[str, ...]]


def roles_of_a_node(target: Mapping[Rank, str]) -> int:
    """The most roles that the loss of one node takes."""
    return max(Counter(target.values()).values(), default=0)


def can_be_helped(task: TaskState) -> bool:
    """A standby takes state from a replica, or a shard from its copy; without either there is nothing to take."""
    layout = task.job.layout
    return task.job.managed and layout.num_replicas > 1 and (layout.copies_shards or not layout.sharded)


def standbys_for(
    state: State,
    nodes: Mapping[str, int],
    targets: Mapping[str, Mapping[Rank, str]],
    layouts: Mapping[str, Layout] | None = None,
) -> Standbys:
    """nodes: usable -> slots; targets: what every task shall hold; layouts: what some go over to from there. Who stood
    by for a task stays where it is."""
    used = Counter(node for target in targets.values() for node in target.values())
    free = [n for n in sorted(nodes, key=node_order) if n not in used and not state.nodes[n].is_drained]
    missing = sum(max(new.world_size - len(targets.get(name, {})), 0) for name, new in (layouts or {}).items())
    beside = sum(max(nodes.get(node, 0) - count, 0) for node, count in used.items() if not state.nodes[node].is_drained)
    free = _left_by_layouts(state, nodes, free, missing - beside)
    takers = [state.tasks[name] for name in targets if state.tasks[name].job.standbys and targets[name]]
    takers = [task for task in takers if can_be_helped(task)]
    chosen: dict[str, list[str]] = {task.name: [] for task in takers}
    for task in takers:
        for node in state.allocation.standbys.get(task.name, ()):
            fits = nodes.get(node, 0) >= roles_of_a_node(targets[task.name])
            if node in free and fits and len(chosen[task.name]) < task.job.standbys:
                chosen[task.name].append(node)
                free.remove(node)
    for task in sorted(takers, key=lambda t: (len(chosen[t.name]), -_lost_with_a_node(t, targets[t.name]), t.name)):
        while len(chosen[task.name]) < task.job.standbys:
            found = next((n for n in free if nodes[n] >= roles_of_a_node(targets[task.name])), None)
            if found is None:
                break
            chosen[task.name].append(found)
            free.remove(found)
    return {name: tuple(names) for name, names in chosen.items() if names}


def _left_by_layouts(state: State, nodes: Mapping[str, int], free: list[str], missing: int) -> list[str]:
    """Nodes on which nobody is waited for: a wider layout that finds its slots taken waits until it is given up.
    missing: slots that the new layouts need on free nodes. They take those where nobody stands by yet, first."""
    standing = {node for names in state.allocation.standbys.values() for node in names}
    left = list(free)
    for node in sorted(free, key=lambda name: name in standing):
        if missing > 0:
            left.remove(node)
            missing -= nodes[node]
    return left


def _lost_with_a_node(task: TaskState, target: Mapping[Rank, str]) -> float:
    """Weighted FLOP/s."""
    size = task.job.layout.replica_size
    whole = len(target) // size
    lost = -(-roles_of_a_node(target) // size)
    left = throughput_of(task, whole - lost) if whole > lost else 0.0
    return task.job.weight * (throughput_of(task, whole) - left)


class Odds:
    """What the planner believes of failures and transitions."""

    def __init__(self, failures: Failures, transitions: Transitions) -> None:
        self.failures, self.transitions = failures, transitions


def is_worth_it(state: State, task: TaskState, ranks: list[Rank], odds: Odds) -> tuple[bool, str]:
    """Spend standbys on these roles, whose nodes are lost? With the planner's words for it.

    Its question is about this task alone: the nodes it holds, and those that are free and do not stand by.
    """
    assert task.plan is not None
    layout = task.job.layout
    holds = Counter(member.node for member in task.plan.members)
    standing = {node for nodes in state.allocation.standbys.values() for node in nodes}
    used = Counter(node for target in state.allocation.targets.values() for node in target.values())
    free = {
        node: slots - used[node]
        for node, slots in state.allocation.nodes.items()
        if node not in standing and node not in holds and slots > used[node]
    }
    lost_nodes = sorted({task.placement[rank] for rank in ranks}, key=node_order)
    gone = {layout.replica_of(m.rank) for m in task.plan.members if m.node in lost_nodes}
    surviving = len(task.plan.replicas) - len(gone)
    nodes = tuple(Node(name, count) for name, count in (*holds.items(), *free.items()))
    demand = demand_of(task, dict(holds), surviving, max(node.slots for node in nodes), {})
    spent = sum(holds[node] for node in lost_nodes)
    cluster = Cluster(nodes, (demand,), spent, False, odds.failures, odds.transitions)
    try:
        planner = Planner(cluster, table=False)
        decision = planner.decision(tuple(f"node:{name}" for name in lost_nodes))
    except (PlannerProblem, UnicronError) as problem:
        return True, f"nothing else can be planned: {problem}"
    return decision.how == "standby", explain(planner, decision)
