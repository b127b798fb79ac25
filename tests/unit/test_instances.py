"""Several instances of the distributed optimizer: who has the same shard, and where a lost one comes from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import parallel_state

from machines import running
from unicron.cli import main
from unicron.coordinator.job import Job, refusal_of
from unicron.coordinator.narrowing import layout_of, narrows, with_copies
from unicron.coordinator.standing_by import can_be_helped
from unicron.coordinator.transitions import TaskPhase
from unicron.demo import model as demo
from unicron.demo.variant import Variant
from unicron.healing.record import CommitResult, Record
from unicron.healing.resolve import Fetch, WorldVerdict, resolve_world
from unicron.training import megatron_cpu
from unicron.training.chunks import Chunks
from unicron.training.groups import Groups
from unicron.training.memory import StateMemory
from unicron.training.optimizer_state import inner_optimizers
from unicron.training.registries import forget_all_groups
from unicron.training.stand_ins import end_stand_ins, make_stand_ins
from unicron.training.step import EXTRA_BYTES_MAX
from unicron.training.transfer import StateTransfer
from unicron.training.undoable_step import params_of
from unicron.types import EpochPlan, Layout, Member, PlanKind, Stage, refusal_of_instances

FOUR = Layout(dp=4, num_micro_batches=8, sharded=True, instances=2)
PIPES = Layout(pp=2, dp=4, num_micro_batches=8, sharded=True, instances=2)
COMMIT = CommitResult(6, 64.0, 1.0, 0.0, 5.0)

pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_op. is deprecated:FutureWarning")


@given(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_every_shard_has_one_holder_an_instance(tp: int, pp: int, shards: int, instances: int) -> None:
    layout = Layout(tp=tp, pp=pp, dp=shards * instances, sharded=True, instances=instances)
    for rank in range(layout.world_size):
        holders, mates = layout.holders(rank), layout.shard_mates(rank)
        assert rank in holders and len(holders) == instances and rank in mates and len(mates) == shards
        assert all(layout.holders(other) == holders for other in holders)
        assert all(layout.shard_mates(other) == mates for other in mates)
        assert [layout.shard_of(mate) for mate in mates] == list(range(shards))
        assert sorted({other for mate in mates for other in layout.holders(mate)}) == list(layout.peers(rank))


def test_of_a_plain_optimizer_all_replicas_hold_the_same_and_of_one_instance_nobody_else() -> None:
    plain, one = Layout(tp=2, dp=3), Layout(tp=2, dp=3, sharded=True)
    assert plain.holders(1) == plain.peers(1) == (1, 3, 5) and not plain.copies_shards
    assert one.holders(1) == (1,) and one.shard_mates(3) == (1, 3, 5) and not one.copies_shards
    assert FOUR.copies_shards and FOUR.holders(0) == (0, 2) and FOUR.shard_mates(3) == (2, 3)


@pytest.fixture
def without_peers() -> Iterator[None]:
    megatron_cpu.install()
    yield
    parallel_state.destroy_model_parallel()
    end_stand_ins()
    forget_all_groups()


@pytest.mark.parametrize("rank", range(8))
def test_they_are_those_of_megatron(rank: int, without_peers: None) -> None:
    make_stand_ins(rank, PIPES)
    of_shard = parallel_state.get_data_parallel_group(partial_data_parallel=True, with_context_parallel=True)
    across = parallel_state.get_inter_distributed_optimizer_instance_group()
    assert tuple(dist.get_process_group_ranks(of_shard)) == PIPES.shard_mates(rank)
    assert tuple(dist.get_process_group_ranks(across)) == PIPES.holders(rank)


# ------------------------------------------------------------ what travels


@pytest.mark.parametrize("bf16", [False, True])
def test_a_shard_is_what_holders_have_in_common_and_a_move_takes_all(bf16: bool, without_peers: None) -> None:
    """One of them may have gathered the newest parameters, and another not. Who moves has nobody who gathers for it."""
    make_stand_ins(1, FOUR)
    model, optimizer, _ = demo.build(FOUR, Variant(bf16=bf16))
    memory = StateMemory(Chunks(model), optimizer, 64)
    transfer = StateTransfer(1, memory, cast(Groups, None), of_shards=True)
    extra = torch.zeros(EXTRA_BYTES_MAX, dtype=torch.uint8)

    def digests() -> tuple[int, int]:
        return transfer.digest(extra), transfer._digest(transfer._pieces(), extra)

    before = digests()
    whole = model.buffers[0].param_data.view(-1)
    whole[0].add_(1.0)  # of shard 0; this rank has shard 1
    others = digests()
    assert others[0] != before[0] and others[1] == before[1]
    for name in ("exp_avg", "exp_avg_sq", "step"):
        next(iter(inner_optimizers(optimizer)[0].state.values()))[name].add_(1.0)
        assert digests()[0] != others[0] and digests()[1] != others[1], name
        others = digests()
    main = params_of(optimizer)[-1][1]
    main.data.view(-1)[-1].add_(1.0)
    assert digests()[0] != others[0] and digests()[1] != others[1]
    assert sum(piece.numel() for piece in transfer._pieces()) < sum(p.numel() for p in memory.state_pieces())


# ------------------------------------------------------------ at the meeting


def verdict_of(records: list[Record], layout: Layout = FOUR) -> WorldVerdict:
    members = tuple(Member(rank, f"n{rank}", f"n{rank}.w0") for rank in range(layout.world_size))
    lost = tuple(r.rank for r in records if not r.has_state)
    plan = EpochPlan("t", 2, PlanKind.REPLACE, layout, tuple(range(layout.dp)), members, lost, lost)
    return resolve_world(plan, records)


def at(rank: int, iteration: int = 7, *, gathered: bool = True) -> Record:
    commit = COMMIT if iteration > 6 else None
    return Record(rank, iteration, Stage.COMPUTE, num_segments=2, commit=commit, gathered=gathered)


def lost(rank: int) -> Record:
    return Record(rank, 0, Stage.STARTING, has_state=False, num_segments=2)


def test_a_lost_shard_comes_from_the_other_instance_and_the_parameters_are_gathered() -> None:
    verdict = verdict_of([at(0), at(1), at(2), lost(3)])
    assert verdict.fetches == (Fetch(0, 1, (3,), shard=1),) and verdict.gather and not verdict.lost_positions
    verdict = verdict_of([lost(0), at(1), at(2), lost(3)])
    assert verdict.fetches == (Fetch(0, 2, (0,), shard=0), Fetch(0, 1, (3,), shard=1))


def test_a_shard_without_any_holder_is_lost() -> None:
    verdict = verdict_of([at(0), lost(1), at(2), lost(3)])
    assert verdict.lost_positions == (0,) and not verdict.fetches
    pipes = [lost(rank) if rank in (5, 7) else at(rank) for rank in range(8)]
    assert verdict_of(pipes, PIPES).lost_positions == (1,)


def test_of_two_holders_one_has_stepped_and_one_only_knows_how() -> None:
    """The other rolls forward first, so both serve the same."""
    verdict = verdict_of([at(0, 6), at(1, 7, gathered=False), lost(2), at(3, 6)])
    assert verdict.iteration == 7 and verdict.fetches == (Fetch(0, 0, (2,), shard=0),) and verdict.gather


# ------------------------------------------------------------ at the coordinator


def test_a_node_that_is_lost_for_good_takes_nothing_with_it() -> None:
    driver = running(FOUR, nodes=4, slots=1)
    epoch = driver.task.epoch
    assert can_be_helped(driver.task) and narrows(driver.task)
    driver.disconnected("n3")
    driver.probed("n3", "gone")
    driver.all_up()
    assert driver.task.guests and driver.task.plan is not None and driver.task.plan.kind is PlanKind.REPLACE
    assert driver.task.epoch == epoch + 1 and len(driver.task.plan.members) == 4
    driver.all_healed()
    assert driver.task.phase is TaskPhase.RUNNING


def test_it_has_as_many_instances_as_its_width_divides_into() -> None:
    task = running(FOUR, nodes=4, slots=1).task
    assert [layout_of(task, count).instances for count in (4, 3, 2, 1)] == [2, 1, 2, 1]
    wide = with_copies(msgspec.structs.replace(FOUR, dp=8), msgspec.structs.replace(FOUR, instances=4))
    assert wide.instances == 4 and not with_copies(wide, FOUR).buddy
    assert with_copies(msgspec.structs.replace(FOUR, sharded=False), FOUR).instances == 1


@pytest.mark.parametrize("first", ["n0", "n1", "n2", "n3"])
@pytest.mark.parametrize("second", ["n0", "n1", "n2", "n3"])
def test_a_guest_is_not_beside_the_other_holder_of_its_shard(first: str, second: str) -> None:
    """The next node would take both."""
    driver = running(FOUR, nodes=4, slots=1)
    for node in dict.fromkeys((first, second)):
        driver.disconnected(node)
        driver.probed(node, "gone")
        driver.all_up()
        task = driver.task
        homes = task.placement
        assert all(homes[rank] != homes[other] for rank in task.guests for other in FOUR.holders(rank) if other != rank)
        driver.all_healed()
    assert not driver.task.waits_why


def test_nodes_with_all_holders_of_a_shard_leave_the_others_to_wait() -> None:
    driver = running(FOUR, nodes=4, slots=1)
    for node in ("n1", "n3"):
        driver.disconnected(node)
    for node in ("n1", "n3"):
        driver.probed(node, "gone")
    assert set(driver.task.guests) == {1}, "decided while n3 might come back with the shard"
    assert "who keeps the copies of the shards of ranks [3] is gone" in driver.task.waits_why


# ------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("instances", "more", "says"),
    [
        (2, {}, ""),
        (4, {}, ""),
        (3, {}, "dp 4 does not divide"),
        (0, {}, "dp 4 does not divide"),
        (2, {"sharded": False}, "only a distributed optimizer"),
        (2, {"ep": 2}, "one of both must be 1"),
        (2, {"buddy": True}, "leave the buddies out"),
    ],
)
def test_numbers_that_cannot_be(instances: int, more: dict[str, object], says: str) -> None:
    layout = msgspec.structs.replace(FOUR, instances=instances, **more)
    found = refusal_of_instances(layout)
    assert says in found and bool(says) == bool(found)
    refused = refusal_of(Job(name="t", command=("true",), layout=layout))
    assert says in refused and bool(says) == bool(refused)


def test_a_layout_to_go_over_to_must_have_its_number_too() -> None:
    other = msgspec.structs.replace(FOUR, dp=3)
    job = Job(name="t", command=("true",), layout=FOUR, layouts=(FOUR, other))
    assert "layouts: 1,1,3" in refusal_of(job) and "dp 3 does not divide" in refusal_of(job)


def test_the_command_line_says_why(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    arguments = ["run", "--agents", "3", "--optimizer", "distributed", "--optimizer-instances", "2", __file__]
    assert main(arguments) == 2
    assert "dp 3 does not divide" in capsys.readouterr().err
