"""Nodes that must pass their checks before they are used, and those that were lost too often."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from machines import TASK, Agent, Coordinator
from unicron.agent import events as agent_on
from unicron.agent.actions import RunChecks
from unicron.coordinator import events as on
from unicron.coordinator.actions import Answer
from unicron.coordinator.config import CoordinatorConfig
from unicron.coordinator.fitness import PENDING
from unicron.coordinator.incident import Incident
from unicron.coordinator.state import NodeState, Purpose
from unicron.messages import AgentChecked, AgentHello, CheckNode, HardwareSeen
from unicron.runtime.metrics_coordinator import CoordinatorMetrics
from unicron.runtime.views import incident_view, nodes_view
from unicron.types import Layout, Severity

ECC = "gpu_memory_errors: GPU 3: 2 uncorrected memory errors since its driver was loaded; reset it"


class Cluster(Coordinator):
    """Agents with checks."""

    def hello(self, node: str, incarnation: int = 1, slots: int = 2, *, knows: bool = False, clock: str = "") -> None:
        self.incarnations[node] = incarnation
        hello = AgentHello(node, incarnation, slots, 1, f"tcp://{node}:7000", "key", clock=clock, checks=True)
        self.feed(on.AgentMessage(node, hello))

    def checked(self, node: str, unfit: str = "") -> None:
        told = (("disk", "ok", "fine"),)
        self.feed(on.AgentMessage(node, AgentChecked(node, self.incarnations[node], unfit, told)))

    def node(self, name: str = "n1") -> NodeState:
        return self.machine.state.nodes[name]

    def incidents(self) -> list[Incident]:
        return list(self.machine.state.incidents.values())

    def asked(self) -> list[Any]:
        return self.sent(CheckNode)

    def drain(self, node: str, drained: bool) -> Any:
        self.feed(on.DrainRequested("d", node, drained))
        (answer,) = [a for a in self.actions if isinstance(a, Answer)]
        return answer.reply


def running(**fields: Any) -> Cluster:
    driver = Cluster(CoordinatorConfig(**fields))
    for name in ("n0", "n1"):
        driver.hello(name)
        driver.checked(name)
    driver.submit(Layout(tp=1, dp=4, num_micro_batches=4))
    driver.all_up()
    return driver


def test_a_node_is_used_once_its_checks_passed() -> None:
    driver = Cluster()
    driver.hello("n0")
    driver.submit(Layout(dp=2, num_micro_batches=2))
    assert not driver.task.workers and driver.node("n0").why_drained == f"unfit: {PENDING}"
    driver.checked("n0")
    assert driver.task.workers and driver.node("n0").is_usable


def test_one_that_fails_them_is_not_and_says_why() -> None:
    driver = Cluster()
    driver.hello("n0")
    driver.checked("n0", ECC)
    driver.submit(Layout(dp=2, num_micro_batches=2))
    assert not driver.task.workers
    (incident,) = driver.incidents()
    assert (incident.severity, incident.node, incident.fault) == (Severity.SEV1, "n0", "hardware")
    assert ECC in incident.cause and driver.machine.state.node_faults == {"n0": 1}
    driver.checked("n0", ECC)
    assert len(driver.incidents()) == 1  # said before


def test_checks_that_do_not_end_are_asked_for_again_and_the_node_waits() -> None:
    driver = Cluster()
    driver.hello("n0")
    driver.fire("check/n0")
    assert driver.asked() and "check/n0" in driver.machine.state.timers and not driver.node("n0").is_usable


def test_an_older_lifes_answer_does_not_count() -> None:
    driver = Cluster()
    driver.hello("n0")
    driver.hello("n0", 2)
    driver.feed(on.AgentMessage("n0", AgentChecked("n0", 1, "", ())))
    assert driver.refusals() == ["stale_incarnation"] and not driver.node("n0").is_usable


def test_every_incident_on_a_node_makes_it_look_again_a_moment_later() -> None:
    driver = running()
    driver.lost("n1.w0", "signal 11")
    assert not driver.asked()
    driver.fire("check/n1")
    assert [c.reason for c in driver.asked()] == ["its checks are due"]
    driver.checked("n1")
    assert driver.node().is_usable


def test_an_xid_empties_the_node_and_only_passed_checks_bring_it_back() -> None:
    driver = running()
    driver.feed(on.AgentMessage("n1", HardwareSeen("n1", "SEV1", "Xid 79 on 0000:3b:00: fallen off the bus")))
    assert not driver.node().is_usable and "Xid 79" in driver.node().why_drained
    driver.disconnected("n1")
    driver.probed("n1", "gone")
    driver.hello("n1", 2)  # repaired
    assert not driver.node().is_usable and "check/n1" in driver.machine.state.timers
    driver.checked("n1", ECC)
    assert not driver.node().is_usable
    reply = driver.drain("n1", False)
    assert reply.ok and "checks run" in reply.result["why"] and driver.asked() and not driver.node().is_usable
    driver.checked("n1")
    assert driver.node().is_usable


def test_what_the_kernel_only_counts_is_only_told() -> None:
    driver = running()
    driver.feed(on.AgentMessage("n1", HardwareSeen("n1", "INFO", "Xid 63: a row was remapped")))
    (incident,) = driver.incidents()
    assert incident.is_only_told and driver.node().is_usable


def test_a_person_clears_what_has_no_checks_any_more() -> None:
    driver = Cluster()
    driver.hello("n0")
    driver.checked("n0", ECC)
    Coordinator.hello(driver, "n0", 2)  # an agent without checks
    assert not driver.node("n0").is_usable
    assert driver.drain("n0", False).ok and driver.node("n0").is_usable


def test_an_agent_without_checks_is_used_at_once() -> None:
    driver = Cluster()
    driver.hello("n0")
    Coordinator.hello(driver, "n0", 2)
    assert driver.node("n0").is_usable


def come_back(driver: Cluster, node: str, incarnation: int) -> None:
    driver.disconnected(node)
    driver.probed(node, "gone")
    driver.hello(node, incarnation)
    driver.checked(node)


def test_a_flapping_node_rests_twice_as_long_each_time_until_it_is_calm() -> None:
    driver = Cluster(CoordinatorConfig(flaps_max=3, rest_ms_min=1_000.0, rest_ms_max=3_000.0))
    driver.hello("n1")
    driver.checked("n1")
    rests = []
    for life in range(2, 8):
        come_back(driver, "n1", life)
        rests.append(driver.node().rest_ms)
    assert rests == [0.0, 0.0, 1_000.0, 2_000.0, 3_000.0, 3_000.0]
    assert not driver.node().is_usable and "lost 6 times" in driver.node().why_drained
    driver.fire("rest/n1")
    assert driver.node().is_usable and driver.node().flaps == 6
    driver.fire("calm/n1")
    assert driver.node().flaps == 0
    come_back(driver, "n1", 9)
    assert driver.node().is_usable


def test_a_person_ends_a_rest() -> None:
    driver = Cluster(CoordinatorConfig(flaps_max=1))
    driver.hello("n1")
    driver.checked("n1")
    come_back(driver, "n1", 2)
    assert not driver.node().is_usable
    assert driver.drain("n1", False).ok
    assert driver.node().is_usable and "rest/n1" not in driver.machine.state.timers


def test_fitness_outlives_the_coordinator() -> None:
    driver = Cluster(CoordinatorConfig(flaps_max=1))
    for name in ("n0", "n1"):
        driver.hello(name)
        driver.checked(name)
    driver.checked("n0", ECC)
    come_back(driver, "n1", 2)
    driver.restart()
    assert driver.node("n0").unfit == ECC and driver.node("n1").rest_ms > 0
    assert "rest/n1" in driver.machine.state.timers
    driver.hello("n0")
    assert not driver.node("n0").is_usable


@pytest.mark.parametrize(("cause", "is_out"), [("signal 11", True), ("signal 9", False)])
def test_one_node_that_fails_at_different_work_is_sev1(cause: str, is_out: bool) -> None:
    """A plain SIGKILL says nothing about a node; segmentation faults at three places of different work do."""
    driver = running()
    for number in range(3):
        victim = next(w for w in driver.task.workers.values() if w.node == "n1" and driver.task.role_of(w.name))
        driver.lost(victim.name, cause, iteration=10 + 5 * number)
        incident = driver.incidents()[-1]
        if f"classify/{incident.id}" in driver.machine.state.timers:
            driver.fire(f"classify/{incident.id}")
        driver.all_up()
        driver.all_healed()
    assert driver.node().is_usable is not is_out
    assert any(i.severity is Severity.SEV1 for i in driver.incidents()) is is_out
    assert TASK in driver.machine.state.tasks


# ---------------------------------------------------------------- the agent's machine


def test_an_agent_runs_its_checks_when_told_and_says_the_answer_again_after_each_hello() -> None:
    agent = Agent(checks=True)
    agent.live(("n0.w0", 0, 0, False))
    agent.order(CheckNode("after i1 on it"))
    (run,) = agent.of(RunChecks)
    assert not run.is_idle
    agent.feed(agent_on.NodeChecked("", (("disk", "ok", "fine"),)))
    assert agent.said(AgentChecked)[0].unfit == ""
    agent.feed(agent_on.CoordinatorDisconnected())
    agent.feed(agent_on.NodeChecked(ECC, ()))
    assert not agent.said(AgentChecked)
    agent.feed(agent_on.CoordinatorConnected())
    assert agent.said(AgentHello)[0].checks and agent.said(AgentChecked)[0].unfit == ECC
    agent.feed(agent_on.HardwareFailed("SEV1", "Xid 79"))
    assert agent.said(HardwareSeen)[0].text == "Xid 79"


def test_an_agent_without_workers_is_idle() -> None:
    agent = Agent()
    agent.feed(agent_on.CoordinatorConnected())
    agent.order(CheckNode("its checks are due"))
    assert agent.of(RunChecks)[0].is_idle


def test_people_and_metrics_see_an_incident_of_no_task() -> None:
    driver = Cluster()
    driver.hello("n0")
    driver.checked("n0", ECC)
    (incident,) = driver.incidents()
    view = incident_view(incident, driver.machine.state, 10.0)
    assert view["root"] == {"node": "n0", "rank": -1} and view["cost"]["total_gpu_s"] == 0
    registry = CollectorRegistry()
    CoordinatorMetrics(registry).note_incident(incident, 10.0)
    labels = {"severity": "SEV1", "cause": "hardware"}
    assert registry.get_sample_value("unicron_incidents_total", labels) == 1
    (row,) = nodes_view(driver.machine.state)
    assert ECC in row["why"] and row["drained"] and row["checks"] == {"disk": "ok: fine"}


@pytest.mark.parametrize("dp", [4, 1])
def test_a_role_that_is_lost_again_on_an_unfit_node_leaves_it(dp: int) -> None:
    """Found with an interface that went: who was put there again could not bind its address, as often as the job may be
    restarted at all, and then the whole task was stopped. The only replica has nobody who goes on without it."""
    driver = Cluster(CoordinatorConfig())
    for name in ("n0", "n1")[-dp:]:
        driver.hello(name)
        driver.checked(name)
    driver.submit(Layout(tp=1, dp=dp, num_micro_batches=4), checkpoint_dir="/ckpt")
    driver.all_up()
    rank = dp - 1

    def lose() -> None:
        for worker in [w for w in driver.task.workers.values() if w.node == "n1"]:
            if worker.rank == rank or worker.purpose is Purpose.UNDERSTUDY:
                driver.lost(worker.name, "signal 9")

    lose()
    assert driver.task.refills == {rank: 1}
    driver.checked("n1", ECC)
    plan = driver.task.plan
    assert plan is not None and not driver.task.is_over
    if dp > 1:
        assert rank not in plan.ranks
        return
    lose()
    assert driver.task.refills == {rank: 2} and not driver.task.is_over
