"""One gloo group over all participants of a change of layout: members of both layouts, whatever their ranks are.

It belongs to nobody's model. The native monitor knows its sockets and shuts them when the change is called off, as it
does with every group between replicas.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from unicron import _core
from unicron.training.gloo_device import make_device
from unicron.training.watched_group import COLLECTIVE_TIMEOUT, CONNECT_TIMEOUT, SHUT_S, Helpers, WatchedGroup

GROUP_ID = 1 << 30  # beyond the numbers that Groups gives


class CalledOff(RuntimeError):
    """A newer epoch came before everybody had the new layout."""


class Line:
    """A reshard.move.Channel. close() when all is done, or has failed."""

    def __init__(
        self, own: int, size: int, store: dist.Store, monitor: Any, pulse: Any, is_over: Callable[[], bool]
    ) -> None:
        self._monitor, self._pulse, self._is_over = monitor, pulse, is_over
        self._helpers = Helpers()
        before = set(_core.connected_sockets())
        options = dist.ProcessGroupGloo._Options()
        options._devices = [make_device()]
        options._timeout = CONNECT_TIMEOUT
        backend = self._helpers.call(lambda: dist.ProcessGroupGloo(store, own, size, options), self._check)
        backend._set_default_timeout(COLLECTIVE_TIMEOUT)
        sockets = [each for each in _core.connected_sockets() if each not in before]
        monitor.register_group(GROUP_ID, sockets, list(range(size)), True)
        self._group: WatchedGroup | None = WatchedGroup(
            backend, self._helpers, lambda: str(monitor.group_state(GROUP_ID)), pulse
        )

    def _check(self, seconds: float) -> None:
        if self._is_over() and seconds > SHUT_S:
            raise CalledOff("a newer epoch came while the participants connected")

    def send(self, data: torch.Tensor, target: int) -> Any:
        assert self._group is not None
        return self._group.send([data], target, 0)

    def receive(self, data: torch.Tensor, source: int) -> Any:
        assert self._group is not None
        return self._group.recv([data], source, 0)

    def close(self) -> None:
        """Its destructor joins threads that are on their way out, so another thread waits for them; a group that lost
        an operation is kept for ever, because its destructor would wait for that."""
        group, self._group = self._group, None
        if group is None:
            return
        self._monitor.forget_group(GROUP_ID)
        if group.lost:
            _lost.append(group)
            return
        going = [group]
        del group
        threading.Thread(target=going.clear, name="unicron-release", daemon=True).start()


_lost: list[WatchedGroup] = []
