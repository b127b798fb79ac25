"""Process groups by epoch in the living process: stand-ins at first, real ones by difference.

Every worker builds its model over stand-in groups (stand_ins.py): no peers are needed, so a member, an understudy and a
joiner are built alike. All handles to those groups (parallel_state's globals, modules, DDP buffers, optimizer, what a
script keeps) are found once (handles.py), and rebound whenever a group is made for an epoch; one that is missed is
refused by name (missed_handles.py). Groups with the same members share one gloo group (18 groups are 5 member lists:
MECHANICS 3.4).

The sockets of a group are those that appear while it is made; the native monitor is told them, because nothing in
PyTorch frees a rank that is blocked in a gloo collective (MECHANICS 3.2) and shutting its sockets does, except where
gloo loses the operation (watched_group.py).

Private API of torch.distributed is used and pinned by tests: _world, _update_default_pg, _register_process_group.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from unicron import _core
from unicron.training.gloo_device import make_device
from unicron.training.handles import Site
from unicron.training.missed_handles import find_handles
from unicron.training.nccl_groups import NcclGroups
from unicron.training.pair import GlooPair, NcclPair
from unicron.training.registries import forget_all_groups, forget_group
from unicron.training.stand_ins import Ranks, end_stand_ins
from unicron.training.watched_group import (
    COLLECTIVE_TIMEOUT,
    CONNECT_TIMEOUT,
    SHUT_S,
    AtOperation,
    Check,
    Helpers,
    WatchedGroup,
)
from unicron.types import EpochPlan, Layout, Rank

Connected = tuple[Any, Any]  # a gloo group with (descriptor, inode) of its sockets; an NCCL group with its backend
How = tuple[Helpers, Check]  # who waits for it, and what ends the wait
CLOSE_S_MAX = 5.0


class GroupInterrupted(RuntimeError):
    """A newer epoch was announced, or a member died, while groups were being made."""


def wait_out(works: Iterable[Any], is_broken: Callable[[BaseException], bool]) -> None:
    """Operations of a group that was ended: each ends, or is given up, and nothing writes to its memory afterwards.
    is_broken: of an error: that of an operation with others; any other is raised."""
    gave_up = False
    for work in works:
        if gave_up and not work.is_completed():
            continue  # as long ago as this one was given up, its connections were shut, too
        try:
            work.wait()
        except Exception as error:
            if not is_broken(error):
                raise
            gave_up = gave_up or not work.is_completed()


class Groups:
    """This rank's process groups. register: see _core.WorkerMonitor.register_group / forget_group."""

    def __init__(self, rank: Rank, layout: Layout, monitor: Any, pulse: Any, gpu: int | None = None) -> None:
        """gpu: this worker's; None: it trains on a CPU."""
        self.rank, self.layout, self._monitor, self._pulse = rank, layout, monitor, pulse
        self._sites: list[Site] = []
        self._lists: list[Ranks] = []  # distinct member lists of two or more at full width that hold this rank
        self._live: dict[Ranks, dist.ProcessGroup] = {}  # by member list at full width
        self._ids: dict[Ranks, int] = {}
        self._next_id = itertools.count(1)
        self._retired: list[WatchedGroup] = []  # replaced handles stay referenced until every site is rebound
        self._lost: list[WatchedGroup] = []  # with operations that gloo never ends
        self._helpers = Helpers()
        self._prepared_for: EpochPlan | None = None  # announced: its groups stand beside those in use
        self._prepared: dict[Ranks, Connected] = {}
        self._spare: Any = None  # the group of this worker alone, made while it waited
        self._nccl = None if gpu is None else NcclGroups(monitor, gpu, self._helpers)
        self._members: dict[Ranks, Ranks] = {}  # the live members of each group, in order
        self._rank_lists: dict[str, list[Rank]] = {}  # parallel_state's own lists of ranks, at full width
        # torch's number of a rank: its place in the default group. Ranks are stable, those are not.
        self._number: dict[Rank, int] = {r: r for r in range(layout.world_size)}
        self.world: dist.ProcessGroup | None = None
        self.at_operation: AtOperation | None = None  # of groups made from now on (gloo)
        self.at_making: Callable[[int], None] = lambda number: None  # a rebuild has made so many, and makes one more
        self._device: Any = None  # gloo's, from open() on

    # -------------------------------------------------------------- once

    def adopt_handles(self, roots: Mapping[str, Any]) -> None:
        """Find all handles and the member lists behind them. roots: what holds them, by name. Raises MissedHandle."""
        from megatron.core import parallel_state

        self._sites = find_handles({"parallel_state": vars(parallel_state), **roots})
        lists = {site.ranks for site in self._sites if self.rank in site.ranks}
        every = tuple(range(self.layout.world_size))
        replica = self.layout.replica_ranks(self.layout.replica_of(self.rank))
        lists |= {every, tuple(sorted(replica)), self.layout.peers(self.rank), self.layout.holders(self.rank)}
        self._lists = sorted((r for r in lists if len(r) > 1), key=lambda r: (len(r), r))
        self._rank_lists = {
            name: list(value) for name, value in vars(parallel_state).items()
            if "_GLOBAL_RANKS" in name and isinstance(value, list)  # one ends in _WITH_CP
        }  # fmt: skip

    @property
    def is_on_gpu(self) -> bool:
        return self._nccl is not None

    def open(self) -> None:
        """For a role: the gloo device, and a real group for the sites of size 1. A rank that waits has neither: the
        device's thread looks around a hundred times a second. (On a GPU it was made while waiting: see warm_up.)"""
        alone = self._alone()
        self._register(alone, (self.rank,), "alone")
        for site in self._sites:
            if site.ranks == (self.rank,):
                site.bind(alone)
        self._live[(self.rank,)], self._members[(self.rank,)] = alone, (self.rank,)
        if self.layout.world_size == 1:
            c10d._update_default_pg(alone)
        end_stand_ins((self.rank,))

    def _gloo(self, store: dist.Store, index: int, size: int) -> Any:
        """All groups share one device, so one thread serves their connections, and a group costs no new thread of
        its own to start and to join."""
        options = dist.ProcessGroupGloo._Options()
        options._devices = [self._device]
        options._timeout = CONNECT_TIMEOUT
        return dist.ProcessGroupGloo(store, index, size, options)

    def warm_up(self) -> None:
        """What a waiting rank does beforehand: NCCL's first communicator of a process costs most of a second."""
        if self._nccl is not None:
            self._spare = self._nccl.alone()

    def _alone(self) -> Any:
        if self._nccl is not None:
            return self._spare if self._spare is not None else self._nccl.alone()
        self._device = make_device()
        backend = self._gloo(dist.HashStore(), 0, 1)
        return WatchedGroup(backend, self._helpers, lambda: "whole", self._pulse)

    # -------------------------------------------------------------- which is which

    def is_cross(self, ranks: Ranks) -> bool:
        return len({self.layout.replica_of(r) for r in ranks}) > 1

    @property
    def inside_lists(self) -> list[Ranks]:
        return [r for r in self._lists if not self.is_cross(r)]

    @property
    def cross_lists(self) -> list[Ranks]:
        return [r for r in self._lists if self.is_cross(r)]

    def replica_group(self) -> dist.ProcessGroup:
        """All ranks of my replica."""
        return self._live[tuple(sorted(self.layout.replica_ranks(self.layout.replica_of(self.rank))))]

    def _of_several(self, full: Ranks) -> dist.ProcessGroup | None:
        """A group of one exists where it is the world, or where the others are lost; nobody has to be asked there."""
        group = self._live.get(full)
        return None if group is None or group.size() == 1 else group

    def data_group(self) -> dist.ProcessGroup | None:
        """The live ranks of my position, one a replica; None when I am the only one."""
        return self._of_several(self.layout.peers(self.rank))

    def data_index(self, rank: Rank) -> int:
        """Place of a rank of my position in data_group()."""
        return self._members[self.layout.peers(self.rank)].index(rank)

    def shard_mates_group(self) -> dist.ProcessGroup | None:
        """The ranks with the shards outside of experts of my instance of the optimizer; None when I am the only one."""
        return self._of_several(self.layout.shard_mates(self.rank))

    def holders_group(self) -> dist.ProcessGroup | None:
        """The live ranks with my optimizer state; None when I am the only one."""
        return self._of_several(self.layout.holders(self.rank))

    def holders_index(self, rank: Rank) -> int:
        """Place of such a rank in holders_group()."""
        return self._members[self.layout.holders(self.rank)].index(rank)

    # -------------------------------------------------------------- by difference

    def rebuild_inside(self, plan: EpochPlan, touched: Ranks | None, store: Callable[[str], dist.Store]) -> int:
        """Groups inside my replica that hold a touched rank (None: all). Returns how many were made."""
        todo = [r for r in self.inside_lists if touched is None or set(touched) & set(r) or r not in self._live]
        return self._rebuild(plan, todo, store)

    def rebuild_cross(self, plan: EpochPlan, store: Callable[[str], dist.Store]) -> int:
        """Every group that spans replicas, over the live ranks: keeping a healthy one deadlocks (MECHANICS 1.1)."""
        made = self._rebuild(plan, self.cross_lists, store)
        if all(full in self._live for full in self._lists):
            end_stand_ins()  # also those that nothing holds but torch: it would find them by name
        return made

    def kept(self) -> int:
        """Groups of two or more members inside my replica."""
        return len([r for r in self.inside_lists if r in self._live])

    def _rebuild(self, plan: EpochPlan, todo: list[Ranks], store: Callable[[str], dist.Store]) -> int:
        for full in todo:
            self._forget(full)
        alive = set(plan.ranks)
        for number, full in enumerate(todo):
            self.at_making(number)
            members = tuple(r for r in full if r in alive)
            self._make(plan, full, members, store, world=len(full) == self.layout.world_size)
        return len(todo)

    def _make(
        self, plan: EpochPlan, full: Ranks, members: Ranks, store: Callable[[str], dist.Store], *, world: bool
    ) -> None:
        name = f"e{plan.epoch}:{'-'.join(map(str, full))}"
        group_id = next(self._next_id)
        make = self._make_gloo if self._nccl is None else self._make_nccl
        group = make(plan, full, members, store(name), name, group_id)
        self._live[full], self._ids[full], self._members[full] = group, group_id, members
        if self._monitor.newest_epoch() > plan.epoch:
            raise GroupInterrupted(f"epoch {self._monitor.newest_epoch()} while making groups of {plan.epoch}")
        self._register(group, members, name)
        if world:
            self.world = group
            c10d._update_default_pg(group)
            self._renumber(plan)
        for site in self._sites:
            if site.ranks == full:
                site.bind(group)
        end_stand_ins(full)

    def _make_gloo(
        self, plan: EpochPlan, full: Ranks, members: Ranks, store: dist.Store, name: str, group_id: int
    ) -> WatchedGroup:
        """gloo's own group over these members. It waits for all of them, and a newer epoch ends that wait."""

        ready = self._take_prepared(plan, full)
        if ready is None:
            how = self._helpers, self._check_of(plan)
            ready = self.connect(store, name, members.index(self.rank), len(members), how)
        backend, sockets = ready
        kind = self.layout.wait_kind(full)
        group = WatchedGroup(
            backend, self._helpers, lambda: str(self._monitor.group_state(group_id)), self._pulse, kind,
            self.at_operation,
        )  # fmt: skip
        self._monitor.register_group(group_id, sockets, list(members), self.is_cross(full))
        if self._monitor.group_state(group_id) == "broken":  # gloo closes its end when a member dies, now or long ago
            self._retired.append(group)
            raise GroupInterrupted(f"a connection of group {name} ended before it was used")
        return group

    def connect(self, store: dist.Store, name: str, index: int, size: int, how: How) -> Connected:
        """A gloo group of `size` members, of which this one is `index`. Its sockets are those that appear meanwhile."""
        before = set(_core.connected_sockets())
        helpers, check = how
        backend = helpers.call(lambda: self._gloo(dist.PrefixStore(name, store), index, size), check)
        backend._set_default_timeout(COLLECTIVE_TIMEOUT)
        return backend, [each for each in _core.connected_sockets() if each not in before]

    def connect_pair(self, store: dist.Store, index: int, how: How, is_over: Callable[[], bool]) -> GlooPair | NcclPair:
        """My role's leaver (index 0) and its joiner (1). From any thread, beside training."""
        name = f"pair{self.rank}"
        if self._nccl is None:
            return GlooPair(self.connect(store, name, index, 2, how)[0], how[0], is_over, self._pulse)
        _, backend = self._nccl.connect_beside(store, name, index, 2, *how)
        number = next(self._next_id)
        self._nccl.register(number, backend, [self.rank], True)  # every epoch ends it: by then it is of no use
        return NcclPair(self._nccl, number, backend, is_over, self._pulse)

    def prepare(self, plan: EpochPlan, store: dist.Store, how: How) -> int:
        """The groups that an announced plan will need, connected beside those in use. From any thread; everybody makes
        them in the same order. Returns the number of connections."""
        is_wounded = self.layout.replica_of(self.rank) in plan.wounded()
        connect = self._connect_alone if self._nccl is None else self._nccl.connect_beside
        ready: dict[Ranks, Connected] = {}
        count = 0
        try:
            for full in [r for r in self._lists if is_wounded or self.is_cross(r)]:
                members = tuple(r for r in full if r in plan.ranks)
                name = f"e{plan.epoch}:{'-'.join(map(str, full))}"
                ready[full] = connect(store, name, members.index(self.rank), len(members), *how)
                count += len(members) - 1
            how[1](0.0)
        except BaseException:
            self._let_go(ready)
            raise
        self.drop_prepared()
        self._prepared_for, self._prepared = plan, ready
        return count

    def _connect_alone(
        self, store: dist.Store, name: str, index: int, size: int, helpers: Helpers, check: Check
    ) -> Connected:
        connected = self.connect(store, name, index, size, (helpers, check))
        if len(connected[1]) != size - 1:  # somebody else connected meanwhile: whose sockets are these?
            raise GroupInterrupted(f"{len(connected[1])} sockets appeared with a group of {size}")
        return connected

    def _take_prepared(self, plan: EpochPlan, full: Ranks) -> Connected | None:
        return self._prepared.pop(full, None) if plan == self._prepared_for else None

    def drop_prepared(self, plan: EpochPlan | None = None) -> None:
        """A move was called off, or is over. plan: only what was prepared for that one."""
        if plan is not None and plan != self._prepared_for:
            return
        going, self._prepared, self._prepared_for = self._prepared, {}, None
        self._let_go(going)

    def _let_go(self, going: dict[Ranks, Connected]) -> None:
        """Destructors join threads that are on their way out: not here. NCCL's must be told to end before."""
        if self._nccl is not None:
            self._nccl.discard(backend for _, backend in going.values())
        elif going:
            threading.Thread(target=going.clear, name="unicron-release", daemon=True).start()

    def _make_nccl(
        self, plan: EpochPlan, full: Ranks, members: Ranks, store: dist.Store, name: str, group_id: int
    ) -> Any:
        assert self._nccl is not None
        ready = self._take_prepared(plan, full)
        if ready is None:
            place = members.index(self.rank)
            ready = self._nccl.connect(store, name, place, len(members), self._check_of(plan))
        group, backend = ready
        # Now and not before: the arrival of the plan that they are for would have ended them.
        self._nccl.register(group_id, backend, members, self.is_cross(full))
        return group

    def _check_of(self, plan: EpochPlan) -> Check:
        def check(seconds: float) -> None:
            newest = self._monitor.newest_epoch()
            if newest > plan.epoch and seconds > SHUT_S:
                raise GroupInterrupted(f"epoch {newest} while connecting a group of {plan.epoch}")

        return check

    def require_whole(self, *, inside: bool) -> None:
        """After a synchronisation: raises if what the last collectives left cannot be trusted. inside: only my
        replica's groups were used."""
        if self._nccl is None:
            return  # gloo raises by itself
        used = self.inside_lists if inside else self._lists
        self._nccl.require_whole(self._ids[full] for full in used if full in self._ids)

    def settle_broken(self) -> None:
        """After an operation that raised, in its thread: nothing that it left half done disturbs the next ones."""
        if self._nccl is not None:
            self._nccl.close_calls()

    def _register(self, group: Any, members: Ranks, name: str) -> None:
        group._set_group_name(name)  # type: ignore[arg-type]
        group._set_group_desc(name)
        world = c10d._world
        backend = "gloo" if self._nccl is None else "nccl"
        world.pg_map[group] = (backend, None)  # type: ignore[assignment]
        world.pg_names[group] = name  # type: ignore[assignment]
        world.pg_group_ranks[group] = self._numbered(members)
        world.pg_backend_config[group] = str(c10d.BackendConfig(dist.Backend(backend)))
        world.pg_to_tag[group] = f"ptd:{name}"
        world.tags_to_pg.setdefault(f"ptd:{name}", []).append(group)
        c10d._register_process_group(name, group)  # type: ignore[arg-type]

    def _numbered(self, members: Ranks) -> dict[int, int]:
        """Members by torch's numbers; ranks that the default group does not hold yet get numbers beyond it."""
        beyond = self.layout.world_size
        return {self._number.get(rank, beyond + rank): index for index, rank in enumerate(members)}

    def _renumber(self, plan: EpochPlan) -> None:
        """A new default group: torch and megatron look members up by their place in it, in every group."""
        from megatron.core import parallel_state

        self._number = {rank: index for index, rank in enumerate(plan.ranks)}
        for full, group in self._live.items():
            c10d._world.pg_group_ranks[group] = self._numbered(self._members[full])
        for name, ranks in self._rank_lists.items():
            setattr(parallel_state, name, [self._number[r] for r in ranks if r in self._number])

    def _forget(self, full: Ranks) -> None:
        group = self._live.pop(full, None)
        if group is None:
            return
        number = self._ids.pop(full)
        if self._nccl is None:
            self._monitor.forget_group(number)
            self._retired.append(group)
        else:
            self._nccl.retire(number)
        forget_group(group)

    def close(self) -> None:
        """The task is over here."""
        going, self._prepared, self._prepared_for = self._prepared, {}, None
        if self._nccl is not None:
            self._nccl.close(CLOSE_S_MAX, [backend for _, backend in going.values()])

    def dissolve(self) -> None:
        """This worker leaves its layout: no group of it stays in torch, and megatron's parallel_state stands empty."""
        from megatron.core import parallel_state

        for full in [*self._live]:
            if full in self._ids:
                self._forget(full)
            else:
                forget_group(self._live.pop(full))
        self.drop_prepared()
        self.release_retired()
        _never_destroyed.extend(self._lost)
        self._sites.clear()
        self.world = None
        parallel_state.destroy_model_parallel()
        end_stand_ins()
        forget_all_groups()

    def release_retired(self) -> None:
        """Between iterations: let the replaced groups go.

        In the background, because their destructors join threads that are still on their way out. A group that lost
        an operation is never destroyed: its destructor would wait for it.
        """
        if self._nccl is not None:
            self._nccl.release()
        self._lost += [group for group in self._retired if group.lost]
        going = [group for group in self._retired if not group.lost]
        self._retired.clear()
        if going:
            threading.Thread(target=going.clear, name="unicron-release", daemon=True).start()


#: Groups that lost an operation and whose Groups are gone: a destructor would wait for it.
_never_destroyed: list[WatchedGroup] = []
