"""In megatron-core's own objects no stand-in is left after binding, and no number that depends on the width is used.

Both hold for the installed version and are what must be run with another: `PYTHONPATH=<its sources> pytest` this file.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from megatron.core import parallel_state

from unicron.demo import model as demo
from unicron.demo.variant import PLAIN, Variant
from unicron.training import handles, megatron_cpu, missed_handles
from unicron.training.chunks import Chunks
from unicron.training.groups import Groups
from unicron.training.overlap import take_over
from unicron.training.registries import forget_all_groups
from unicron.training.stand_ins import StandIn, end_stand_ins, make_stand_ins, stand_ins
from unicron.types import Layout

pytestmark = pytest.mark.timeout(300)


def layout_of(tp: int, pp: int, dp: int, *, ep: int = 1, sharded: bool = False, instances: int = 1) -> Layout:
    return Layout(tp=tp, pp=pp, dp=dp, ep=ep, num_micro_batches=12, sharded=sharded, instances=instances)


CASES = {
    "dp": (layout_of(1, 1, 4), PLAIN),
    "alone": (layout_of(1, 1, 1), PLAIN),
    "tp, pp": (layout_of(2, 2, 2), PLAIN),
    "distributed": (layout_of(1, 1, 2, sharded=True), PLAIN),
    "distributed, tp, pp, overlapped": (layout_of(2, 2, 2, sharded=True), Variant(overlap=True)),
    "bf16, sequence parallel": (layout_of(2, 1, 2), Variant(bf16=True, sequence_parallel=True)),
    "distributed, bf16": (layout_of(1, 2, 2, sharded=True), Variant(bf16=True)),
    "distributed, two instances": (layout_of(1, 2, 4, sharded=True, instances=2), PLAIN),
    "interleaved": (layout_of(1, 2, 2), Variant(virtual_pp=2)),
    "experts": (layout_of(1, 1, 2), Variant(experts=4)),
    "experts, spread": (layout_of(1, 2, 4, ep=2), Variant(experts=4)),
    "experts, spread, distributed": (layout_of(1, 1, 4, ep=2, sharded=True), Variant(experts=4)),
}


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    megatron_cpu.install()
    yield
    clean_up()


def clean_up() -> None:
    parallel_state.destroy_model_parallel()
    end_stand_ins()
    forget_all_groups()
    gc.collect()


class Real(dist.ProcessGroup):
    """What takes a stand-in's place here: only who it is counts."""


@pytest.mark.parametrize("case", CASES)
def test_no_stand_in_is_left(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, variant = CASES[case]
    monkeypatch.setattr(missed_handles, "_search", lambda *_: pytest.fail("the walk alone must find all of them"))
    for rank in {0, layout.world_size - 1}:  # the first and the last stage have the groups of tied embeddings
        make_stand_ins(rank, layout)
        model, optimizer, scheduler = demo.build(layout, variant)
        chunks = Chunks(model)
        take_over(chunks, optimizer)
        groups = Groups(rank, layout, None, None)
        groups.adopt_handles({"model": chunks.chunks, "optimizer": optimizer, "scheduler": scheduler})
        real: dict[Any, Real] = {}
        for site in groups._sites:
            site.bind(real.setdefault(site.ranks, Real(0, len(site.ranks))))
        assert parallel_state.get_tensor_model_parallel_group() in real.values()
        alive = [weakref.ref(each) for each in stand_ins()]
        c10d._update_default_pg(None)
        end_stand_ins()
        gc.collect()
        assert len(alive) >= 5
        assert [each().ranks for each in alive if each() is not None] == []  # type: ignore[union-attr]
        del model, optimizer, scheduler, chunks, groups
        clean_up()


def numbers(roots: dict[str, Any]) -> dict[str, Counter[Any]]:
    """Every int and float, by class and attribute: what is cached of a group's size, or computed from it."""
    found: dict[str, Counter[Any]] = {}
    seen: set[int] = set()
    stack = [*roots.items()]
    while stack:
        label, holder = stack.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        is_object = hasattr(holder, "__dict__") and not isinstance(holder, (dict, list, type))
        for _, _, key, value in [*handles.places(holder)]:
            name = f"{type(holder).__name__}.{getattr(key, '__name__', key)}" if is_object else label
            if label == "parallel_state" and isinstance(key, str):
                name = f"parallel_state.{key}"
            parts = [value] if not isinstance(value, tuple) else [*value]
            for part in parts:
                if isinstance(part, (int, float)) and not isinstance(part, bool):
                    found.setdefault(name, Counter())[part] += 1
                elif isinstance(part, torch.Tensor) and not isinstance(part, torch.nn.Parameter):
                    found.setdefault(f"{name} (elements)", Counter())[part.numel()] += 1
                elif not isinstance(part, (StandIn, type)) and handles._is_worth_it(part):
                    stack.append((name, part))
    return found


def built(dp: int, tp: int, pp: int, ep: int = 1) -> dict[str, Counter[Any]]:
    layout = layout_of(tp, pp, dp, ep=ep)
    make_stand_ins(0, layout)
    model, optimizer, scheduler = demo.build(layout, Variant(experts=4) if ep > 1 else PLAIN)
    take_over(Chunks(model), optimizer)
    roots = {"parallel_state": vars(parallel_state), "model": model, "optimizer": optimizer, "scheduler": scheduler}
    found = numbers(roots)
    del model, optimizer, scheduler, roots
    clean_up()
    return found


#: What they need when ranks come and go. gradient_scaling_factor is none of them: it is 1 with per-token losses. With
#: the distributed optimizer there are more (a rank's shard), but then the width never changes.
BOUND = "Groups gives parallel_state its lists with every new default group (_renumber)"
KNOWN = {
    "_ParamAndGradBuffer.data_parallel_world_size": "pads the buffer while it is built, for the distributed optimizer",
    "parallel_state._DATA_PARALLEL_GLOBAL_RANKS": BOUND,
    "parallel_state._DATA_PARALLEL_GLOBAL_RANKS_WITH_CP": BOUND,
    "parallel_state._EMBEDDING_GLOBAL_RANKS": BOUND,
    "parallel_state._MODEL_PARALLEL_GLOBAL_RANKS": BOUND,
    "parallel_state._PIPELINE_GLOBAL_RANKS": BOUND,
    "parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS": BOUND,
}


@pytest.mark.parametrize(("tp", "pp", "ep"), [(1, 1, 1), (2, 2, 1), (1, 1, 2)])
def test_every_cached_number_that_depends_on_the_width_is_known(tp: int, pp: int, ep: int) -> None:
    """A task with the plain optimizer goes on at another width without building its model again."""
    narrow, wide = built(2 * ep, tp, pp, ep), built(3 * ep, tp, pp, ep)
    changed = {name for name in {*narrow, *wide} if narrow.get(name) != wide.get(name)}
    unknown = {name: (narrow.get(name), wide.get(name)) for name in changed - KNOWN.keys()}
    assert not unknown, f"what does each need when the width changes? Then say so in KNOWN: {unknown}"
    assert "_ParamAndGradBuffer.data_parallel_world_size" in changed
    lists = {name.partition(".")[2] for name in changed if name.startswith("parallel_state.")}
    groups = Groups(0, layout_of(tp, pp, 2 * ep, ep=ep), None, None)
    make_stand_ins(0, layout_of(tp, pp, 2 * ep, ep=ep))
    groups.adopt_handles({})
    assert lists <= groups._rank_lists.keys()
