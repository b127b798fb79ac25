"""Timers of a daemon: each fires once, in order, and no round of them is without end."""

from __future__ import annotations

from unicron.runtime.timers import Timers


def test_in_order_once_and_as_they_were_moved() -> None:
    timers = Timers()
    for name, at_ms in (("c", 3.0), ("a", 1.0), ("b", 2.0), ("later", 9.0), ("moved", 2.5), ("gone", 2.6)):
        timers.set(name, at_ms)
    fired = []
    for name in timers.due(4.0):
        fired.append(name)
        if name == "a":
            timers.set("moved", 8.0)
            timers.cancel("gone")
    assert fired == ["a", "b", "c"]
    assert list(timers.due(10.0)) == ["moved", "later"] and list(timers.due(99.0)) == []


def test_a_timer_that_is_always_due_does_not_keep_the_loop() -> None:
    """A thousand suspected nodes ask again every 250 ms; a round of their steps may take longer than that."""
    timers = Timers()
    timers.set("verdict/n0", 1.0)
    rounds = 0
    for name in timers.due(5.0):
        rounds += 1
        timers.set(name, 5.0)  # due at once, by the time that this round began
        assert rounds < 3
    assert rounds == 1 and timers.wait_ms(6.0, 100.0) == 0.0
