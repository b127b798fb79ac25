"""Which segments of the gradient are reduced under the backward, and when each may begin. Pure.

Theory. Every replica must begin the same collectives of a group in the same order. So *which* segments are eager, their
order, and where their results lie is fixed when the model is managed, from its structure alone; `signature` says it in
a word that ranks compare at each meeting. Only *when* a segment begins is a replica's own affair: when all before it
have begun and its gradients are final, and at the latest when the last backward has ended. So a replica that knows
nothing yet of its model's backward (an heir) is late, but never out of step.

Final: the hook of each of its parameters was called as often as in the last backwards before. More than once is usual
(a tied weight under activation checkpointing). A gradient that comes after its segment began would be missing in
everybody's sum: that raises, here, before the iteration can be committed.

The scalars, segment 0, are never eager, and results are taken in the order of the segments: so nobody takes any before
all of its position have left their backward, and "reduced here and not there" is a thing of the reduction, as ever.

Results lie apart from the local sums until the reduction, each in a place of its own: memory bounds how many segments
are eager, and an heir finds an open copy's source again. Rejected: to take a result when it comes. Then sums are
partly reduced while the replica still computes, and a death in the backward would need the lost replica's share of
those segments only; today's rule is that whoever dies before the reduction leaves nobody with anything but local sums.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from unicron.training.chunks import Chunks

PLACE_BYTES = 512  # places begin at a multiple of it


class LateGradient(RuntimeError):
    """A parameter got more of its gradient after its segment had begun to be reduced."""


class EagerPlan(NamedTuple):
    segment_bytes: int  # of the largest segment, eager or not
    order: tuple[int, ...]  # numbers of segments, as everybody begins them
    places: Mapping[int, int]  # of a segment's result: byte from the beginning of the eager part of the staging area
    nbytes: int  # of that part
    params: Mapping[int, tuple[str, ...]]  # names of the parameters whose gradient lies in a segment, also in part
    chunk_of: Mapping[int, int]  # segment -> chunk of the model
    signature: str  # equal for all that can reduce eagerly together; "" if nothing is eager


def plan_eager(model: Chunks, segment_bytes: int, bytes_max: int, tied: Collection[str]) -> EagerPlan:
    """As many segments as fit into bytes_max, in the order in which a backward completes them: Megatron lays a buffer's
    parameters out from the model's end, and the last chunk's backward is over first. tied: names of parameters whose
    gradients are added up inside the replica before."""
    names = {id(param): name for name, param in model.named_parameters()}
    order: list[int] = []
    places: dict[int, int] = {}
    nbytes = 0
    of_segment: dict[int, tuple[str, ...]] = {}
    chunk_of: dict[int, int] = {}
    for chunk, number, data, buffer in sorted(_segments(model, segment_bytes), key=lambda s: (-s[0], s[1])):
        params = _params_in(buffer, data, names)
        if set(params) & set(tied):
            continue
        size = -(-data.numel() * data.element_size() // PLACE_BYTES) * PLACE_BYTES
        if nbytes + size > bytes_max:
            break
        order.append(number)
        places[number], of_segment[number], chunk_of[number] = nbytes, params, chunk
        nbytes += size
    text = repr((segment_bytes, [(number, places[number]) for number in order], nbytes))
    signature = hashlib.sha256(text.encode()).hexdigest()[:16] if order else ""
    return EagerPlan(segment_bytes, tuple(order), places, nbytes, of_segment, chunk_of, signature)


def _segments(model: Chunks, segment_bytes: int) -> list[tuple[int, int, Any, Any]]:
    """(chunk, number of the segment, its part of the buffer, buffer), as Gradients numbers them: 0 is the scalars."""
    found: list[Any] = []
    owner = {
        id(buffer): number
        for number, chunk in enumerate(model.chunks)
        for buffer in chunk.buffers + chunk.expert_parallel_buffers
    }
    for buffer in model.buffers + model.expert_parallel_buffers:
        for data in buffer.grad_data.split(max(1, segment_bytes // buffer.grad_data.element_size())):
            found.append((owner[id(buffer)], len(found) + 1, data, buffer))
    return found


def _params_in(buffer: Any, data: Any, names: Mapping[int, str]) -> tuple[str, ...]:
    begin, end = data.data_ptr(), data.data_ptr() + data.numel() * data.element_size()
    found: list[Any] = []
    for param in buffer.params:
        first = param.main_grad.data_ptr()
        if first < end and first + param.main_grad.numel() * param.main_grad.element_size() > begin:
            found.append(names[id(param)])
    return tuple(found)


class Readiness:
    """Of one rank. Chunks' last backwards are opened, gradients come, and segments may begin in the plan's order."""

    def __init__(self, plan: EagerPlan) -> None:
        self._plan = plan
        self._segments_of: dict[str, list[int]] = {}
        for number, params in plan.params.items():
            for param in params:
                self._segments_of.setdefault(param, []).append(number)
        self._expected: Counter[str] = Counter()  # calls of a parameter's hook in a chunk's last backward
        self._known: set[int] = set()  # chunks of which that is known
        self._open: set[int] = set()
        self._seen: Counter[str] = Counter()
        self._missing: dict[int, int] = {}  # segment of an open and known chunk -> parameters that are not final
        self._place = {number: place for place, number in enumerate(plan.order)}
        self._next = len(plan.order)  # of the order: those before have begun

    def arm(self) -> None:
        """An iteration's compute begins, in which segments are to be eager."""
        self._open.clear()
        self._seen.clear()
        self._missing.clear()
        self._next = 0

    def last_backward(self, chunk: int) -> list[int]:
        """It begins. Returns the segments that may begin: those that no gradient is expected in."""
        self._open.add(chunk)
        if chunk in self._known:
            for number, params in self._plan.params.items():
                if self._plan.chunk_of[number] == chunk:
                    self._missing[number] = sum(1 for param in params if self._expected[param])
        return self._advance()

    def came(self, param: str, chunk: int) -> list[int]:
        """A gradient was added to the sum. Returns the segments that may begin now. Raises LateGradient."""
        if chunk not in self._open:
            return []  # of an earlier micro-batch
        self._seen[param] += 1
        numbers = self._segments_of.get(param, ())
        if any(self._place[number] < self._next for number in numbers):
            raise LateGradient(
                f"a gradient of {param} came after a segment of it ({min(numbers)}) had begun to be reduced: its "
                "backward is not the same in every iteration; leave overlap_grad_reduce out of "
                "DistributedDataParallelConfig"
            )
        if self._seen[param] != self._expected[param]:
            return []
        for number in numbers:
            if number in self._missing:
                self._missing[number] -= 1
        return self._advance()

    def rest(self) -> list[int]:
        """All backwards have ended. Returns the segments that have not begun; what was seen is expected next time."""
        for param, count in self._seen.items():
            self._expected[param] = max(self._expected[param], count)
        self._known |= self._open
        self._open.clear()
        left = list(self._plan.order)[self._next :]
        self._next += len(left)
        return left

    def _advance(self) -> list[int]:
        first, order = self._next, list(self._plan.order)
        while self._next < len(order) and self._missing.get(order[self._next], 1) == 0:
            self._next += 1
        return order[first : self._next]
