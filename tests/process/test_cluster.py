"""A whole cluster of real processes without torch: kills, stops, lost nodes, a coordinator that
comes back.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec
import pytest

from clusters import closed_incident, eventually, happened, plain_job, running
from unicron.runtime import processes
from unicron.runtime.client import CoordinatorRefused
from unicron.runtime.local_cluster import ClusterProblem, LocalCluster
from unicron.types import Layout

pytestmark = pytest.mark.timeout(60)


def test_a_task_runs_to_its_end(cluster: LocalCluster, tmp_path: Path) -> None:
    task = cluster.submit(plain_job("t", tmp_path, iterations=30))
    row = cluster.wait(task, 20)
    assert (row["outcome"], row["restarts"], happened(cluster, task)) == ("done", 0, [])
    for incarnation, rank in ((0, 0), (0, 1)):
        log = tmp_path / "t" / str(incarnation) / str(rank) / "stdout.log"
        assert log.read_text().splitlines()[-1] == "finished"
    eventually(lambda: cluster.workers(task) == [])


def test_a_killed_worker_is_replaced_and_its_arena_adopted(cluster: LocalCluster, tmp_path: Path) -> None:
    task = cluster.submit(plain_job("t", tmp_path))
    running(cluster, task)
    victim = cluster.member(task, 1)
    os.kill(victim.pid, signal.SIGKILL)
    incident = closed_incident(cluster, task)
    assert incident["root"] == {"node": "n1", "rank": 1}
    assert (incident["outcome"], incident["kind"]) == ("healed", "replace")
    # Its mutex told of the death; the exit status may come after the healing.
    eventually(lambda: happened(cluster, task)[0]["cause"] == "signal 9")
    assert incident["method"] == "process"
    assert cluster.member(task, 1).worker != victim.worker
    out = (tmp_path / "t" / "1" / "1" / "stdout.log").read_text()
    assert "arena adopted" in out
    assert cluster.wait(task, 20)["outcome"] == "done"


def test_a_stopped_worker_is_seen_and_replaced(cluster: LocalCluster, tmp_path: Path) -> None:
    task = cluster.submit(plain_job("t", tmp_path))
    running(cluster, task)
    victim = cluster.member(task, 0)
    os.kill(victim.pid, signal.SIGSTOP)
    incident = closed_incident(cluster, task)
    assert (incident["fault"], incident["outcome"]) == ("stopped", "healed")
    assert not processes.is_alive(victim.pid)


def test_a_fault_is_armed_and_timed(cluster: LocalCluster, tmp_path: Path) -> None:
    task = cluster.submit(plain_job("t", tmp_path))
    running(cluster, task)
    cluster.arm_fault(task, 1, "stop")
    incident = closed_incident(cluster, task)
    assert incident["fault"] == "stopped" and 0 < incident["detect_ms"] < 1000
    with pytest.raises(CoordinatorRefused, match="rank 9"):
        cluster.arm_fault(task, 9, "kill")


def test_an_exception_heals_and_is_fatal_the_second_time_at_the_same_place(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    env = {"PLAIN_FAIL_AT": "100"}
    task = cluster.submit(plain_job("t", tmp_path, iterations=1000, env=env))
    row = cluster.wait(task, 30)
    assert row["outcome"] == "stopped" and "InjectedFault" in row["cause"]
    first, second = happened(cluster, task)
    assert (first["fault"], first["text"], first["method"]) == ("exception", "boom", "exception")
    assert (first["severity"], second["severity"]) == ("SEV2", "FATAL")
    assert second["iteration"] == 100 and second["log"].endswith("/0/stderr.log")


def test_a_lost_node_shrinks_the_task_and_its_return_grows_it(cluster: LocalCluster, tmp_path: Path) -> None:
    task = cluster.submit(plain_job("t", tmp_path, iterations=2000))
    running(cluster, task)
    cluster.kill_agent("n1")
    incident = closed_incident(cluster, task)
    assert (incident["outcome"], incident["kind"]) == ("resized", "shrink")
    assert cluster.task(task)["replicas"] == [0]
    cluster.start_agent("n1")
    eventually(lambda: cluster.task(task)["replicas"] == [0, 1], 20)
    assert cluster.member(task, 1).node == "n1"
    cluster.cancel(task)
    assert cluster.wait(task, 20)["cause"] == "cancelled"


def test_an_agent_killed_alone_takes_its_workers_with_it(cluster: LocalCluster, tmp_path: Path) -> None:
    task = cluster.submit(plain_job("t", tmp_path, iterations=2000))
    running(cluster, task)
    mine = [w.pid for w in cluster.workers(task) if w.node == "n0"]
    other = [w.pid for w in cluster.workers(task) if w.node == "n1"]
    os.kill(mine[-1], signal.SIGSTOP)  # one that cannot end by itself
    cluster.kill_agent_alone("n0")
    eventually(lambda: not any(map(processes.is_alive, mine)), 2)
    assert all(map(processes.is_alive, other))
    assert closed_incident(cluster, task)["outcome"] == "resized"
    cluster.start_agent("n0")  # over the socket file that the killed one left
    eventually(lambda: cluster.task(task)["replicas"] == [0, 1], 20)


def test_training_goes_on_without_a_coordinator_which_finds_its_task_again(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    task = cluster.submit(plain_job("t", tmp_path, iterations=600))
    running(cluster, task)
    before = {w.worker: w.pid for w in cluster.workers(task)}
    cluster.kill_coordinator()
    time.sleep(1.0)
    cluster.start_coordinator()
    running(cluster, task, 50)
    assert {w.worker: w.pid for w in cluster.workers(task)} == before
    assert cluster.ask("ping")["term"] == 2
    assert cluster.wait(task, 20)["outcome"] == "done" and happened(cluster, task) == []


def test_a_death_while_the_coordinator_is_away_is_healed_on_its_return(cluster: LocalCluster, tmp_path: Path) -> None:
    task = cluster.submit(plain_job("t", tmp_path, iterations=2000))
    running(cluster, task)
    victim = cluster.member(task, 0)
    cluster.kill_coordinator()
    os.kill(victim.pid, signal.SIGKILL)
    time.sleep(0.3)
    cluster.start_coordinator()
    incident = closed_incident(cluster, task)
    assert (incident["root"]["rank"], incident["outcome"]) == (0, "healed")


def test_dead_daemons_are_started_again(cluster: LocalCluster, tmp_path: Path) -> None:
    task = cluster.submit(plain_job("t", tmp_path, iterations=3000))
    running(cluster, task)
    assert cluster.tend() == []
    os.kill(cluster.coordinator_pid, signal.SIGKILL)
    os.kill(cluster.agent_pid("n1"), signal.SIGKILL)
    seen: list[str] = []
    eventually(lambda: seen.extend(cluster.tend()) or set(seen) == {"coordinator", "n1"})
    eventually(lambda: cluster.task(task)["phase"] == "running", 20)


def test_what_cannot_be_is_refused_in_one_line(cluster: LocalCluster, tmp_path: Path) -> None:
    for change, text in (
        ({"layout": Layout(dp=3, num_micro_batches=3)}, "3 slots"),
        ({"layout": Layout(dp=2, num_micro_batches=1)}, "micro-batches"),
        ({"layout": Layout(tp=0)}, "tp is 0"),
        ({"command": ()}, "command is empty"),
    ):
        job = msgspec.structs.replace(plain_job("t", tmp_path), **change)
        with pytest.raises(CoordinatorRefused, match=text):
            cluster.submit(job)
    with pytest.raises(CoordinatorRefused, match="did you mean command"):
        cluster.ask("submit", job={"name": "t", "comand": ["x"]})
    with pytest.raises(CoordinatorRefused, match="did you mean submit"):
        cluster.ask("sumbit")
    with pytest.raises(CoordinatorRefused, match="no task"):
        cluster.ask("describe", task="none")
    with pytest.raises(ClusterProblem, match="running already"):
        cluster.start_agent("n0")


def test_a_program_that_is_missing_stops_the_task(cluster: LocalCluster, tmp_path: Path) -> None:
    job = plain_job("t", tmp_path, managed=False, restart_max=0)
    task = cluster.submit(msgspec.structs.replace(job, command=("no-such-program", "x")))
    row = cluster.wait(task, 20)
    assert (row["outcome"], "exit code 2" in row["cause"]) == ("stopped", True), row
    said = (tmp_path / "t" / "0" / "0" / "stderr.log").read_text()
    assert "cannot run no-such-program" in said


def test_another_cluster_of_this_machine_may_end_as_it_likes(cluster: LocalCluster, tmp_path: Path) -> None:
    """Its agents found their template gone, and killed who bore their workers' names: ours."""
    endless = 1_000_000  # the other cluster may take long to come: neither task ends by itself
    task = cluster.submit(plain_job("t", tmp_path / "ours", iterations=endless))
    running(cluster, task)
    ours = [cluster.member(task, rank) for rank in (0, 1)]
    with LocalCluster(num_agents=2, slots=1, understudies=1, imports="unicron._core") as other:
        theirs = other.submit(plain_job("t", tmp_path / "theirs", iterations=endless))
        running(other, theirs)
        assert {other.member(theirs, rank).worker for rank in (0, 1)} == {member.worker for member in ours}
        victims = [other.member(theirs, rank).pid for rank in (0, 1)]
        for pid in processes.find(other.directory):
            if "unicron.runtime.template" in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                processes.kill(pid)
        eventually(lambda: not any(map(processes.is_alive, victims)))
        eventually(lambda: not [pid for pid in processes.find(other.directory) if processes.worker_of(pid)])
    assert [cluster.member(task, rank) for rank in (0, 1)] == ours
    assert all(processes.is_alive(member.pid) for member in ours) and happened(cluster, task) == []
