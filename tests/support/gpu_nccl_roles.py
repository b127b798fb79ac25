"""Ranks of the NCCL tests and benches, and a reader of another process's GPU memory (see gpu_roles.py)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

Line = Any


def reader(line: Line, device: int, sizes: list[int], big_bytes: int) -> None:
    """Digests of the piece that fills the largest slab, through a peer mapping and by each kind of copy."""
    import torch

    from unicron import _core

    torch.cuda.set_device(device)
    target = torch.zeros(big_bytes // 8, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    copier = _core.GpuCopier(device)
    line.send({})
    _, fds = line.receive(90)
    largest = max(range(len(sizes)), key=lambda i: sizes[i])
    begun = time.monotonic()
    mapping = _core.GpuMapping(fds[largest], sizes[largest], device)
    map_ms = (time.monotonic() - begun) * 1000
    digests = {"mapped": _core.gpu_digest(device, [(mapping.address, big_bytes, 0)], 20_000)}
    rates = {}
    for mode in ("plain", "overlapped", "fused"):
        for _ in range(3):
            digest, ms = copier.copy(target.data_ptr(), mapping.address, big_bytes, mode, 20_000)
        rates[mode] = big_bytes / ms / 1e6
        if mode != "plain":
            digests[mode] = digest
    digests["copied"] = _core.gpu_digest(device, [(target.data_ptr(), big_bytes, 0)], 20_000)
    line.send({"digests": digests, "gb_per_s": rates, "map_ms": map_ms})
    for fd in fds:
        os.close(fd)


def _timed_ms(action: Callable[[], Any]) -> float:
    begun = time.monotonic()
    action()
    return (time.monotonic() - begun) * 1000


def _exchange(line: Line, message: dict[str, Any]) -> dict[str, Any]:
    line.send(message)
    answer: dict[str, Any] = line.receive(90)[0]
    return answer


def rank_of_twelve(line: Line, rank: int, num_groups: int, die: bool) -> None:
    """`num_groups` communicators of two ranks. One dies; the other has a hung all-reduce, then ends all of them."""
    import torch

    from unicron import _core

    torch.cuda.set_device(rank)
    data = torch.ones(num_groups, 1 << 22, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(num_groups)]
    torch.cuda.synchronize()
    communicators, made_ms = [], []
    for group in range(num_groups):
        identity = _core.make_nccl_id().hex() if rank == 0 else ""
        identity = _exchange(line, {"id": identity})["id"]
        begun = time.monotonic()
        communicator = _core.NcclCommunicator(rank, 2, rank, bytes.fromhex(identity))
        communicator.wait_ready(60_000)
        made_ms.append((time.monotonic() - begun) * 1000)
        communicator.all_reduce_f32(data[group].data_ptr(), 1 << 22, streams[group].cuda_stream)
        communicator.wait_ready(60_000)
        streams[group].synchronize()
        communicators.append(communicator)
    assert float(data[0, 0]) == 2.0
    by_difference = _by_difference(communicators[0], data, streams[0])
    if die:
        _exchange(line, {"ready": True})
        os.kill(os.getpid(), signal.SIGKILL)
    _exchange(line, {"ready": True})  # answered when the other is gone
    table = _core.NcclTable()
    for group, communicator in enumerate(communicators):
        if group == 0:
            communicator.all_reduce_f32(data[0].data_ptr(), 1 << 22, streams[0].cuda_stream)
        table.register_own(group, communicator, [0, 1], group == 0)
    time.sleep(0.2)
    before = torch.cuda.mem_get_info()[0]
    freed: list[float] = []
    begun = time.monotonic()

    def wait_for_stream() -> None:
        torch.cuda.set_device(rank)
        streams[0].synchronize()
        freed.append((time.monotonic() - begun) * 1000)

    waiter = threading.Thread(target=wait_for_stream)
    waiter.start()
    table.end([1])
    called_ms = (time.monotonic() - begun) * 1000
    waiter.join(10)
    ended = table.wait_ended(10_000)
    all_ms = (time.monotonic() - begun) * 1000
    healthy = float((torch.ones(1000, device="cuda") * 2).sum()) == 2000.0
    line.send(
        {"called_ms": called_ms, "stream_free_ms": freed, "all_ended": ended, "all_ms": all_ms, "healthy": healthy,
         "states": sorted({table.state(g) for g in range(num_groups)}), "ending_ms": table.ending_ms(),
         "made_ms": made_ms, "by_difference": by_difference, "nccl": _core.nccl_version(),
         "freed_bytes": torch.cuda.mem_get_info()[0] - before}
    )  # fmt: skip
    line.receive()


def _by_difference(parent: Any, data: Any, stream: Any) -> dict[str, float]:
    """Split: make, first all-reduce, second all-reduce."""
    import torch

    made: list[Any] = []

    def split() -> None:
        made.append(parent.split(0, parent.rank))
        made[0].wait_ready(60_000)

    def reduce() -> None:
        made[0].all_reduce_f32(data[0].data_ptr(), 1 << 22, stream.cuda_stream)
        made[0].wait_ready(60_000)
        stream.synchronize()

    result = {"split": _timed_ms(split), "first": _timed_ms(reduce), "second": _timed_ms(reduce)}
    made[0].abort()
    torch.cuda.synchronize()
    return result


def shrinker(line: Line, rank: int) -> None:
    """Two ranks; rank 1 dies; rank 0 shrinks to itself with the abort flag, then makes a new world of one."""
    import torch

    from unicron import _core

    torch.cuda.set_device(rank)
    data = torch.ones(1 << 20, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    identity = _core.make_nccl_id().hex() if rank == 0 else ""
    identity = _exchange(line, {"id": identity})["id"]
    communicator = _core.NcclCommunicator(rank, 2, rank, bytes.fromhex(identity))
    communicator.wait_ready(60_000)
    communicator.all_reduce_f32(data.data_ptr(), 1 << 20, stream.cuda_stream)
    communicator.wait_ready(60_000)
    stream.synchronize()
    _exchange(line, {"ready": True})
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    communicator.all_reduce_f32(data.data_ptr(), 1 << 20, stream.cuda_stream)  # hangs
    time.sleep(0.2)
    made: list[Any] = []

    def shrink() -> None:
        made.append(communicator.shrink([1], True))
        made[0].wait_ready(30_000)

    shrink_ms = _timed_ms(shrink)
    data.fill_(3)
    torch.cuda.synchronize()
    made[0].all_reduce_f32(data.data_ptr(), 1 << 20, stream.cuda_stream)
    made[0].wait_ready(10_000)
    stream.synchronize()
    line.send({"shrink_ms": shrink_ms, "num_ranks": made[0].num_ranks, "sum": float(data[0])})
    line.receive()


def torch_rank(line: Line, rank: int, port: int) -> None:
    """torch's own groups: the peer dies inside an all-reduce; the table revokes, torch goes on with a new group."""
    import torch
    import torch.distributed as dist

    from unicron import _core

    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=timedelta(seconds=60), wait_for_workers=False)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=300)
    groups = []
    for number in range(3):
        group = dist.ProcessGroupNCCL(dist.PrefixStore(f"g{number}", store), rank, 2, options)
        groups.append(group)
    data = torch.ones(1 << 22, device="cuda")
    for group in groups:
        group.allreduce([data]).wait()
    torch.cuda.synchronize()
    assert float(data[0]) == 8.0
    line.send({"ready": True})
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    handles = [group._comm_ptr() for group in groups]
    table = _core.NcclTable()
    for number, handle in enumerate(handles):
        table.register_torch(number, handle, rank, [0, 1], number == 0)
    line.receive()  # the other is gone
    groups[0].allreduce([data]).wait()  # enqueued: its kernel waits for ever
    time.sleep(0.2)
    begun = time.monotonic()
    threading.Timer(0.05, lambda: table.end([1])).start()
    torch.cuda.synchronize()
    free_ms = (time.monotonic() - begun) * 1000 - 50
    ended = table.wait_ended(10_000)
    quiet_ms = (time.monotonic() - begun) * 1000 - 50
    states = [table.state(number) for number in range(3)]
    for number in range(3):
        assert table.forget(number, 1000)
    abort_ms = [_timed_ms(group.abort) for group in groups]
    fresh = dist.ProcessGroupNCCL(dist.PrefixStore("alone", dist.HashStore()), 0, 1, options)
    fresh_ms = _timed_ms(lambda: (fresh.allreduce([data.fill_(5)]).wait(), torch.cuda.synchronize()))
    line.send(
        {"stream_free_ms": free_ms, "quiet_ms": quiet_ms, "ended": ended, "states": states, "abort_ms": abort_ms,
         "new_group_ms": fresh_ms, "sum": float(data[0])}
    )  # fmt: skip
    line.receive()


NCCL_ROLES: dict[str, Callable[..., None]] = {
    "reader": reader, "rank_of_twelve": rank_of_twelve, "shrinker": shrinker, "torch_rank": torch_rank
}  # fmt: skip
