"""What Prometheus sees of an agent: gauges looked up in its machine's state. Cheap, and nothing secret."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterable
from importlib.metadata import version

from prometheus_client.core import CounterMetricFamily, Metric

from unicron.agent.config import AgentConfig
from unicron.agent.state import State
from unicron.agent.transitions import Phase
from unicron.runtime.exposition import gauge, number


def families(state: State, config: AgentConfig, refused: int) -> Iterable[Metric]:
    """refused: connections without an admitted key."""
    info = gauge("agent_info", "This node.", "node", "version")
    info.add_metric((config.node, version("unicron")), 1)
    yield info
    yield number("agent_incarnation", "Grows with every life of this agent.", config.incarnation)
    yield number("agent_slots", "Workers that this node can hold.", config.slots)
    yield number("agent_coordinator_connected", "1 while there is a line to the coordinator.", state.is_connected)
    yield number("agent_term", "Newest term of a coordinator that this agent knows.", state.term)
    workers = gauge("agent_workers", "Workers by phase.", "phase")
    counts = Count(worker.phase for worker in state.workers.values())
    for phase in Phase:
        if phase is not Phase.GONE:
            workers.add_metric((phase.value,), counts[phase])
    yield workers
    waiting = sum(worker.waiting and not worker.is_dead for worker in state.workers.values())
    yield number("agent_standbys", "Warm processes without a role.", waiting)
    yield number("agent_arenas", "Training states kept.", len(state.arenas))
    yield number("agent_arena_bytes", "Host memory of them.", sum(arena.nbytes for arena in state.arenas.values()))
    unsent = len(state.reports)
    yield number("agent_reports_kept", "Reports that a coordinator that comes back is told again.", unsent)
    yield CounterMetricFamily("unicron_agent_refused_connections", "Without an admitted key.", value=refused)
