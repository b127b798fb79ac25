"""Which connection of the coordinator's port belongs to whom, and when it ended.

ZeroMQ does not tell a ROUTER that a peer left. Its monitor does, by descriptor; a received message
knows the descriptor it came through (ZMQ_SRCFD). Together they name the node whose connection
ended, within a millisecond of its death.
"""

from __future__ import annotations

import zmq

from unicron.runtime.zap import monitor_event

MONITORED = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
EVENTS_PER_TURN_MAX = 1024


class Peers:
    """Poll ``monitor`` for reading; ``ended`` gives the nodes whose connection is over."""

    def __init__(self, router: zmq.Socket[bytes]) -> None:
        self._router = router
        self.monitor = router.get_monitor_socket(MONITORED)
        self._is_open: dict[int, bool] = {}  # descriptor -> as the monitor said last
        self._node_of_fd: dict[int, str] = {}
        self._fd_of_node: dict[str, int] = {}
        self._identity_of_node: dict[str, bytes] = {}
        self._node_of_identity: dict[bytes, str] = {}

    def hello(self, node: str, identity: bytes, fd: int) -> None:
        """This connection is now the node's; an earlier one of the same node no longer counts."""
        self._forget(node)
        self._identity_of_node[node] = identity
        self._node_of_identity[identity] = node
        self._fd_of_node[node] = fd
        self._node_of_fd[fd] = node

    def node_of(self, identity: bytes) -> str | None:
        return self._node_of_identity.get(identity)

    def identity_of(self, node: str) -> bytes | None:
        return self._identity_of_node.get(node)

    def fd_of(self, node: str) -> int:
        """-1: none."""
        return self._fd_of_node.get(node, -1)

    def is_open(self, node: str) -> bool:
        """False when the connection ended before its hello was read."""
        return self._is_open.get(self._fd_of_node.get(node, -1), False)

    def ended(self) -> list[str]:
        """Read the monitor's events; nodes whose connection ended."""
        nodes = []
        for _ in range(EVENTS_PER_TURN_MAX):
            try:
                frames = self.monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            event, fd = monitor_event(frames)
            if event == zmq.EVENT_ACCEPTED:
                self._is_open[fd] = True
                continue
            self._is_open.pop(fd, None)
            node = self._node_of_fd.get(fd)
            if node is not None:
                self._forget(node)
                nodes.append(node)
        return nodes

    def _forget(self, node: str) -> None:
        identity = self._identity_of_node.pop(node, None)
        if identity is not None:
            self._node_of_identity.pop(identity, None)
        fd = self._fd_of_node.pop(node, None)
        if fd is not None and self._node_of_fd.get(fd) == node:
            del self._node_of_fd[fd]

    def close(self) -> None:
        self._router.disable_monitor()
        self.monitor.close(0)
