"""What the native listener says of a node's beats: changes only. Silence is suspicion, and no more.

While a node's beats are heard nobody waits for its heartbeats on the connection (they carry news, and there may be
none). A node that does not beat (an older agent, a network without UDP) is watched by its heartbeats, as ever.
"""

from __future__ import annotations

from unicron.coordinator.events import NodeHeard, NodeSilent, NodeVouched
from unicron.coordinator.nodes import hear_again, suspect_node
from unicron.coordinator.state import Hearing, NodeState
from unicron.coordinator.step import Step
from unicron.coordinator.transitions import NodePhase


def on_hearing(step: Step, node: NodeState, event: NodeHeard | NodeVouched | NodeSilent) -> None:
    if node.phase in (NodePhase.AWAITED, NodePhase.LOST):
        step.refuse("not_up", f"a beat of {node.name}, which is {node.phase.value}")
        return
    match event:
        case NodeHeard():
            node.hearing = Hearing.HEARD
            step.cancel_timer("silence", node.name, "its beats are heard")
            hear_again(step, node, "its beats are heard")
        case NodeVouched():
            node.hearing = Hearing.VOUCHED
        case NodeSilent():
            node.hearing = Hearing.SILENT
            if node.phase is NodePhase.UP:
                reason = f"no beat for {event.silent_ms:.0f} ms, here or where others listen to it"
                suspect_node(step, node, "silent", reason)
