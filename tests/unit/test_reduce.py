"""Segments under way: one at a time, and two as on a GPU. The collective doubles what it is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from unicron.training import gradients as module
from unicron.training.gradients import GPU_SLOTS, Gradients, ReduceHooks, squares_of, staging_bytes
from unicron.training.watched_group import LostOperation

CHUNK_BYTES = 24  # six numbers
NUMBERS = 27
NUM_SEGMENTS = 6  # the scalars, four chunks of six, one of three


@dataclass
class Ledger:
    segments_reduced: int = 0
    open_copy: bool = False

    def copying(self, number: int) -> None:
        assert number == self.segments_reduced and not self.open_copy
        self.open_copy = True

    def reduced(self, count: int) -> None:
        self.segments_reduced, self.open_copy = count, False


@dataclass
class Setting:
    slots: int
    said: list[str] = field(default_factory=list)
    ended_at: int = 1_000  # the collective that the group's end meets
    killed_at: int = 1_000  # the segment whose result is half copied
    made: int = 0

    def __post_init__(self) -> None:
        data = torch.arange(NUMBERS, dtype=torch.float32)
        buffer = SimpleNamespace(grad_data=data, params=[])
        self.model: Any = SimpleNamespace(buffers=[buffer], expert_parallel_buffers=[])
        nbytes = staging_bytes(self.model, CHUNK_BYTES, slots=self.slots)
        self.memory: Any = SimpleNamespace(
            pool=None if self.slots == 1 else object(), scalars=torch.ones(4, dtype=torch.float64),
            staging=torch.zeros(nbytes, dtype=torch.uint8), synchronize=lambda: self.said.append("all ended"),
            synchronize_stream=lambda: None,
        )  # fmt: skip
        self.ledger = Ledger()
        self.gradients = self.gradients_again()

    def gradients_again(self) -> Gradients:
        """An heir's, over the same memory."""
        return Gradients(self.model, self.memory, CHUNK_BYTES)

    def all_reduce(self, tensor: torch.Tensor, group: Any, async_op: bool) -> Any:
        number, self.made = self.made, self.made + 1
        self.said.append(f"begin {number}")

        def wait() -> None:
            self.said.append(f"wait {number}")
            if number >= self.ended_at:
                tensor.fill_(-1.0)  # whatever a collective that was ended leaves
            else:
                tensor.mul_(2)

        if async_op:
            return SimpleNamespace(wait=wait)
        wait()
        return None

    def hooks(self) -> ReduceHooks:
        def settle() -> None:
            if self.said[-1:] == [f"wait {self.ended_at}"]:
                raise LostOperation("the group was ended")

        def half_copied(number: int) -> None:
            if number == self.killed_at:
                raise KeyboardInterrupt

        return ReduceHooks(lambda number: None, settle, half_copied)

    def reduce(self, monkeypatch: pytest.MonkeyPatch, shared: tuple[int, ...] = ()) -> None:
        monkeypatch.setattr(module.dist, "all_reduce", self.all_reduce)
        monkeypatch.setattr(module.dist, "broadcast", lambda *_, **__: None)
        monkeypatch.setattr(module.dist, "get_rank", lambda _: 0)
        self.gradients.reduce(self.ledger, object(), shared, self.hooks())  # type: ignore[arg-type]

    def sums(self) -> list[float]:
        return [float(x) for segment in self.gradients.segments for x in segment]


def whole(count: int) -> list[float]:
    """What all segments hold when so many are reduced."""
    segments = [torch.ones(4), *torch.arange(NUMBERS, dtype=torch.float32).split(6)]
    return [float(x) * (2 if number < count else 1) for number, segment in enumerate(segments) for x in segment]


@pytest.mark.parametrize("slots", [1, GPU_SLOTS])
def test_all_segments_are_reduced_once(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(slots)
    setting.reduce(monkeypatch)
    assert setting.sums() == whole(NUM_SEGMENTS) and setting.ledger.segments_reduced == NUM_SEGMENTS


def test_the_next_ones_are_under_way_while_a_result_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(GPU_SLOTS)
    setting.reduce(monkeypatch)
    assert setting.said[:6] == ["begin 0", "begin 1", "begin 2", "wait 0", "begin 3", "wait 1"]


@pytest.mark.parametrize("slots", [1, GPU_SLOTS])
@pytest.mark.parametrize("ended_at", range(NUM_SEGMENTS))
def test_a_group_that_ends_tears_no_sum(slots: int, ended_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(slots, ended_at=ended_at)
    with pytest.raises(LostOperation):
        setting.reduce(monkeypatch)
    assert setting.ledger.segments_reduced == ended_at and setting.sums() == whole(ended_at)
    setting.said.clear()
    setting.ended_at = 1_000  # in a new group
    shared = (0,) * ended_at
    setting.reduce(monkeypatch, shared)
    if slots > 1:
        assert setting.said[0] == "all ended", "what was under way may still write to its slot"
    assert setting.sums() == whole(NUM_SEGMENTS) and "all ended" not in setting.said[1:]


@pytest.mark.parametrize("slots", [1, GPU_SLOTS])
@pytest.mark.parametrize("killed_at", range(NUM_SEGMENTS))
def test_an_heir_finishes_a_half_copied_result(slots: int, killed_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(slots, killed_at=killed_at)
    with pytest.raises(KeyboardInterrupt):
        setting.reduce(monkeypatch)
    assert setting.ledger.open_copy
    setting.gradients_again().finish_open_copy(setting.ledger)  # type: ignore[arg-type]
    assert setting.sums() == whole(killed_at + 1) and setting.ledger.segments_reduced == killed_at + 1


def test_an_ended_collective_that_raises_leaves_nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(GPU_SLOTS)
    begin = setting.all_reduce

    def refused(*arguments: Any, **words: Any) -> Any:
        if setting.made == 3:
            raise dist.DistError("NCCL error: the communicator was revoked")
        return begin(*arguments, **words)

    monkeypatch.setattr(module.dist, "all_reduce", refused)
    with pytest.raises(dist.DistError):
        setting.gradients.reduce(setting.ledger, object(), (), setting.hooks())  # type: ignore[arg-type]
    assert setting.sums() == whole(1) and "all ended" not in setting.said, "a hung one would hold up the report"


@pytest.mark.parametrize("known", range(NUM_SEGMENTS + 1))
@pytest.mark.parametrize("killed_at", range(NUM_SEGMENTS))
def test_the_last_replica_never_takes_a_reduced_segment_for_local_again(known: int, killed_at: int) -> None:
    """They hold what lost replicas computed: an heir that believed otherwise would compute that again on top."""
    setting = Setting(1, killed_at=killed_at)
    setting.ledger.segments_reduced = known
    before = setting.sums()
    with pytest.raises(KeyboardInterrupt):
        setting.gradients.reduce(setting.ledger, None, (), setting.hooks())  # type: ignore[arg-type]
    assert setting.ledger.segments_reduced == max(known, killed_at) and not setting.ledger.open_copy
    setting.killed_at = 1_000
    setting.gradients.reduce(setting.ledger, None, (), setting.hooks())  # type: ignore[arg-type]
    assert setting.ledger.segments_reduced == NUM_SEGMENTS and setting.sums() == before


def test_slots_hold_a_chunk_each_and_are_aligned() -> None:
    model: Any = SimpleNamespace(buffers=[SimpleNamespace(grad_data=torch.zeros(NUMBERS))], expert_parallel_buffers=[])
    assert staging_bytes(model, CHUNK_BYTES) == 64 and staging_bytes(model, CHUNK_BYTES, slots=2) == 1024
    assert staging_bytes(model, 104, slots=2) == 1024 and staging_bytes(model, slots=1) == NUMBERS * 4


def test_squares_keep_their_bits() -> None:
    spans = [torch.arange(NUMBERS, dtype=torch.float32), torch.ones(3, dtype=torch.bfloat16)]
    assert squares_of(spans) == pytest.approx(sum(n * n for n in range(NUMBERS)) + 3, rel=1e-12)
    assert squares_of([]) == 0.0


def test_a_fault_may_be_between_a_segment_s_begin_and_its_end_and_before_its_result_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is not begun apart without a fault is with one; a result that is here is not the ledger's yet."""
    setting = Setting(1)
    ledger = setting.ledger
    then, complete = (lambda: setting.said.append("fault")), []

    def hooks() -> ReduceHooks:
        return Setting.hooks(setting)._replace(
            enter=lambda number: then if number == 1 else None,
            complete=lambda number: complete.append((number, ledger.segments_reduced, ledger.open_copy)),
        )

    monkeypatch.setattr(setting, "hooks", hooks)
    setting.reduce(monkeypatch)
    assert setting.said[:5] == ["begin 0", "wait 0", "begin 1", "fault", "wait 1"]
    assert [(number, reduced) for number, reduced, _ in complete] == [(n, n) for n in range(NUM_SEGMENTS)]
    assert not any(is_open for _, _, is_open in complete)
    assert setting.sums() == whole(NUM_SEGMENTS)
