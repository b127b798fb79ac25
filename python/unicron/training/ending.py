"""Behind the last iteration: do all leave, or do all meet a newer plan? One answer for everybody of an epoch.

In the epoch's store. Each member says that its loop is over, and when all have, that it saw so: who died while it
waited says nothing more, and is replaced. Whoever has seen all of it proposes that they leave, whoever was broken off
by a newer plan that they meet it, and the first proposal stands: else one would leave while another waits for it at a
meeting. Who dies after its last word is missed by nobody but the rest of its own script.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from unicron.runtime.store_client import Cancelled, StoreClient, StoreError, StoreTimeout
from unicron.types import Rank

LEAVE, MEET = b"leave", b"meet"
COMES_S_MAX = 30.0  # until a plan of which others know, or which tells of the store's end, is here
LOOK_S = 0.02


def all_leave(
    client: StoreClient, prefix: str, rank: Rank, ranks: Iterable[Rank], is_over: Callable[[], bool], ms_max: int
) -> bool:
    """Whether everybody leaves; else a newer plan stands, or will, and all meet it.

    prefix: of the epoch's keys. is_over: a newer epoch is known here, as it is whenever this returns False. ms_max: for
    everybody's loop to be over; then they leave, whoever is missing. Never raises a StoreError.
    """
    ranks = tuple(ranks)
    try:
        try:
            for word in ("over", "seen"):
                client.set(f"{prefix}{word}/{rank}", b"1")
                client.wait([f"{prefix}{word}/{each}" for each in ranks], ms_max, cancelled=is_over)
            proposal = LEAVE
        except Cancelled:
            proposal = MEET
        except StoreTimeout:
            proposal = LEAVE
        if client.compare_set(f"{prefix}verdict", b"", proposal) == LEAVE:
            return True
    except StoreError:  # nobody can agree on anything: its node is lost, or this epoch is long over
        pass
    return not _comes(is_over)


def _comes(is_over: Callable[[], bool]) -> bool:
    """Some have heard of it, or are about to."""
    deadline = time.monotonic() + COMES_S_MAX
    while not is_over() and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    return is_over()
