"""Beats: what the listener tells the machine, what agents who are heard leave unsaid, and who listens to whom."""

from __future__ import annotations

import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from machines import Agent, Coordinator, running
from unicron import _core
from unicron.agent import events as agent_on
from unicron.coordinator import events as on
from unicron.coordinator import nodes
from unicron.coordinator.actions import ProbeAgent, SendAgent
from unicron.coordinator.config import CoordinatorConfig
from unicron.coordinator.state import Hearing, NodeState
from unicron.coordinator.transitions import NodePhase
from unicron.messages import AgentHeartbeat, AgentHello, AskWaits, BeatOrder, WorkersWait
from unicron.runtime.beats import WITNESSES, AgentBeats, BeatDesk
from unicron.types import Layout

pytestmark = pytest.mark.timeout(60)

SO_TIMESTAMPNS = 35  # of Linux; this Python's socket module does not name it


def node_of(driver: Coordinator, name: str = "n1") -> NodeState:
    return driver.machine.state.nodes[name]


def test_who_beats_needs_no_heartbeats() -> None:
    driver = running()
    driver.feed(on.NodeHeard("n1"))
    assert "silence/n1" not in driver.machine.state.timers
    driver.beat("n1")
    assert "silence/n1" not in driver.machine.state.timers and node_of(driver).phase is NodePhase.UP


def test_silence_is_suspicion_and_taken_back() -> None:
    driver = running()
    driver.feed(on.NodeHeard("n1"))
    driver.feed(on.NodeSilent("n1", 1_000.0))
    assert node_of(driver).phase is NodePhase.SUSPECT
    assert [type(a) for a in driver.actions if isinstance(a, ProbeAgent)]
    driver.probed("n1", "alive")
    driver.fire("verdict/n1")
    assert node_of(driver).phase is NodePhase.SUSPECT  # and no more: nobody misses it
    driver.feed(on.NodeHeard("n1"))
    assert node_of(driver).phase is NodePhase.UP and "verdict/n1" not in driver.machine.state.timers


def test_a_vouched_node_is_not_even_suspected() -> None:
    driver = running()
    driver.feed(on.NodeHeard("n1"))
    driver.feed(on.NodeVouched("n1", 1_000.0))
    assert node_of(driver).phase is NodePhase.UP and node_of(driver).hearing is Hearing.VOUCHED


@pytest.mark.parametrize(("hearing", "is_lost"), [("heard", False), ("vouched", False), ("silent", True)])
def test_an_ended_connection_is_no_evidence_against_a_node_that_is_heard(hearing: str, is_lost: bool) -> None:
    """The way to it is cut, and others lost their peers: without beats that is a loss, with them it is a bad way."""
    driver = running()
    driver.feed(on.NodeHeard("n1"))
    if hearing == "vouched":
        driver.feed(on.NodeVouched("n1", 1_000.0))
    driver.disconnected("n1")
    if hearing == "silent":
        driver.feed(on.NodeSilent("n1", 1_000.0))
    driver.failed("n0.w0", inside=False)
    driver.probed("n1", "unknown")
    assert (node_of(driver).phase is NodePhase.LOST) is is_lost


def test_a_silent_node_on_a_living_connection_is_lost_by_two_more_signals_only() -> None:
    driver = running()
    driver.feed(on.NodeHeard("n1"))
    driver.feed(on.NodeSilent("n1", 1_000.0))
    driver.probed("n1", "unknown")
    assert node_of(driver).phase is NodePhase.SUSPECT
    driver.failed("n0.w0", inside=False)
    assert node_of(driver).phase is NodePhase.LOST


def test_that_a_few_wait_is_no_word_against_a_silent_node() -> None:
    """They wait for any straggler. All who are heard: that is for the silent one."""
    driver = running(Layout(dp=4, num_micro_batches=8), nodes=4, slots=1)
    assert driver.task.plan is not None
    members = {driver.worker(m.worker).node: m.worker for m in driver.task.plan.members}
    for node in ("n1", "n2"):
        driver.feed(on.NodeHeard(node))
        driver.feed(on.NodeSilent(node, 1_000.0))
        driver.probed(node, "unknown")
    driver.stalled(members["n0"], waiting=True, is_sure=False)
    driver.fire("verdict/n1")
    assert node_of(driver).phase is NodePhase.SUSPECT
    driver.stalled(members["n3"], waiting=True, is_sure=False)
    driver.probed("n1", "unknown")
    assert node_of(driver).phase is NodePhase.LOST, "what the other silent one does nobody knows"


def asked(driver: Coordinator) -> dict[str, AskWaits]:
    return {a.node: a.message for a in driver.actions if isinstance(a, SendAgent) and isinstance(a.message, AskWaits)}


def silent(driver: Coordinator, node: str = "n1") -> None:
    driver.feed(on.NodeHeard(node))
    driver.feed(on.NodeSilent(node, 1_000.0))


def test_those_who_are_heard_are_asked_whether_they_wait_for_a_silent_node() -> None:
    """Long before that is a stall: that all of them do, it does not answer, and nobody hears it, is enough."""
    driver = running(Layout(dp=3, num_micro_batches=6), nodes=3, slots=1)
    assert driver.task.plan is not None
    members = {driver.worker(m.worker).node: m.worker for m in driver.task.plan.members}
    silent(driver)
    assert asked(driver) == {"n0": AskWaits(driver.task.name), "n2": AskWaits(driver.task.name)}
    driver.probed("n1", "unknown")
    driver.feed_fact("n0", WorkersWait("n0", driver.task.name, (members["n0"],)))
    driver.feed_fact("n2", WorkersWait("n2", driver.task.name, ()))
    assert node_of(driver).phase is NodePhase.SUSPECT
    driver.fire("verdict/n1")
    assert set(asked(driver)) == {"n0", "n2"}, "again, as long as it is silent"
    driver.feed_fact("n2", WorkersWait("n2", driver.task.name, (members["n2"],)))
    assert node_of(driver).phase is NodePhase.LOST


def test_what_they_said_is_soon_out_of_date() -> None:
    driver = running()
    assert driver.task.plan is not None
    worker = next(m.worker for m in driver.task.plan.members if driver.worker(m.worker).node == "n0")
    silent(driver)
    driver.feed_fact("n0", WorkersWait("n0", driver.task.name, (worker,)))
    driver.feed(on.AgentProbed("n1", "unknown"), after_ms=2 * driver.config.reconnect_grace_ms + 1)
    assert node_of(driver).phase is NodePhase.SUSPECT


def test_a_patient_coordinator_waits_for_who_may_only_be_cut_off() -> None:
    driver = running(config=CoordinatorConfig(cut_off_delay_ms=5_000.0))
    silent(driver)
    driver.probed("n1", "unknown")
    driver.failed("n0.w0", inside=False)
    assert node_of(driver).phase is NodePhase.SUSPECT
    driver.feed(on.AgentProbed("n1", "unknown"), after_ms=5_001.0)
    assert node_of(driver).phase is NodePhase.LOST


def test_nobody_is_asked_of_a_task_of_very_many_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "ASKED_NODES_MAX", 1)
    driver = running(Layout(dp=3, num_micro_batches=6), nodes=3, slots=1)
    silent(driver)
    assert not asked(driver)


def test_after_a_long_silence_one_that_waits_is_enough() -> None:
    """Another may never wait (a debugger holds it), and somebody has to go on."""
    driver = running(Layout(dp=3, num_micro_batches=6), nodes=3, slots=1)
    assert driver.task.plan is not None
    members = {driver.worker(m.worker).node: m.worker for m in driver.task.plan.members}
    driver.feed(on.NodeHeard("n1"))
    driver.feed(on.NodeSilent("n1", 1_000.0))
    driver.stalled(members["n0"], waiting=True, is_sure=False)
    driver.probed("n1", "unknown")
    assert node_of(driver).phase is NodePhase.SUSPECT
    driver.feed(on.AgentProbed("n1", "unknown"), after_ms=driver.config.silence_ms_max)
    assert node_of(driver).phase is NodePhase.LOST


def test_a_beat_of_a_lost_or_unknown_node_is_refused() -> None:
    driver = running()
    driver.feed(on.NodeHeard("n7"))
    assert driver.refusals() == ["unknown_node"]
    driver.disconnected("n1")
    driver.probed("n1", "gone")
    for event in (on.NodeHeard("n1"), on.NodeVouched("n1", 1.0), on.NodeSilent("n1", 1.0)):
        driver.feed(event)
        assert driver.refusals() == ["not_up"] and node_of(driver).phase is NodePhase.LOST


def test_a_hello_forgets_what_was_heard() -> None:
    driver = running()
    driver.feed(on.NodeHeard("n1"))
    driver.hello("n1", 1, knows=True)
    assert node_of(driver).hearing is Hearing.NONE and "silence/n1" in driver.machine.state.timers


# ---------------------------------------------------------------- the agent's machine


def beats_sent(agent: Agent, times: int) -> int:
    sent = 0
    for _ in range(times):
        agent.fire("heartbeat/coordinator")
        sent += len(agent.said(AgentHeartbeat))
    return sent


def test_an_agent_that_is_heard_sends_news_only() -> None:
    agent = Agent()
    agent.live(("n0.w0", 0, 0, False))
    assert beats_sent(agent, 8) == 8
    agent.feed(agent_on.BeatsAnswered(True))
    assert beats_sent(agent, 8) == 2  # without news: every two seconds
    agent.machine.state.workers["n0.w0"].epoch = 1
    assert beats_sent(agent, 1) == 1
    agent.feed(agent_on.BeatsAnswered(False))
    assert beats_sent(agent, 4) == 4


def test_a_lost_connection_ends_the_quiet() -> None:
    agent = Agent()
    agent.feed(agent_on.CoordinatorConnected())
    agent.feed(agent_on.BeatsAnswered(True))
    agent.feed(agent_on.CoordinatorDisconnected())
    agent.feed(agent_on.CoordinatorConnected())
    assert beats_sent(agent, 4) == 4


# ---------------------------------------------------------------- both ends, with real sockets


class Cluster:
    """A desk and agents' ends in one process."""

    def __init__(self, count: int) -> None:
        self.orders: dict[str, BeatOrder] = {}
        self.desk = BeatDesk("127.0.0.1", 0, self.orders.__setitem__)
        self.agents = {f"n{i}": AgentBeats("127.0.0.1", 1) for i in range(count)}
        self.events: list[object] = []
        self.answers: dict[str, bool] = {}
        for name in self.agents:
            self.join(name)
        for name in self.agents:
            self.follow(name)

    def join(self, name: str) -> None:
        self.desk.hello(AgentHello(name, 1, 1, 0, "tcp://127.0.0.1:9", "k", beat_port=self.agents[name].port))

    def follow(self, name: str) -> None:
        self.agents[name].follow(self.orders[name], "tcp://127.0.0.1:1")

    def turn(self, deaf: tuple[str, ...] = ()) -> None:
        """deaf: agents whose loop hangs."""
        select.select([self.desk.fileno()], [], [], 0.02)
        self.events += self.desk.changes()
        for name, agent in self.agents.items():
            if name not in deaf:
                agent.turned()
            for event in agent.changes():
                self.answers[name] = event.answered

    def until(self, done: object, deaf: tuple[str, ...] = (), seconds: float = 20.0) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.turn(deaf)
            if done in self.events:
                return True
        return False

    def close(self) -> None:
        self.desk.close()
        for agent in self.agents.values():
            agent.close()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster(4)
    yield made
    made.close()


def test_agents_are_heard_and_hear_that_they_are(cluster: Cluster) -> None:
    for name in cluster.agents:
        assert cluster.until(on.NodeHeard(name))
    deadline = time.monotonic() + 20
    while len(cluster.answers) < 4 and time.monotonic() < deadline:
        cluster.turn()
    assert cluster.answers == dict.fromkeys(cluster.agents, True)
    facts = cluster.desk.facts()
    assert facts["taken"] > 0 and facts["refused_tag"] == facts["refused_shape"] == 0


def test_a_loop_that_hangs_does_not_beat(cluster: Cluster) -> None:
    assert cluster.until(on.NodeHeard("n2"))
    deadline = time.monotonic() + 20
    while not any(isinstance(e, on.NodeSilent) for e in cluster.events) and time.monotonic() < deadline:
        cluster.turn(deaf=("n2",))
    assert [e.node for e in cluster.events if isinstance(e, on.NodeSilent)] == ["n2"]
    cluster.events.clear()
    assert cluster.until(on.NodeHeard("n2"))


BEATS = """
import sys, time
from unicron import _core
heart = _core.Heart("127.0.0.1", 0, 50)
heart.beat_as(1, 1, b"k" * 16, 100, 60_000, [("127.0.0.1", int(sys.argv[1]))])
time.sleep(60)
"""


def test_who_stood_still_beats_once_when_it_goes_on_and_then_as_ever() -> None:
    """Two beats at once would look like jitter, and its next silence would be told later."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ear:
        ear.bind(("127.0.0.1", 0))
        ear.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)  # the kernel's, however late we read
        ear.settimeout(20)
        agent = subprocess.Popen([sys.executable, "-c", BEATS, str(ear.getsockname()[1])])
        try:
            heard_s(ear)
            agent.send_signal(signal.SIGSTOP)
            stopped_s = time.time()
            time.sleep(0.35)
            agent.send_signal(signal.SIGCONT)
            after = next(at for at in iter(lambda: heard_s(ear), None) if at > stopped_s + 0.3)
            assert heard_s(ear) - after >= 0.09
        finally:
            agent.kill()
            agent.wait(10)


def heard_s(ear: socket.socket) -> float:
    _, ancillary, _, _ = ear.recvmsg(2048, 64)
    seconds, nanoseconds = struct.unpack("qq", ancillary[0][2])
    return float(seconds + nanoseconds / 1e9)


def test_a_way_that_is_cut_is_vouched_for(cluster: Cluster) -> None:
    """n1 beats to its witnesses alone: the coordinator does not hear it, and knows that it lives."""
    assert cluster.until(on.NodeHeard("n1"))
    nowhere = AgentBeats("127.0.0.1", 1)
    port = nowhere.port
    nowhere.close()
    order = cluster.orders["n1"]
    cut = BeatOrder(order.node, order.key, port, order.period_ms, order.witnesses, order.heard)
    cluster.agents["n1"].follow(cut, "tcp://127.0.0.1:1")
    deadline = time.monotonic() + 20
    while not any(isinstance(e, on.NodeVouched) for e in cluster.events) and time.monotonic() < deadline:
        cluster.turn()
    assert [e.node for e in cluster.events if isinstance(e, on.NodeVouched)] == ["n1"]
    assert not any(isinstance(e, on.NodeSilent) for e in cluster.events)


def test_everybody_has_witnesses_whoever_comes_and_goes() -> None:
    orders: dict[str, BeatOrder] = {}
    desk = BeatDesk("127.0.0.1", 0, orders.__setitem__)
    try:
        present: list[str] = []
        for step, name in enumerate(["a", "b", "c", "d", "e", "-b", "f", "-a", "-f", "b", "-c", "-d", "-e"]):
            if name.startswith("-"):
                present.remove(name[1:])
                orders.pop(name[1:])
                desk.forget(name[1:])
            else:
                present.append(name)
                desk.hello(AgentHello(name, 1, 1, 0, "tcp://127.0.0.1:9", "k", beat_port=1000 + step))
            assert orders.keys() == set(present)
            numbers = {order.node for order in orders.values()}
            for order in orders.values():
                assert len(order.witnesses) == len(order.heard) == min(WITNESSES, len(present) - 1)
                assert {number for number, _, _ in order.heard} <= numbers - {order.node}
                keys = {o.node: o.key for o in orders.values()}
                assert all(keys[number] == key for number, _, key in order.heard)
    finally:
        desk.close()


def test_an_agent_without_a_beat_port_is_watched_by_its_heartbeats() -> None:
    orders: dict[str, BeatOrder] = {}
    desk = BeatDesk("127.0.0.1", 0, orders.__setitem__)
    desk.hello(AgentHello("a", 1, 1, 0, "tcp://127.0.0.1:9", "k"))
    desk.close()
    assert not orders


def test_bad_arguments_are_named() -> None:
    with pytest.raises(_core.UnicronError, match="16 bytes"):
        _core.write_beat(1, 1, 1, b"short", [])
    with pytest.raises(_core.UnicronError, match="at most 16"):
        _core.write_beat(1, 1, 1, bytes(16), [(1, 1)] * 17)
    with pytest.raises(_core.UnicronError, match="numeric"):
        _core.Heart("no-such-name", 0, 50)
