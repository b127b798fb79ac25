"""Arenas: state outlives its process, the header says whether it may be used, and what does not fit is refused."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Iterator

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron import _core

HEADER = _core.ARENA_HEADER_BYTES
PAGE = mmap.PAGESIZE


@pytest.fixture
def arena() -> Iterator[int]:
    fd = _core.create_arena(3 * PAGE - 5)
    yield fd
    os.close(fd)


def region(nbytes: int) -> tuple[mmap.mmap, int]:
    memory = mmap.mmap(-1, nbytes)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


# ---------------------------------------------------------------- adoption

HOLDER = """
import mmap, os, sys, time, ctypes
from unicron import _core
fd, nbytes = int(sys.argv[1]), int(sys.argv[2])
memory = mmap.mmap(-1, nbytes)
_core.map_fixed(ctypes.addressof(ctypes.c_char.from_buffer(memory)), fd, nbytes)
header = _core.ArenaHeader(fd)
header.format("layout", nbytes - _core.ARENA_HEADER_BYTES)
memory[_core.ARENA_HEADER_BYTES :] = bytes(range(256)) * ((nbytes - _core.ARENA_HEADER_BYTES) // 256)
header.iteration = 41
header.stage = 4
print("written", flush=True)
time.sleep(60)
"""


def test_state_is_adopted_from_a_killed_process() -> None:
    """MECHANICS 2, method O: one MAP_FIXED of the dead worker's memfd over the heir's region; every view follows."""
    nbytes = HEADER + 64 * PAGE
    fd = _core.create_arena(nbytes - HEADER)
    command = [sys.executable, "-c", HOLDER, str(fd), str(nbytes)]
    with subprocess.Popen(command, pass_fds=(fd,), stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"written\n"
        holder.kill()
        assert _core.wait_owner_gone(holder.pid, 20_000)
    memory, address = region(nbytes)
    view = numpy.frombuffer(memory, dtype=numpy.uint8)[HEADER:]
    assert not view.any()
    _core.map_fixed(address, fd, nbytes)
    assert bytes(view[:256]) == bytes(range(256)) and bytes(view[-256:]) == bytes(range(256))
    header = _core.ArenaHeader(fd)
    assert (header.check("layout", nbytes - HEADER), header.iteration, header.stage) == ("", 41, 4)
    view[0] = 77
    assert os.pread(fd, 1, HEADER) == bytes((77,))
    os.close(fd)
    assert view[0] == 77  # the mapping keeps the memory


def test_a_region_can_be_mapped_again(arena: int) -> None:
    memory, address = region(4 * PAGE)
    _core.map_fixed(address, arena, 4 * PAGE)
    memory[HEADER] = 5
    other = _core.create_arena(3 * PAGE)
    _core.map_fixed(address, other, 4 * PAGE)
    assert memory[HEADER] == 0
    _core.map_fixed(address, arena, 4 * PAGE)
    assert memory[HEADER] == 5
    os.close(other)


def test_what_map_fixed_refuses(arena: int) -> None:
    memory, address = region(4 * PAGE)
    memory[0:4] = b"kept"
    for wrong_address, nbytes, why in (
        (address + 8, PAGE, "is not a multiple of 4096"),
        (0, PAGE, "is not a multiple of 4096"),
        (address, 4 * PAGE + 1, "holds 16384 bytes"),
        (address, 0, "cannot map 0 bytes"),
        (address, 1 << 50, "cannot map"),
        (1 << 40, PAGE, "are not one mapping"),
    ):
        with pytest.raises(_core.ArenaRefused, match=why):
            _core.map_fixed(wrong_address, arena, nbytes)
    with pytest.raises(_core.UnicronError, match="Bad file descriptor"):
        _core.map_fixed(address, 1 << 20, PAGE)
    assert memory[0:4] == b"kept"


def test_map_fixed_replaces_no_neighbour(arena: int) -> None:
    """A region that reaches into another mapping is refused, though mmap itself would do it without a word."""
    fd = os.memfd_create("neighbour")
    os.ftruncate(fd, PAGE)
    memory, address = region(4 * PAGE)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    map_private_fixed = 0x02 | 0x10
    assert libc.mmap(address + 2 * PAGE, PAGE, 3, map_private_fixed, fd, 0) == address + 2 * PAGE
    with pytest.raises(_core.ArenaRefused, match="are not one mapping"):
        _core.map_fixed(address, arena, 4 * PAGE)
    _core.map_fixed(address, arena, 2 * PAGE)
    os.close(fd)
    del memory


@pytest.mark.parametrize("nbytes", [0, 1 << 60])
def test_a_senseless_size_is_refused(nbytes: int) -> None:
    with pytest.raises(_core.UnicronError, match="cannot be made"):
        _core.create_arena(nbytes)


def test_the_size_is_rounded_up_and_sealed(arena: int) -> None:
    assert os.fstat(arena).st_size == HEADER + 3 * PAGE
    with pytest.raises(PermissionError):
        os.ftruncate(arena, 0)


# ---------------------------------------------------------------- header


def test_check_says_why_not(arena: int) -> None:
    header = _core.ArenaHeader(arena)
    assert header.check("digest", 100) == "magic: this is not a formatted arena"
    header.format("digest", 100)
    assert header.check("digest", 100) == ""
    assert header.check("other", 100) == "other layout: the arena's digest is digest, this model's is other"
    assert header.check("digest", 101).startswith("other size: the arena holds 100 bytes")
    os.pwrite(arena, struct.pack("<Q", 99), 8)
    assert header.check("digest", 100) == "version: the arena has 99, this unicron writes 2"
    header.format("digest", 100)
    os.pwrite(arena, struct.pack("<Q", 1 << 30), 16)
    assert "file ends after 12288 bytes" in header.check("digest", 1 << 30)
    os.pwrite(arena, b"garbage!", 0)
    assert header.check("digest", 100).startswith("magic")


def test_what_format_refuses(arena: int) -> None:
    header = _core.ArenaHeader(arena)
    with pytest.raises(_core.ArenaRefused, match="room for 12288 bytes"):
        header.format("digest", 3 * PAGE + 1)
    with pytest.raises(_core.UnicronError, match="layout_digest has 65 bytes, limit 64"):
        header.format("d" * 65, 10)
    header.format("d" * 64, 3 * PAGE)
    assert header.layout_digest == "d" * 64


def test_a_file_too_small_for_a_header_is_refused() -> None:
    fd = os.memfd_create("small")
    os.ftruncate(fd, 100)
    with pytest.raises(_core.ArenaRefused, match="less than an arena's header"):
        _core.ArenaHeader(fd)
    os.close(fd)


FIELDS: dict[str, int | float | bool] = {
    "epoch": 3, "iteration": 1 << 40, "stage": 6, "dealt_replicas": (1 << 64) - 1, "reduction": 5,
    "torn": True, "summed": True, "open_step": 5, "ungathered": True, "has_commit": True, "commit_iteration": 17,
    "commit_tokens": 1e9 + 0.5, "commit_sumsq": 1e-300, "commit_found_inf": 1.0, "commit_loss_sum": float("-inf"),
}  # fmt: skip


def test_every_field_is_seen_by_the_other_side(arena: int) -> None:
    worker, agent = _core.ArenaHeader(arena), _core.ArenaHeader(arena)
    worker.format("digest", 100)
    for name, value in FIELDS.items():
        assert getattr(worker, name) == type(value)(0)
        setattr(worker, name, value)
    assert {name: getattr(agent, name) for name in FIELDS} == FIELDS
    assert (agent.version, agent.layout_digest, agent.nbytes) == (2, "digest", 100)
    worker.format("digest", 200)
    assert {getattr(agent, name) for name in FIELDS} == {0}
    with pytest.raises(AttributeError):
        worker.nbytes = 7  # type: ignore[misc]


@settings(max_examples=50)
@given(bitmaps=st.lists(st.binary(max_size=2048), min_size=1, max_size=4))
def test_the_bitmap_is_what_was_set_last(bitmaps: list[bytes]) -> None:
    fd = _core.create_arena(1)
    header = _core.ArenaHeader(fd)
    header.format("", 1)
    assert header.done() == b""
    for bitmap in bitmaps:
        header.set_done(bitmap)
        assert header.done() == bitmap
    os.close(fd)


def test_strings_above_their_limits_are_refused(arena: int) -> None:
    header = _core.ArenaHeader(arena)
    with pytest.raises(_core.UnicronError, match="bitmap of micro-batches has 2049 bytes, limit 2048"):
        header.set_done(bytes(2049))
    with pytest.raises(_core.UnicronError, match="extra has 1025 bytes, limit 1024"):
        header.set_extra(bytes(1025))


def test_torn_extra_bytes_are_refused(arena: int) -> None:
    header = _core.ArenaHeader(arena)
    header.format("digest", 1)
    assert header.extra() == b""
    header.set_extra(bytes(1024))
    assert header.extra() == bytes(1024)
    header.set_extra(b"schedule")
    assert header.extra() == b"schedule"
    page = os.pread(arena, HEADER, 0)
    os.pwrite(arena, b"S", page.index(b"schedule"))
    with pytest.raises(_core.ArenaRefused, match="extra: its checksum is wrong"):
        header.extra()
    header.set_extra(b"")
    assert header.extra() == b""


# ---------------------------------------------------------------- checksum


def xxh64(data: bytes) -> int:
    """XXH64 with seed 0, written plainly from its specification."""
    mask = (1 << 64) - 1
    p1, p2, p3, p4, p5 = (
        0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
    )  # fmt: skip

    def rotate(value: int, bits: int) -> int:
        return ((value << bits) | (value >> (64 - bits))) & mask

    def mix(accumulator: int, lane: int) -> int:
        return rotate((accumulator + lane * p2) & mask, 31) * p1 & mask

    at = 0
    lanes = [(p1 + p2) & mask, p2, 0, -p1 & mask]
    while len(data) - at >= 32:
        lanes = [mix(lane, word) for lane, word in zip(lanes, struct.unpack_from("<4Q", data, at), strict=True)]
        at += 32
    value = p5
    if len(data) >= 32:
        value = sum(rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)) & mask
        for lane in lanes:
            value = ((value ^ mix(0, lane)) * p1 + p4) & mask
    value = (value + len(data)) & mask
    for size, code in ((8, "<Q"), (4, "<I"), (1, "<B")):
        while len(data) - at >= size:
            (word,) = struct.unpack_from(code, data, at)
            if size == 8:
                value = (rotate(value ^ mix(0, word), 27) * p1 + p4) & mask
            elif size == 4:
                value = (rotate(value ^ (word * p1 & mask), 23) * p2 + p3) & mask
            else:
                value = rotate(value ^ (word * p5 & mask), 11) * p1 & mask
            at += size
    value = (value ^ (value >> 33)) * p2 & mask
    value = (value ^ (value >> 29)) * p3 & mask
    return value ^ (value >> 32)


@pytest.mark.parametrize(
    ("data", "digest"),
    [(b"", 0xEF46DB3751D8E999), (b"a", 0xD24EC4F1A98C6E5B), (b"abc", 0x44BC2CF5AD770999)],
)
def test_checksum_of_published_vectors(data: bytes, digest: int) -> None:
    assert _core.checksum(data) == xxh64(data) == digest


@settings(max_examples=200)
@given(data=st.binary(max_size=300))
def test_checksum_equals_the_plain_one(data: bytes) -> None:
    assert _core.checksum(data) == xxh64(data)


def test_checksum_takes_any_contiguous_buffer() -> None:
    array = numpy.arange(1000, dtype=numpy.float32).reshape(10, 100)
    assert _core.checksum(array) == _core.checksum(array.tobytes()) == _core.checksum(array.data)
    assert _core.checksum(bytearray(array)) == _core.checksum(array)
    assert _core.checksum(array) != _core.checksum(array + 1)
    with pytest.raises((ValueError, BufferError)):
        _core.checksum(array[:, ::2])
    with pytest.raises(TypeError):
        _core.checksum(7)
