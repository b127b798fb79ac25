"""The worker's monitor: frames in order, groups shut by a plan, and the end of the process when its agent is gone."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from native_workers import Worker, frame, wait_until
from unicron import _core

PLAN = 1
ECHO = """
while True:
    message = monitor.next_frame(60_000)
    monitor.send(b"%d " % monitor.newest_epoch() + message, 10_000)
"""
SLEEP = "time.sleep(60)"


@pytest.fixture
def pages() -> Iterator[int]:
    fd = _core.create_pulse_pages(2)
    yield fd
    os.close(fd)


@pytest.fixture
def local(pages: int) -> Iterator[tuple[_core.WorkerMonitor, socket.socket]]:
    """A monitor in this process, and its agent's end of the connection."""
    agent, worker = socket.socketpair()
    monitor = _core.WorkerMonitor(worker.detach(), _core.PulsePage(pages, 0))
    yield monitor, agent
    monitor.close()
    agent.close()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        return client, accepted


# ---------------------------------------------------------------- frames


def test_frames_arrive_in_order_with_their_epoch(pages: int) -> None:
    with Worker(pages, 0, ECHO) as worker:
        worker.control.sendall(frame(2, 0, (), b"a") + frame(PLAN, 1, (0, 3), b"b") + frame(9, 0, (), b""))
        assert [worker.receive() for _ in range(3)][1:] == [b"1 b", b"1 "]
        worker.control.sendall(frame(PLAN, 5, (), b"c"))
        assert worker.receive() == b"5 c"
        worker.control.sendall(frame(PLAN, 4, (), b"stale"))
        assert worker.receive() == b"5 stale"


def test_frames_cut_into_single_bytes(local: tuple[_core.WorkerMonitor, socket.socket]) -> None:
    monitor, agent = local
    for byte in frame(PLAN, 3, (1, 2), b"hello") + frame(2, 3, (), b"again"):
        agent.sendall(bytes((byte,)))
    assert monitor.next_frame(10_000) == b"hello"
    assert monitor.next_frame(10_000) == b"again"
    assert monitor.newest_epoch() == 3


def test_the_largest_message_passes_both_ways(pages: int) -> None:
    code = "message = monitor.next_frame(60_000); monitor.send(message, 60_000); time.sleep(60)"
    message = os.urandom(4 << 20)
    with Worker(pages, 0, code) as worker:
        worker.control.sendall(frame(2, 0, tuple(range(65_535)), message))
        assert worker.receive() == message


def test_next_frame_is_none_after_its_timeout(local: tuple[_core.WorkerMonitor, socket.socket]) -> None:
    monitor, _ = local
    assert monitor.next_frame(0) is None
    assert monitor.next_frame(30) is None
    assert monitor.newest_epoch() == 0


def test_send_frames_a_message(local: tuple[_core.WorkerMonitor, socket.socket]) -> None:
    monitor, agent = local
    monitor.send(b"hi", 1000)
    monitor.send(b"", 1000)
    assert agent.recv(64) == b"\x02\0\0\0hi\0\0\0\0"


def test_send_times_out_and_continues_what_was_begun(local: tuple[_core.WorkerMonitor, socket.socket]) -> None:
    monitor, agent = local
    first, second = os.urandom(3 << 20), b"second"
    with pytest.raises(_core.Timeout, match="was begun") as caught:
        monitor.send(first, 20)
    assert isinstance(caught.value, TimeoutError) and isinstance(caught.value, _core.UnicronError)
    with pytest.raises(_core.Timeout, match="nothing of it was sent"):
        monitor.send(b"dropped", 0)
    agent.settimeout(20)
    received = bytearray()
    while len(received) < 100_000:
        received += agent.recv(1 << 16)
    sender = threading.Thread(target=lambda: monitor.send(second, 20_000))
    sender.start()
    while len(received) < len(first) + len(second) + 8:
        received += agent.recv(1 << 16)
    sender.join(20)
    assert not sender.is_alive()
    assert bytes(received) == b"\0\0\x30\0" + first + b"\x06\0\0\0second"


def test_a_message_above_the_limit_is_refused(local: tuple[_core.WorkerMonitor, socket.socket]) -> None:
    with pytest.raises(_core.UnicronError, match="limit 4194304"):
        local[0].send(bytes((4 << 20) + 1), 1000)


def test_a_closed_monitor_says_so(pages: int) -> None:
    agent, worker = socket.socketpair()
    with agent:
        monitor = _core.WorkerMonitor(worker.detach(), _core.PulsePage(pages, 1))
        monitor.close()
        monitor.close()
        assert agent.recv(1) == b""
        with pytest.raises(_core.UnicronError, match="closed"):
            monitor.next_frame(0)
        with pytest.raises(_core.UnicronError, match="closed"):
            monitor.send(b"", 0)


def test_the_control_descriptor_must_be_a_stream_socket(pages: int) -> None:
    with pytest.raises(_core.UnicronError, match="not a stream socket"):
        _core.WorkerMonitor(pages, _core.PulsePage(pages, 0))


# ---------------------------------------------------------------- the agent's end is the worker's end


def test_the_end_of_the_connection_ends_the_worker(pages: int) -> None:
    with Worker(pages, 0, SLEEP) as worker:
        worker.wait_ready().control.close()
        assert worker.exit_code() == 75
        assert "the agent's connection ended; this worker ends (exit code 75)" in worker.stderr()


def test_even_while_the_worker_holds_the_gil(pages: int) -> None:
    with Worker(pages, 0, "import re; re.match('(a+)+$', 'a' * 60 + 'b')") as worker:
        worker.wait_ready().control.close()
        assert worker.exit_code() == 75


def test_a_closed_monitor_does_not_end_the_worker(pages: int) -> None:
    with Worker(pages, 0, "monitor.close(); time.sleep(0.3); sys.exit(4)") as worker:
        worker.wait_ready()
        assert worker.control.recv(1) == b""
        worker.control.close()
        assert worker.exit_code() == 4


HEAD = (11).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (frame(PLAN, 1, (1,), b"abc")[:-2], "connection ended"),  # truncated
        (b"\x01", "connection ended"),
        ((5 << 20).to_bytes(4, "little"), "is outside"),  # oversized
        (b"\xff\xff\xff\xff" * 10, "is outside"),
        ((3).to_bytes(4, "little") + b"abc", "is outside"),  # shorter than its own head
        (HEAD + b"\x01" + bytes(8) + b"\x05\x00", "claims 5 touched ranks"),
        (HEAD + b"\x01" + b"\xff" * 8 + b"\0\0", "epoch"),
        (((4 << 20) + 12).to_bytes(4, "little") + bytes((4 << 20) + 12), "limit 4194304"),
    ],
    ids=["truncated", "one byte", "oversized", "garbage", "short", "touched", "epoch", "message"],
)
def test_a_stream_that_is_not_frames_ends_the_worker(pages: int, sent: bytes, why: str) -> None:
    with Worker(pages, 0, SLEEP) as worker:
        worker.wait_ready().control.sendall(sent)
        worker.control.shutdown(socket.SHUT_WR)
        assert worker.exit_code() == 75
        assert why in worker.stderr()


def test_a_loop_that_never_reads_is_bounded(pages: int) -> None:
    with Worker(pages, 0, SLEEP) as worker:
        worker.wait_ready().control.sendall(frame(2, 0, (), b"x") * 1025)
        assert worker.exit_code() == 75
        assert "1025 frames unread" in worker.stderr()


def test_a_forked_child_does_not_hang_on_the_monitor(pages: int) -> None:
    """As a data loader's: forked after the monitor's threads started, and it ends by the interpreter's normal way."""
    code = (
        "pid = os.fork()\n"
        "if pid == 0: del monitor; sys.exit(6)\n"
        "monitor.send(b'%d' % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 1000); time.sleep(60)"
    )
    with Worker(pages, 0, code) as worker:
        assert worker.receive() == b"6"


# ---------------------------------------------------------------- groups


def is_shut(peer: socket.socket) -> bool:
    peer.settimeout(0.2)
    try:
        return peer.recv(1) == b""
    except TimeoutError:
        return False


def identities(*sockets: socket.socket) -> list[tuple[int, int]]:
    numbers = {each.fileno() for each in sockets}
    return [(fd, inode) for fd, inode in _core.connected_sockets() if fd in numbers]


def test_a_plan_shuts_what_it_makes_useless(local: tuple[_core.WorkerMonitor, socket.socket]) -> None:
    """Groups that span replicas always, others when they hold a touched rank; and a blocked receiver wakes."""
    monitor, agent = local
    pairs = {name: tcp_pair() for name in ("touched", "whole", "cross")}
    monitor.register_group(1, identities(pairs["touched"][0]), [0, 1], False)
    monitor.register_group(2, identities(pairs["whole"][0]), [2, 3], False)
    monitor.register_group(3, identities(pairs["cross"][0]), [0, 2], True)
    agent.sendall(frame(PLAN, 1, (1,), b"plan"))
    assert pairs["touched"][0].recv(1) == b""  # blocked until the monitor shut it
    assert monitor.next_frame(10_000) == b"plan"
    assert is_shut(pairs["touched"][1]) and is_shut(pairs["cross"][1])
    assert not is_shut(pairs["whole"][1])
    agent.sendall(frame(PLAN, 1, (2,), b"again") + frame(2, 2, (2,), b"no plan"))
    assert monitor.next_frame(10_000) == b"again"
    assert monitor.next_frame(10_000) == b"no plan"
    assert not is_shut(pairs["whole"][1])  # neither a stale plan nor another kind shuts anything
    for pair in pairs.values():
        for end in pair:
            end.close()


def test_shut_groups_counts_and_forgotten_groups_stay(local: tuple[_core.WorkerMonitor, socket.socket]) -> None:
    monitor, _ = local
    kept, gone, cross = tcp_pair(), tcp_pair(), tcp_pair()
    monitor.register_group(1, identities(kept[0]), [5], False)
    monitor.register_group(2, identities(gone[0], gone[1]), [6], False)
    monitor.register_group(3, identities(cross[0]), [7], True)
    monitor.forget_group(3)
    monitor.forget_group(99)
    assert monitor.shut_groups([1, 2]) == 0
    assert monitor.shut_groups([6]) == 2
    assert not is_shut(kept[1]) and not is_shut(cross[1])
    monitor.register_group(3, identities(cross[0]), [7], True)
    assert monitor.shut_groups([]) == 1
    for pair in (kept, gone, cross):
        for end in pair:
            end.close()


def test_a_number_that_stands_for_another_file_is_left_alone(local: tuple[_core.WorkerMonitor, socket.socket]) -> None:
    monitor, _ = local
    old, new = tcp_pair(), tcp_pair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monitor.register_group(1, identities(old[0], old[1]), [0], True)
        os.dup2(new[0].fileno(), old[0].fileno())
        os.dup2(listener.fileno(), old[1].fileno())
        assert monitor.shut_groups([0]) == 0
        assert not is_shut(new[1])
        socket.create_connection(listener.getsockname()).close()  # it still listens
    for end in (*old, *new):
        end.close()


def test_what_ended_before_it_was_registered_makes_a_broken_group(
    local: tuple[_core.WorkerMonitor, socket.socket],
) -> None:
    """A group of a move is connected long before it is used (phase 1): whoever is gone by then is no error of ours."""
    monitor, _ = local
    whole, closed, reused, left = tcp_pair(), tcp_pair(), tcp_pair(), tcp_pair()
    listed = [identities(pair[0]) for pair in (whole, closed, reused, left)]
    closed[0].close()
    os.dup2(whole[1].fileno(), reused[0].fileno())
    left[1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    left[1].close()  # resets
    for number, sockets in enumerate(listed):
        monitor.register_group(number, sockets, [0, 1], True)
    assert [monitor.group_state(number) for number in range(4)] == ["whole", "broken", "broken", "broken"]
    assert monitor.shut_groups([0]) == 1
    with pytest.raises(_core.UnicronError, match="group 1 is registered already"):
        monitor.register_group(1, [], [0], True)
    for pair in (whole, closed, reused, left):
        for end in pair:
            end.close()


def test_connected_sockets() -> None:
    before = _core.connected_sockets()
    client, accepted = tcp_pair()
    unix, other_unix = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)), socket.socket(), socket.socket(type=socket.SOCK_DGRAM) as datagram:
        datagram.connect(("127.0.0.1", 9))
        found = _core.connected_sockets()
    expected = sorted((end.fileno(), os.fstat(end.fileno()).st_ino) for end in (client, accepted))
    assert sorted(set(found) - set(before)) == expected
    for end in (client, accepted, unix, other_unix):
        end.close()


# ---------------------------------------------------------------- a process forked from a template


def test_a_monitor_in_a_process_forked_from_a_template(pages: int) -> None:
    """The template imports everything and has no threads; its child is the worker."""
    agent, worker = socket.socketpair()
    code = (
        "import os, sys; from unicron import _core\n"
        "if os.fork() == 0:\n"
        "    monitor = _core.WorkerMonitor(int(sys.argv[2]), _core.PulsePage(int(sys.argv[1]), 0))\n"
        "    while (message := monitor.next_frame(60_000)) is not None: monitor.send(message, 1000)\n"
        "os._exit(0)\n"
    )
    with agent:
        with worker:
            command = [sys.executable, "-c", code, str(pages), str(worker.fileno())]
            assert subprocess.run(command, pass_fds=(pages, worker.fileno()), timeout=20, check=False).returncode == 0
        agent.settimeout(20)
        agent.sendall(frame(2, 0, (), b"hello"))
        assert agent.recv(64) == b"\x05\0\0\0hello"
        pid = _core.PulsePage(pages, 0).owner_pid
        assert not _core.owner_gone(pid)
    wait_until(lambda: _core.owner_gone(pid), "the worker ends with its agent's connection")
