"""Where members of an epoch tell one another how far they are: its store, and what was said there."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch.distributed as dist

from unicron.healing import events as on
from unicron.healing.machine import HealingMachine
from unicron.healing.record import Record, decode_record, encode_record
from unicron.runtime.store_client import StoreClient, StoreTimeout
from unicron.training import ending
from unicron.training.link import WorkerLink, now_ms
from unicron.training.store import RendezvousStore
from unicron.types import EpochPlan, PlanKind, Rank

#: For the others' records. Some may be in an evaluation that their script said is long: the coordinator knows of it,
#: and ends this wait by another plan where it is not so.
COME_MS_MAX = 4 * 3_600_000
LOOK_MS = 1_000  # whether the others have left


class Meeting:
    """Of one rank, for the life of its engine."""

    def __init__(self, link: WorkerLink, machine: HealingMachine) -> None:
        self._link, self._machine = link, machine
        self._clients: dict[str, StoreClient] = {}
        self.others_in = -1  # the newest iteration in which a script was when records were exchanged
        self.all_wait_at_end = False  # as they said then
        self.left_in: int | None = None  # the epoch in which all the others left their loops, and never meet again

    def client(self, plan: EpochPlan) -> StoreClient:
        if plan.store not in self._clients:
            self.close()
            welcome = self._link.welcome
            made = StoreClient(plan.store, plan.store_key, welcome.store_public, welcome.store_secret)
            self._clients = {plan.store: made}
        return self._clients[plan.store]

    def store(self, plan: EpochPlan) -> Callable[[str], dist.Store]:
        client = self.client(plan)

        def make(name: str) -> dist.Store:
            return RendezvousStore(client, f"{plan.task}/{plan.epoch}/{name}/", lambda: self.is_over(plan))

        return make

    def is_over(self, plan: EpochPlan) -> bool:
        return self._link.monitor.newest_epoch() > plan.epoch

    def all_leave(self, plan: EpochPlan, ms_max: int) -> bool:
        """Behind the last iteration; see ending.all_leave."""
        client, rank = self.client(plan), self._machine.rank
        is_over = functools.partial(self.is_over, plan)
        return ending.all_leave(client, plan.task, plan.epoch, rank, plan.ranks, is_over, ms_max)

    def exchange(self, plan: EpochPlan, where: str, ranks: tuple[Rank, ...], mine: Record) -> on.AnyEvent:
        """The records of these ranks, or that nobody comes any more. Raises StoreError: a newer epoch is known, or the
        store does not answer."""
        client, prefix = self.client(plan), f"{plan.task}/{plan.epoch}/{where}/"
        begins = plan.kind in (PlanKind.START, PlanKind.RESTORE)
        is_new = self._machine.plan is None or self._machine.is_ending  # an heir, or who did not hear of it
        if begins:
            ending.tell_met(client, plan.task, plan.epoch)
        elif is_new and self._have_left(plan):
            return on.OthersLeft()
        client.set(f"{prefix}{mine.rank}", encode_record(mine))
        keys, deadline = [f"{prefix}{rank}" for rank in ranks], now_ms() + COME_MS_MAX
        while True:
            try:
                found = client.multi_get(keys, LOOK_MS, cancelled=lambda: self.is_over(plan))
                break
            except StoreTimeout:
                if now_ms() > deadline:
                    raise
                if not begins and self._have_left(plan):
                    return on.OthersLeft()
        if where == "world":
            ending.tell_met(client, plan.task, plan.epoch)
        records = [decode_record(record) for record in found]
        self.others_in = max(self.others_in, *(each.loop for each in records))
        self.all_wait_at_end = all(each.waits_at_end for each in records)
        return on.RecordsGathered(records)

    def _have_left(self, plan: EpochPlan) -> bool:
        self.left_in = ending.left_in(self.client(plan), plan.task)
        return self.left_in is not None

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
