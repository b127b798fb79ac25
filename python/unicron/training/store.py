"""torch.distributed.Store over unicron's rendezvous store, so that gloo meets where the epoch's plan says.

The store is hosted by an agent (runtime/store_server.py) and protected by CURVE. Waits end early when a newer epoch
is announced: a failure during a recovery must not hold anybody in a rendezvous that will never complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from unicron.runtime.store_client import StoreClient

RENDEZVOUS_MS_MAX = 20_000


class RendezvousStore(dist.Store):
    """Every key gets `prefix`; blocking calls obey `cancelled`."""

    def __init__(self, client: StoreClient, prefix: str, cancelled: Callable[[], bool]) -> None:
        super().__init__()
        self._client, self._prefix, self._cancelled = client, prefix, cancelled
        self._timeout_ms = RENDEZVOUS_MS_MAX

    def _key(self, key: str) -> str:
        return self._prefix + key

    def set(self, key: str, value: bytes | str) -> None:
        self._client.set(self._key(key), value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._client.get(self._key(key), self._timeout_ms, cancelled=self._cancelled)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit = self._timeout_ms if timeout is None else int(timeout.total_seconds() * 1000)
        self._client.wait([self._key(k) for k in keys], min(limit, RENDEZVOUS_MS_MAX), cancelled=self._cancelled)

    def add(self, key: str, amount: int) -> int:
        return self._client.add(self._key(key), amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._client.check([self._key(k) for k in keys])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._client.compare_set(self._key(key), expected.encode(), desired.encode())

    def delete_key(self, key: str) -> bool:
        return self._client.delete(self._key(key))

    def clone(self) -> RendezvousStore:
        """Torch's NCCL backend wants a copy for threads of its own; this one may be used by any thread."""
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_ms = min(int(timeout.total_seconds() * 1000), RENDEZVOUS_MS_MAX)

    @property
    def timeout(self) -> timedelta:
        return timedelta(milliseconds=self._timeout_ms)
