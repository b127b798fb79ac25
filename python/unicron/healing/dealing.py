"""Who computes which micro-batch: global numbers 0..M-1 over replicas.

In an undisturbed iteration each replica takes a contiguous run, in order of replica index. When a replica is lost in
mid-iteration its micro-batches are dealt round-robin over the others, which keep their own sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def assigned(replica: int, replicas: Sequence[int], num_micro_batches: int) -> tuple[int, ...]:
    """The contiguous share of `replica`; the first M mod n replicas take one more. Empty if it is not among them."""
    if replica not in replicas:
        return ()
    index, count = sorted(replicas).index(replica), len(replicas)
    base, more = divmod(num_micro_batches, count)
    start = index * base + min(index, more)
    return tuple(range(start, start + base + (1 if index < more else 0)))


def deal(
    num_micro_batches: int,
    dealt: Sequence[int],
    live: Sequence[int],
    have: Mapping[int, Iterable[int]],
) -> dict[int, tuple[int, ...]]:
    """What each live replica still has to compute, so that every micro-batch is counted exactly once.

    Args:
        dealt: replicas over which the iteration was dealt when it began.
        live: replicas that go on.
        have: for each live replica with complete sums, the micro-batches in them.
    """
    counted: set[int] = set()
    for replica in live:
        mine = set(have.get(replica, ()))
        if counted & mine:
            raise AssertionError(f"micro-batches {sorted(counted & mine)} counted twice")
        counted |= mine
    todo: dict[int, list[int]] = {replica: [] for replica in live}
    for replica in live:
        if replica not in have:
            own = [m for m in assigned(replica, dealt, num_micro_batches) if m not in counted]
            todo[replica] = own
            counted.update(own)
    takers = [r for r in live if r in dealt] or list(live)
    for index, micro_batch in enumerate(m for m in range(num_micro_batches) if m not in counted):
        todo[takers[index % len(takers)]].append(micro_batch)
    return {replica: tuple(sorted(todo[replica])) for replica in live}
