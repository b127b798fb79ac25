"""A hello that no plan could mean is refused at the door. Found by `make fuzz`: the coordinator journaled it, and ended
at the next decision, and at every start after that."""

from __future__ import annotations

import pytest

from several import Cluster
from unicron.coordinator import events as on
from unicron.coordinator.actions import Refused
from unicron.messages import AgentHeartbeat, AgentHello


@pytest.mark.parametrize(
    ("hello", "said"),
    [
        (AgentHello("my node", 1, 1, 0, "tcp://10.0.0.9:7", "k"), "a name has letters"),
        (AgentHello("n" * 300, 1, 1, 0, "tcp://10.0.0.9:7", "k"), "128 at most"),
        (AgentHello("n9", 1, -1, 0, "tcp://10.0.0.9:7", "k"), "-1 slots"),
        (AgentHello("n9", 1, 1 << 40, 0, "tcp://10.0.0.9:7", "k"), "1024 at most"),
        (AgentHello("n9", -1, 1, 0, "tcp://10.0.0.9:7", "k"), "incarnation -1"),
        (AgentHello("n9", 1, 1, 0, "nowhere", "k"), "not host:port"),
        (AgentHello("n9", 1, 1, 0, "tcp://10.0.0.9:70000", "k"), "not host:port"),
    ],
)
def test_it_is_refused_by_name(hello: AgentHello, said: str) -> None:
    cluster = Cluster(nodes=2, slots=2)
    cluster.run("a", 2)
    cluster.journal.clear()
    cluster.feed(on.AgentMessage(hello.node, hello))
    refused = [action for action in cluster.actions if isinstance(action, Refused)]
    assert len(refused) == 1 and refused[0].name == "unusable_node" and said in refused[0].reason
    assert cluster.journal == [] and hello.node not in cluster.machine.state.nodes
    cluster.feed(on.AgentMessage(hello.node, AgentHeartbeat(hello.node, hello.incarnation, 1)))
    assert hello.node not in cluster.machine.state.nodes
