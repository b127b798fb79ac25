"""What is simulated, as people write it (SCENARIO.yaml), and what comes of it: one account per policy."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from unicron.performance.shape import ModelShape
from unicron.planner import Planner
from unicron.planner.cluster import Transitions
from unicron.simulate.account import Account
from unicron.simulate.generate import DAY_S, RATE, Rates, generate
from unicron.simulate.history import History
from unicron.simulate.measured import stored
from unicron.simulate.parameters import values_of
from unicron.simulate.policies import POLICIES, Setting
from unicron.simulate.policies.planned import cluster_of
from unicron.simulate.tasks import MODELS, SimTask, task_of
from unicron.simulate.traces import TRACE_A, TRACE_B, by_counts, read_incidents
from unicron.simulate.world import World

NODES_MAX = 1 << 13  # 65,536 GPUs in nodes of 8


class ScenarioProblem(ValueError):
    """A scenario that cannot be simulated; one line that says what is wrong and what to do."""


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int


class Width(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    min: int = 1
    max: int = 0  # 0: all nodes


class ScenarioTask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    model: str | Model = "gpt3-7b"
    weight: float = 1.0
    nodes: Width = Width()
    global_batch: int = 0  # samples; 0: the model's usual


class Failures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """kind: rates (drawn from published rates), trace-a, trace-b, file (a table of incidents, by path)."""

    kind: Literal["rates", "trace-a", "trace-b", "file"] = "rates"
    path: str = ""
    per_1000_node_days: float = RATE
    interval_cv: float = Rates().interval_cv
    offender_shape: float = Rates().offender_shape
    repair_scale: float = 1.0
    preempt_per_1000_node_days: float = 0.0
    preempt_h: float = Rates().preempt_h
    moves_every_s: float = 0.0


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tasks: tuple[ScenarioTask, ...]
    name: str = "scenario"
    nodes: int = 0  # 0: as many as the file of incidents has
    gpus_per_node: int = 8
    gpu: str = "H100-80GB"
    days: float = 28.0  # a file and trace-a, trace-b have their own
    standbys: int = 1  # nodes, for the policies that keep any
    detection: Literal["own", "same", "none"] = "own"
    failures: Failures = Failures()
    policies: tuple[str, ...] = ("unicron", "unicron-standby", "trainmover", "megatron", "oobleck", "torchft")
    assume: dict[str, float] = {}
    seed: int = 0


class Outcome(msgspec.Struct, frozen=True):
    policy: str
    account: Account
    gpus: dict[str, float]  # task -> GPUs that it began with
    wall_s: float
    read: frozenset[str]  # parameters that entered it

    @property
    def ettr(self) -> float:
        return self.account.ettr(self.gpus)


class Simulated(msgspec.Struct, frozen=True):
    scenario: Scenario
    history: History
    tasks: tuple[SimTask, ...]
    ideal: float  # FLOP/s: the best plan for all nodes, if nothing ever failed
    outcomes: dict[str, Outcome]

    @property
    def events_per_s(self) -> float:
        events = sum(outcome.account.num_events for outcome in self.outcomes.values())
        return events / max(sum(outcome.wall_s for outcome in self.outcomes.values()), 1e-9)


# ---------------------------------------------------------------- from a scenario


def history_from(scenario: Scenario, folder: Path) -> History:
    """Raises HistoryProblem, ScenarioProblem."""
    failures = scenario.failures
    if failures.kind == "file":
        if not failures.path:
            raise ScenarioProblem("failures.kind is file: give failures.path, a table of incidents")
        return read_incidents(folder / failures.path, scenario.nodes)
    if not 1 <= scenario.nodes <= NODES_MAX:
        raise ScenarioProblem(f"nodes is {scenario.nodes}: give a number from 1 to {NODES_MAX}")
    if failures.kind != "rates":
        counts = TRACE_A if failures.kind == "trace-a" else TRACE_B
        return by_counts(counts, scenario.nodes, scenario.seed, failures.repair_scale)
    rates = Rates(*(getattr(failures, name) for name in Rates._fields))
    return generate(scenario.nodes, scenario.days, scenario.seed, rates)


def tasks_from(scenario: Scenario, num_nodes: int) -> tuple[SimTask, ...]:
    """Raises PerformanceError for a model that fits nowhere, ScenarioProblem."""
    if not scenario.tasks:
        raise ScenarioProblem("tasks: give at least one")
    tasks = []
    for one in scenario.tasks:
        shape, batch = _model(one)
        most = min(one.nodes.max or num_nodes, num_nodes)
        task = task_of(one.name, shape, batch, one.weight, most, scenario.gpu, scenario.gpus_per_node)
        if one.nodes.min > most:
            raise ScenarioProblem(f"task {one.name}: nodes.min {one.nodes.min} is above {most}")
        flops = task.flops.copy()
        flops[: one.nodes.min] = 0.0
        tasks.append(task._replace(flops=flops))
    return tuple(tasks)


def _model(one: ScenarioTask) -> tuple[ModelShape, int]:
    if isinstance(one.model, str):
        if one.model not in MODELS:
            raise ScenarioProblem(f"task {one.name}: no model {one.model!r}; there are {', '.join(MODELS)}")
        shape, batch = MODELS[one.model]
        return shape, one.global_batch or batch
    if not one.global_batch:
        raise ScenarioProblem(f"task {one.name}: give global_batch, in samples")
    model = one.model
    return ModelShape(model.layers, model.hidden, model.heads, model.seq, model.vocab), one.global_batch


def setting_of(scenario: Scenario, history: History, assume: dict[str, float]) -> Setting:
    """Rates as the scenario states them, and the history's mean repair time: what an operator would know by then."""
    return Setting(
        values=values_of({**scenario.assume, **assume}),
        measured=stored(),
        gpu=scenario.gpu,
        detection=scenario.detection,
        standbys=scenario.standbys,
        failures_per_node_s=scenario.failures.per_1000_node_days / 1000 / DAY_S,
        repair_s=history.mean_repair_s,
    )


def first_widths(tasks: tuple[SimTask, ...], num_nodes: int, setting: Setting) -> list[int]:
    """Everybody's allocation at the start: the planner's over the nodes that are not standbys."""
    cluster = cluster_of(tasks, [0] * len(tasks), num_nodes, 0, setting, Transitions(start_s=0.0))
    plan = Planner(cluster, table=False).solve([])
    counts = dict(zip((task.name for task in cluster.tasks), plan.allocation, strict=True))
    return [int(counts.get(task.name, 0)) for task in tasks]


# ---------------------------------------------------------------- play


def play(
    scenario: Scenario, history: History, tasks: tuple[SimTask, ...], policy: str, assume: dict[str, float]
) -> Outcome:
    """One policy through the history. assume: parameters that differ from the scenario's."""
    begin_s = time.perf_counter()
    setting = setting_of(scenario, history, assume)
    chosen = POLICIES[policy](setting)
    if chosen.num_standbys >= history.num_nodes:
        raise ScenarioProblem(f"standbys is {chosen.num_standbys}, the cluster has {history.num_nodes} nodes")
    widths = first_widths(tasks, history.num_nodes - chosen.num_standbys, setting)
    account = World(tasks, widths, history, chosen).run()
    gpus = {task.name: float(task.gpus(width)) for task, width in zip(tasks, widths, strict=True)}
    return Outcome(policy, account, gpus, time.perf_counter() - begin_s, frozenset(setting.values.read))


def silent(_: str) -> None:
    """For whoever does not show how far it is."""


def simulate(scenario: Scenario, folder: Path = Path(), tell: Callable[[str], None] = silent) -> Simulated:
    """Every policy of the scenario through the same history; ``tell`` hears what begins. Raises ScenarioProblem and the
    problems of its parts."""
    unknown = [name for name in scenario.policies if name not in POLICIES]
    if unknown or not scenario.policies:
        raise ScenarioProblem(f"no policy {', '.join(unknown) or '(none given)'}; there are {', '.join(POLICIES)}")
    tell("what every task earns")
    history = history_from(scenario, folder)
    tasks = tasks_from(scenario, history.num_nodes)
    setting = setting_of(scenario, history, {})
    widths = first_widths(tasks, history.num_nodes, setting)
    ideal = sum(task.waf(width) for task, width in zip(tasks, widths, strict=True))
    outcomes = {}
    for name in scenario.policies:
        tell(name)
        outcomes[name] = play(scenario, history, tasks, name, {})
    return Simulated(scenario, history, tasks, ideal, outcomes)
