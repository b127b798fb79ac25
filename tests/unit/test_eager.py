"""Results that come under the backward: taken in the reduction, or dropped with nothing torn."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_reduce import CHUNK_BYTES, NUM_SEGMENTS, NUMBERS, Ledger, whole

from spawned import in_own_process
from unicron.training import eager as module
from unicron.training import gradients as reduction
from unicron.training.eager import MIB_SETTING, EagerReduction, plan_of, why_never
from unicron.training.eager_plan import EagerPlan
from unicron.training.gradients import GPU_SLOTS, Gradients, ReduceHooks, staging_bytes
from unicron.training.watched_group import LostOperation
from unicron.types import Layout

EAGER = (1, 3)  # of the six segments
PLAN = EagerPlan(
    CHUNK_BYTES, EAGER, {1: 0, 3: 512}, 1024, {1: ("a",), 3: ("b",)}, dict.fromkeys(EAGER, 0), "word"
)  # fmt: skip


class Setting:
    """One rank; each collective doubles what it is given, when it is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slots: int = 1) -> None:
        buffer = SimpleNamespace(grad_data=torch.arange(NUMBERS, dtype=torch.float32), params=[])
        self.model: Any = SimpleNamespace(buffers=[buffer], expert_parallel_buffers=[])
        nbytes = staging_bytes(self.model, CHUNK_BYTES, slots=slots, eager_bytes=PLAN.nbytes)
        self.said: list[str] = []
        self.memory: Any = SimpleNamespace(
            pool=None if slots == 1 else object(), scalars=torch.ones(4, dtype=torch.float64),
            staging=torch.zeros(nbytes, dtype=torch.uint8), synchronize=lambda: self.said.append("all ended"),
            synchronize_stream=lambda: None,
        )  # fmt: skip
        self.ledger, self.group, self.ended, self.refused = Ledger(), object(), False, False
        self.gradients = Gradients(self.model, self.memory, CHUNK_BYTES, PLAN)
        self.eager = EagerReduction(PLAN, self.gradients, lambda error: isinstance(error, LostOperation))
        monkeypatch.setattr(module.dist, "all_reduce", self.all_reduce)
        monkeypatch.setattr(reduction.dist, "all_reduce", self.all_reduce)

    def all_reduce(self, tensor: torch.Tensor, group: Any, async_op: bool) -> Any:
        if self.refused:
            raise LostOperation("refused")
        number = next(n for n in range(NUM_SEGMENTS) if self.gradients.staged(n).data_ptr() == tensor.data_ptr())
        self.said.append(f"begin {tensor.numel()}" if number not in EAGER else f"eager {number}")

        def wait() -> None:
            if self.ended:
                tensor.fill_(-1.0)
                raise LostOperation("the group was ended")
            tensor.mul_(2)

        if async_op:
            return SimpleNamespace(wait=wait, is_completed=lambda: True)
        wait()
        return None

    def compute(self) -> None:
        self.eager.drop()
        self.eager.arm(self.group)  # type: ignore[arg-type]
        self.eager.last_backward(0)
        self.eager.computed()

    def reduce(self, killed_at: int = 1_000) -> None:
        def half_copied(number: int) -> None:
            if number == killed_at:
                raise KeyboardInterrupt

        hooks = ReduceHooks(lambda _: None, lambda: None, half_copied, eager=self.eager.take)
        self.gradients.reduce(self.ledger, self.group, (), hooks)  # type: ignore[arg-type]
        self.eager.over()

    def sums(self) -> list[float]:
        return [float(x) for segment in self.gradients.segments for x in segment]


@pytest.mark.parametrize("slots", [1, GPU_SLOTS])
def test_results_are_taken_in_the_order_of_the_segments(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(monkeypatch, slots)
    setting.compute()
    assert setting.said == ["eager 1", "eager 3"] and setting.sums() == whole(0), "local sums stay as they are"
    assert setting.ledger.segments_reduced == 0
    setting.reduce()
    assert setting.said == ["eager 1", "eager 3", "begin 4", "begin 6", "begin 6", "begin 3"]
    assert setting.sums() == whole(NUM_SEGMENTS) and not setting.eager.is_under_way


@pytest.mark.parametrize("slots", [1, GPU_SLOTS])
def test_nobody_takes_a_result_before_all_have_left_their_backward(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who dies in its backward, or raises there, has its segments under way; it never enters that of the scalars."""
    setting = Setting(monkeypatch, slots)
    setting.compute()
    begin = setting.all_reduce

    def not_entered_by_all(tensor: torch.Tensor, group: Any, async_op: bool) -> Any:
        if tensor.dtype is torch.float64:
            raise LostOperation("a peer died")
        return begin(tensor, group, async_op)

    monkeypatch.setattr(reduction.dist, "all_reduce", not_entered_by_all)
    with pytest.raises(LostOperation):
        setting.reduce()
    assert setting.ledger.segments_reduced == 0 and setting.sums() == whole(0)


@pytest.mark.parametrize("slots", [1, GPU_SLOTS])
def test_what_broke_is_told_in_the_reduction_and_done_again_the_ordinary_way(
    slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting(monkeypatch, slots)
    setting.compute()
    setting.ended = True  # a peer died, and the group was shut
    with pytest.raises(LostOperation):
        setting.reduce()
    assert setting.sums() == whole(0)
    setting.eager.drop()
    setting.ended, setting.group = False, object()
    setting.said.clear()
    setting.reduce()
    setting.said = [word for word in setting.said if word != "all ended"]  # once, before, on a GPU
    assert setting.said == ["begin 4", "eager 1", "begin 6", "eager 3", "begin 6", "begin 3"], "all of them, in order"
    assert setting.sums() == whole(NUM_SEGMENTS)


def test_nobody_stops_computing_for_an_operation_that_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(monkeypatch)
    setting.refused = True
    setting.compute()
    setting.refused = False
    with pytest.raises(LostOperation, match="refused"):
        setting.reduce()
    assert setting.sums() == whole(1), "the scalars came before"
    setting.eager.drop()
    setting.group = object()
    setting.ledger.segments_reduced = 0
    setting.gradients.segments[0].div_(2)
    setting.reduce()
    assert setting.sums() == whole(NUM_SEGMENTS)


def test_what_is_no_broken_operation_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(monkeypatch)
    monkeypatch.setattr(module.dist, "all_reduce", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        setting.compute()


def test_results_of_another_group_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(monkeypatch)
    setting.compute()
    assert setting.eager.is_in(setting.group)  # type: ignore[arg-type]
    assert not setting.eager.is_in(object())  # type: ignore[arg-type]
    setting.ended = True
    setting.eager.drop()
    assert setting.said[-1] == "all ended", "nothing may write to a place afterwards"
    assert setting.eager.is_in(object()) and setting.eager.take(1) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("slots", [1, GPU_SLOTS])
@pytest.mark.parametrize("killed_at", range(NUM_SEGMENTS))
def test_an_heir_finds_the_place_of_a_half_copied_result(
    slots: int, killed_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting(monkeypatch, slots)
    setting.compute()
    with pytest.raises(KeyboardInterrupt):
        setting.reduce(killed_at)
    heirs = Gradients(setting.model, setting.memory, CHUNK_BYTES, PLAN)
    heirs.finish_open_copy(setting.ledger)  # type: ignore[arg-type]
    assert setting.sums() == whole(killed_at + 1)


@pytest.mark.parametrize("slots", [1, GPU_SLOTS])
def test_no_two_segments_under_way_share_a_place(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = Setting(monkeypatch, slots).gradients
    for number in EAGER:
        gradients.staged(number).fill_(number)
    for number in set(range(NUM_SEGMENTS)) - set(EAGER):
        gradients.staged(number).fill_(0)
    assert all(bool((gradients.staged(number) == number).all()) for number in EAGER)


def test_an_iteration_that_is_not_agreed_begins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(monkeypatch)
    setting.eager.arm(None)
    setting.eager.last_backward(0)
    setting.eager.computed()
    assert not setting.said
    setting.reduce()
    assert setting.sums() == whole(NUM_SEGMENTS)


def test_what_is_never_eager_says_why() -> None:
    param = SimpleNamespace(is_cuda=False)
    model: Any = SimpleNamespace(
        config=SimpleNamespace(), first=SimpleNamespace(ddp_config=SimpleNamespace()), parameters=lambda: iter([param])
    )
    assert why_never(model, Layout(dp=2)) == ""
    assert "exact sums" in why_never(model, Layout(dp=2, exact=True))
    model.config.defer_embedding_wgrad_compute = True
    assert "defer_embedding_wgrad_compute" in why_never(model, Layout(dp=2))
    model.config = SimpleNamespace(cuda_graph_impl="local")
    assert "CUDA graph" in why_never(model, Layout(dp=2))


def test_on_a_gpu_nothing_is_eager_where_the_backward_may_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(batch_p2p_sync=True)
    model: Any = SimpleNamespace(
        config=config, first=SimpleNamespace(ddp_config=SimpleNamespace()),
        parameters=lambda: iter([SimpleNamespace(is_cuda=True)]),
    )  # fmt: skip
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert why_never(model, Layout(dp=2)) == ""
    assert "batch_p2p_sync" in why_never(model, Layout(dp=2, pp=2))
    config.batch_p2p_sync = False
    assert why_never(model, Layout(dp=2, pp=2)) == ""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in why_never(model, Layout(dp=2))


@pytest.mark.parametrize("text", ["many", "inf", "nan"])
def test_a_setting_that_is_no_number_is_refused_by_name(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MIB_SETTING, text)
    with pytest.raises(ValueError, match=f"UNICRON_EAGER_MIB is '{text}': say a number of MiB"):
        plan_of(SimpleNamespace(), Layout(dp=2))  # type: ignore[arg-type]


# ---------------------------------------------------------- Megatron's own hooks


@pytest.mark.timeout(120)
@pytest.mark.parametrize("body", ["plain", "bf16", "sequence"])
def test_a_segment_begins_when_the_sum_of_its_last_gradient_is_whole(body: str) -> None:
    in_own_process({"plain": plain, "bf16": bf16, "sequence": sequence}[body])


def plain() -> None:
    begun, order = train({})
    assert begun == order and len(order) == 6


def bf16() -> None:
    begun, order = train({"bf16": True})
    assert begun == order and len(order) == 6


def sequence() -> None:
    """Norms' gradients are added up inside the replica first: they are in every segment of so small a model."""
    assert train({"sequence_parallel": True}, tp=2) == ([], [])


def train(variant: dict[str, Any], tp: int = 1) -> tuple[list[int], list[int]]:
    """Segments that began before the third iteration's backward ended, and the order of all that are eager."""
    from unicron.demo import model as demo
    from unicron.demo.variant import Variant
    from unicron.training.chunks import Chunks
    from unicron.training.compute import Computation
    from unicron.training.data import ByteCorpus, ByteDataset
    from unicron.training.overlap import plan_own
    from unicron.training.stand_ins import make_stand_ins

    layout = Layout(tp=tp, dp=2, micro_batch=2, num_micro_batches=4)
    make_stand_ins(0, layout)
    built, optimizer, _ = demo.build(layout, Variant(overlap=True, **variant))
    model = Chunks(built)
    plan = plan_own(model, optimizer, layout).eager
    assert plan is not None
    memory: Any = SimpleNamespace(
        pool=None, scalars=torch.zeros(4, dtype=torch.float64),
        staging=torch.zeros(staging_bytes(model, plan.segment_bytes, eager_bytes=plan.nbytes), dtype=torch.uint8),
    )  # fmt: skip
    gradients = Gradients(model, memory, plan.segment_bytes, plan)
    early: list[int] = []
    done = False

    def passage(begin: Callable[[], Any]) -> Any:
        staged = begin()
        place = next(n for n in plan.order if gradients.staged(n).data_ptr() == staged.data_ptr())
        if not done:
            early.append(place)
        return SimpleNamespace(wait=lambda: None, is_completed=lambda: True)

    module.dist.all_reduce = lambda tensor, **_: tensor  # type: ignore[assignment]
    eager = EagerReduction(plan, gradients, lambda _: False, passage)
    eager.watch(model)
    computation = Computation(model, layout, memory.scalars)
    computation.last_backward = eager.last_backward
    dataset = ByteDataset(ByteCorpus.from_stdlib(100_000), demo.SEQ_LENGTH, 2, 4)
    for iteration in range(3):
        early, done = [], False
        gradients.zero()
        optimizer.zero_grad()
        eager.arm(object())  # type: ignore[arg-type]
        computation.run(iteration, (0, 1), demo.forward_step, dataset, lambda _: None)
        done = True
        eager.computed()
        for number in plan.order:
            assert torch.equal(gradients.staged(number), gradients.segments[number]), (iteration, number)
            assert float(gradients.segments[number].abs().sum()) > 0
        assert early == [] or iteration > 0, "nothing is known of the backward yet"
        eager.over()
    eager.leave()
    return early, list(plan.order)
