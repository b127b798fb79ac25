"""Stand-in groups: what a worker builds its model over before it has a role and peers.

Their collectives do nothing (torch's fake backend), which is right while a model is built and silently wrong
afterwards. So a stand-in is in use only until the real group for its ranks is made: from then on each call of it
raises, also the question for its size, whoever still holds it (a local variable, a thread, native code). That is the
last line of defence; handles.py finds the holders and exchanges the handle before anybody gets there.

Rejected: torch's fake group as it is. It cannot be ended (its error_on_collective leaves out send and recv), and
Python's garbage collector does not track it, nor dictionaries and tuples that hold nothing else of interest.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from unicron.training.registries import forget_group
from unicron.training.watched_group import BACKEND_NAMES, COLLECTIVES, POINT_TO_POINT
from unicron.types import Layout, Rank

Ranks = tuple[Rank, ...]
BACKEND = "unicron_stand_in"


class StandInUsed(RuntimeError):
    """A group from before manage() was asked for something after the real one had taken its place."""


class StandIn(dist.ProcessGroup):
    def __init__(self, rank: int, ranks: Ranks) -> None:
        """rank: this worker's place in ranks."""
        super().__init__(rank, len(ranks))
        self.ranks = ranks
        self.is_over = False
        self._fake = FakeProcessGroup._create_internal(rank, len(ranks))
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        for device in ("cpu", "cuda"):
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, self._fake)

    def require_in_use(self, what: str) -> None:
        if self.is_over:
            raise StandInUsed(
                f"{what} on the stand-in group of ranks {list(self.ranks)}, which was replaced in manage(): take the "
                "group from parallel_state where you need it, do not keep it in a variable from before"
            )

    def size(self) -> int:
        self.require_in_use("size()")
        return int(super().size())

    def rank(self) -> int:
        self.require_in_use("rank()")
        return int(super().rank())


def _guarded(name: str, backend_name: str) -> Any:
    def call(self: StandIn, *args: Any, **kwargs: Any) -> Any:
        self.require_in_use(name)
        return getattr(self._fake, backend_name)(*args, **kwargs)

    call.__name__ = name
    return call


for _name in (*COLLECTIVES, *POINT_TO_POINT, "monitored_barrier"):
    setattr(StandIn, _name, _guarded(_name, BACKEND_NAMES.get(_name, _name)))


#: Those of the present make_stand_ins. One reference each, which handles.py knows of.
_in_use: list[StandIn] = []


def _create(common: Any, _options: Any) -> StandIn:
    ranks = common.global_ranks_in_group or range(common.group_size)  # torch says none for the default group
    made = StandIn(common.group_rank, tuple(ranks))
    _in_use.append(made)
    return made


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


def make_stand_ins(rank: Rank, layout: Layout) -> None:
    """torch.distributed and megatron's parallel_state for this rank, without peers."""
    from megatron.core import parallel_state

    dist.init_process_group(BACKEND, rank=rank, world_size=layout.world_size, store=FakeStore())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        num_distributed_optimizer_instances=layout.instances,
        create_gloo_process_groups=False,
    )


def drop_stand_ins() -> None:
    """Undo make_stand_ins, for a worker that is to be built again for another role."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    end_stand_ins()


def stand_ins() -> list[StandIn]:
    """Those in use. The list itself: who copies it holds them."""
    return _in_use


def end_stand_ins(ranks: Ranks | None = None) -> None:
    """Those of these ranks (None: all) have been replaced. torch knows them no more, by name neither."""
    going = [each for each in _in_use if ranks is None or each.ranks == ranks]
    _in_use[:] = [each for each in _in_use if ranks is not None and each.ranks != ranks]
    for each in going:
        forget_group(each)
        each.is_over = True
