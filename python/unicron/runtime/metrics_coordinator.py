"""What Prometheus sees of the coordinator: gauges looked up in the state, counters that grow as incidents close.

Names and units are Prometheus's: base units, `_total` for what only grows. Counters begin at 0 in every life of a
coordinator, which is what rate() and increase() expect; the whole past is in the journal (`unicron incidents`).
An incident counts when it has its outcome, because until then its severity and its cost may change. Labels are from
small sets: tasks, nodes, and words of unicron; never a text of a person or a program.
"""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterable, Mapping
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from unicron.coordinator.accounting import cost_of
from unicron.coordinator.incident import Incident
from unicron.coordinator.state import State, TaskState
from unicron.coordinator.timesheet import MEANT_TO_RUN
from unicron.coordinator.transitions import NodePhase, TaskPhase
from unicron.runtime.exposition import gauge, number
from unicron.types import Severity

PHASE_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
APPEND_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)
# A failure that is the first of its kind must not be its series' first sample: increase() would not see it.
USUAL = (
    (Severity.SEV1, "node lost"),
    *((Severity.SEV2, cause) for cause in ("worker lost", "exception", "stopped", "stalled", "state lost")),
    *((Severity.SEV3, cause) for cause in ("connection", "all wait")),
    *((Severity.FATAL, cause) for cause in ("worker lost", "exception")),
)


class CoordinatorMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._incidents = Counter(
            "unicron_incidents_total", "Failures that are over, by severity and cause.", ("severity", "cause"),
            registry=registry,
        )  # fmt: skip
        self._lost = Counter(
            "unicron_lost_gpu_seconds_total", "GPU-seconds that failures cost, by cause and part of the cost.",
            ("cause", "part"), registry=registry,
        )  # fmt: skip
        self._phases = Histogram(
            "unicron_recovery_phase_seconds", "Seconds by phase of recovery, on the rank that took longest.",
            ("phase",), buckets=PHASE_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self._append = Histogram(
            "unicron_journal_append_seconds", "From a decision until it is durable.", buckets=APPEND_BUCKETS_S,
            registry=registry,
        )  # fmt: skip
        self._entries = Counter("unicron_journal_entries_total", "Decisions written.", registry=registry)
        self._transferred = Counter(
            "unicron_state_transfer_bytes_total", "State that came from another process while a task healed.",
            ("node",), registry=registry,
        )  # fmt: skip
        self._transfer_s = Counter(
            "unicron_state_transfer_seconds_total", "Seconds in which it came.", ("node",), registry=registry
        )
        self._slow = Counter(
            "unicron_slow_state_transfers_total", "Of them, those whose bandwidth was too low.", ("node",),
            registry=registry,
        )  # fmt: skip
        self._told_epochs: dict[str, int] = {}  # task -> newest epoch whose transfers are counted
        self._costs: dict[str, dict[str, float]] = {}  # incident -> what of it is counted
        for severity, cause in USUAL:
            self._incidents.labels(severity.value, cause)

    def begin(self, state: State, now_ms: float) -> None:
        """Of what an earlier life counted nothing counts again."""
        self._costs = {i.id: cost_of(i, now_ms) for i in state.incidents.values() if not i.is_open}

    def note_incident(self, incident: Incident, now_ms: float) -> None:
        if incident.is_open:
            return
        if incident.id not in self._costs:
            self._incidents.labels(incident.severity.value, incident.fault).inc()
            self._count_transfers(incident)
            for phase, seconds in phases_s(incident).items():
                self._phases.labels(phase).observe(seconds)
        self._count_cost(incident, now_ms)

    def _count_transfers(self, incident: Incident) -> None:
        """Once an epoch: all incidents that it answers tell the same ones. Counted by the node that got the state."""
        if not incident.transfers or incident.epoch <= self._told_epochs.get(incident.task, 0):
            return
        self._told_epochs[incident.task] = incident.epoch
        for each in incident.transfers:
            self._transferred.labels(each.target).inc(each.nbytes)
            self._transfer_s.labels(each.target).inc(each.ms / 1000)
            self._slow.labels(each.target).inc(bool(each.slow))

    def note_append(self, entries: int, seconds: float) -> None:
        if entries:
            self._entries.inc(entries)
            self._append.observe(seconds)

    def _count_cost(self, incident: Incident, now_ms: float) -> None:
        if incident.part_of:
            return
        known, cost = self._costs.get(incident.id, {}), cost_of(incident, now_ms)
        for name, value in cost.items():
            grown = value - known.get(name, 0.0)
            if name != "total_gpu_s" and grown > 0:
                self._lost.labels(incident.fault, name.removesuffix("_gpu_s")).inc(grown)
        self._costs[incident.id] = {name: max(value, known.get(name, 0.0)) for name, value in cost.items()}

    def families(
        self, state: State, heard_ms: Mapping[str, float], now_ms: float, refused: int, refused_messages: int = 0
    ) -> Iterable[Metric]:
        """heard_ms: when each node was heard last; refused: connections without an admitted key; refused_messages: of
        those that have one."""
        for name in sorted(state.sub_healthy):  # these grow while nothing happens
            self._count_cost(state.incidents[name], now_ms)
        self._costs = {name: cost for name, cost in self._costs.items() if name in state.incidents}
        self._told_epochs = {name: epoch for name, epoch in self._told_epochs.items() if name in state.tasks}
        yield from cluster_families(state, now_ms)
        yield from node_families(state, heard_ms, now_ms)
        yield from task_families(state, now_ms)
        yield CounterMetricFamily("unicron_refused_connections", "Without an admitted key.", value=refused)
        text = "Messages of admitted peers that could not be taken."
        yield CounterMetricFamily("unicron_refused_messages", text, value=refused_messages)


def phases_s(incident: Incident) -> dict[str, float]:
    """Seconds by phase: detect, decide and resume as the incident has them, then the members' own phases."""
    whole = {"detect": incident.detect_ms, "decide": incident.decide_ms, "resume": incident.resume_ms}
    known = {name: value for name, value in whole.items() if value is not None}
    return {name: value / 1000 for name, value in {**known, **incident.phases_ms}.items()}


def cluster_families(state: State, now_ms: float) -> Iterable[Metric]:
    tasks = [task for task in state.tasks.values() if not task.is_over]
    info = gauge("build_info", "Version that runs.", "version")
    info.add_metric((version("unicron"),), 1)
    yield info
    yield number("leader", "1 where this coordinator decides, 0 where it waits.", 1)
    yield number("term", "Of the coordinator: grows with every one that begins.", state.term)
    yield number("slots", "Usable slots.", sum(n.slots for n in state.nodes.values() if n.is_usable))
    yield number("slots_used", "Slots that tasks hold.", sum(len(t.slotted) for t in tasks))
    waf = sum(task.accounts.waf for task in tasks)
    yield number("waf_flop_per_second", "Weighted achieved FLOP/s of all tasks.", waf)
    flop = sum(task.accounts.flop_until(now_ms) for task in state.tasks.values())
    yield CounterMetricFamily("unicron_waf_flop", "Integral of the weighted achieved FLOP/s.", value=flop)
    spent = [task.accounts.spent(now_ms) for task in tasks]
    meant = sum(each.get(kind, 0.0) for each in spent for kind in MEANT_TO_RUN)
    if meant > 0:
        ratio = sum(each.get("running", 0.0) for each in spent) / meant
        yield number("ettr_ratio", "Effective training time ratio over the tasks that live.", ratio)
    if state.allocation.number:
        age_s = max(now_ms - state.allocation.at_ms, 0.0) / 1000
        yield number("plan_age_seconds", "Since what every task holds was decided.", age_s)
    yield number("plan_number", "Decisions about what every task holds.", state.allocation.number)
    opened = gauge("incidents_open", "Failures that are not over, by severity.", "severity")
    counts = Count(i.severity.value for i in state.incidents.values() if i.is_open)
    for severity in Severity:
        opened.add_metric((severity.value,), counts[severity.value])
    yield opened
    yield number("incidents_sub_healthy", "Failures whose slots are still missed.", len(state.sub_healthy))


def node_families(state: State, heard_ms: Mapping[str, float], now_ms: float) -> Iterable[Metric]:
    phases = gauge("nodes", "Nodes by phase.", "phase")
    counts = Count(node.phase for node in state.nodes.values())
    for phase in NodePhase:
        phases.add_metric((phase.value,), counts[phase])
    yield phases
    yield number("nodes_drained", "Nodes that a person wants empty.", sum(n.is_drained for n in state.nodes.values()))
    age = gauge("node_heartbeat_age_seconds", "Since this node was heard; none for one that is lost.", "node")
    faults = CounterMetricFamily("unicron_node_faults", "Failures remembered against a node.", labels=("node",))
    for name, node in sorted(state.nodes.items()):
        if node.phase is not NodePhase.LOST and name in heard_ms:
            age.add_metric((name,), max(now_ms - heard_ms[name], 0.0) / 1000)
        faults.add_metric((name,), state.node_faults.get(name, 0))
    yield age
    yield faults


def task_families(state: State, now_ms: float) -> Iterable[Metric]:
    phases = gauge("tasks", "Tasks by state.", "state")
    counts = Count(task.phase for task in state.tasks.values())
    for phase in TaskPhase:
        phases.add_metric((phase.value,), counts[phase])
    yield phases
    slots = gauge("task_slots", "Slots that a task holds.", "task")
    target = gauge("task_slots_target", "Slots that were decided for it.", "task")
    waf = gauge("task_waf_flop_per_second", "Its weighted achieved FLOP/s.", "task")
    ettr = gauge("task_ettr_ratio", "Its effective training time ratio.", "task")
    iteration = gauge("task_iteration", "Highest iteration that anybody reported.", "task")
    standbys = gauge("standbys", "Warm processes without a role, by whether they could take one now.", "task", "state")
    spent = CounterMetricFamily("unicron_task_seconds", "A task's time by kind.", labels=("task", "kind"))
    restarts = CounterMetricFamily("unicron_task_restarts", "Workers replaced, or whole restarts.", labels=("task",))
    for task in state.tasks.values():
        for kind, ms in task.accounts.spent(now_ms).items():
            spent.add_metric((task.name, kind), ms / 1000)
        restarts.add_metric((task.name,), task.restarts)
        ratio = task.accounts.ettr(now_ms)
        if ratio is not None:
            ettr.add_metric((task.name,), ratio)
        if task.is_over:
            continue
        slots.add_metric((task.name,), len(task.slotted))
        target.add_metric((task.name,), len(state.target(task.name)))
        waf.add_metric((task.name,), task.accounts.waf)
        iteration.add_metric((task.name,), task.iteration)
        _add_standbys(standbys, task)
    yield from (slots, target, waf, ettr, iteration, standbys, spent, restarts)


def _add_standbys(standbys: GaugeMetricFamily, task: TaskState) -> None:
    standbys.add_metric((task.name, "ready"), sum(worker.is_candidate for worker in task.workers.values()))
    standbys.add_metric((task.name, "coming"), sum(worker.is_coming for worker in task.workers.values()))
