"""Names and numbers of faults and of the points where they can be armed (pulse page, `unicron inject`)."""

from __future__ import annotations

import enum


class FaultKind(enum.IntEnum):
    KILL = 1  # SIGKILL
    SEGV = 2
    ABORT = 3
    EXIT = 4  # os._exit(3)
    EXCEPTION = 5
    OOM = 6  # MemoryError
    STOP = 7  # SIGSTOP
    DEADLOCK = 8  # the main thread waits on a lock for ever; other threads live
    GIL = 9  # native code holds the GIL for ever
    RESET = 10  # connections of all groups shut with both ends alive
    LEAVE = 11  # sys.exit(0) in the middle
    CORRUPT = 13  # what it sends next of its state is not what it has
    SCRIBBLE = 14  # a number in its state is overwritten, and nobody says so
    NODE = 12  # SIGKILL to its agent and to itself: the node is gone
    MEMORY = 15  # a kernel uses an address that is not mapped: an illegal memory access, and the GPU's context is lost
    SPIN = 16  # it computes for ever, and comes no further


class FaultPoint(enum.IntEnum):
    COMPUTE = 1  # a micro-batch is fetched
    FORWARD = 2  # its forward is done, before backward or send
    TIE = 3
    REDUCE = 4  # before a segment: the micro-batch armed is the segment's number
    COMMIT = 5
    STEP = 6  # half of the parameters written
    IDLE = 7  # between iterations
    HEAL = 8  # while carrying out a plan
    GATHER = 9  # the step is done, other replicas' shards are still to come
    BACKWARD = 10  # a micro-batch's backward begins
    COPY = 11  # a segment's complete result is half copied over the local sum; armed as REDUCE
    FETCH = 13  # state goes from a replica to another
    SAVE = 12  # a checkpoint is begun
    BUDDY = 14  # the step is gathered, the buddy's copy is still of the one before
    # state goes into another layout: 0 as the micro-batch armed is before anything is sent, 1 when all of it arrived
    LAYOUT = 20


#: Spellings accepted besides the names: a death in the pipeline is one after the forward, before its send.
ALIASES = {"pipeline": FaultPoint.FORWARD, "now": None}


def fault_kind(name: str) -> FaultKind:
    try:
        return FaultKind[name.upper()]
    except KeyError:
        raise ValueError(f"unknown fault {name!r}; known: {', '.join(k.name.lower() for k in FaultKind)}") from None


def fault_point(name: str) -> int:
    """0 is any point."""
    if name in ALIASES:
        return int(ALIASES[name] or 0)
    try:
        return int(FaultPoint[name.upper()])
    except KeyError:
        known = [p.name.lower() for p in FaultPoint] + list(ALIASES)
        raise ValueError(f"unknown point {name!r}; known: {', '.join(known)}") from None
