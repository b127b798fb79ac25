"""The demo's watch: arms and acts at the right moment, bears a coordinator that is away."""

from __future__ import annotations

import json

import pytest

from unicron.demo import scenarios, watch
from unicron.demo.scenarios import Act, Expect, Fault, Scenario

pytestmark = pytest.mark.timeout(30)


class CoordinatorSilent(Exception):
    """By this name the watch knows it."""


class CoordinatorRefused(Exception):
    pass


class Cluster:
    """Trains one iteration every time it is asked about the task; writes what workers would."""

    nodes = ("n0", "n1")

    def __init__(self, folder, iterations, incidents=()):
        self.folder, self.iterations = folder, iterations
        self.iteration, self.calls, self.refuse = 0, [], 0
        self.is_away = False
        self.alive = set()  # agents
        self._incidents = list(incidents)

    def task(self, _task):
        self._train()
        if self.is_away:
            raise CoordinatorSilent
        over = self.iteration >= self.iterations
        worker = {"worker": "n0.w0", "pid": 11, "is_member": True}
        return {
            "phase": "done" if over else "running",
            "replicas": [0, 1],
            "layout": {"tp": 1, "pp": 1, "dp": 2},
            "workers": [worker, {**worker, "pid": 12}, {**worker, "pid": 13, "is_member": False}],
        }

    def _train(self):
        if self.iteration < self.iterations:
            line = {"event": "iteration", "iteration": self.iteration, "loss": 5.0, "pid": 11}
            with open(self.folder / "rank_0.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")
            self.iteration += 1

    def incidents(self, _task):
        return [i for at, i in self._incidents if at <= self.iteration]

    def arm_fault(self, _task, rank, fault, point, iteration, micro_batch):
        if self.refuse:
            self.refuse -= 1
            raise CoordinatorRefused("nobody holds it")
        self.calls.append(("arm", rank, fault, point, iteration, micro_batch, self.iteration))

    def is_running(self, node):
        return node in self.alive

    def __getattr__(self, name):
        return lambda *words: self._did(name, *words)

    def _did(self, name, *words):
        self.is_away = {"kill_coordinator": True, "start_coordinator": False}.get(name, self.is_away)
        self.calls.append((name, *words, self.iteration))


class Listener:
    def __init__(self):
        self.told = []

    def moved(self, iteration, loss):
        self.told.append(("moved", iteration))

    def workers(self, members, waiting):
        self.told.append(("workers", members, waiting))

    def happened(self, text):
        self.told.append(("happened", text))

    def incident(self, incident):
        self.told.append(("incident", incident["id"], incident["outcome"]))


HEALED = {"fault": "worker lost", "outcome": "healed", "is_only_told": False}


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(watch, "LOOK_S", 0.001)
    monkeypatch.setattr(watch, "ASK_S", 0.002)


def run(folder, scenario, iterations=20, incidents=(), refuse=0, alive=()):
    cluster, listener = Cluster(folder, iterations, incidents), Listener()
    cluster.refuse = refuse
    cluster.alive.update(alive)
    watching = watch.Watch(cluster, "t", folder, scenario, iterations, 1.0, listener)
    return cluster, listener, watching.until_over(), watching


def plain(**how):
    return Scenario("s", "", Expect("healed"), **how)


def test_faults_are_armed_once_all_roles_are_held(tmp_path):
    fault = Fault(1, "kill", 12, "compute", 3)
    cluster, listener, seen, _ = run(tmp_path, plain(faults=(fault,)))
    assert [call[:6] for call in cluster.calls] == [("arm", 1, "kill", "compute", 12, 3)]
    assert cluster.calls[0][6] < 12
    assert seen.iteration == 19 and seen.pids == {11, 12, 13} and seen.replicas == (0, 1)
    assert ("workers", 2, 1) in listener.told


def test_a_refused_fault_is_tried_again(tmp_path):
    cluster, _, _, _ = run(tmp_path, plain(faults=(Fault(1, "kill", 12, "compute"),)), refuse=3)
    assert len(cluster.calls) == 1


def test_spread_faults_come_one_after_the_other(tmp_path):
    faults = tuple(Fault(0, "kill", i, "compute") for i in (6, 12))
    seen = [(at, {**HEALED, "id": f"i{at}"}) for at in (8, 14)]
    cluster, _, _, _ = run(tmp_path, plain(faults=faults, spread=True), incidents=seen)
    for call, fault in zip(cluster.calls, faults, strict=True):
        assert fault.iteration - watch.SPREAD_AHEAD <= call[6] <= fault.iteration + 2


def test_a_spread_fault_that_came_too_late_is_armed_again_for_any_iteration(tmp_path):
    faults = tuple(Fault(0, "kill", i, "compute") for i in (6, 20))
    seen = [(at, {**HEALED, "id": f"i{at}"}) for at in (16, 22)]
    cluster, _, _, _ = run(tmp_path, plain(faults=faults, spread=True), iterations=40, incidents=seen)
    assert [call[4] for call in cluster.calls] == [6, -1, 20]
    assert cluster.calls[1][6] >= 6 + watch.SPREAD_MISSED


def test_acts_follow_iterations_and_delays(tmp_path):
    acts = (Act("kill_agent", 5, 1), Act("start_agent", 9, 1))
    cluster, listener, seen, _ = run(tmp_path, plain(acts=acts))
    (killed, where, at), (started, _, again) = cluster.calls
    assert (killed, where, started) == ("kill_agent", "n1", "start_agent")
    assert at > 5 and again > 9
    assert ("happened", "kill agent of n1") in listener.told
    assert seen.marks[0][1] == "kill agent"


def test_an_absent_coordinator_is_borne(tmp_path):
    acts = (Act("kill_coordinator", 3), Act("start_coordinator", 3, delay_s=0.02))
    cluster, _, seen, _ = run(tmp_path, plain(acts=acts))
    assert [call[0] for call in cluster.calls] == ["kill_coordinator", "start_coordinator"]
    assert seen.view["phase"] == "done" and seen.iteration == 19


def test_acts_that_were_not_reached_are_put_right(tmp_path):
    acts = (Act("start_agent", 500, 0), Act("start_coordinator", 500))
    cluster, _, _, watching = run(tmp_path, plain(acts=acts))
    watching.put_right()
    assert [call[0] for call in cluster.calls] == ["start_agent", "start_coordinator"]


def test_an_agent_that_did_not_end_is_not_started(tmp_path):
    acts = (Act("start_agent", 5, 0), Act("start_agent", 500, 0), Act("start_agent", 500, 1))
    cluster, listener, _, watching = run(tmp_path, plain(acts=acts), alive=["n0"])
    watching.put_right()
    assert [call[:2] for call in cluster.calls] == [("start_agent", "n1")]
    assert ("happened", "n0 did not end: nothing to start") in listener.told


def test_incidents_are_told_when_they_open_and_when_they_close(tmp_path):
    opened = {"id": "i1", "fault": "worker lost", "outcome": None, "is_only_told": False}
    closed = {**opened, "outcome": "healed"}
    slow = {"id": "i2", "fault": "slow", "outcome": "unaffected", "is_only_told": True}
    _, listener, seen, _ = run(tmp_path, plain(), incidents=[(2, slow), (3, opened), (6, closed)])
    told = [words for words in listener.told if words[0] == "incident"]
    assert told[0] == ("incident", "i1", None) and told[-1] == ("incident", "i1", "healed")
    assert seen.incidents["i1"]["outcome"] == "healed" and len(seen.marks) == 1 and "i2" not in seen.incidents


def test_a_task_that_does_not_end_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "TIMEOUT_S", 0.05)
    monkeypatch.setattr(watch, "TIMEOUT_PER_ITERATION_S", 0.0)
    with pytest.raises(watch.WatchProblem, match="did not end in its time"):
        run(tmp_path, plain(), iterations=1 << 30)


def test_every_act_of_every_scenario_is_something_a_cluster_can_do():
    from unicron.demo.runner import layout_of

    for name in scenarios.names():
        for act in scenarios.make(name, layout_of(1, 1, 4)).acts:
            assert hasattr(watch.Cluster, act.do)


def test_a_run_that_waits_for_something_ends_when_it_has_come(tmp_path):
    acts = (Act("kill_agent", 5, 1), Act("start_agent", 8, 1))
    seen = [(15, {**HEALED, "id": "i"})]
    cluster, _, _, _ = run(tmp_path, plain(acts=acts, iterations=10, extra_s=60.0), iterations=60, incidents=seen)
    end = int((tmp_path / "end").read_text())
    assert [call[0] for call in cluster.calls] == ["kill_agent", "start_agent"]
    assert end > 15 + 1000 * watch.END_AHEAD_S  # an iteration takes 1 ms here: no rank is there yet


def test_a_run_that_waits_for_nothing_is_told_no_end(tmp_path):
    run(tmp_path, plain(acts=(Act("kill_agent", 5, 1),)))
    assert not (tmp_path / "end").exists()


def test_what_does_not_come_is_waited_for(tmp_path):
    run(tmp_path, plain(acts=(Act("kill_agent", 5, 1),), extra_s=60.0))  # nobody saw the agent die
    assert not (tmp_path / "end").exists()


def test_a_node_may_come_back_only_when_the_task_is_narrow(tmp_path):
    cluster, *_ = run(tmp_path, plain(acts=(Act("start_agent", 2, 1, when_dp=1),)))
    assert not cluster.calls, "it has two replicas all the time"
    cluster, *_ = run(tmp_path, plain(acts=(Act("start_agent", 2, 1, when_dp=2),)))
    assert [call[0] for call in cluster.calls] == ["start_agent"]
