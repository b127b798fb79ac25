"""Who is behind, out of the numbers of collectives that ranks' texts state. Pure.

Numbers count per process group and are compared inside one only. In a group, whoever has started the oldest collective
that has not ended waits for whoever has not; where all have started it, for whoever has not ended what others have (a
device that stopped). A rank that is behind in one group because it waits in another is no root: the edges are followed
to their end, as for flight recorder dumps (flight.py). And where nobody but one rank has begun anything, that one has
gone on alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from unicron.diagnosis.collectives import TIMED_OUT, UNKNOWN_GROUP, are_mixed
from unicron.diagnosis.naming import as_number
from unicron.diagnosis.reader import RankText
from unicron.diagnosis.words import Progress

SHARE_MAX = 0.5  # more ranks than this share behind are no root: the others are ahead
# Members of one group wait at nearly the same number. Numbers without the name of their group that are further apart
# than this share of them (or than two, of small ones) are of different groups.
GAP_SHARE_MAX = 0.02
FEW = 2  # so many ranks have no majority


def laggards(ranks: Mapping[str, RankText]) -> list[str]:
    """The ranks that others wait for in some group, and that wait for nobody themselves."""
    groups = _groups(ranks)
    waits: set[str] = set()
    late: set[str] = set()
    for group, members in groups.items():
        behind = set() if are_mixed(p.member for p in members.values()) else _behind(group, members)
        late |= behind
        waits |= members.keys() - behind if behind else set()
    return sorted(late - waits, key=as_number)


def runaway(ranks: Mapping[str, RankText], told: Set[str]) -> str | None:
    """The one rank that went on alone: the others stand together where it left them, with nothing begun.

    Whoever is late in a collective is in the minority; where all others are, the program is elsewhere.

    Args:
        told: ranks that only heard of another one's timeout.
    """
    found = {rank for members in _groups(ranks).values() for rank in _alone(members, told)}
    return found.pop() if len(found) == 1 else None


def is_pending(progress: Progress) -> bool:
    """Has it started what it has not ended?"""
    return progress.completed is not None and progress.enqueued > progress.completed


def _groups(ranks: Mapping[str, RankText]) -> dict[str, dict[str, Progress]]:
    """By group: the ranks that say how far they are in it."""
    groups: dict[str, dict[str, Progress]] = {}
    for rank, entry in ranks.items():
        for group, progress in entry.progress.items() if rank else ():
            groups.setdefault(group, {})[rank] = progress
    return groups


def _alone(members: Mapping[str, Progress], told: Set[str]) -> set[str]:
    ahead = {rank for rank, progress in members.items() if is_pending(progress)}
    if len(ahead) != 1 or len(members) <= FEW or are_mixed(p.member for p in members.values()):
        return set()
    left = {progress.enqueued for rank, progress in members.items() if rank not in ahead}
    left |= {progress.completed or 0 for progress in members.values()}
    return ahead if len(left) == 1 and members.keys() - ahead <= told else set()


def _behind(group: str, members: Mapping[str, Progress]) -> set[str]:
    started = {rank: progress.enqueued for rank, progress in members.items()}
    done = {rank: progress.completed for rank, progress in members.items() if progress.completed is not None}
    if group.endswith(TIMED_OUT):
        return set() if group == UNKNOWN_GROUP + TIMED_OUT and not _is_one_group(started) else _fewest(started)
    if len(done) < len(started):
        return _fewest(started)
    pending = max(done.values()) + 1  # the oldest collective that nobody has ended
    absent = {rank for rank, number in started.items() if number < pending}
    return _minority(absent, members) or _fewest(done) or _odd(started)


def _is_one_group(numbers: Mapping[str, int]) -> bool:
    """Could these numbers be of one group, though no line says so?"""
    highest = max(numbers.values())
    return highest - min(numbers.values()) <= max(2, GAP_SHARE_MAX * highest)


def _odd(started: Mapping[str, int]) -> set[str]:
    """Programs run ahead of their device by different amounts: only if all but a few agree, those stopped earlier."""
    return _fewest(started) if len(set(started.values())) == 2 and len(started) > FEW else set()


def _fewest(numbers: Mapping[str, int]) -> set[str]:
    lowest = min(numbers.values(), default=0)
    return _minority({rank for rank, number in numbers.items() if number == lowest}, numbers)


def _minority(behind: set[str], members: Mapping[str, object]) -> set[str]:
    return behind if len(behind) <= SHARE_MAX * len(members) else set()
