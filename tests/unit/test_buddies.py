"""Copies of shards between three ranks over real gloo in one process: kept, sent, refused, and gone back to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from unicron.healing.buddies import Copy, common_version
from unicron.healing.record import Record
from unicron.healing.resolve import Fetch
from unicron.training import buddies, courier
from unicron.training.buddies import Buddies, CopyDiffers, buddy_bytes
from unicron.training.optimizer_state import force_optimizer_state
from unicron.training.watched_group import LostOperation
from unicron.types import EpochPlan, Layout, Member, PlanKind, Stage

RANKS = 3
SIZES = (33, 7, 64)
EXTRA = torch.frombuffer(bytearray(b"state".ljust(1024, b"\xc1")), dtype=torch.uint8)
TIMEOUT = timedelta(seconds=20)


class Rank:
    """One of them: an optimizer whose step adds one to everything."""

    def __init__(self, rank: int, layout: Layout, group: Any, pool: object) -> None:
        torch.manual_seed(rank)
        self.params = [torch.nn.Parameter(torch.randn(size)) for size in SIZES]
        self.optimizer = torch.optim.AdamW(self.params)
        force_optimizer_state(SimpleNamespace(optimizer=self.optimizer))
        model = SimpleNamespace(
            buffers=[SimpleNamespace(grad_data=torch.zeros(RANKS * sum(SIZES)))], expert_parallel_buffers=[],
            parameters=lambda: self.params,
        )  # fmt: skip
        memory = SimpleNamespace(
            optimizer=SimpleNamespace(optimizer=self.optimizer),
            buddy=torch.zeros(buddy_bytes(model, layout), dtype=torch.uint8),
            pool=pool, device=torch.device("cpu"),
        )  # fmt: skip
        groups = SimpleNamespace(
            data_group=lambda: group, data_index=lambda other: other, require_whole=lambda inside: None
        )  # fmt: skip
        self.rank, self.buddies = rank, Buddies(rank, layout, memory, groups)  # type: ignore[arg-type]
        self.was: dict[int, list[bytes]] = {}  # state by iteration

    def step(self, plan: EpochPlan, iteration: int) -> None:
        for tensor in self._tensors():
            tensor.add_(1.0)
        self.was[iteration] = self.bits()
        self.buddies.after_step(plan, iteration, EXTRA)

    def bits(self) -> list[bytes]:
        return [tensor.numpy().tobytes() for tensor in self._tensors()]

    def _tensors(self) -> list[torch.Tensor]:
        return [t for p in self.params for t in (p.data, *self.optimizer.state[p].values())]

    def record(self) -> Record:
        return Record(self.rank, 0, Stage.COMPUTE, copies=self.buddies.copies(), kept=self.buddies.kept())


class World:
    def __init__(self, every: int, pool: object = None) -> None:
        """pool: as if the state were in this GPU's."""
        self.layout = Layout(dp=RANKS, num_micro_batches=RANKS, sharded=True, buddy=True, buddy_every=every)
        members = tuple(Member(rank, f"n{rank}", f"w{rank}") for rank in range(RANKS))
        self.plan = EpochPlan("t", 1, PlanKind.START, self.layout, tuple(range(RANKS)), members)
        self._pool = ThreadPoolExecutor(RANKS)
        store = dist.HashStore()
        groups = self.together(lambda rank: dist.ProcessGroupGloo(store, rank, RANKS, TIMEOUT))
        self.ranks = [Rank(rank, self.layout, _Group(group), pool) for rank, group in enumerate(groups)]

    def together(self, what: Callable[[int], Any]) -> list[Any]:
        """what(rank) of all at once; an exception is a result."""

        def caught(rank: int) -> Any:
            try:
                return what(rank)
            except CopyDiffers as error:
                return error

        return list(self._pool.map(caught, range(RANKS), timeout=30))

    def hand_over(self, fetch: Fetch, holder: int, heir: int) -> list[Any]:
        """The holder serves, the heir takes, the others are not concerned."""
        serving, taking = self.ranks[holder].buddies, self.ranks[heir].buddies
        return self.together(
            lambda r: serving.serve(fetch, []) if r == holder else taking.take(fetch, []) if r == heir else None
        )

    def step(self, iteration: int) -> list[Any]:
        return self.together(lambda rank: self.ranks[rank].step(self.plan, iteration))

    def common(self, lost: int = -1) -> int:
        records = [rank.record() if rank.rank != lost else Record(lost, 0, Stage.STARTING) for rank in self.ranks]
        found = common_version(records)
        return -1 if found is None else found[0]

    def close(self) -> None:
        self._pool.shutdown()


class _Group:
    """As dist.isend and dist.recv use a group, without torch's registry."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """The four calls, straight to the backend: its registry holds one group of each process only."""

    def begin(name: str) -> Callable[..., Any]:
        peer = "group_dst" if name == "send" else "group_src"
        return lambda tensor, group, **to: getattr(group.backend, name)([tensor], to[peer], 0)

    monkeypatch.setattr(dist, "isend", begin("send"))
    monkeypatch.setattr(dist, "irecv", begin("recv"))
    monkeypatch.setattr(dist, "send", lambda *args, **more: begin("send")(*args, **more).wait())
    monkeypatch.setattr(dist, "recv", lambda *args, **more: begin("recv")(*args, **more).wait())

    def exchange(piece: torch.Tensor, peer: int, group: Any, _device: object, *, receives: bool) -> None:
        (group.backend.recv if receives else group.backend.send)([piece], peer, 0).wait()

    def exchange_both(carrying: Any, group: Any, to: int, source: int) -> list[Any]:
        sending = group.backend.send([carrying.leaving], to, 0)
        return [group.backend.recv([carrying.arriving], source, 0), sending]

    monkeypatch.setattr(buddies, "exchange", exchange)
    monkeypatch.setattr(courier, "exchange_both", exchange_both)
    monkeypatch.setattr(courier, "PIECE_BYTES", 1000)  # several, and a part of one


@pytest.fixture(params=[None, "a GPU's"], ids=["host", "courier"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[int], World]]:
    worlds: list[World] = []

    def make_one(every: int) -> World:
        worlds.append(World(every, request.param))
        return worlds[-1]

    yield make_one
    for world in worlds:
        world.close()


@pytest.mark.parametrize("every", [2, 3, 5])
def test_a_lost_node_costs_at_most_the_interval_and_one(make: Callable[[int], World], every: int) -> None:
    world = make(every)
    for iteration in range(1, 3 * every + 2):
        assert world.step(iteration) == [None] * RANKS
        for lost in range(RANKS):
            common = world.common(lost)
            assert common >= 1 and iteration + 1 - common <= every + 1
            # One more iteration may be committed before what travels is waited for.


def test_copies_of_every_step_are_as_new_as_the_state(make: Callable[[int], World]) -> None:
    world = make(0)
    for iteration in range(1, 4):
        assert world.step(iteration) == [None] * RANKS
        for rank in world.ranks:
            assert Copy((rank.rank - 1) % RANKS, iteration) in rank.buddies.copies()
    assert all(rank.buddies.kept() == () for rank in world.ranks)


def test_going_back_gives_the_bits_of_then(make: Callable[[int], World]) -> None:
    world = make(2)
    for iteration in range(1, 7):
        world.step(iteration)
    common = world.common(2)
    for rank in world.ranks:
        assert rank.bits() != rank.was[common]
        assert rank.buddies.go_back(common).startswith(b"state")
        assert rank.bits() == rank.was[common]
        rank.buddies.forget(after=common)
        assert max(rank.buddies.kept()) == common


def test_an_heir_gets_its_shard_from_the_holder(make: Callable[[int], World]) -> None:
    world = make(2)
    for iteration in range(1, 6):
        world.step(iteration)
    common = world.common(2)
    heir = world.ranks[2]
    heir.buddies._memory.buddy.zero_()
    for tensor in heir._tensors():
        tensor.zero_()
    fetch = Fetch(0, 0, (2,), True, common)
    done = world.hand_over(fetch, holder=0, heir=2)
    assert bytes(done[2]).startswith(b"state") and heir.bits() == heir.was[common]
    assert common in heir.buddies.kept()


def test_what_did_not_arrive_as_it_was_sent_is_no_copy(make: Callable[[int], World]) -> None:
    world = make(0)
    world.step(1)
    world.ranks[1].buddies.spoil_next = True
    results = world.step(2)
    assert [isinstance(result, CopyDiffers) for result in results] == [False, False, True]
    assert world.ranks[2].buddies.copies() == (Copy(1, 1),)


def test_a_copy_that_something_wrote_into_is_refused_on_both_sides(make: Callable[[int], World]) -> None:
    world = make(2)
    for iteration in range(1, 4):
        world.step(iteration)
    common = world.common(2)
    holder = world.ranks[0]
    slot = next(slot for slot in holder.buddies._wards() if slot.whole() == Copy(2, common))
    slot.body[2000] ^= 1
    fetch = Fetch(0, 0, (2,), True, common)
    results = world.hand_over(fetch, holder=0, heir=2)
    assert isinstance(results[0], CopyDiffers) and isinstance(results[2], CopyDiffers)
    assert Copy(2, common) not in holder.buddies.copies()
    assert world.common(2) < common  # the next source is the older one, or the checkpoint


def test_what_was_kept_and_is_written_into_is_not_gone_back_to(make: Callable[[int], World]) -> None:
    world = make(2)
    world.step(1)
    rank = world.ranks[0]
    before = rank.bits()
    rank.buddies._own()[0].body[2000] ^= 1
    with pytest.raises(CopyDiffers):
        rank.buddies.go_back(1)
    assert rank.buddies.kept() == () and rank.bits() == before


def test_a_new_epoch_renews_the_copies_at_once_and_keeps_what_all_can_go_back_to(make: Callable[[int], World]) -> None:
    world = make(5)
    for iteration in range(1, 8):
        world.step(iteration)
    common = world.common(1)
    for rank in world.ranks:
        rank.buddies.abandon()
        rank.buddies.agreed(common)
    world.plan = EpochPlan("t", 2, PlanKind.REPLACE, world.layout, world.plan.replicas, world.plan.members)
    world.step(8)
    assert world.common(1) == 8
    assert all(common in rank.buddies.kept() for rank in world.ranks)


def test_a_carriage_that_is_given_up_ends_with_the_piece_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recovery waited until a whole shard had gone to the host."""
    monkeypatch.setattr(courier, "PIECE_BYTES", 8)
    begun, goes_on = threading.Event(), threading.Event()
    put = courier.Courier._put

    def held_up(made: courier.Courier, arriving: Any) -> None:
        begun.set()
        assert goes_on.wait(10)
        put(made, arriving)

    monkeypatch.setattr(courier.Courier, "_put", held_up)
    made = courier.Courier(torch.device("cpu"), 64)
    made.leaving.fill_(7)
    own = torch.zeros(64, dtype=torch.uint8)
    carriage = courier.Carriage(made, [], own, torch.zeros_like(own), lambda: True)
    assert begun.wait(10)
    carriage.give_up()
    assert carriage.is_stuck
    goes_on.set()
    with pytest.raises(LostOperation, match="given up"):
        carriage.wait()
    assert not carriage.is_stuck and not carriage.is_kept and not carriage.is_right
    assert int(own.sum()) < 7 * 16, "two pieces at most went to the host"


def test_who_waits_for_a_carriage_hears_that_it_comes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A healthy copy of seconds looked like a wait for nobody."""
    monkeypatch.setattr(courier, "PIECE_BYTES", 8)
    monkeypatch.setattr(courier, "LOOK_S", 0.001)
    put = courier.Courier._put
    monkeypatch.setattr(courier.Courier, "_put", lambda self, what: (time.sleep(0.02), put(self, what))[1])
    made = courier.Courier(torch.device("cpu"), 64)
    own, moved = torch.zeros(64, dtype=torch.uint8), []
    carriage = courier.Carriage(made, [], own, torch.zeros_like(own), lambda: True)
    carriage.wait(lambda: moved.append(1))
    assert carriage.is_kept and carriage.is_right and len(moved) >= 4
