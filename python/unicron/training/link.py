"""A worker's line to its agent: who am I, what is my role, plans as they come, reports out, arenas on request."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from unicron import _core
from unicron.messages import (
    ArenaGrant,
    ArenaRequest,
    ChangeLayout,
    FinishUnderstudies,
    GpuGrant,
    GpuRequest,
    LayoutReady,
    MoveRoles,
    PublishEpoch,
    SaveAndHold,
    WorkerHello,
    WorkerWelcome,
    decode,
    encode,
)
from unicron.runtime import framing
from unicron.types import EpochPlan, Member, Rank

CONNECT_MS_MAX = 10_000
ANSWER_MS_MAX = 10_000
SEND_MS_MAX = 5_000
ARENA_MS_MAX = 20_000  # an adopter waits in it until the dead owner is gone

GpuSlabs = tuple[tuple[int, ...], tuple[int, ...]]  # descriptors, bytes of each
NO_SLABS: GpuSlabs = ((), ())


class AgentGone(RuntimeError):
    """The agent does not answer."""


class WorkerLink:
    """Made once per process, after the fork. `plan` is the newest one received."""

    def __init__(self) -> None:
        self.task = os.environ["UNICRON_TASK"]
        self.worker = os.environ["UNICRON_WORKER"]
        self._path = os.environ["UNICRON_AGENT"]
        self.incarnation = int(os.environ.get("UNICRON_INCARNATION", "0"))
        control = framing.connect(self._path, CONNECT_MS_MAX)
        hello = WorkerHello(self.task, self.worker, self.incarnation, os.getpid())
        framing.send_blocking(control, encode(hello))
        payload, fds = framing.receive_blocking(control, ANSWER_MS_MAX)
        welcome = decode(framing.worker_message(payload))
        if not isinstance(welcome, WorkerWelcome) or len(fds) != 1:
            raise AgentGone(f"agent at {self._path} answered {type(welcome).__name__} with {len(fds)} descriptors")
        self.welcome = welcome
        self.pulse = _core.PulsePage(fds[0], welcome.pulse_slot)
        os.close(fds[0])
        self.agent_pid = framing.peer_pid(control)
        control.setblocking(True)
        self.monitor = _core.WorkerMonitor(control.detach(), self.pulse)
        self.plan: EpochPlan | None = None
        self._unread: list[EpochPlan] = []
        self.finished = False  # the task is done: an understudy leaves with exit code 0
        self.change: ChangeLayout | None = None  # told to take the state over into another layout; until a newer epoch
        self.move: MoveRoles | None = None  # told that roles go to other workers; until a newer epoch
        self.refuses_layouts = ""  # why this worker cannot go over to another layout; "": it can
        self.told_to_hold = False  # the task gives up its slots: said in every commit until a newer epoch

    def send(self, message: Any) -> None:
        self.monitor.send(encode(message), SEND_MS_MAX)

    def receive(self, timeout_ms: int) -> EpochPlan | None:
        """Next frame, if there is one in time; the plan in it, if it is one."""
        frame = self.monitor.next_frame(timeout_ms)
        return None if frame is None else self._take(frame)

    def _take(self, frame: bytes) -> EpochPlan | None:
        message = decode(frame)
        if isinstance(message, PublishEpoch):
            if self.plan is None or message.plan.epoch > self.plan.epoch:
                self.plan = message.plan
                # The plan that an announcement starts from may come after it: who waits for a role hears it only when
                # its node comes back.
                if self.change is not None and message.plan.epoch > self.change.former.epoch:
                    self.change = None
                if self.move is not None and message.plan.epoch > self.move.former.epoch:
                    self.move = None
                self.told_to_hold = False  # who still must is told again in the new epoch
                return message.plan
        elif isinstance(message, FinishUnderstudies):
            self.finished = True
        elif isinstance(message, SaveAndHold):
            self.told_to_hold = True
        elif isinstance(message, ChangeLayout) and (self.plan is None or message.plan.epoch > self.plan.epoch):
            if self.refuses_layouts:
                self.send(LayoutReady(self.worker, -1, message.plan.epoch, 0, error=self.refuses_layouts))
            else:
                self.change = message
        elif isinstance(message, MoveRoles) and (self.plan is None or message.plan.epoch > self.plan.epoch):
            self.move = message
        return None

    def take_orders(self) -> None:
        """Read what has come, without waiting. A plan among it is given out by new_plans()."""
        while (frame := self.monitor.next_frame(0)) is not None:
            plan = self._take(frame)
            if plan is not None:
                self._unread.append(plan)

    def wait_for_orders(self, timeout_ms: int) -> None:
        """The next frame, if one comes in time. A plan in it is given out by new_plans()."""
        plan = self.receive(timeout_ms)
        if plan is not None:
            self._unread.append(plan)

    def new_plans(self) -> list[EpochPlan]:
        """Plans that arrived since the last call, without waiting for more than is announced already."""
        plans, self._unread = self._unread, []
        while self.monitor.newest_epoch() > (self.plan.epoch if self.plan else 0):
            plan = self.receive(1_000)
            if plan is not None:
                plans.append(plan)
        return plans

    def wait_for_role(self) -> tuple[Rank, EpochPlan] | None:
        """Until a plan names this worker, or a change of layout does (whose plan is not published yet); None when the
        task is finished. Bounded by the agent's life (EOF ends us)."""
        while not self.finished:
            mine = self.member()
            if mine is not None and self.plan is not None:
                return mine.rank, self.plan
            if self.change is not None and (joins := self.member(self.change.plan)) is not None:
                return joins.rank, self.change.plan
            if self.move is not None and (joins := self.member(self.move.plan)) is not None:
                return joins.rank, self.move.plan
            self.receive(1_000)
        return None

    def member(self, plan: EpochPlan | None = None) -> Member | None:
        """This worker in a plan; by default in the newest."""
        known = plan or self.plan
        return next((m for m in known.members if m.worker == self.worker), None) if known else None

    def request_arena(
        self, rank: Rank, nbytes: int, digest: str, *, adopt: bool, gpu: GpuSlabs = NO_SLABS, epoch: int = 0
    ) -> tuple[int, ArenaGrant, tuple[int, ...]]:
        """(descriptor or -1, grant, descriptors of an adopted arena's GPU slabs), on a connection of its own.

        gpu: descriptors and sizes of this worker's slabs, for the agent to keep with a fresh arena. epoch: see
        ArenaRequest.
        """
        request = ArenaRequest(self.task, self.worker, rank, nbytes, digest, adopt, gpu[1], epoch)
        grant, fds = self._ask(request, gpu[0])
        if not isinstance(grant, ArenaGrant):
            raise AgentGone(f"asked for an arena, got {type(grant).__name__}")
        return (fds[0] if fds else -1), grant, tuple(fds[1:])

    def request_gpu(self, rank: Rank, num_gpus: int) -> int:
        """Index of the role's GPU among the so many that this process sees. RuntimeError when all have roles."""
        grant, _ = self._ask(GpuRequest(self.task, self.worker, rank, num_gpus))
        if not isinstance(grant, GpuGrant):
            raise AgentGone(f"asked for a GPU, got {type(grant).__name__}")
        if grant.index < 0:
            raise RuntimeError(grant.refused)
        return grant.index

    def _ask(self, request: Any, fds: Sequence[int] = ()) -> tuple[Any, Sequence[int]]:
        with framing.connect(self._path, CONNECT_MS_MAX) as line:
            framing.send_blocking(line, encode(request), fds)
            payload, got = framing.receive_blocking(line, ARENA_MS_MAX)
        return decode(framing.worker_message(payload)), got


def now_ms() -> float:
    return time.monotonic_ns() / 1e6
