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
    TIE = 3  # a passage; INSIDE where the replica has something to tie
    REDUCE = 4  # before a segment: the micro-batch armed is the segment's number
    COMMIT = 5  # a passage: see BEFORE
    STEP = 6  # half of the parameters written
    IDLE = 7  # between iterations
    HEAL = 8  # records are exchanged for a plan: the number armed is that of epochs since its iteration began, less one
    GATHER = 9  # the step is done, other replicas' shards are still to come
    BACKWARD = 10  # a micro-batch's backward begins
    COPY = 11  # a segment's complete result is half copied over the local sum; armed as REDUCE
    FETCH = 13  # state goes from a replica to another
    SAVE = 12  # a checkpoint is begun
    BUDDY = 14  # the step is gathered, the buddy's copy is still of the one before
    TENSOR = 15  # a tensor-parallel collective of a forward or backward: a passage
    SEND = 16  # to a neighbour in the pipeline: a passage
    RECEIVE = 17  # from one: a passage
    REDUCING = 18  # a segment's sum is under way, all are in it; armed as REDUCE
    REDUCED = 19  # a segment's result is here and everywhere, and not copied at all; armed as REDUCE
    # state goes into another layout: 0 as the micro-batch armed is before anything is sent, 1 when all of it arrived
    LAYOUT = 20
    GATHERING = 21  # a bucket's parameters are under way, all are in it; the number armed is the bucket's
    CONFIRM = 22  # the members of a replica tell each other the commit's result: a passage
    SETTLE = 23  # they tell each other how a gather or a transfer ended: a passage
    LOG = 24  # the step is done, and the script is about to hear of it
    EVALUATE = 25  # the script's own work between iterations begins (Session.expect)
    REBUILD_INSIDE = 26  # a group is made: the number armed is that of the groups of this replica made before it
    REBUILD_CROSS = 27  # the same of groups between replicas
    COMPUTE_AGAIN = 28  # as COMPUTE, of a micro-batch that is computed in a recovery, or again at a smaller scale
    REDUCE_AGAIN = 29  # as REDUCE, in a recovery, or of sums at a smaller scale
    EXPERT = 30  # tokens go to the lanes that hold their experts, or come back: a passage
    EAGER = 31  # a segment is reduced under the backward: a passage
    OVER = 32  # the script's loop is over: a passage; the iteration armed is the number of iterations
    LATE = 34  # the forward comes to a bucket whose parameters are still under way; the number armed is the bucket's
    REST = 33  # all have left their loops, and the script goes on with what is behind its own; armed as OVER


#: What is armed as the micro-batch at a point that is a passage through an operation with others. Before and inside a
#: rank waits for a moment first, so that the others are in it when it dies (or whatever is armed).
BEFORE, INSIDE, AFTER = 0, 1, 2


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
