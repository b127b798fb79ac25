"""Handles of stand-in groups, wherever a script keeps them: found and exchanged, or refused by name."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

import a_users_models as users
from unicron.training import megatron_cpu, missed_handles
from unicron.training.missed_handles import MissedHandle, find_handles
from unicron.training.registries import forget_all_groups
from unicron.training.stand_ins import StandIn, StandInUsed, end_stand_ins, make_stand_ins, stand_ins
from unicron.types import Layout

LAYOUT = Layout(tp=2, dp=2, num_micro_batches=2)


@pytest.fixture(autouse=True)
def built() -> Iterator[None]:
    megatron_cpu.install()
    make_stand_ins(0, LAYOUT)
    yield
    users.TP_GROUP = None
    users.HELD.clear()
    parallel_state.destroy_model_parallel()
    end_stand_ins()
    forget_all_groups()
    gc.collect()


class Real(dist.ProcessGroup):
    """What takes a stand-in's place here: only who it is counts."""


def find(root: Any) -> list[Any]:
    return find_handles({"parallel_state": vars(parallel_state), "model": root})


def rebind(root: Any) -> dict[tuple[int, ...], Real]:
    """As Groups does it. Returns the groups that are in place."""
    sites = find(root)
    real = {site.ranks: Real(0, len(site.ranks)) for site in sites}
    for site in sites:
        site.bind(real[site.ranks])
    return real


def test_the_count_of_references_is_exact_where_nothing_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were it not, every worker would search its whole memory."""
    monkeypatch.setattr(missed_handles, "_globals_with_handles", lambda: pytest.fail("there is nothing to look for"))
    assert len(find(users.Mine())) > len(stand_ins())


@pytest.mark.parametrize("kind", users.KINDS)
def test_a_handle_is_exchanged_wherever_it_is_kept(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, read = users.KINDS[kind]
    holder = users.Holder(make(), read)
    monkeypatch.setattr(missed_handles, "_search", lambda *_: pytest.fail("the walk alone must find it"))
    before = holder.groups()
    assert before and all(isinstance(group, StandIn) for group in before)
    del before
    sites = find(holder)
    for epoch in range(2):  # a place is known for good
        real = {site.ranks: Real(0, len(site.ranks)) for site in sites}
        for site in sites:
            site.bind(real[site.ranks])
        assert all(any(group is each for each in real.values()) for group in holder.groups()), f"epoch {epoch}"
    end_stand_ins()


def test_a_tuple_that_stands_in_two_places_is_exchanged_in_both() -> None:
    shared = (users.dp(), "x")
    one, two = users.Frozen(shared), users.Slotted(shared)
    del shared
    real = rebind([one, two])
    assert one.group[0] is two.group[0] is real[(0, 2)]


def test_a_users_subclass_of_megatrons_model_is_walked() -> None:
    model = tiny(users.MyGPT)
    real = rebind(model)
    assert model.my_group is real[(0, 2)]
    assert model.mine.group is real[(0, 1)]
    assert model.decoder.layers[0].mlp.linear_fc1.tp_group is real[(0, 1)]


def tiny(kind: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, tensor_model_parallel_size=2, **megatron_cpu.CONFIG
    )
    return kind(config, get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=8)


def test_a_global_of_a_users_module_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missed_handles, "_search", lambda *_: pytest.fail("globals are looked at before"))
    users.TP_GROUP = users.tp()
    real = rebind(None)
    assert users.TP_GROUP is real[(0, 1)]


def test_a_handle_where_the_walk_does_not_go_is_found_by_the_search() -> None:
    """In an object that no root leads to, and of which no global is the group itself."""
    users.HELD.append({"deep": users.Slotted((users.tp(), 0))})
    real = rebind(None)
    assert users.HELD[0]["deep"].group[0] is real[(0, 1)]


def test_the_search_looks_at_what_the_template_froze() -> None:
    """gc.get_referrers does not."""
    users.HELD.append([None])
    gc.freeze()
    try:
        users.HELD[0][0] = users.tp()
        assert not any(each is users.HELD[0] for each in gc.get_objects())
        real = rebind(None)
    finally:
        gc.unfreeze()
    assert users.HELD[0][0] is real[(0, 1)]


PLANTED: dict[str, tuple[Callable[[], Any], str]] = {
    "a_users_models.HELD": (users.generator, "generator generator"),
    "model": (users.hidden, "tuple_iterator"),
}


@pytest.mark.parametrize("where", PLANTED)
def test_a_handle_that_nobody_can_exchange_is_refused_by_name(where: str) -> None:
    make, name = PLANTED[where]
    planted = make()
    next(planted)
    root = [planted]
    if where != "model":
        users.HELD.append(planted)
        root.clear()
    del planted
    with pytest.raises(MissedHandle, match=rf"{where}.*{name}.*Take it from parallel_state") as caught:
        find(root)
    assert "\n" not in str(caught.value)


def test_garbage_is_no_holder() -> None:
    loop: list[Any] = [users.generator()]
    next(loop[0])
    loop.append(loop)
    del loop
    find(None)


def test_a_variable_of_a_running_function_is_said_and_raises_when_it_is_used(
    capfd: pytest.CaptureFixture[str],
) -> None:
    kept_here = users.dp()
    rebind(None)
    assert f"held by kept_here of {sys._getframe().f_code.co_name}()" in capfd.readouterr().err
    dist.all_reduce(torch.ones(1), group=kept_here)  # until the real one is there, as the build needs it
    end_stand_ins((0, 2))
    tensor = torch.ones(1)
    for name, arguments in (
        ("allreduce", ([tensor],)), ("barrier", ()), ("send", ([tensor], 1, 0)), ("recv", ([tensor], 1, 0)),
        ("size", ()), ("rank", ()),
    ):  # fmt: skip
        with pytest.raises(StandInUsed, match=r"ranks \[0, 2\].*from parallel_state"):
            getattr(kept_here, name)(*arguments)
    with pytest.raises(ValueError, match="not initialized in the world group map"):
        dist.all_reduce(tensor, group=kept_here)
    with pytest.raises(RuntimeError, match="resolve the process group"):
        torch.ops._c10d_functional.all_reduce(tensor, "sum", kept_here.group_name)


def test_every_operation_of_a_group_is_guarded() -> None:
    """One that torch adds, or calls by another name, would do nothing and say nothing."""
    guarded = {name for name in vars(StandIn) if callable(getattr(StandIn, name))}
    operations = {
        name for name in dir(dist.ProcessGroup)
        if any(word in name for word in ("reduce", "gather", "scatter", "cast", "send", "recv", "barrier", "all"))
        and callable(getattr(dist.ProcessGroup, name)) and not name.startswith("__")
    }  # fmt: skip
    assert "allreduce" in operations
    assert not operations - guarded
