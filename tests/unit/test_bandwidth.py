"""State that came over a network: told in the incident, and slow only where it is sure enough."""

from __future__ import annotations

import math

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from machines import TASK, Coordinator, running
from unicron.coordinator import events as on
from unicron.coordinator.bandwidth import KEPT_MAX, judged, judged_all, words
from unicron.coordinator.config import CoordinatorConfig
from unicron.coordinator.incident import Incident
from unicron.coordinator.journal import IncidentRecorded, decode_entry, encode_entry
from unicron.coordinator.state import NodeState
from unicron.coordinator.transitions import NodePhase
from unicron.messages import AgentHello
from unicron.runtime.metrics_coordinator import CoordinatorMetrics
from unicron.runtime.views import incident_view, nodes_view
from unicron.types import Layout, Network, Transfer

MIB = 1 << 20
CONFIG = CoordinatorConfig()


def node(name: str, mbit: int = 0, interface: str = "eth0", clock: str = "") -> NodeState:
    made = NodeState(name, 1, 2, 0, f"tcp://{name}:1", "k", NodePhase.UP, clock=clock or name)
    made.state_network = Network(interface, "10.0.0.2", "route", mbit)
    return made


def slow(nbytes: int, mb_s: float, *mbits: int, interface: str = "eth0", clock: str = "") -> str:
    nodes = {f"n{i}": node(f"n{i}", mbit, clock=clock) for i, mbit in enumerate(mbits or (0, 0))}
    transfer = Transfer(1, "n0", "n1", nbytes, nbytes / 1000 / mb_s, interface)
    return judged(transfer, nodes, CONFIG).slow


@pytest.mark.parametrize(
    ("mbits", "mb_s", "is_slow"),
    [
        ((0, 0), 49.0, True),  # nothing is known: the floor
        ((0, 0), 51.0, False),
        ((1_000, 1_000), 30.0, True),  # rated 125 MB/s: a quarter
        ((1_000, 1_000), 32.0, False),
        ((10_000, 1_000), 32.0, False),  # the slower end counts
        ((100, 100), 4.0, False),  # below the floor, and as fast as a quarter of such a card
        ((10_000, 0), 300.0, True),
        ((400_000, 400_000), 499.0, True),  # one connection does not fill such a card
        ((400_000, 400_000), 501.0, False),
    ],
)
def test_what_is_slow(mbits: tuple[int, int], mb_s: float, is_slow: bool) -> None:
    assert bool(slow(64 * MIB, mb_s, *mbits)) == is_slow
    assert slow(16 * MIB - 1, mb_s, *mbits) == ""  # too little to judge
    assert slow(64 * MIB, mb_s, *mbits, clock="one machine") == ""
    assert slow(64 * MIB, mb_s, *mbits, interface="lo") == ""


def test_groups_on_another_interface_are_not_judged_by_this_ones_rating() -> None:
    assert slow(64 * MIB, 60.0, 10_000, 10_000)
    assert slow(64 * MIB, 60.0, 10_000, 10_000, interface="eth1") == ""
    assert "the floor" in slow(64 * MIB, 40.0, 10_000, 10_000, interface="eth1")


def test_in_words() -> None:
    nodes = {"n0": node("n0", 1_000), "n1": node("n1", 1_000), "n2": node("n2", clock="n1")}
    told = judged(Transfer(1, "n0", "n1", 512_000_000, 20_480.0, "eth0"), nodes, CONFIG)
    assert words(told) == (
        "512.0 MB for rank 1, n0 to n1 over eth0, in 20480 ms: 25.0 MB/s,"
        " slow: below 31 MB/s, 25% of the rated 125 MB/s"
    )
    here = judged(Transfer(1, "n1", "n1", 1_000_000, 10.0, "lo"), nodes, CONFIG)
    assert words(here) == "1.0 MB for rank 1, inside n1 over lo, in 10 ms: 100.0 MB/s"
    beside = judged(Transfer(1, "n2", "n1", 1_000_000, 10.0, "eth0"), nodes, CONFIG)
    assert words(beside) == "1.0 MB for rank 1, n2 to n1 over eth0 (one machine), in 10 ms: 100.0 MB/s"


def test_nonsense_is_left_out_and_many_are_bounded() -> None:
    every = [Transfer(0, "n0", "n1", nbytes, ms) for nbytes, ms in ((0, 1.0), (-1, 1.0), (5, 0.0), (5, math.nan))]
    assert judged_all([*every, Transfer(0, "n0", "n1", 5, math.inf)], {}, CONFIG) == ()
    many = [Transfer(rank, "n0", "n1", 64 * MIB, 10.0 if rank else 1e6) for rank in reversed(range(200))]
    kept = judged_all(many, {}, CONFIG)
    assert len(kept) == KEPT_MAX and kept[0].rank == 0 and kept[0].slow


def healed(transfers: tuple[Transfer, ...]) -> Coordinator:
    """Two nodes, their clocks apart; the worker of rank 1 dies, and its heir takes state from rank 0."""
    made = running(Layout(dp=2, num_micro_batches=4), slots=1)
    assert made.task.plan is not None
    network = Network("eth0", "10.0.0.2", "--interface", 1_000)
    for name in ("n0", "n1"):
        node = made.machine.state.nodes[name]
        here = tuple(made.status(w) for w in made.task.workers.values() if w.node == name)
        hello = AgentHello(name, 1, 1, 1, node.store, "key", here, (made.task.plan,), name, 0, False, network, network)
        made.feed(on.AgentMessage(name, hello))
    made.lost(next(m.worker for m in made.task.plan.members if m.rank == 1), "signal 9")
    assert made.task.plan is not None
    source, heir = (member.worker for member in made.task.plan.members)
    made.healed(source, transfers=transfers)
    made.healed(heir)
    return made


def test_a_healing_tells_what_came_and_that_it_was_slow() -> None:
    made = healed((Transfer(1, "n0", "n1", 64 * MIB, 10_000.0, "eth0"),))
    incident = next(iter(made.machine.state.incidents.values()))
    assert incident.outcome is not None and len(incident.transfers) == 1
    assert "state came slowly: 67.1 MB for rank 1, n0 to n1 over eth0" in incident.timeline[-1][1]
    view = incident_view(incident, made.machine.state, made.now_ms)
    assert view["transfers"][0]["mb_s"] == pytest.approx(6.7, abs=0.1) and view["transfers"][0]["slow"]
    assert {n["node"]: n["state_network"]["interface"] for n in nodes_view(made.machine.state)} == dict.fromkeys(
        ("n0", "n1"), "eth0"
    )
    entry = IncidentRecorded(incident)
    assert decode_entry(encode_entry(entry)) == entry


def test_a_healing_without_a_transfer_says_nothing_of_it() -> None:
    incident = next(iter(healed(()).machine.state.incidents.values()))
    assert incident.transfers == () and "state came" not in incident.timeline[-1][1]


def test_an_incident_of_before_has_none() -> None:
    old = msgspec.to_builtins(next(iter(healed(()).machine.state.incidents.values())))
    del old["transfers"]
    assert msgspec.convert(old, Incident).transfers == ()


def test_counters_count_an_epoch_once() -> None:
    made = healed((Transfer(1, "n0", "n1", 64 * MIB, 10_000.0, "eth0"),))
    incident = next(iter(made.machine.state.incidents.values()))
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry)
    metrics.note_incident(incident, made.now_ms)
    metrics.note_incident(msgspec.structs.replace(incident, id="i9"), made.now_ms)  # another that it answers

    def value(name: str) -> float | None:
        return registry.get_sample_value(f"unicron_{name}_total", {"node": "n1"})

    assert value("state_transfer_bytes") == 64 * MIB
    assert value("state_transfer_seconds") == 10.0
    assert value("slow_state_transfers") == 1.0
    assert incident.task == TASK
