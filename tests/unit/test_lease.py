"""A coordinator's lease, by its own clock; and the simulated disk and etcd that it is tried against."""

from __future__ import annotations

import random

import pytest

from unicron.coordinator.lease import Lease, refused_append
from unicron.sim.disk import Disk, DiskFull


def test_it_ends_before_anybody_can_follow_and_counts_from_the_question() -> None:
    lease = Lease(5_000.0, 2_500.0, asked_ms=100.0)
    assert lease.left_ms(100.0) == 2_500.0
    assert lease.left_ms(2_600.0) == 0.0
    lease.refreshed(1_000.0)
    assert lease.left_ms(2_600.0) == 900.0
    lease.refreshed(500.0)  # an older question, answered late
    assert lease.left_ms(2_600.0) == 900.0


def test_what_is_lost_stays_lost() -> None:
    """A refresh that was under way when the journal said that another one leads."""
    lease = Lease(5_000.0, 2_500.0, asked_ms=0.0)
    lease.lose()
    lease.refreshed(1_000.0)
    assert lease.left_ms(1_000.0) < 0


@pytest.mark.parametrize(
    ("leader", "head", "outcome"),
    [(7, 4, "written"), (7, 3, "broken"), (7, 5, "broken"), (8, 4, "followed"), (None, 3, "followed")],
)
def test_a_refused_append(leader: int | None, head: int, outcome: str) -> None:
    assert refused_append(leader, own=7, head=head, before=3) == outcome


def test_a_transaction_is_on_the_disk_whole_or_not_at_all() -> None:
    rng = random.Random(1)
    seen = set()
    for _ in range(400):
        disk = Disk(rng)
        disk.write(b"first" * 20, 0.0, commits=True)
        disk.sync()
        for number in range(3):
            disk.write(bytes([65 + number]) * rng.randint(1, 200), 0.0, commits=number == 2)
        survived, lost = disk.crash()
        seen.add((len(survived), lost))
        assert disk.entries[0] == b"first" * 20 and len(disk.entries) == 1 + len(survived)
    assert seen == {(0, 3), (3, 0)}


def test_a_full_disk_takes_nothing_of_a_transaction() -> None:
    disk = Disk(random.Random(1))
    disk.write(b"one", 0.0, commits=False)
    disk.full_until_ms = 10.0
    with pytest.raises(DiskFull):
        disk.write(b"two", 5.0, commits=True)
    assert disk.crash() == ([], 0) and disk.entries == []
