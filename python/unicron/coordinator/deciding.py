"""The decision: facts and the former allocation in, the next allocation out. Pure; the planner is a function here.

One thing that happened, and nobody's admission changed by it: the answer stands in the planner's table. Anything else
is solved directly. Either way the planner says counts and nodes, and this file turns them into roles: a replica that
can stay where it is stays, the highest leave, the lowest free numbers come.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from unicron.coordinator.admission import admitted
from unicron.coordinator.allocation import Allocation
from unicron.coordinator.demand import can_leave, demand_of, kept_slots, least_slots
from unicron.coordinator.layout_times import for_planner
from unicron.coordinator.narrowing import layout_of, narrows
from unicron.coordinator.placement import place_replica
from unicron.coordinator.planned import Planned
from unicron.coordinator.standing_by import standbys_for
from unicron.coordinator.state import State, TaskState, node_order
from unicron.coordinator.transitions import NodePhase
from unicron.planner.cluster import Cluster, Failures, Node, Task, Transitions
from unicron.planner.explain import explain, flops
from unicron.planner.planner import Decision, Planner
from unicron.types import Layout, Rank

Targets = dict[str, dict[Rank, str]]
CHANGES_SAID_MAX = 6  # in one decision's trigger; the facts themselves are journaled whole


class Facts(NamedTuple):
    nodes: dict[str, int]  # usable node -> slots
    tasks: tuple[str, ...]  # that want slots, oldest first
    stuck: frozenset[str] = frozenset()  # what they have beside drained nodes is too little, and they cannot leave


def facts_of(state: State) -> Facts:
    nodes = {n.name: n.slots for n in state.nodes.values() if n.is_usable}
    wanting = wanting_slots(state)
    stuck = frozenset(t.name for t in wanting if _is_stuck(state, t))
    for name in sorted(stuck):
        for node in _homes(state, state.tasks[name]).values():
            if state.nodes[node].is_drained and state.nodes[node].phase is not NodePhase.LOST:
                nodes[node] = nodes.get(node, 0) + 1
    ordered = dict(sorted(nodes.items(), key=lambda item: node_order(item[0])))
    return Facts(ordered, tuple(t.name for t in wanting), stuck)


def wanting_slots(state: State) -> list[TaskState]:
    """Oldest first."""
    return [task for task in state.tasks.values() if not task.is_over and not task.is_held]


def _is_stuck(state: State, task: TaskState) -> bool:
    if can_leave(task):
        return False
    layout, roles = task.job.layout, _homes(state, task)
    homes = [
        [state.nodes[roles[rank]] for rank in layout.replica_ranks(replica)]
        for replica in sorted({layout.replica_of(rank) for rank in roles})
    ]
    there = [nodes for nodes in homes if all(node.phase is not NodePhase.LOST for node in nodes)]
    drained = sum(any(node.is_drained for node in nodes) for nodes in there)
    free = len(there) - drained
    return drained > 0 and free * layout.replica_size < least_slots(task, free)


def _homes(state: State, task: TaskState) -> dict[Rank, str]:
    """Where its roles are: its target. But nobody can go to a drained or a lost node any more: what of one that cannot
    leave was yet to go there is where it lives, when too little is left without."""
    target, layout = state.target(task.name), task.job.layout
    if can_leave(task) or all(state.nodes[node].is_usable for node in target.values()):
        return target

    def replicas(roles: dict[Rank, str]) -> dict[int, dict[Rank, str]]:
        found: dict[int, dict[Rank, str]] = {}
        for rank, node in roles.items():
            found.setdefault(layout.replica_of(rank), {})[rank] = node
        return found

    def may_stay(rank: Rank, node: str) -> bool:
        return state.nodes[node].is_usable or task.placement.get(rank) == node

    wanted, lived = replicas(target), replicas(task.placement)
    homes = {r: roles for r, roles in wanted.items() if all(may_stay(*role) for role in roles.items())}
    if len(homes) == len(wanted) or len(homes) * layout.replica_size >= least_slots(task, len(homes)):
        return target
    for replica, roles in lived.items():
        is_guest = not roles.keys().isdisjoint(task.guests)
        if not is_guest and all(state.nodes[node].phase is not NodePhase.LOST for node in roles.values()):
            homes.setdefault(replica, roles)
    return {rank: node for replica in sorted(homes) for rank, node in homes[replica].items()}


def is_due(state: State, facts: Facts) -> bool:
    """Did anything happen that an allocation depends on?"""
    known = state.allocation
    if facts.tasks != known.tasks:
        return True
    return bool(facts.tasks) and facts.nodes != known.nodes


@dataclass(frozen=True)
class Question:
    """One decision's inputs, as far as admission went."""

    state: State
    facts: Facts
    homes: dict[str, dict[Rank, str]]  # task -> where its roles are
    surviving: dict[str, int]  # task -> whole replicas that are still on usable nodes
    chosen: list[TaskState]
    gone: list[str]  # had slots; want or get none now

    @property
    def before(self) -> Allocation:
        return self.state.allocation

    def whole(self, task: TaskState) -> list[int]:
        return _whole(self.state, self.facts, task, self.homes[task.name])


def decide(state: State, facts: Facts, now_ms: float) -> tuple[Allocation, Planned]:
    without: set[str] = set()
    while True:
        question = _question(state, facts, without)
        planned, decision, from_table, words = _ask(question)
        layouts = _layouts(question, decision)
        targets = _targets(question, _at_home(question, decision, layouts), planned)
        _narrow_what_has_no_place(question, targets, layouts)
        homeless = _homeless(question, targets)
        if not homeless:
            break
        # Its least number of slots is there, but not in places its groups fit into: it waits, the others go on.
        without |= homeless
    notes = _notes(question, targets, without, planned)
    reason = " ".join([words, *(f"{name}: {note}." for name, note in notes.items() if name not in targets)])
    allocation = Allocation(
        number=state.allocation.number + 1,
        nodes=facts.nodes,
        tasks=facts.tasks,
        targets=targets,
        layouts=layouts,
        standbys=standbys_for(state, facts.nodes, targets, layouts),
        trigger=_trigger(state, facts),
        events=planned.events,
        from_table=from_table,
        waf=decision.waf if decision else 0.0,
        reward=decision.reward if decision else 0.0,
        reason=reason.strip(),
        notes=notes,
        at_ms=now_ms,
    )
    return allocation, planned


def _question(state: State, facts: Facts, without: set[str]) -> Question:
    homes = {name: _homes(state, task) for name, task in state.tasks.items() if not task.is_over}
    surviving = {name: len(_whole(state, facts, state.tasks[name], homes[name])) for name in facts.tasks}
    pool = sum(facts.nodes.values())
    chosen = admitted((state.tasks[name] for name in facts.tasks), surviving, pool, without)
    names = {task.name for task in chosen}
    gone = [name for name in state.allocation.targets if name not in names and name in state.tasks]
    homes |= {name: _homes(state, state.tasks[name]) for name in gone if name not in homes}
    return Question(state, facts, homes, surviving, chosen, gone)


def _whole(state: State, facts: Facts, task: TaskState, homes: dict[Rank, str]) -> list[int]:
    """Its replicas all of whose nodes are usable, to it."""
    layout = task.job.layout
    replicas = sorted({layout.replica_of(rank) for rank in homes})
    return [r for r in replicas if all(_keeps(state, facts, task, homes[k]) for k in layout.replica_ranks(r))]


def _keeps(state: State, facts: Facts, task: TaskState, node: str) -> bool:
    return node in facts.nodes and (not state.nodes[node].is_drained or task.name in facts.stuck)


# ------------------------------------------------------------ the planner


class Asked(NamedTuple):
    planner: Planner
    events: tuple[str, ...]
    from_table: bool
    renamed: tuple[str, str] | None = None  # a new node: the planner's name for it, ours


def _ask(question: Question) -> tuple[Planned, Decision | None, bool, str]:
    """(what was asked and answered, the decision, whether the table had it, its words)."""
    number = question.before.number + 1
    if not question.chosen:
        return Planned(number, Cluster((), ()), (), {}, {}), None, False, "Nothing runs."
    asked = _in_table(question) or _direct(question)
    decision = asked.planner.decision(asked.events)
    words = explain(asked.planner, decision)
    if asked.renamed:
        theirs, ours = asked.renamed
        moves = tuple(
            msgspec.structs.replace(move, node=ours) if move.node == theirs else move for move in decision.moves
        )
        decision = msgspec.structs.replace(decision, moves=moves)
    planned = Planned(
        number, asked.planner.cluster, asked.events, decision.allocation, decision.unplaced, decision.reward
    )
    return planned, decision, asked.from_table, words


def _in_table(question: Question) -> Asked | None:
    """One thing happened, the tables foresaw it, and whoever is left keeps being admitted. The tables were made from
    the present allocation (steering.py); throughput and failures may have moved a little since."""
    planner, before, after = question.state.planner, question.before.nodes, question.facts.nodes
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if planner is None or len(changed) + len(question.gone) != 1:
        return None
    if {task.name for task in planner.cluster.tasks} != {task.name for task in question.chosen} | {*question.gone}:
        return None
    if any(question.homes[task.name] != question.state.target(task.name) for task in question.chosen):
        return None  # the tables count it where it was to go, and it stays where it lives
    renamed = None
    if question.gone:
        event = f"finish:{question.gone[0]}"
    elif changed[0] not in after:
        event = f"node:{changed[0]}"
        if any(changed[0] in task.holds and _is_rigid(question.state, task.name) for task in planner.cluster.tasks):
            return None  # what survives of it has become a count it may keep
    elif changed[0] in before:
        return None
    elif changed[0] in {node.name for node in planner.cluster.nodes}:
        event = f"join:{changed[0]}"
    else:
        event = f"join:{after[changed[0]]}"
        renamed = (_stranger_name(planner.cluster.nodes), changed[0])
    return Asked(planner, (event,), True, renamed) if event in planner.events else None


def _is_rigid(state: State, name: str) -> bool:
    return state.tasks[name].job.replicas_min == 0 or narrows(state.tasks[name])


def _direct(question: Question) -> Asked:
    """The cluster before it happened, except that who came is there already: a newcomer holds nothing, so it makes no
    difference, and the tasks' least counts then fit."""
    before, after = question.before.nodes, question.facts.nodes
    there = {**{name: slots for name, slots in before.items() if name not in after}, **after}
    cluster = _cluster(question, there)
    leavers = [task.name for task in cluster.tasks if task.name in question.gone]
    events = [f"node:{name}" for name in before if name not in after] + [f"finish:{name}" for name in leavers]
    return Asked(Planner(cluster, table=False), tuple(events), False)


def _cluster(question: Question, there: dict[str, int]) -> Cluster:
    """there: node -> slots, of those that are up in the cluster's file, so to speak."""
    state = question.state
    nodes = tuple(
        Node(
            name,
            there.get(name, node.slots),
            faults=state.node_faults.get(name, 0),
            state="up" if name in there else "lost",
        )
        for name, node in state.nodes.items()
    )
    names = {*question.gone, *(task.name for task in question.chosen)}
    widest = max(there.values(), default=1)
    demands = []
    held = _holds(question, there)
    for task in (task for task in state.tasks.values() if task.name in names):
        size = task.job.layout.replica_size
        holds = held[task.name]
        if not holds and task.name in question.gone:
            continue  # there is nothing that it could leave
        whole = sum(holds.values()) // size
        surviving = whole if task.name in question.gone else question.surviving[task.name]
        others = for_planner(state, task, surviving) if holds or narrows(task) else {}
        relayout_s = {slots: seconds for slots, (_, seconds) in others.items()}
        demands.append(demand_of(task, holds, surviving, widest, relayout_s))
    return Cluster(nodes, tuple(demands), 0, False, failures_of(state), transitions_of(state))


def _holds(question: Question, there: dict[str, int]) -> dict[str, dict[str, int]]:
    """Task -> its slots by node. Whoever is admitted first has them, should several count the same ones as theirs."""
    left, found = dict(there), {}
    for task in (*question.chosen, *(question.state.tasks[name] for name in question.gone)):
        holds = {n: c for n, c in Counter(_held(question, task)).items() if left.get(n, 0) >= c}
        if sum(holds.values()) % task.job.layout.replica_size:
            holds = {}
        for node, count in holds.items():
            left[node] -= count
        found[task.name] = holds
    return found


def _held(question: Question, task: TaskState) -> list[str]:
    """The node of each of its roles that may stay: those of whole replicas. What a drained node still counts is for who
    cannot leave it."""
    nodes, layout = question.state.nodes, task.job.layout
    homes, is_stuck = question.homes[task.name], task.name in question.facts.stuck
    parted = {layout.replica_of(rank) for rank, node in homes.items() if nodes[node].is_drained and not is_stuck}
    return [node for rank, node in homes.items() if layout.replica_of(rank) not in parted]


def _stranger_name(nodes: tuple[Node, ...]) -> str:
    """As planner/situation.py names it."""
    known = {node.name for node in nodes}
    return next(f"new{index}" for index in range(len(known) + 1) if f"new{index}" not in known)


def tables_for(state: State) -> Planner | None:
    """Plans for every one-step event from the allocation as it stands; None when nothing runs."""
    facts = facts_of(state)
    homes = {name: _homes(state, state.tasks[name]) for name in facts.tasks}
    surviving = {name: len(_whole(state, facts, state.tasks[name], homes[name])) for name in facts.tasks}
    chosen = [state.tasks[name] for name in facts.tasks if state.target(name)]
    return Planner(_cluster(Question(state, facts, homes, surviving, chosen, []), facts.nodes)) if chosen else None


def failures_of(state: State) -> Failures:
    """The rate this cluster has shown, with the planner's prior."""
    return Failures(seen=state.num_failures, slot_s=state.slot_ms / 1000)


def transitions_of(state: State) -> Transitions:
    """D_transition: the planner's value counts as one measurement beside those that were made."""
    prior = Transitions()
    means = {}
    for kind, (count, total_s) in state.transitions_s.items():
        if not hasattr(prior, f"{kind}_s"):
            continue  # a change of layout: layout_times.py
        means[f"{kind}_s"] = (getattr(prior, f"{kind}_s") + total_s) / (1 + count)
    return msgspec.structs.replace(prior, **means)


# ------------------------------------------------------------ counts to roles


def _layouts(question: Question, decision: Decision | None) -> dict[str, Layout]:
    """Who shall go over to another layout, and to which."""
    found: dict[str, Layout] = {}
    if decision is None:
        return found
    for task in question.chosen:
        slots, layout = decision.allocation[task.name], task.job.layout
        other = for_planner(question.state, task, question.surviving[task.name]).get(slots)
        if narrows(task):  # fewer replicas than its layout has are no width of it, but a state to get out of
            if slots != layout.world_size:
                found[task.name] = other[0] if other else layout_of(task, slots // layout.replica_size)
        elif other is not None and slots not in _widths(task):
            found[task.name] = other[0]
    return found


def _narrow_what_has_no_place(question: Question, targets: Targets, layouts: dict[str, Layout]) -> None:
    """There are slots for all of it, but not in places its groups fit into: for one that narrows that is a width."""
    for task in question.chosen:
        layout, roles = task.job.layout, targets.get(task.name, {})
        if not narrows(task) or task.name in layouts or len(roles) in (0, layout.world_size):
            continue
        layouts[task.name] = layout_of(task, len(roles) // layout.replica_size)
        whole = question.whole(task)
        targets[task.name] = {rank: node for rank, node in roles.items() if layout.replica_of(rank) in whole}


def _widths(task: TaskState) -> set[int]:
    size = task.job.layout.replica_size
    return {count * size for count in range(1, task.job.layout.num_replicas + 1)}


def _at_home(question: Question, decision: Decision | None, layouts: dict[str, Layout]) -> Decision | None:
    """Who goes over to another layout stays where it is until everybody has it."""
    if decision is None or not layouts:
        return decision
    states = question.state.tasks
    there = {name: len(question.whole(states[name])) * states[name].job.layout.replica_size for name in layouts}
    moves = tuple(move for move in decision.moves if move.task not in layouts)
    return msgspec.structs.replace(decision, allocation={**decision.allocation, **there}, moves=moves)


def _targets(question: Question, decision: Decision | None, planned: Planned) -> Targets:
    if decision is None:
        return {}
    targets = _placed(question, decision, planned)
    if _is_too_much(question, targets):  # who goes over to another layout stays for now where another was to come
        return _first_fit(question, decision)
    for task in question.chosen:
        survived = question.whole(task)
        kept = {r for r in survived if targets.get(task.name, {}).items() >= _roles(question, task, r).items()}
        if survived and not kept and targets.get(task.name):
            return _first_fit(question, decision)  # nobody is moved away whole to make room
    return targets


def _is_too_much(question: Question, targets: Targets) -> bool:
    wanted = Counter(node for roles in targets.values() for node in roles.values())
    return any(count > question.facts.nodes.get(node, 0) for node, count in wanted.items())


def _roles(question: Question, task: TaskState, replica: int) -> dict[Rank, str]:
    homes = question.homes[task.name]
    return {rank: homes[rank] for rank in task.job.layout.replica_ranks(replica)}


def _placed(question: Question, decision: Decision, planned: Planned) -> Targets:
    """Where the planner puts them: what it was told that they hold, and its moves."""
    held = {task.name: task.holds for task in planned.cluster.tasks}
    want = {task.name: Counter(held.get(task.name, {})) for task in question.chosen}
    for move in decision.moves:
        if move.task in want:
            want[move.task][move.node] += move.change
    targets = {}
    for task in question.chosen:
        left = {n: want[task.name][n] for n in question.facts.nodes if want[task.name][n] > 0}
        roles = _assign(question, task, left, decision.allocation[task.name])
        if roles:
            targets[task.name] = roles
    return targets


def _first_fit(question: Question, decision: Decision) -> Targets:
    """Without moving anybody: replicas stay as far as the counts allow, new ones go where there is room."""
    free = dict(question.facts.nodes)
    kept: Targets = {}
    for task in question.chosen:
        survived = question.whole(task)
        most = decision.allocation[task.name] // task.job.layout.replica_size
        kept[task.name] = {}
        for mine in [_roles(question, task, r) for r in survived[:most]]:
            need = Counter(mine.values())
            if all(free.get(node, 0) >= count for node, count in need.items()):
                kept[task.name].update(mine)
                free.update({node: free[node] - count for node, count in need.items()})
    for task in question.chosen:
        _add(task, kept[task.name], free, decision.allocation[task.name])
    return {name: roles for name, roles in kept.items() if roles}


def _assign(question: Question, task: TaskState, left: dict[str, int], slots: int) -> dict[Rank, str]:
    """Roles on `left` slots by node: who is there stays, lowest first, then free numbers."""
    roles: dict[Rank, str] = {}
    for replica in question.whole(task):
        mine = _roles(question, task, replica)
        need = Counter(mine.values())
        if all(left.get(node, 0) >= count for node, count in need.items()):
            roles.update(mine)
            for node, count in need.items():
                left[node] -= count
    _add(task, roles, left, slots)
    return roles


def _add(task: TaskState, roles: dict[Rank, str], free: dict[str, int], slots: int) -> None:
    """New replicas on free slots. Numbers that are in use elsewhere come last: such a one must leave before it can
    come."""
    layout = task.job.layout
    have = {layout.replica_of(rank) for rank in roles}
    busy = set(task.plan.replicas) if task.plan else set()
    for replica in sorted(set(range(layout.num_replicas)) - have, key=lambda r: (r in busy, r)):
        if len(roles) >= slots:
            return
        roles.update(place_replica(layout, replica, free) or {})


def _homeless(question: Question, targets: Targets) -> set[str]:
    """Tasks that were given fewer slots than they run on, for want of whole places; the last admitted of them."""
    for task in reversed(question.chosen):
        size = task.job.layout.replica_size
        surviving = min(question.surviving[task.name], len(targets.get(task.name, {})) // size)
        if len(targets.get(task.name, {})) < kept_slots(task, surviving):
            return {task.name}
    return set()


# ------------------------------------------------------------ words


def _trigger(state: State, facts: Facts) -> str:
    before = state.allocation
    said = []
    for name, slots in before.nodes.items():
        node = state.nodes.get(name)
        if name not in facts.nodes:
            said.append(f"{name} is {'drained' if node is not None and node.is_drained else 'lost'}")
        elif facts.nodes[name] != slots:
            said.append(f"{name} has {facts.nodes[name]} slots, not {slots}")
    for name in facts.nodes:
        if name not in before.nodes:
            is_drained = state.nodes[name].is_drained
            said.append(f"{name} is drained, and who is there cannot leave" if is_drained else f"{name} joined")
    for name in before.tasks:
        if name not in facts.tasks:
            task = state.tasks.get(name)
            said.append(f"{name} is {'suspended' if task is not None and task.is_held else 'over'}")
    said += [f"{name} wants slots" for name in facts.tasks if name not in before.tasks]
    more = len(said) - CHANGES_SAID_MAX
    return ", ".join(said[:CHANGES_SAID_MAX] + ([f"and {more} changes more"] if more > 0 else []))


def _notes(question: Question, targets: Targets, without: set[str], planned: Planned) -> dict[str, str]:
    """One line for each task that wants slots: why it gets what it gets."""
    notes = {}
    pool = sum(question.facts.nodes.values())
    free = pool - sum(len(roles) for roles in targets.values())
    demands = {task.name: task for task in planned.cluster.tasks}
    for name in question.facts.tasks:
        task = question.state.tasks[name]
        before, after = len(question.state.target(name)), len(targets.get(name, {}))
        least = least_slots(task, 0)
        if after:
            had = f"; it had {before}" if before not in (0, after) else ", as before" if before else ""
            notes[name] = f"{after} of {pool} slots{_why_no_more(demands.get(name), after, free)}{had}"
        elif name in without:
            notes[name] = f"waits: no node has room for its groups of {task.job.layout.tp}"
        elif before:
            who = "checkpoint first, " if can_leave(task) and task.job.managed else ""
            notes[name] = f"pre-empted ({who}it keeps its place): its {least} slots are not left by higher priority"
        else:
            notes[name] = f"waits: of {pool} slots its {least} are not left by those before it"
    return notes


def _why_no_more(task: Task | None, slots: int, free: int) -> str:
    """Of a task beside which slots stay free: that with them it is slower, where that is why."""
    more = [count for count in task.counts() if slots < count <= slots + free] if task is not None else []
    if task is None or not more or max(map(task.waf, more)) > task.waf(slots):
        return ""
    theirs, its = (float(task.throughput.get(count, 0.0)) for count in (more[0], slots))
    rates = f"{flops(theirs, like=its)} against {flops(its)}"
    return f": {more[0]} earn {'less' if theirs < its else 'no more'} ({rates})"
