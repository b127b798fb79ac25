"""Which segments are reduced under the backward, where their results lie, and when each may begin."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unicron.training.eager_plan import EagerPlan, LateGradient, Readiness, plan_eager

SEGMENT_BYTES = 512  # 128 numbers


def model_of(*chunks: tuple[int, ...]) -> Any:
    """Each chunk has one buffer of parameters of so many numbers, laid out from the last one."""
    made: list[Any] = []
    named: list[tuple[str, Any]] = []
    for number, sizes in enumerate(chunks):
        data = torch.zeros(sum(sizes))
        params = []
        end = data.numel()
        for place, size in enumerate(sizes):
            params.append(SimpleNamespace(main_grad=data[end - size : end]))
            named.append((f"{number}.{place}", params[-1]))
            end -= size
        buffer = SimpleNamespace(grad_data=data, params=params)
        made.append(SimpleNamespace(buffers=[buffer], expert_parallel_buffers=[]))
    buffers = [buffer for chunk in made for buffer in chunk.buffers]
    return SimpleNamespace(
        chunks=made, buffers=buffers, expert_parallel_buffers=[], named_parameters=lambda: iter(named)
    )


def test_segments_begin_as_a_backward_completes_them() -> None:
    plan = plan_eager(model_of((100, 200, 100)), SEGMENT_BYTES, 1 << 20, ())
    assert plan.order == (1, 2, 3, 4) and plan.nbytes == 3 * 512 + 512
    assert plan.places == {1: 0, 2: 512, 3: 1024, 4: 1536}
    assert plan.params == {1: ("0.1", "0.2"), 2: ("0.1",), 3: ("0.0", "0.1"), 4: ("0.0",)}


def test_the_last_chunk_s_backward_is_over_first() -> None:
    plan = plan_eager(model_of((128, 128), (128,)), SEGMENT_BYTES, 1 << 20, ())
    assert plan.order == (3, 1, 2) and plan.chunk_of == {1: 0, 2: 0, 3: 1}


def test_what_is_added_up_inside_the_replica_first_is_not_eager() -> None:
    plan = plan_eager(model_of((100, 200, 100)), SEGMENT_BYTES, 1 << 20, ("0.0",))
    assert plan.order == (1, 2) and set(plan.places) == {1, 2}
    nothing = plan_eager(model_of((100, 200, 100)), SEGMENT_BYTES, 1 << 20, ("0.0", "0.1"))
    assert nothing.order == () and nothing.signature == ""


@pytest.mark.parametrize(
    ("bytes_max", "order"), [(0, ()), (511, ()), (512, (1,)), (1535, (1, 2)), (1 << 20, (1, 2, 3))]
)
def test_memory_bounds_how_many_are_eager(bytes_max: int, order: tuple[int, ...]) -> None:
    plan = plan_eager(model_of((128, 128, 128)), SEGMENT_BYTES, bytes_max, ())
    assert plan.order == order and plan.nbytes == 512 * len(order) <= max(bytes_max, 0)


def test_ranks_with_other_segments_have_another_signature() -> None:
    model = model_of((128, 128, 128))
    every = [plan_eager(model, SEGMENT_BYTES, size, ()).signature for size in (512, 1024, 1536)]
    every += [plan_eager(model, SEGMENT_BYTES, 1536, ("0.2",)).signature, plan_eager(model, 256, 1536, ()).signature]
    assert len(set(every)) == 5 and plan_eager(model, SEGMENT_BYTES, 1024, ()).signature == every[1]


def plan_of(params: dict[int, tuple[str, ...]], chunk_of: dict[int, int] | None = None) -> EagerPlan:
    order = tuple(params)
    chunks = chunk_of or dict.fromkeys(order, 0)
    return EagerPlan(64, order, dict.fromkeys(order, 0), 0, params, chunks, "x")


def learned(plan: EagerPlan, calls: list[str]) -> Readiness:
    """After one iteration with these gradients in the last backward of chunk 0."""
    readiness = Readiness(plan)
    readiness.arm()
    assert readiness.last_backward(0) == []
    assert [number for param in calls for number in readiness.came(param, 0)] == [], "nothing is known yet"
    assert readiness.rest() == list(plan.order)
    readiness.arm()
    return readiness


def test_who_knows_nothing_of_its_backward_begins_all_behind_it() -> None:
    learned(plan_of({1: ("a",), 2: ("b",)}), ["a", "b"])


def test_a_segment_begins_with_the_last_of_its_gradients_and_never_before_one_ahead_of_it() -> None:
    readiness = learned(plan_of({1: ("a", "b"), 2: ("b", "c"), 3: ("d",)}), ["a", "b", "c", "d"])
    assert readiness.came("a", 0) == [], "of an earlier micro-batch"
    assert readiness.last_backward(0) == []
    assert readiness.came("d", 0) == [] and readiness.came("a", 0) == []
    assert readiness.came("b", 0) == [1]
    assert readiness.came("c", 0) == [2, 3]
    assert readiness.rest() == []


def test_a_parameter_without_gradient_holds_nothing_up() -> None:
    readiness = learned(plan_of({1: ("frozen",), 2: ("a", "frozen")}), ["a"])
    assert readiness.last_backward(0) == [1]
    assert readiness.came("a", 0) == [2]


def test_a_gradient_that_does_not_come_leaves_its_segment_for_the_end() -> None:
    readiness = learned(plan_of({1: ("a",), 2: ("b",), 3: ("c",)}), ["a", "b", "c"])
    readiness.last_backward(0)
    assert readiness.came("a", 0) == [1] and readiness.came("c", 0) == []
    assert readiness.rest() == [2, 3]


def test_a_parameter_used_twice_is_final_the_second_time() -> None:
    readiness = learned(plan_of({1: ("a",), 2: ("b",)}), ["a", "b", "a"])
    readiness.last_backward(0)
    assert readiness.came("a", 0) == [] and readiness.came("b", 0) == [] and readiness.came("a", 0) == [1, 2]


def test_a_gradient_that_would_be_missing_in_the_sum_raises() -> None:
    readiness = learned(plan_of({1: ("a",), 2: ("b",)}), ["a", "b"])
    readiness.last_backward(0)
    assert readiness.came("a", 0) == [1]
    with pytest.raises(LateGradient, match="a gradient of a came after a segment of it"):
        readiness.came("a", 0)


def test_each_chunk_s_own_last_backward_counts() -> None:
    plan = plan_of({2: ("b",), 1: ("a",)}, {1: 0, 2: 1})
    readiness = Readiness(plan)
    for _ in range(2):
        readiness.arm()
        readiness.last_backward(1)
        begun = [*readiness.came("b", 1), *readiness.came("a", 0)]  # the other chunk's micro-batch is not its last
        readiness.last_backward(0)
        begun += readiness.came("a", 0)
        rest = readiness.rest()
    assert begun == [2, 1] and rest == []


@pytest.mark.parametrize("seed", range(50))
def test_whatever_comes_in_whatever_order_all_begin_once_and_in_order(seed: int) -> None:
    stream = random.Random(seed)
    names = "abcdefgh"
    order = list(range(1, stream.randrange(2, 8)))
    params = {number: tuple(stream.sample(names, stream.randrange(0, 4))) for number in order}
    readiness = Readiness(plan_of(params))
    calls = [name for name in names for _ in range(stream.randrange(0, 3))]
    for _ in range(4):
        stream.shuffle(calls)
        readiness.arm()
        begun = readiness.last_backward(0)
        left = list(calls)
        while left:
            begun += readiness.came(name := left.pop(), 0)
            assert not {number for number in begun if name in params[number] and name in left}, "not final yet"
        begun += readiness.rest()
        assert begun == order
