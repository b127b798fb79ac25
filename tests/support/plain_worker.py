"""A worker without torch: speaks the protocol, advances its pulse, accounts for every new epoch,
finishes.

argv: iterations, milliseconds an iteration takes. Kept beside the tests that run it under real
agents.
"""

from __future__ import annotations

import os
import struct
import sys
import time

from unicron import _core
from unicron.messages import (
    ArenaGrant,
    ArenaRequest,
    ExceptionRaised,
    Finished,
    FinishUnderstudies,
    Healed,
    MoveReady,
    MoveRoles,
    PublishEpoch,
    SaveAndHold,
    Saved,
    WorkerHello,
    WorkerReady,
    WorkerWelcome,
    decode,
    encode,
)
from unicron.runtime import framing
from unicron.types import EpochPlan, Stage

ITERATIONS, STEP_MS = int(sys.argv[1]), float(sys.argv[2])
WORKER = os.environ["UNICRON_WORKER"]
TASK = os.environ["UNICRON_TASK"]
ARENA_BYTES = 4096
PAUSES = os.environ.get("PLAIN_PAUSES", "")  # where long times between two iterations are told, a file a worker
PAUSE_S_MIN = 0.1
FAIL_AT = int(os.environ.get("PLAIN_FAIL_AT", "-1"))  # rank 0 raises there, every time


def strip(payload: bytes) -> bytes:
    return payload[11 + 4 * struct.unpack_from("<H", payload, 9)[0] :]


def join() -> tuple[WorkerWelcome, _core.PulsePage, _core.WorkerMonitor]:
    control = framing.connect(os.environ["UNICRON_AGENT"], 5000)
    hello = WorkerHello(TASK, WORKER, int(os.environ["UNICRON_INCARNATION"]), os.getpid())
    framing.send_blocking(control, encode(hello))
    payload, fds = framing.receive_blocking(control, 5000)
    welcome = decode(strip(payload))
    assert isinstance(welcome, WorkerWelcome), welcome
    pulse = _core.PulsePage(fds[0], welcome.pulse_slot)
    control.setblocking(True)
    return welcome, pulse, _core.WorkerMonitor(control.detach(), pulse)


def arena(rank: int, adopt: bool) -> int:
    """The iteration that the arena's former owner had reached, or 0; and whether it was adopted."""
    with framing.connect(os.environ["UNICRON_AGENT"], 5000) as line:
        request = ArenaRequest(TASK, WORKER, rank, ARENA_BYTES, "plain", adopt)
        framing.send_blocking(line, encode(request))
        payload, fds = framing.receive_blocking(line, 10_000)
    grant = decode(strip(payload))
    assert isinstance(grant, ArenaGrant) and len(fds) == 1, grant
    print("arena", "adopted" if grant.adopted else f"fresh {grant.refused}", flush=True)
    return fds[0]


def healed(rank: int, plan: EpochPlan, iteration: int, source: str) -> Healed:
    return Healed(
        worker=WORKER,
        rank=rank,
        epoch=plan.epoch,
        iteration=iteration,
        interrupted=iteration,
        iteration_ms=2 * STEP_MS,
        median_ms=STEP_MS,
        committed_ns=time.monotonic_ns(),
        micro_batches_recomputed=(),
        recompute_ms=0.0,
        groups_kept=0,
        groups_rebuilt=1,
        state_source=source,
        iterations_lost=0,
        phases_ms={},
    )


def come_along(order: MoveRoles, rank: int, iteration: int) -> MoveReady:
    """How far it is with a move of roles: there are no groups to make and no state to send."""
    joiners = tuple(m.worker for m in order.plan.members if m.rank in order.plan.heirs)
    phase = "moved" if order.switch and WORKER in joiners else "prepared"
    return MoveReady(WORKER, rank, order.plan.epoch, phase, iteration, joiners)


def tell_pause(last_s: float) -> float:
    """Now, which is when the next iteration begins."""
    now_s = time.monotonic()
    if PAUSES and now_s - last_s >= PAUSE_S_MIN:
        with open(f"{PAUSES}.{os.getpid()}", "a") as file:
            file.write(f"{now_s - last_s:.3f}\n")
    return now_s


def main() -> None:
    welcome, pulse, monitor = join()
    rank, waiting = welcome.rank, welcome.waiting
    memory = arena(rank, adopt=False)
    pulse.advance(Stage.WAITING if waiting else Stage.IDLE, 0, 0)
    monitor.send(encode(WorkerReady(WORKER, rank, waiting)), 1000)
    plan, iteration, holds = None, 0, False
    last_s = time.monotonic()
    while iteration < ITERATIONS or waiting:
        frame = monitor.next_frame(0 if plan and not waiting and not holds else 50)
        if frame is not None:
            message = decode(frame)
            if isinstance(message, FinishUnderstudies):
                sys.exit(0)
            if isinstance(message, SaveAndHold) and plan and not waiting:
                holds = True
                print("saved", iteration, flush=True)  # before it is told: the run may end at once then
                if rank == min(plan.ranks):
                    path = f"{welcome.checkpoint_dir}/{iteration}"
                    monitor.send(encode(Saved(WORKER, rank, iteration, path, plan.epoch, final=True)), 1000)
            if isinstance(message, MoveRoles):
                holds = message.switch and not waiting
                monitor.send(encode(come_along(message, rank, iteration)), 1000)
            if isinstance(message, PublishEpoch):
                plan, holds = message.plan, False
                mine = next((m for m in plan.members if m.worker == WORKER), None)
                if mine is None and plan.kind == "move" and not waiting:
                    sys.exit(0)  # its role is elsewhere
                if mine is None:
                    continue
                source = "none_needed"
                if plan.restore:
                    iteration, source = int(plan.restore.rpartition("/")[2]), "checkpoint"
                    print("restored", iteration, flush=True)
                if waiting:
                    rank, waiting, source = mine.rank, False, "own_arena"
                    memory = arena(rank, adopt=plan.kind != "move")
                    iteration = int(os.pread(memory, 16, _core.ARENA_HEADER_BYTES).strip(b"\0") or b"0")
                    monitor.send(encode(WorkerReady(WORKER, rank, False)), 1000)
                print("plan", plan.epoch, plan.kind.value, "rank", rank, flush=True)
                if plan.kind != "start":
                    monitor.send(encode(healed(rank, plan, iteration, source)), 1000)
        if plan is None or waiting or holds:
            continue
        pulse.advance(Stage.COMPUTE, iteration, 0)
        if pulse.take_fault(1, iteration, 0) == 5 or (iteration == FAIL_AT and rank == 0):
            raised = ExceptionRaised(
                WORKER, rank, plan.epoch, iteration, 0, Stage.COMPUTE, "InjectedFault", "boom",
                "plain.py:1", time.monotonic_ns(),
            )  # fmt: skip
            monitor.send(encode(raised), 1000)
            sys.exit(1)
        time.sleep(STEP_MS / 1000)
        iteration += 1
        last_s = tell_pause(last_s)
        os.pwrite(memory, b"%016d" % iteration, _core.ARENA_HEADER_BYTES)
        pulse.committed(iteration, 1.0)
    pulse.advance(Stage.DONE, iteration, 0)
    print("finished", flush=True)
    monitor.send(encode(Finished(WORKER, rank)), 1000)


main()
