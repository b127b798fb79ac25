"""The coordinator's disk: what a transaction wrote is there only when it was synced, and a disk may be full.

As SQLite with WAL and synchronous FULL: the entries of one step are one transaction; a crash before its end leaves
none of them (a torn one is not replayed), a crash after it all.
"""

from __future__ import annotations


class DiskFull(Exception):
    """Nothing of the transaction was written."""


class Disk:
    def __init__(self) -> None:
        self.entries: list[bytes] = []  # durable
        self.open: list[bytes] = []  # written, not synced
        self.full_until_ms = -1.0

    def write(self, data: bytes, now_ms: float) -> None:
        if now_ms < self.full_until_ms:
            self.open.clear()
            raise DiskFull
        self.open.append(data)

    def sync(self) -> None:
        self.entries += self.open
        self.open.clear()

    def crash(self) -> int:
        """Entries that were lost."""
        lost = len(self.open)
        self.open.clear()
        return lost
