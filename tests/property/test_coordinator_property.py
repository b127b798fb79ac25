"""Whatever arrives in whatever order: the machine refuses or takes it, keeps its invariants, and forgets nothing.

The events are drawn from what agents and people can say about a small task, with wrong epochs, unknown workers and
repetitions among them. Invariants run inside every step; here a replay of the journal must give the same facts, and
no plan may name two workers for a role or go back in epochs.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from machines import TASK, Coordinator, running
from unicron.coordinator import events as on
from unicron.coordinator.actions import SendAgent, WriteJournal
from unicron.coordinator.job import Job
from unicron.coordinator.journal import EpochDecided
from unicron.coordinator.placement import place_replica
from unicron.coordinator.transitions import TERMINAL
from unicron.messages import PublishEpoch, Saved
from unicron.sim.checkers import facts
from unicron.types import Layout

NODES = ("n0", "n1")
WORKERS = tuple(f"{node}.w{number}" for node in NODES for number in range(5))

EVENTS = st.one_of(
    st.tuples(st.just("up"), st.sampled_from(WORKERS)),
    st.tuples(st.just("lost"), st.sampled_from(WORKERS), st.sampled_from(["", "signal 9", "exit code 3"])),
    st.tuples(st.just("exited"), st.sampled_from(WORKERS)),
    st.tuples(st.just("stopped"), st.sampled_from(WORKERS)),
    st.tuples(st.just("continued"), st.sampled_from(WORKERS)),
    st.tuples(st.just("stalled"), st.sampled_from(WORKERS), st.booleans()),
    st.tuples(st.just("failed"), st.sampled_from(WORKERS), st.booleans(), st.integers(0, 4)),
    st.tuples(st.just("raised"), st.sampled_from(WORKERS)),
    st.tuples(st.just("healed"), st.sampled_from(WORKERS)),
    st.tuples(st.just("all_healed")),
    st.tuples(st.just("saved"), st.sampled_from(WORKERS), st.integers(1, 9)),
    st.tuples(st.just("state_lost"), st.sampled_from(WORKERS)),
    st.tuples(st.just("finished"), st.sampled_from(WORKERS)),
    st.tuples(st.just("disconnected"), st.sampled_from(NODES)),
    st.tuples(st.just("probed"), st.sampled_from(NODES), st.sampled_from(["alive", "gone", "unknown"])),
    st.tuples(st.just("hello"), st.sampled_from(NODES), st.integers(1, 3), st.booleans()),
    st.tuples(st.just("beat"), st.sampled_from(NODES)),
    st.tuples(st.just("fire"), st.integers(0, 7)),
    st.tuples(st.just("fire"), st.integers(0, 7)),
    st.tuples(st.just("restart")),
    st.tuples(st.just("cancel")),
    st.tuples(st.just("suspend")),
    st.tuples(st.just("resume")),
    st.tuples(st.just("drain"), st.sampled_from(NODES), st.booleans()),
    st.tuples(st.just("final"), st.sampled_from(WORKERS), st.integers(1, 9)),
    st.tuples(st.just("submit"), st.integers(0, 2), st.integers(0, 2)),
)


class Watched(Coordinator):
    """Checks every step's actions: epochs grow, and a plan is in the journal before it is sent."""

    epoch = 0

    def feed(self, event: on.Event, after_ms: float = 1.0):  # type: ignore[no-untyped-def]
        actions = super().feed(event, after_ms)
        for action in actions:
            if isinstance(action, WriteJournal) and isinstance(action.entry, EpochDecided):
                assert action.entry.plan.epoch > self.epoch
                self.epoch = action.entry.plan.epoch
            if isinstance(action, SendAgent) and isinstance(action.message, PublishEpoch):
                assert action.message.plan.epoch <= self.epoch, "sent before it was journaled"
            assert action.reason
        return actions


def apply(driver: Coordinator, event: tuple[object, ...]) -> None:
    verb, *rest = event
    state = driver.machine.state
    match verb:
        case "stalled":
            driver.stalled(rest[0], waiting=rest[1])  # type: ignore[arg-type]
        case "failed":
            driver.failed(rest[0], inside=rest[1], epoch=rest[2])  # type: ignore[arg-type]
        case "hello":
            knows = bool(rest[2]) and bool(driver.task.workers)
            driver.hello(rest[0], rest[1], knows=knows)  # type: ignore[arg-type]
        case "fire":
            if state.timers:
                names = sorted(state.timers)
                driver.fire(names[int(rest[0]) % len(names)])  # type: ignore[call-overload]
        case "all_healed":
            if driver.task.plan is not None and not driver.task.lost:
                driver.all_healed()
        case "cancel":
            driver.feed(on.CancelRequested("c", TASK))
        case "suspend":
            driver.feed(on.SuspendRequested("s", TASK))
        case "resume":
            driver.feed(on.ResumeRequested("s", TASK))
        case "drain":
            driver.feed(on.DrainRequested("d", str(rest[0]), bool(rest[1])))
        case "final":
            name, epoch = str(rest[0]), driver.task.epoch
            said = Saved(name, driver.rank_of(name), int(str(rest[1])), "ckpt/x", epoch, final=True)
            driver.says(said)
        case "submit":
            layout, numbers = Layout(dp=2, num_micro_batches=2), [int(str(number)) for number in rest]
            job = Job("other", ("x",), layout, priority=numbers[0], replicas_min=numbers[1])
            driver.feed(on.TaskSubmitted("r", job))
        case _:
            getattr(driver, str(verb))(*rest)


def start(managed: bool, layout: Layout) -> Coordinator:
    driver = running(layout, managed=managed, checkpoint_dir="ckpt", restart_max=5)
    driver.__class__ = Watched
    driver.epoch = driver.task.epoch  # type: ignore[attr-defined]
    return driver


@settings(
    max_examples=int(os.environ.get("UNICRON_EXAMPLES", "150")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    events=st.lists(EVENTS, max_size=40),
    managed=st.sampled_from([True, True, True, False]),
    layout=st.sampled_from([Layout(tp=2, dp=2, num_micro_batches=4), Layout(dp=4, num_micro_batches=4)]),
)
def test_any_history(events: list[tuple[object, ...]], managed: bool, layout: Layout) -> None:
    driver = start(managed, layout)
    for event in events:
        apply(driver, event)
    alive = facts(driver.machine.state)
    twin = Coordinator()
    twin.journal = driver.journal
    phase = driver.task.phase
    driver.restart()
    replayed = facts(driver.machine.state)
    roles = {k: v for k, v in alive.items() if k.startswith("roles ")}
    for name, value in alive.items():
        if name == "term":
            continue
        if name in roles:
            assert value.items() <= replayed[name].items()
        elif phase not in TERMINAL:
            assert replayed[name] == value, name


@given(tp=st.integers(1, 4), pp=st.integers(1, 3), dp=st.integers(1, 4), slots=st.lists(st.integers(0, 8), max_size=6))
def test_placement_keeps_a_replica_together_where_it_fits(tp: int, pp: int, dp: int, slots: list[int]) -> None:
    layout = Layout(tp=tp, pp=pp, dp=dp)
    free = {f"n{i}": count for i, count in enumerate(slots)}
    left = dict(free)
    placed = {rank: node for r in range(dp) for rank, node in (place_replica(layout, r, left) or {}).items()}
    used = {node: list(placed.values()).count(node) for node in free}
    assert all(0 <= used[node] <= free[node] and left[node] == free[node] - used[node] for node in free)
    whole = [r for r in range(dp) if all(rank in placed for rank in layout.replica_ranks(r))]
    assert len(placed) == len(whole) * layout.replica_size, "a replica is placed whole or not at all"
    if sum(free.values()) >= layout.world_size:
        assert len(whole) == dp
    size = layout.replica_size
    if slots and all(count % size == 0 for count in slots):
        assert all(len({placed[rank] for rank in layout.replica_ranks(r)}) == 1 for r in whole)
