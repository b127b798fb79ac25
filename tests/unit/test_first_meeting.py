"""A failure while a START may not have been met by everybody.

Found by the matrix on a busy machine (1,2,2, a death at the first forward): one stage of the whole replica had made its
groups and computed, the other was still making them when the new epoch came. The one went to the new meeting, the other
waited for it in the pipeline, and only the healing's bound of a minute freed both.
"""

from __future__ import annotations

import pytest

from machines import Coordinator, running
from unicron.types import Layout

PIPELINE = Layout(pp=2, dp=2, num_micro_batches=4)


def wounded(driver: Coordinator) -> tuple[int, ...]:
    assert driver.task.plan is not None and driver.task.plan.epoch == 2
    return driver.task.plan.wounded()


@pytest.mark.parametrize("layout", [PIPELINE, Layout(tp=2, dp=2, num_micro_batches=4)])
def test_a_death_before_the_first_commit_wounds_every_replica(layout: Layout) -> None:
    driver = running(layout)
    driver.lost("n1.w0", "signal 9", iteration=0)
    assert wounded(driver) == (0, 1)


def test_so_does_what_breaks_between_living_ranks() -> None:
    driver = running(PIPELINE)
    driver.failed("n1.w0", inside=True, iteration=0)
    driver.fire("diagnose/" + driver.task.name)
    assert wounded(driver) == (0, 1)


def test_whoever_is_in_a_later_iteration_shows_that_all_have_met() -> None:
    driver = running(PIPELINE)
    driver.lost("n1.w0", "signal 9", iteration=1)
    assert len(wounded(driver)) == 1
    driver = running(PIPELINE)
    driver.failed("n1.w0", inside=True, iteration=1)
    driver.fire("diagnose/" + driver.task.name)
    assert len(wounded(driver)) == 1


def test_a_replica_of_one_rank_waits_for_nobody_inside() -> None:
    driver = running(Layout(dp=4, num_micro_batches=4))
    driver.lost("n1.w0", "signal 9", iteration=0)
    assert len(wounded(driver)) == 1
