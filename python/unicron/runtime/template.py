"""The template: one process a machine that has imported everything already and forks workers for
the agents.

    python -m unicron.runtime.template --socket S [--import torch,megatron.core]

Imports cost 4 to 17 s a process on two cores, a fork 10 ms (MECHANICS 1.15). Workers are then the
template's children: it reaps them, reports exits, stops and continues to the agent that asked for
them, and kills what an agent leaves behind when its connection ends: no orphan trains on. If the
template dies, the kernel kills its children.

It must stay single-threaded: everything is imported before anything else, and no library that
starts threads is called.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unicron.messages import ChildStatus, Fork, Forked, MessageRefused, decode, encode
from unicron.runtime import child, processes
from unicron.runtime.framing import FramedSocket, FrameRefused, PeerClosed, listen

if TYPE_CHECKING:
    from collections.abc import Iterable

AGENTS_MAX = 256
CHILDREN_MAX = 4096
END_S_MAX = 2.0  # for the last children to be gone
WAIT_S = 1.0  # a lost wakeup costs at most this

DEVICES = Path("/dev")
WITHOUT_GPUS = "Transformer Engine and Apex are not installed"  # they are of no use there

_KINDS = {
    os.CLD_EXITED: "exited",
    os.CLD_KILLED: "signaled",
    os.CLD_DUMPED: "signaled",
    os.CLD_STOPPED: "stopped",
    os.CLD_CONTINUED: "continued",
}


@dataclass
class _Agent:
    link: FramedSocket
    workers: dict[int, str] = field(default_factory=dict)  # pid -> worker
    events: int = selectors.EVENT_READ


class Template:
    """``serve`` returns None when told to stop, and in a forked child the request it was forked
    for.
    """

    def __init__(self, path: Path, lifeline: int = -1) -> None:
        self._lifeline = lifeline
        self._pid = os.getpid()
        self._path = path
        self._server = listen(path)
        self._selector = selectors.DefaultSelector()
        self._agents: dict[int, _Agent] = {}  # by descriptor
        self._owners: dict[int, _Agent] = {}  # by pid, as long as the child is not reaped
        self._stopping = False
        self._leaves_orphans = False  # a worker ended, and what it started may live on
        child.adopt_orphans()
        self._awake, self._waker = socket.socketpair()
        for end in (self._awake, self._waker):
            end.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # no SA_NOCLDSTOP: stops wake us, too
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        self._selector.register(self._server, selectors.EVENT_READ, None)
        self._selector.register(self._awake, selectors.EVENT_READ, None)
        if lifeline >= 0:
            self._selector.register(lifeline, selectors.EVENT_READ, None)

    def _stop(self, *_: Any) -> None:
        self._stopping = True

    def serve(self) -> Fork | None:
        while not self._stopping:
            for key, events in self._selector.select(WAIT_S):
                if key.fileobj is self._server:
                    self._accept()
                elif key.fileobj is self._awake:
                    with contextlib.suppress(BlockingIOError):
                        self._awake.recv(4096)
                elif key.fd == self._lifeline:
                    self._stop()
                elif key.fd in self._agents:
                    request = self._serve_agent(self._agents[key.fd], events)
                    if request is not None:
                        return request
            self._reap()
            if self._leaves_orphans:
                self._leaves_orphans = self._end_orphans()
            self._watch_writes()
        self._end_everything()
        return None

    # ------------------------------------------------------------ agents

    def _accept(self) -> None:
        connection, _ = self._server.accept()
        if len(self._agents) >= AGENTS_MAX:
            connection.close()
            return
        agent = _Agent(FramedSocket(connection))
        self._agents[agent.link.fileno()] = agent
        self._selector.register(agent.link, selectors.EVENT_READ, None)

    def _serve_agent(self, agent: _Agent, events: int) -> Fork | None:
        """A request in the child that was forked for it."""
        try:
            if events & selectors.EVENT_WRITE:
                agent.link.flush()
            for frame in agent.link.receive() if events & selectors.EVENT_READ else ():
                message = decode(frame)
                if not isinstance(message, Fork):
                    raise FrameRefused(f"a template cannot take {type(message).__name__}")
                if self._fork(agent, message):
                    return message
        except (ConnectionError, MessageRefused) as error:
            if not isinstance(error, PeerClosed):
                sys.stderr.write(f"unicron template: connection refused: {error}\n")
            self._drop(agent)
        return None

    def _drop(self, agent: _Agent) -> None:
        """The agent is gone: its workers must not outlive it, stopped ones included."""
        if self._agents.pop(agent.link.fileno(), None) is None:
            return
        self._selector.unregister(agent.link)
        agent.link.close()
        for pid in agent.workers:
            kill_group(pid)

    def _watch_writes(self) -> None:
        for agent in self._agents.values():
            events = selectors.EVENT_READ
            if agent.link.wants_to_write:
                events |= selectors.EVENT_WRITE
            if events != agent.events:
                agent.events = events
                self._selector.modify(agent.link, events, None)

    # ------------------------------------------------------------ children

    def _fork(self, agent: _Agent, request: Fork) -> bool:
        """True in the child."""
        if len(self._owners) >= CHILDREN_MAX:
            raise FrameRefused(f"more than {CHILDREN_MAX} workers")
        try:
            pid = os.fork()
        # no memory, no pids: the agent hears of a worker that died at once
        except OSError as error:
            sys.stderr.write(f"unicron template: cannot fork: {error}\n")
            status = ChildStatus(request.worker, 0, "exited", 71)
            agent.link.send(encode(Forked(request.worker, 0)))
            agent.link.send(encode(status))
            return False
        if pid == 0:
            self._leave()
            child.become_worker(request, self._pid)
            return True
        agent.workers[pid] = request.worker
        self._owners[pid] = agent
        agent.link.send(encode(Forked(request.worker, pid)))
        return False

    def _leave(self) -> None:
        """In the child: nothing of the template stays open."""
        signal.set_wakeup_fd(-1)
        for agent in self._agents.values():
            agent.link.close()
        self._selector.close()
        for end in (self._server, self._awake, self._waker):
            end.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)

    def _reap(self) -> None:
        options = os.WEXITED | os.WSTOPPED | os.WCONTINUED | os.WNOHANG
        while True:
            try:
                seen = os.waitid(os.P_ALL, 0, options | os.WNOWAIT)
            except ChildProcessError:
                return
            if seen is None:
                return
            kind = _KINDS.get(seen.si_code)
            if kind in ("exited", "signaled"):
                # Not reaped yet, so the number is still its own: end what it started (data
                # loaders).
                with contextlib.suppress(OSError):
                    os.killpg(seen.si_pid, signal.SIGKILL)
            os.waitid(os.P_PID, seen.si_pid, options)
            if kind is not None:
                self._report(seen.si_pid, kind, seen.si_status)

    def _report(self, pid: int, kind: str, status: int) -> None:
        agent = self._owners.get(pid)
        if agent is None:
            return
        worker = agent.workers[pid]
        if kind in ("exited", "signaled"):
            del self._owners[pid], agent.workers[pid]
            self._leaves_orphans = True
        if agent.link.closed:
            return
        try:
            agent.link.send(encode(ChildStatus(worker, pid, kind, status)))
        except ConnectionError:
            self._drop(agent)

    def _end_orphans(self) -> bool:
        """Data loaders, daemons: what a dead worker started and what left its process group too. They are children of
        this process by now (it adopts orphans), and say whose they are. True: some were there, so look again."""
        living = {worker for agent in self._agents.values() for worker in agent.workers.values()}
        found = False
        for pid in processes.children():
            owner = processes.worker_of(pid) if pid not in self._owners else ""
            if owner and owner not in living:
                found = True
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        return found

    def _end_everything(self) -> None:
        for agent in [*self._agents.values()]:
            self._drop(agent)
        for pid in self._owners:
            kill_group(pid)
        until = time.monotonic() + END_S_MAX
        while (self._owners or self._end_orphans()) and time.monotonic() < until:
            self._reap()
            time.sleep(0.005)
        self._reap()
        self._server.close()
        self._path.unlink(missing_ok=True)


def kill_group(pid: int) -> None:
    """SIGKILL to an unreaped child and what it started (it may not have come to its setsid yet)."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            kill(pid, signal.SIGKILL)


def import_all(names: Iterable[str]) -> list[str]:
    """Import, and return those that could not be: a missing module is the script's own error,
    later.
    """
    missing = []
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            missing.append(name)
            if isinstance(error, ModuleNotFoundError) and name.startswith(error.name or " "):
                continue  # not installed: then no script needs it
            sys.stderr.write(f"unicron template: cannot import {name}: {error}\n")
    return missing


def expect_no_gpus() -> None:
    """Where there are none, megatron-core's word that kernels for them are missing is most of what a run shows."""
    if not any(DEVICES.glob("nvidia[0-9]*")):  # CUDA itself is not asked: it must not begin before a fork
        warnings.filterwarnings("ignore", WITHOUT_GPUS, UserWarning)


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m unicron.runtime.template")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--import", dest="imports", default="", help="modules, separated by commas")
    parser.add_argument("--lifeline", type=int, default=-1, help="end when it is at its end")
    options = parser.parse_args(arguments)
    for name in (
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
        "TORCHINDUCTOR_COMPILE_THREADS",
    ):
        # pools that start with the import would not survive a fork
        os.environ.setdefault(name, "1")
    gc.disable()
    expect_no_gpus()
    import_all(name for name in options.imports.split(",") if name)
    gc.collect()
    gc.freeze()  # shared pages stay shared: no collection writes to what was imported
    gc.enable()
    if num_threads() > 1:
        text = f"{num_threads()} threads after the imports; forks may hang"
        sys.stderr.write(f"unicron template: {text}\n")
    request = Template(options.socket, options.lifeline).serve()
    if request is not None:
        child.run_and_report(request.argv)


if __name__ == "__main__":
    main()
