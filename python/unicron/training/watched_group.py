"""A gloo group whose waits always end: in what gloo says, or in LostOperation.

Why. When a connection ends, gloo (tcp/pair.cc, signalException) tells those who wait for operations that are queued,
but not the one that it is in the middle of sending (its tx_ holds an unbound buffer) or receiving (rx_). Whoever waits
for such an operation waits for gloo's own timeout, half an hour. That happens when a peer dies with half a message on
the wire, and when a socket is shut while another thread writes to it; no call ends that wait.

So nobody waits in gloo without a bound here: waits are cut into slices, and when the native monitor says that the
group was shut (a new epoch) or that one of its sockets ended, an operation that still does not end is given up. Its
thread and its group are kept for ever (see Groups.release_retired): the operation still points at the memory.

Who waits longer than a slice says so in its pulse, so that a rank that waits for another is not taken for the one
that all wait for (pipeline and tensor-parallel collectives are inside of what the pulse calls compute).

Collectives can be waited for in slices. A send or a receive cannot (its wait closes the pair when it times out), nor
can a reduce_scatter (gloo makes it of an all-reduce, and the work that is given back heeds no time) or the building of
a group: those are waited for by a helper thread, and the caller waits for the helper.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unicron.types import WaitKind

COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # the bound of last resort; failures are seen long before
CONNECT_TIMEOUT = timedelta(seconds=10)  # all have found each other by then, or somebody died and an epoch comes
SLICE_S = 0.05
SLICE = timedelta(seconds=SLICE_S)
SHUT_S = SLICE_S  # gloo's thread answers a shut socket at once; who waits longer waits for a lost operation
BROKEN_S = 2.0  # nobody shut the group: a peer may have left after its last collective, and others still answer

#: Whether a wait that has lasted this many seconds is to be given up: raises.
Check = Callable[[float], None]
#: (kind of group, name) of an operation that is about to begin -> what is to be called when it has begun, or None.
AtOperation = Callable[[int, str], Callable[[], None] | None]


class LostOperation(RuntimeError):
    """gloo does not end this operation: its connection ended under it."""


class Helpers:
    """Threads that wait where a wait cannot be cut into slices. One serves until it is left stuck in a call."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Any] | None = None

    def call(self, what: Callable[[], Any], check: Check) -> Any:
        """what() in a helper. check(seconds so far) may raise; then the helper is left behind."""
        calls = self._calls
        if calls is None:
            calls = self._calls = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(calls,), name="unicron-helper", daemon=True).start()
        outcome: list[Any] = []
        done = threading.Lock()
        done.acquire()
        calls.put((what, outcome, done))
        begun = time.monotonic()
        while not done.acquire(timeout=SLICE_S):
            try:
                check(time.monotonic() - begun)
            except BaseException:
                calls.put(None)  # it ends when it comes back
                self._calls = None
                raise
        is_error, value = outcome
        if is_error:
            raise value
        return value


def _serve(calls: queue.SimpleQueue[Any]) -> None:
    while (call := calls.get()) is not None:
        what, outcome, done = call
        try:
            outcome[:] = False, what()
        except BaseException as error:
            outcome[:] = True, error
        done.release()
        del call, what, outcome  # an operation holds its group, and a group its threads


class WatchedGroup(dist.ProcessGroup):
    """A gloo group (as dist.new_group's, for CPU tensors) with bounded waits.

    state: "whole", "shut" or "broken", see _core.WorkerMonitor.group_state; pulse: this process's _core.PulsePage;
    kind: what the group is for, under which its waits are counted; at_operation: asked before each operation.
    """

    def __init__(
        self, backend: Any, helpers: Helpers, state: Callable[[], str], pulse: Any, kind: WaitKind = WaitKind.WORLD,
        at_operation: AtOperation | None = None,
    ) -> None:  # fmt: skip
        super().__init__(backend.rank(), backend.size())
        self.at_operation = at_operation
        self.kind = int(kind)
        self.backend, self._helpers, self._state, self._pulse = backend, helpers, state, pulse
        self.lost: str = ""  # what was given up; the group must never be destroyed then
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)

    def check(self, what: str, seconds: float) -> None:
        """Called in every slice of a wait. Raises LostOperation."""
        self._pulse.set_waiting(True)
        state = self._state()
        if state == "whole" or (state == "broken" and seconds < BROKEN_S):
            return
        self.lost = f"{what} does not end although the group is {state}, after {seconds * 1000:.0f} ms"
        raise LostOperation(f"gloo lost an operation: {self.lost}")

    def wait_uncut(self, work: Any, what: str) -> Any:
        with self.noticed_waits():
            return self._helpers.call(lambda: work.wait(COLLECTIVE_TIMEOUT), lambda seconds: self.check(what, seconds))

    def waited(self, begun_ns: int) -> None:
        """A wait is over: its time is not the time of this rank (it may have waited for a slow one)."""
        self._pulse.waited(self.kind, begun_ns)

    @contextlib.contextmanager
    def noticed_waits(self) -> Iterator[None]:
        """The pulse's mark of waiting is afterwards what it was."""
        before = self._pulse.waiting
        try:
            yield
        finally:
            if not before:
                self._pulse.set_waiting(False)


class _Collective(dist.Work):
    def __init__(self, work: Any, group: WatchedGroup, what: str) -> None:
        super().__init__()
        self._work, self._group, self._what = work, group, what

    def wait(self, timeout: timedelta | None = None) -> Any:
        begun_ns = time.monotonic_ns()
        try:
            return self._wait(timeout)
        finally:
            self._group.waited(begun_ns)

    def _wait(self, timeout: timedelta | None) -> Any:
        try:
            return self._work.wait(SLICE)
        except RuntimeError:
            if self._work.is_completed():
                return self._work.wait(SLICE)  # its own result, or its own error
        with self._group.noticed_waits():
            return self._wait_on(timeout)

    def _wait_on(self, timeout: timedelta | None) -> Any:
        begun = time.monotonic() - SLICE_S
        while True:
            try:
                return self._work.wait(SLICE)
            except RuntimeError:
                seconds = time.monotonic() - begun
                if self._work.is_completed():
                    return self._work.wait(SLICE)
            if timeout and seconds > timeout.total_seconds():
                raise TimeoutError(f"{self._what} did not end in {timeout}")
            self._group.check(self._what, seconds)

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> Any:
        return self._work.result()

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        return self._work.get_future()


class _Uncut(_Collective):
    """A send, a receive or a reduce_scatter."""

    def _wait(self, timeout: timedelta | None) -> Any:
        return self._group.wait_uncut(self._work, self._what)


def _watched(name: str, kind: type[_Collective], backend_name: str = "") -> Any:
    def call(self: WatchedGroup, *args: Any, **kwargs: Any) -> Any:
        then = self.at_operation and self.at_operation(self.kind, name)
        work = kind(getattr(self.backend, backend_name or name)(*args, **kwargs), self, name)
        if then:
            then()
        return work

    call.__name__ = name
    return call


def _kind_of(name: str) -> type[_Collective]:
    return _Uncut if "reduce_scatter" in name else _Collective


#: What a ProcessGroup does, under the names that this torch has. torch >= 2.13 calls some by new names; the backends
#: keep the old ones.
BACKEND_NAMES = {
    "all_gather_single": "_allgather_base", "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base", "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}  # fmt: skip
POINT_TO_POINT = ("send", "recv", "recv_anysource")
COLLECTIVES = tuple(
    name for name in (
        "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "allgather_coalesced",
        "_allgather_base", "allgather_into_tensor_coalesced", "gather", "scatter", "reduce_scatter",
        "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base", "barrier",
        *BACKEND_NAMES,
    )
    if hasattr(dist.ProcessGroup, name)
)  # fmt: skip
for _name in COLLECTIVES:
    setattr(WatchedGroup, _name, _watched(_name, _kind_of(_name), BACKEND_NAMES.get(_name, "")))
for _name in POINT_TO_POINT:
    setattr(WatchedGroup, _name, _watched(_name, _Uncut))
