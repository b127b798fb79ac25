"""Who may speak of whom: an agent of its own node and of the workers that live there, and of nobody else.

A worker's name begins with its node's, and is never used twice, so this is known without looking anything up.
"""

from __future__ import annotations

from collections.abc import Iterator

from unicron.coordinator.events import AgentSays
from unicron.messages import AgentChecked, AgentHeartbeat, AgentHello, FromWorker, HardwareSeen, WorkersWait, WorkerUp


def foreign(node: str, message: AgentSays) -> str | None:
    """Of whom this message speaks that is not of the node it came from; None: of nobody."""
    if message.node != node:
        return message.node
    return next((worker for worker in _workers(message) if worker.rpartition(".")[0] != node), None)


def _workers(message: AgentSays) -> Iterator[str]:
    match message:
        case AgentHello():
            yield from (status.worker for status in message.workers)
        case AgentHeartbeat():
            yield from (status.worker for status in message.workers)
            yield from (pace.worker for pace in message.paces)
        case WorkerUp():
            yield message.status.worker
        case FromWorker():
            yield message.body.worker
        case WorkersWait():
            yield from message.workers
        case AgentChecked() | HardwareSeen():
            pass
        case _:
            yield message.worker
