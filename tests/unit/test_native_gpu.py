"""GPU arenas and NCCL communicators against libraries that inject faults: bookkeeping, error paths, who waits for whom.

What a GPU does is tested in tests/gpu.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from fakes import run
from unicron import _core
from unicron.runtime import framing

MIB = 1 << 20


# ---------------------------------------------------------------- without any driver


def test_without_a_driver_everything_says_so() -> None:
    program = """
        assert _core.num_cuda_devices() == 0 and _core.cuda_driver_version() == 0
        for call in (lambda: _core.GpuArena(0, 0, True), lambda: _core.gpu_digest(0, [(16, 16, 0)], 100)):
            try:
                call()
            except _core.UnicronError as error:
                assert "no CUDA driver" in str(error), error
            else:
                raise AssertionError("no error")
        assert "libnccl" in _core.why_no_nccl()
        try:
            _core.NcclTable()
        except _core.UnicronError as error:
            print(error)
    """
    result = subprocess.run(
        [sys.executable, "-c", "from unicron import _core\n" + textwrap.dedent(program)],
        env={"PATH": "/nowhere"}, capture_output=True, text=True, check=False, timeout=50,
    )  # fmt: skip
    if _core.num_cuda_devices() > 0:
        pytest.skip("this machine has a GPU")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("no NCCL")


def test_the_allocator_is_exported_by_name() -> None:
    library = ctypes.CDLL(_core.__file__)
    for name in (_core.ARENA_MALLOC, _core.ARENA_FREE):
        assert hasattr(library, name)


# ---------------------------------------------------------------- arenas


def test_pieces_are_recorded_in_order() -> None:
    run(f"""
        arena = _core.GpuArena(0, 0, True)
        a, b, c = (arena.allocate(n) for n in (1, 3 * {MIB}, 300 * {MIB}))
        assert arena.pieces() == [(0, 0, 512), (1, 512, 3 * {MIB}), (2, 256 * {MIB}, 300 * {MIB})]
        assert arena.slabs() == [(0, 0, 256 * {MIB}), (1, 256 * {MIB}, 320 * {MIB})]  # whole blocks of 64 MiB
        assert b - arena.address == 512 and arena.memory_bytes == 576 * {MIB}
        arena.free(b)
        assert [p[0] for p in arena.pieces()] == [0, 2] and arena.memory_bytes == 576 * {MIB}
        arena.free(a)
        assert arena.memory_bytes == 320 * {MIB}  # a slab without pieces is given back
        arena.allocate(1)
        assert arena.pieces()[-1] == (3, 556 * {MIB}, 512)  # freed addresses are not used again
        for wrong in (a, b, c + 1, 17):
            try:
                arena.free(wrong)
            except _core.UnicronError:
                continue
            raise AssertionError(wrong)
    """)


def test_an_heir_finds_what_its_predecessor_wrote() -> None:
    """The predecessor's memory comes under the heir's slabs; the heir's addresses stay."""
    run(
        f"""
        import ctypes, os
        owner = _core.GpuArena(0, 0, True)
        addresses = [owner.allocate(n) for n in (1, 130 * {MIB}, 320 * {MIB}, 7)]
        for number, address in enumerate(addresses):
            ctypes.memset(address, 65 + number, 7)
        fds = owner.export_all()
        sizes = [nbytes for _, _, nbytes in owner.slabs()]
        assert len(fds) == 2
        del owner
        heir = _core.GpuArena(1, 0, False)  # an understudy: no memory of its own
        mine = [heir.allocate(n) for n in (1, 130 * {MIB}, 320 * {MIB}, 7)]
        assert heir.memory_bytes == 64 * {MIB}
        ctypes.memset(mine[2], 1, 320 * {MIB})  # it may write anywhere
        heir.let_go()
        heir.let_go()  # nothing is left to let go
        heir.adopt(fds, sizes)
        for fd in fds:
            os.close(fd)
        for number, address in enumerate(mine):
            assert ctypes.string_at(address, 3) == bytes([65 + number]) * 3
        assert heir.memory_bytes == sum(sizes)
        again = heir.export_all()  # its own heir can take it on
        assert len(again) == 2
    """,
        FAKE_CUDA_MEMORY=str(4 << 30),
    )


def test_little_of_a_state_is_left_free_at_the_ends_of_slabs() -> None:
    """Parameters, main parameters and moments of 12 layers: an eighth of the memory was lost at ends of 256 MiB."""
    run(
        f"""
        layer = (75, 25, 100, 100)
        arena = _core.GpuArena(0, 0, True)
        wanted = 0
        for kind in range(3):
            for _ in range(12):
                for mib in layer:
                    arena.allocate(mib * {MIB})
                    wanted += mib * {MIB}
        assert arena.memory_bytes < 1.06 * wanted, (arena.memory_bytes / wanted, len(arena.slabs()))
        offsets = [offset for _, offset, _ in arena.pieces()]
        assert offsets != sorted(offsets)  # a later piece lies at the end of an earlier slab
        ends = [(offset, offset + nbytes) for _, offset, nbytes in sorted(arena.pieces(), key=lambda p: p[1])]
        assert all(a[1] <= b[0] for a, b in zip(ends, ends[1:]))
        for offset in offsets:
            arena.free(arena.address + offset)
        assert arena.pieces() == [] and arena.memory_bytes == 0
    """,
        FAKE_CUDA_MEMORY=str(32 << 30),
    )


def test_the_largest_gpus_arena_fits_one_message() -> None:
    """Of descriptors, the header's among them."""
    run(
        f"""
        arena = _core.GpuArena(0, 0, True)
        while arena.memory_bytes < 186 << 30:
            arena.allocate(105 * {MIB})
        assert len(arena.slabs()) < {framing.FDS_PER_FRAME_MAX}, len(arena.slabs())
    """,
        FAKE_CUDA_MEMORY=str(192 << 30),
    )


def test_another_scripts_arena_is_refused_before_anything_changes() -> None:
    run(
        f"""
        import ctypes
        owner, heir = _core.GpuArena(0, 0, True), _core.GpuArena(0, 0, True)
        for n in (1, 300 * {MIB}):
            owner.allocate(n)
        mine = [heir.allocate(n) for n in (1, 330 * {MIB})]
        ctypes.memset(mine[0], 9, 10)
        fds, sizes = owner.export_all(), [n for _, _, n in owner.slabs()]
        for wrong in ((fds[:1], sizes[:1]), (fds, sizes)):
            try:
                heir.adopt(*wrong)
            except _core.ArenaRefused as error:
                print(error)
            else:
                raise AssertionError(wrong)
        assert ctypes.string_at(mine[0], 2) == bytes([9, 9])
    """,
        FAKE_CUDA_MEMORY=str(4 << 30),
    )


def test_a_piece_of_any_size_is_had_without_memory() -> None:
    """The driver maps memory as a whole or not at all; an understudy's is mapped as often as the slab is long."""
    run(
        f"""
        owner, heir = _core.GpuArena(0, 0, True), _core.GpuArena(0, 0, False)
        for nbytes in (1, 300 * {MIB} + 1, 1444 * {MIB}, 513 * {MIB}, 7):
            assert owner.allocate(nbytes) - owner.address == heir.allocate(nbytes) - heir.address
        assert owner.slabs() == heir.slabs() and heir.memory_bytes == 64 * {MIB}
    """,
        FAKE_CUDA_MEMORY=str(8 << 30),
    )


def test_an_understudy_takes_memory_of_its_own() -> None:
    run(f"""
        arena = _core.GpuArena(0, 0, False)
        arena.allocate(100 * {MIB})
        try:
            arena.export_all()
        except _core.UnicronError as error:
            assert "nothing to export" in str(error)
        assert arena.memory_bytes == 64 * {MIB}
        arena.let_go()
        arena.take_own_memory()
        assert arena.memory_bytes == 256 * {MIB} and len(arena.export_all()) == 1
    """)


@pytest.mark.parametrize("function", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_an_allocation_that_fails_leaves_nothing_behind(function: str) -> None:
    """The third call fails: out of memory is an error, what was there before stays, and torch gets a null pointer."""
    run(
        f"""
        import ctypes
        arena = _core.GpuArena(0, 0, True)
        arena.open()
        malloc = ctypes.CDLL(_core.__file__).unicron_arena_malloc
        malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        assert malloc(256 * {MIB}, 0, None) and malloc(256 * {MIB}, 0, None)
        assert malloc(256 * {MIB}, 0, None) is None
        assert "OUT_OF_MEMORY" in _core.arena_allocator_error()
        assert len(arena.pieces()) == 2 and arena.memory_bytes == 512 * {MIB}
        """,
        FAKE_CUDA_FAIL=f"{function}:3",
    )


def test_who_only_waits_gives_the_stacks_memory_back() -> None:
    run("""
        from unicron.training.gpu import STACK_BYTES_WAITING, small_stacks
        with small_stacks(0):
            assert _core.set_stack_bytes(0, STACK_BYTES_WAITING) == STACK_BYTES_WAITING
        assert _core.set_stack_bytes(0, 1024) == 1024  # as it was
        with small_stacks(None):
            pass
        try:
            _core.set_stack_bytes(0, 1 << 30)
        except _core.UnicronError as problem:
            assert "stack limit of GPU 0" in str(problem)
        else:
            raise AssertionError("taken")
    """)


def test_torch_frees_from_an_arena_that_is_closed() -> None:
    run(f"""
        import ctypes
        library = ctypes.CDLL(_core.__file__)
        malloc, free = library.unicron_arena_malloc, library.unicron_arena_free
        malloc.restype = ctypes.c_void_p
        malloc.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        free.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        assert malloc(1, 0, None) is None and "no arena is open" in _core.arena_allocator_error()
        arena = _core.GpuArena(0, 0, True)
        arena.open()
        address = malloc({MIB}, 0, None)
        assert address == arena.address and malloc({MIB}, 1, None) is None  # none on the other GPU
        arena.close()
        assert malloc({MIB}, 0, None) is None
        free(address, {MIB}, 0, None)
        assert arena.pieces() == []
    """)


def test_a_wait_for_a_stuck_gpu_ends() -> None:
    run(
        f"""
        import time
        copier = _core.GpuCopier(0)
        arena = _core.GpuArena(0, 0, True)
        a, b = arena.allocate({MIB}), arena.allocate({MIB})
        begun = time.monotonic()
        try:
            copier.copy(a, b, {MIB}, "plain", 200)
        except _core.Timeout:
            pass
        assert 0.15 < time.monotonic() - begun < 20
        try:
            copier.copy(a, b, {MIB}, "plain", 200)
        except _core.UnicronError as error:
            assert "did not end in time" in str(error)
        del copier
        """,
        FAKE_CUDA_STUCK="1",
    )


# ---------------------------------------------------------------- communicators


def test_communicators_end_at_once_and_by_plan() -> None:
    """Twelve endings of two seconds each: all begun at once, those of untouched groups left alone."""
    run(
        """
        import time
        table = _core.NcclTable()
        made = [_core.NcclCommunicator(0, 2, 0, _core.make_nccl_id()) for _ in range(12)]
        for group, communicator in enumerate(made):
            communicator.wait_ready(1000)
            table.register_own(group, communicator, [group, 100], group == 3)
        begun = time.monotonic()
        assert table.end([0, 1]) == 3  # two that hold a touched rank, one that spans replicas
        assert table.state(0) == "ending" and table.state(5) == "whole"
        assert table.end_all() == 9
        assert table.wait_ended(20_000) and time.monotonic() - begun < 12  # one by one it were 24
        assert {table.state(group) for group in range(12)} == {"ended"}
        assert all(ms > 1980 for _, ms in table.ending_ms())
        assert table.forget(0, 100) and table.state(0) == "forgotten"
        """,
        FAKE_NCCL_ENDING_MS="2000",
    )


def test_what_is_about_to_be_ended_is_not_forgotten(tmp_path: Path) -> None:
    """The threads that end them may not have begun yet: torch would free what they then revoke."""
    held = tmp_path / "held"
    held.touch()
    run(
        """
        import os
        table = _core.NcclTable()
        torchs = [_core.NcclCommunicator(0, 4, 1, _core.make_nccl_id()) for _ in range(64)]
        for group, communicator in enumerate(torchs):
            table.register_torch(group, communicator.handle, 0, [0, 1], False)
        assert table.end_all() == 64
        assert [group for group in range(64) if table.forget(group, 0)] == []
        os.unlink(os.environ["FAKE_NCCL_HELD_BY"])
        assert all(table.forget(group, 9000) for group in range(64))
        os._exit(0)
        """,
        FAKE_NCCL_HELD_BY=str(held),
    )


def test_torchs_communicators_are_revoked_not_freed() -> None:
    run(
        """
        table = _core.NcclTable()
        torchs = _core.NcclCommunicator(0, 4, 1, _core.make_nccl_id())
        table.register_torch(1, torchs.handle, 0, [0, 1], False)
        assert table.end([1]) == 1
        assert not table.wait_ended(20) and not table.forget(1, 20)  # a thread is still in it
        assert table.wait_ended(2000) and table.state(1) == "ended"
        assert torchs.num_ranks == 4  # it is still there
        """,
        FAKE_NCCL_ENDING_MS="200",
    )


def test_an_older_nccl_leaves_torchs_communicators_to_torch() -> None:
    run(
        """
        assert _core.nccl_version() == 22703
        assert "ncclCommRevoke" in _core.nccl_missing() and "ncclCommShrink" not in _core.nccl_missing()
        table = _core.NcclTable()
        torchs = _core.NcclCommunicator(0, 4, 1, _core.make_nccl_id())
        table.register_torch(1, torchs.handle, 0, [0, 1], False)
        assert table.end_all() == 0 and table.state(1) == "error" and "torch itself" in table.error(1)
        try:
            torchs.make_grow_id()
        except _core.UnicronError as error:
            assert "has no ncclCommGetUniqueId" in str(error)
        """,
        old_nccl=True,
    )


def test_an_asynchronous_error_is_seen_without_asking() -> None:
    run(
        """
        import time
        table = _core.NcclTable()
        communicator = _core.NcclCommunicator(0, 4, 1, _core.make_nccl_id())
        table.register_own(1, communicator, [0, 1], False)
        deadline = time.monotonic() + 2
        while table.state(1) == "whole" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert table.state(1) == "error" and "remote process exited" in table.error(1)
        """,
        FAKE_NCCL_ERROR="6",
    )


def test_communicators_by_difference_wait_for_their_handle() -> None:
    """NCCL fills in the handle later, from a thread of its own."""
    run("""
        parent = _core.NcclCommunicator(0, 4, 1, _core.make_nccl_id())
        parent.wait_ready(1000)
        for made in (lambda: parent.split(0, 1), lambda: parent.shrink([3], True), lambda: parent.grow(6, b"")):
            child = made()
            assert child.handle == 0
            child.wait_ready(1000)
            assert child.handle != 0 and child.num_ranks in (3, 4, 6)
        unready = parent.split(0, 1)
        try:
            unready.wait_ready(0)
        except _core.Timeout as error:
            assert "not ready" in str(error)
        joined = _core.join_grown(0, 6, 5, _core.make_nccl_id())
        joined.wait_ready(1000)
        assert joined.rank == 5
    """)


def test_counters_say_who_did_not_come() -> None:
    run("""
        import os
        fd = _core.create_counter_page()
        worker, agent = _core.CollectiveCounters(fd), _core.CollectiveCounters(fd)
        number = worker.begin(3)
        assert (number, agent.begun(3), agent.ended(3)) == (1, 1, 0)
        worker.end_on_stream(3, number, 0, 0)
        assert agent.ended(3) == 1 and agent.begun(4) == 0
        for slot in (-1, 256):
            try:
                worker.begin(slot)
            except _core.UnicronError:
                continue
            raise AssertionError(slot)
    """)


def test_a_gpu_writes_the_mark_of_an_open_step() -> None:
    run("""
        fd = _core.create_arena(4096)
        worker, agent = _core.ArenaHeader(fd), _core.ArenaHeader(fd)
        worker.format("a", 4096)
        worker.open_step = 2
        worker.open_step_on_stream(3, 0, 0)
        assert (agent.open_step, agent.iteration, agent.torn, agent.nbytes) == (3, 0, False, 4096)
        try:
            worker.open_step_on_stream(4, 9, 0)
        except _core.UnicronError as error:
            assert "GPU 9" in str(error)
        del worker  # and its page is not the driver's any more
        assert agent.open_step == 3
    """)


# ---------------------------------------------------------------- the same bits on a CPU


def test_a_digest_is_the_sum_of_its_pieces() -> None:
    data = np.random.default_rng(1).integers(0, 256, 1001, dtype=np.uint8).tobytes()
    whole = _core.digest(data, 0)
    for cut in (16, 512, 992):
        pieces = _core.digest(data[:cut], 0) + _core.digest(data[cut:], cut)
        assert pieces % 2**64 == whole
    for place in (0, 500, 1000):
        changed = bytearray(data)
        changed[place] ^= 1
        assert _core.digest(bytes(changed), 0) != whole
    swapped = data[8:16] + data[:8] + data[16:]
    assert _core.digest(swapped, 0) != whole
    with pytest.raises(_core.UnicronError, match="multiple of 16"):
        _core.digest(data, 8)


def test_exact_sums_do_not_depend_on_order() -> None:
    rng = np.random.default_rng(2)
    terms = (rng.standard_normal((8, 1000)) * 10.0 ** rng.integers(-6, 3, (8, 1000))).astype(np.float32)
    results = set()
    for seed in range(5):
        sums = np.zeros(1000, dtype=np.int64)
        for row in np.random.default_rng(seed).permutation(8):
            assert _core.exact_accumulate(sums, terms[row], False, 40, 8) == 0
        values = np.zeros(1000, dtype=np.float32)
        _core.exact_to_float(values, sums, 40)
        results.add(values.tobytes())
    assert len(results) == 1
    exact = sum(terms[row].astype(np.float64) for row in range(8))
    assert np.abs(values - exact).max() <= 1e-4 * np.abs(exact).max()


def test_exact_sums_flag_what_they_cannot_hold() -> None:
    sums = np.zeros(3, dtype=np.int64)
    terms = np.array([1.0, np.inf, np.nan], dtype=np.float32)
    assert _core.exact_accumulate(sums, terms, False, 0, 1) == 1
    assert sums.tolist() == [1, 0, 0]
    assert _core.exact_accumulate(sums, np.array([1e30, 2, 3], dtype=np.float32), False, 0, 4) == 2
    assert sums.tolist() == [1, 2, 3]
    limit = float(2**60)  # of four terms: their sum stays below 2^62
    assert _core.exact_accumulate(sums, np.array([limit, 0, 0], dtype=np.float32), False, 0, 4) == 0
    bf16 = (np.array([1.5, -2.0, 0.0], dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    sums[:] = 0
    assert _core.exact_accumulate(sums, bf16, True, 4, 1) == 0
    assert sums.tolist() == [24, -32, 0]
    with pytest.raises(_core.UnicronError):
        _core.exact_accumulate(sums, bf16, True, 2000, 1)


def test_the_exact_norm_is_the_same_however_it_is_cut() -> None:
    values = np.random.default_rng(3).standard_normal(1000).astype(np.float32)
    seen = set()
    for cuts in ([], [500], [1, 2, 3, 997]):
        parts = np.zeros(4, dtype=np.uint64)
        for piece in np.split(values, cuts):
            assert _core.exact_sum_squares(parts, piece, 50) == 0
        seen.add(_core.exact_wide_value(parts, 50))
    assert len(seen) == 1
    exact = float(np.sum(values.astype(np.float64) ** 2))
    assert abs(seen.pop() - exact) <= 1e-12 * exact


def test_wide_sums_round_once() -> None:
    for number in (0, 1, 2**53 + 1, 2**64, 2**64 + 2**11 + 1, 2**100 + 2**47, 2**127 - 1, 3 * 2**90 + 1):
        parts = np.array([number >> 32 * i & 0xFFFFFFFF for i in range(4)], dtype=np.uint64)
        assert _core.exact_wide_value(parts, 0) == float(number), number
