"""The coordinator's disk: what a transaction wrote is there only when it was synced; it may tear, and it may be full.

As SQLite with WAL and synchronous FULL: the entries of one step are frames of one transaction, each with a checksum,
and the last one commits. A crash before the sync leaves any beginning of what was written, cut anywhere, or with a
sector of it never written: a transaction counts only when all its frames are whole. It may also be whole, and nobody
was told.
"""

from __future__ import annotations

import random
import struct
import zlib

HEADER = struct.Struct("<IIB")  # length, checksum, whether it commits
SECTOR_BYTES = 64


class DiskFull(Exception):
    """Nothing of the transaction was written."""


class Disk:
    def __init__(self, rng: random.Random, *, reads_torn: bool = False) -> None:
        """reads_torn: planted, what was written is read without a look at checksums and commits."""
        self._rng, self._reads_torn = rng, reads_torn
        self._written = bytearray()  # since the last sync
        self.entries: list[bytes] = []  # durable
        self.open: list[bytes] = []  # written, not synced
        self.full_until_ms = -1.0

    def write(self, data: bytes, now_ms: float, *, commits: bool) -> None:
        if now_ms < self.full_until_ms:
            self.open.clear()
            self._written.clear()
            raise DiskFull
        self.open.append(data)
        self._written += HEADER.pack(len(data), zlib.crc32(data), commits) + data

    def sync(self) -> None:
        self.entries += self.open
        self.open.clear()
        self._written.clear()

    def crash(self) -> tuple[list[bytes], int]:
        """What of the unsynced is there all the same, whole; how many entries were lost. The rest was torn."""
        count = len(self.open)
        survived = self._recover(self._torn()) if self.open else []
        self.entries += survived
        self.open.clear()
        self._written.clear()
        return survived, count - len(survived)

    def _torn(self) -> bytes:
        left = self._written[: self._rng.randint(0, len(self._written))]
        if self._rng.random() < 0.3:
            left = bytearray(self._written)  # all was written, but for one sector
            begin = self._rng.randrange(len(left)) // SECTOR_BYTES * SECTOR_BYTES
            left[begin : begin + SECTOR_BYTES] = bytes(len(left[begin : begin + SECTOR_BYTES]))
        elif self._rng.random() < 0.3:
            left = self._written
        return bytes(left)

    def _recover(self, data: bytes) -> list[bytes]:
        whole: list[bytes] = []
        transaction: list[bytes] = []
        at = 0
        while at + HEADER.size <= len(data):
            length, checksum, commits = HEADER.unpack_from(data, at)
            frame = data[at + HEADER.size : at + HEADER.size + length]
            at += HEADER.size + length
            is_whole = length and len(frame) == length and zlib.crc32(frame) == checksum
            if not is_whole and not self._reads_torn:
                break
            transaction.append(frame)
            if commits or self._reads_torn:
                whole += transaction
                transaction = []
        return whole
