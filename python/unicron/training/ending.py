"""Behind the last iteration: do all leave, or do all meet a newer plan? One answer for everybody of an epoch.

In the epoch's store. Each member says that its loop is over, and when all have, that it saw so: who died while it
waited says nothing more, and is replaced. Whoever has seen all of it proposes that they leave, whoever was broken off
by a newer plan that they meet it, and the first proposal stands: else one would leave while another waits for it at a
meeting. Who dies after its last word is missed by nobody but the rest of its own script: an heir finds what the epoch
before decided, meets nobody, and runs that rest alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from unicron.runtime.store_client import ANSWER_MS_MAX, Cancelled, StoreClient, StoreError, StoreTimeout
from unicron.types import Rank

LEAVE, MEET = b"leave", b"meet"
COMES_S_MAX = 30.0  # until a plan of which others know, or which tells of the store's end, is here
LOOK_S = 0.02
ALWAYS = 1 << 40  # an "epoch" of keys that outlive those of epochs


def _told(task: str, word: str) -> str:
    return f"{task}/{ALWAYS}/{word}"


def tell_met(client: StoreClient, task: str, epoch: int) -> None:
    """Members of this epoch train from here on, whatever was over before."""
    client.set(_told(task, "met"), b"%d" % epoch)


def left_in(client: StoreClient, task: str) -> int | None:
    """The epoch in which all left their loops, if nobody met afterwards. None also when the store does not say now."""
    left, met = _told(task, "left"), _told(task, "met")
    try:
        if not client.check([left]):
            return None
        epoch = int(client.get(left, ANSWER_MS_MAX))
        return epoch if not client.check([met]) or int(client.get(met, ANSWER_MS_MAX)) <= epoch else None
    except StoreError:
        return None


def all_leave(
    client: StoreClient, task: str, epoch: int, rank: Rank, ranks: Iterable[Rank], is_over: Callable[[], bool],
    ms_max: int,
) -> bool:  # fmt: skip
    """Whether everybody leaves; else a newer plan stands, or will, and all meet it.

    is_over: a newer epoch is known here, as it is whenever this returns False. ms_max: for everybody's loop to be over;
    then they leave, whoever is missing. Never raises a StoreError.
    """
    ranks, prefix = tuple(ranks), f"{task}/{epoch}/end/"
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
            client.set(_told(task, "left"), b"%d" % epoch)
            client.check([_told(task, "left")])  # it is there before anything that may fail here
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
