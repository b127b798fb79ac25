"""What people see of the coordinator's state."""

from __future__ import annotations

from unicron.coordinator.state import NodeState, State
from unicron.coordinator.transitions import NodePhase
from unicron.runtime.views import nodes_view


def test_nodes_are_listed_by_name_however_they_came() -> None:
    state = State(nodes={name: NodeState(name, 1, 1, 0, "", "", NodePhase.UP) for name in ("n10", "n2", "n0")})
    assert [node["node"] for node in nodes_view(state)] == ["n0", "n2", "n10"]
