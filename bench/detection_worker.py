"""A worker without torch for bench_detection.py: computes, then waits for all others, iteration after iteration.

argv: folder shared by the task's workers, milliseconds of a micro-batch (MICRO_BATCHES of them an iteration). The
reduction is a real wait among real processes: a counter a rank in a shared file. SIGUSR1 makes this worker slower
(SLOWER: ten percent), SIGUSR2 ends that. BALLAST_MIB: memory that a holder of rank 1 touches. Faults are those of
unicron.faults, armed by `inject`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import struct
import sys
import time
from pathlib import Path

from unicron import _core
from unicron.faults.kinds import FaultKind, FaultPoint
from unicron.faults.perform import perform
from unicron.messages import (
    ArenaGrant,
    ArenaRequest,
    ExceptionRaised,
    Finished,
    FinishUnderstudies,
    Healed,
    PublishEpoch,
    WorkerHello,
    WorkerReady,
    WorkerWelcome,
    decode,
    encode,
)
from unicron.runtime import framing
from unicron.types import EpochPlan, Rank, Stage, WaitKind

FOLDER, MICRO_BATCH_S = Path(sys.argv[1]), float(sys.argv[2]) / 1000
MICRO_BATCHES, STEP_S, POLL_S = int(os.environ.get("MICRO_BATCHES", "4")), 0.002, 0.0005
RANKS_MAX, ARENA_BYTES = 64, 4096
SLOWER = float(os.environ.get("SLOWER", "1.1"))
WORKER = os.environ["UNICRON_WORKER"]
TASK = os.environ["UNICRON_TASK"]


class Leave(Exception):
    """The task is done."""


class Worker:
    def __init__(self) -> None:
        control = framing.connect(os.environ["UNICRON_AGENT"], 5_000)
        hello = WorkerHello(TASK, WORKER, int(os.environ["UNICRON_INCARNATION"]), os.getpid())
        framing.send_blocking(control, encode(hello))
        payload, fds = framing.receive_blocking(control, 5_000)
        welcome = decode(framing.worker_message(payload))
        assert isinstance(welcome, WorkerWelcome), welcome
        self.rank, self.waiting = welcome.rank, welcome.waiting
        self.pulse = _core.PulsePage(fds[0], welcome.pulse_slot)
        control.setblocking(True)
        self.monitor = _core.WorkerMonitor(control.detach(), self.pulse)
        self.plan: EpochPlan | None = None
        self.iteration = 0
        self.ballast: mmap.mmap | None = None
        self.factor = 1.0
        signal.signal(signal.SIGUSR1, lambda *_: setattr(self, "factor", SLOWER))
        signal.signal(signal.SIGUSR2, lambda *_: setattr(self, "factor", 1.0))
        path = FOLDER / "counters"
        with path.open("a+b") as file:
            file.truncate(8 * RANKS_MAX)
            self.counters = mmap.mmap(file.fileno(), 8 * RANKS_MAX)
        self.arena = self.take_arena(adopt=False)

    def take_arena(self, *, adopt: bool) -> int:
        with framing.connect(os.environ["UNICRON_AGENT"], 5_000) as line:
            request = ArenaRequest(TASK, WORKER, self.rank, ARENA_BYTES, "detection", adopt)
            framing.send_blocking(line, encode(request))
            payload, fds = framing.receive_blocking(line, 10_000)
        assert isinstance(decode(framing.worker_message(payload)), ArenaGrant)
        return fds[0]

    def say(self, message: object) -> None:
        self.monitor.send(encode(message), 1_000)

    # ------------------------------------------------------------ plans

    def hear(self, timeout_ms: int) -> None:
        frame = self.monitor.next_frame(timeout_ms)
        message = None if frame is None else decode(frame)
        if isinstance(message, FinishUnderstudies):
            raise Leave
        if isinstance(message, PublishEpoch):
            self.take_plan(message.plan)

    def take_plan(self, plan: EpochPlan) -> None:
        self.plan = plan
        mine = next((m for m in plan.members if m.worker == WORKER), None)
        if mine is None:
            return
        source = "none_needed"
        if self.waiting:
            self.rank, self.waiting, source = mine.rank, False, "own_arena"
            self.arena = self.take_arena(adopt=True)
            self.iteration = int(os.pread(self.arena, 16, _core.ARENA_HEADER_BYTES).strip(b"\0") or b"0")
            self.say(WorkerReady(WORKER, self.rank, False))
        if self.rank == 1 and self.ballast is None:
            self.ballast = mmap.mmap(-1, max(int(os.environ.get("BALLAST_MIB", "0")), 1) << 20)
            for at in range(0, len(self.ballast), mmap.PAGESIZE):
                self.ballast[at] = 1
        if plan.kind != "start":
            self.catch_up(plan)
            self.say(self.healed(plan, source))

    def catch_up(self, plan: EpochPlan) -> None:
        """A member with a fresh arena begins where the others are, not at 0, where they would wait for it."""
        if self.iteration == 0:
            self.iteration = max(0, *(self.count_of(rank) - 1 for rank in plan.ranks if rank != self.rank))

    def healed(self, plan: EpochPlan, source: str) -> Healed:
        ms = MICRO_BATCH_S * MICRO_BATCHES * 1000
        return Healed(
            WORKER, self.rank, plan.epoch, self.iteration, self.iteration, ms, ms, time.monotonic_ns(), (), 0.0, 0, 1,
            source, 0, {},
        )  # fmt: skip

    # ------------------------------------------------------------ the loop

    def run(self, iterations: int) -> None:
        self.pulse.advance(Stage.WAITING if self.waiting else Stage.IDLE, 0, -1)
        self.say(WorkerReady(WORKER, self.rank, self.waiting))
        while self.plan is None or self.waiting:
            self.hear(1_000)
        while self.iteration < iterations:
            self.compute()
            self.reduce()
            self.pulse.advance(Stage.STEP, self.iteration, -1)
            time.sleep(STEP_S)
            os.pwrite(self.arena, b"%016d" % (self.iteration + 1), _core.ARENA_HEADER_BYTES)
            self.pulse.committed(self.iteration, 1.0)
            self.iteration += 1
            self.pulse.advance(Stage.IDLE, self.iteration, -1)
        self.pulse.advance(Stage.DONE, self.iteration, -1)
        self.say(Finished(WORKER, self.rank))

    def compute(self) -> None:
        for micro_batch in range(MICRO_BATCHES):
            self.pulse.advance(Stage.COMPUTE, self.iteration, micro_batch)
            self.maybe_fault(FaultPoint.COMPUTE, micro_batch)
            time.sleep(MICRO_BATCH_S * self.factor)

    def reduce(self) -> None:
        """Everybody's counter must have come as far as mine."""
        self.pulse.advance(Stage.REDUCE, self.iteration, -1)
        self.maybe_fault(FaultPoint.REDUCE, -1)  # does not join: it never says that it waits
        begun_ns = time.monotonic_ns()
        self.pulse.set_waiting(True)
        struct.pack_into("<q", self.counters, 8 * self.rank, self.iteration + 1)
        while not self.all_are_here():
            self.hear(0)
            time.sleep(POLL_S)
        self.pulse.set_waiting(False)
        self.pulse.waited(int(WaitKind.DP), begun_ns)

    def all_are_here(self) -> bool:
        assert self.plan is not None
        return all(self.count_of(rank) > self.iteration for rank in self.plan.ranks)

    def count_of(self, rank: Rank) -> int:
        return int(struct.unpack_from("<q", self.counters, 8 * rank)[0])

    def maybe_fault(self, point: FaultPoint, micro_batch: int) -> None:
        kind = self.pulse.take_fault(int(point), self.iteration, micro_batch)
        if kind == FaultKind.ABORT:
            ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()  # std::terminate()
        elif kind:
            perform(kind, f"{point.name.lower()} of iteration {self.iteration}")


def main() -> None:
    worker = Worker()
    try:
        worker.run(1 << 40)
    except Leave:
        return
    except SystemExit:
        os._exit(0)
    except Exception as error:
        now = worker.pulse
        worker.say(
            ExceptionRaised(
                WORKER, worker.rank, worker.plan.epoch if worker.plan else 0, now.iteration, now.micro_batch,
                Stage(now.stage), type(error).__name__, str(error), f"{__file__}:1", time.monotonic_ns(),
            )
        )  # fmt: skip
        os._exit(1)


main()
