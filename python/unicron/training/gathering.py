"""Every replica's shard of the stepped parameters goes to the others, in place (docs/ARCHITECTURE.md, gather).

Late, where the script asked for overlap_param_gather: behind the step all buckets are begun, those of the first layers
first, and nobody waits for them. The next forward does: a hook before each module waits for the buckets with its
parameters, and what no module asked for is waited for when the last backward has ended. On CPUs only: on a GPU an
operation that was ended returns like any other, and its stream would go on with what a broken gather left.

In which iterations: healing/machine.py, all or nobody. Until all is here the record says "ungathered"; so a death, and
whatever else breaks, is followed by a gather of all at the meeting, into the same places.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from unicron.faults.kinds import FaultPoint
from unicron.training.chunks import Chunks
from unicron.training.fault_points import FaultPoints, carry_out
from unicron.training.groups import Groups, wait_out
from unicron.types import Layout, Rank


class Shards(NamedTuple):
    """A bucket of parameters as this rank sees it."""

    bucket: Any
    group: Any  # of those who hold a shard of it; None where this rank has all
    num: int
    place: int  # of this rank's

    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(the bucket's parameters, this rank's shard of them)"""
        assert self.group.size() == self.num, "every shard has one holder, and all of them are here"
        whole = self.bucket.param_data.view(-1)
        return whole, whole.chunk(self.num)[self.place]


def why_never_late(model: Chunks, layout: Layout) -> str:
    """Why this task gathers its parameters behind the step and not under the forward; "" if it need not."""
    if layout.num_shards == 1:
        return "every rank has all of them"
    if layout.buddy:
        return "copies of the shards are sent then"
    if next(model.parameters()).is_cuda:
        return "it does so under the forward on CPUs only in this version"
    return "experts are gathered apart" if layout.ep > 1 or model.expert_parallel_buffers else ""


class Gathering:
    """Of one rank, for the life of its engine. is_broken: of an error: that of an operation with others."""

    def __init__(
        self, rank: Rank, layout: Layout, model: Chunks, groups: Groups, points: FaultPoints,
        is_broken: Callable[[BaseException], bool],
    ) -> None:  # fmt: skip
        self._rank, self._layout, self._model, self._groups = rank, layout, model, groups
        self._points, self._is_broken_by = points, is_broken
        self._works: dict[int, Any] = {}  # number of a bucket -> what was begun and not waited for
        self._failure: BaseException | None = None  # of what should have begun
        self._hooks: list[Any] = []
        self.is_broken = False  # a wait for what is late was, and it is still not here

    def shards(self) -> Iterator[Shards]:
        """What is outside of experts is sharded over all lanes of all replicas (of one instance), experts over the
        replicas."""
        dense, experts, layout = self._groups.shard_mates_group(), self._groups.data_group(), self._layout
        mates = layout.shard_mates(self._rank)
        for buffer in self._model.buffers:
            for bucket in buffer.buckets:
                yield Shards(bucket, dense, len(mates), mates.index(self._rank))
        for buffer in self._model.expert_parallel_buffers if experts is not None else ():
            for bucket in buffer.buckets:
                yield Shards(bucket, experts, layout.num_replicas, layout.replica_of(self._rank))

    # ---------------------------------------------------------- at once

    def run(self) -> None:
        """Who is interrupted does it again."""
        for number, shards in enumerate(self.shards()):
            if number:
                self._points.maybe(FaultPoint.GATHER, number)
            then = self._points.enter(FaultPoint.GATHERING, number)
            if shards.group is not None:
                carry_out(functools.partial(dist.all_gather_into_tensor, *shards.parts(), shards.group), then)
            elif then is not None:
                then()

    # ---------------------------------------------------------- late

    def watch(self) -> None:
        """A hook before each module that has parameters of its own. Once."""
        number_of = {id(p): n for n, shards in enumerate(self.shards()) for p in shards.bucket.params}
        for chunk in self._model.chunks:
            for module in chunk.modules():
                own = {number_of[id(p)] for p in module.parameters(recurse=False) if id(p) in number_of}
                if own:
                    self._hooks.append(module.register_forward_pre_hook(self._hook(sorted(own))))

    def _hook(self, numbers: list[int]) -> Callable[..., None]:
        def before(*_: Any) -> None:
            if self.is_under_way:
                self._wait(numbers)

        return before

    @property
    def is_under_way(self) -> bool:
        return bool(self._works) or self._failure is not None

    def begin(self) -> None:
        """Buckets lie in the order of a backward, and the forward needs the last one first. What breaks here is told by
        who needs it."""
        assert not self._works, "what was begun before is still under way"
        for number, shards in reversed(list(enumerate(self.shards()))):
            if number:
                self._points.maybe(FaultPoint.GATHER, number)
            then = self._points.enter(FaultPoint.GATHERING, number)
            if shards.group is not None:
                try:
                    work = dist.all_gather_into_tensor(*shards.parts(), shards.group, async_op=True)
                except Exception as error:
                    if not self._is_broken_by(error):
                        raise
                    self._failure = error
                    return
                self._works[number] = work
            if then is not None:
                then()

    def wait_for_first(self) -> None:
        """Of what is late: before a forward that begins with it, so that one that does not come is no forward."""
        self._wait(list(self._works)[:1])

    def finish(self) -> None:
        """All parameters are here. Raises what broke."""
        self._wait(list(self._works))

    def why_not_whole(self) -> str:
        """The script is about to do something with all parameters: what is late is waited for. Why it does not come; ""
        when it is here. The next iteration heals."""
        try:
            self.finish()
        except Exception as error:
            if not self._is_broken_by(error):
                raise
            self._groups.settle_broken()
            return f"the parameters could not be gathered: {error}"
        return ""

    def _wait(self, numbers: list[int]) -> None:
        try:
            for number in numbers:
                if number in self._works:
                    self._points.maybe(FaultPoint.LATE, number)
                    self._works[number].wait()
                    del self._works[number]
            if self._failure is not None:
                raise self._failure
        except Exception as error:
            self.is_broken = self._is_broken_by(error)
            raise

    def drop(self) -> None:
        """What is under way is of no use any more: its group was ended. Nothing writes to the parameters afterwards."""
        works, self._works, self._failure, self.is_broken = list(self._works.values()), {}, None, False
        wait_out(works, self._is_broken_by)

    def leave(self) -> None:
        """The model goes, and nothing here is to hold it."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
