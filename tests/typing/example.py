"""What a user of the core writes, for mypy --strict: it must type-check as it stands. Not run."""

from unicron import _core


def watch_one(pages_fd: int, slot: int) -> list[tuple[int, int]]:
    page = _core.PulsePage(pages_fd, slot)
    page.reset()
    supervisor = _core.Supervisor()
    supervisor.watch(page, slot)
    seen_ns: int = page.beat_ns
    loss: float = page.loss
    print(seen_ns, loss, supervisor.fileno())
    return supervisor.take_deaths()


def work(control_fd: int, page: _core.PulsePage) -> bytes:
    monitor = _core.WorkerMonitor(control_fd, page)
    monitor.register_group(1, _core.connected_sockets(), ranks=[0, 1], cross=True)
    try:
        monitor.send(b"ready", timeout_ms=1000)
    except _core.Timeout as error:
        late: TimeoutError = error
        raise SystemExit(str(late)) from error
    message = monitor.next_frame(1000)
    return message if message is not None else b""


def adopt(fd: int, address: int, nbytes: int) -> int:
    header = _core.ArenaHeader(fd)
    why: str = header.check("digest", nbytes - _core.ARENA_HEADER_BYTES)
    if why:
        raise _core.ArenaRefused(why)
    _core.map_fixed(address, fd, nbytes)
    header.stage = 2
    header.torn = False
    return _core.checksum(memoryview(b"abc"))
