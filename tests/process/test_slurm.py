"""`unicron run` in real Slurm jobs of four nodes: what fails is healed, a notice heeded, a job queued again goes on."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusters import PLAIN, eventually, happened, plain_job
from servers import ROOT, Server, program
from slurm_servers import Slurm
from unicron.runtime import processes, slurm
from unicron.runtime.local_cluster import LocalCluster
from unicron.runtime.slurm import INTERACTIVE_STEP, Allocation
from unicron.runtime.slurm_watch import Sight, sight

pytestmark = pytest.mark.timeout(180)

BATCH = ROOT / "deploy" / "slurm" / "unicron.sbatch"
UNICRON = [sys.executable, "-m", "unicron.cli"]
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """Four nodes, and its programs in this process's own environment."""
    with Slurm(tmp_path / "slurm", 4) as started:
        for name in ("PATH", "SLURM_CONF"):
            monkeypatch.setenv(name, started.environment[name])
        if "LD_LIBRARY_PATH" in started.environment:
            monkeypatch.setenv("LD_LIBRARY_PATH", started.environment["LD_LIBRARY_PATH"])
        started.environment["UNICRON"] = shlex.join(UNICRON)
        yield started
        started.end_jobs()
        eventually(lambda: not left_of(tmp_path), 30)


class Trained:
    """Three nodes of four train; what the job and its workers wrote."""

    def __init__(self, cluster: Slurm, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.out = folder / "job.out"
        self.words = [
            "--agents", "3", "--managed", "--understudies", "0", "--import", "unicron._core", "--stopped-grace", "0",
            "--checkpoint-dir", str(folder / "ckpt"), "--log-dir", str(folder / "logs"),
        ]  # fmt: skip
        self.script = [str(PLAIN), "1000000", "10"]
        self.job = ""

    def sbatch(self, *words: str) -> None:
        self.job = self.cluster.call("sbatch", "--nodes=4", f"--output={self.out}", *words).split()[-1]

    def batch_script(self, *options: str, more: tuple[str, ...] = ()) -> None:
        self.sbatch(*options, str(BATCH), *more, *self.words, *self.script)
        self.begins()

    def begins(self) -> dict[str, int]:
        """node -> worker, when all three run."""
        eventually(lambda: self.said(r"plan 1 start rank 2"), 60)
        return self.workers(3)

    def workers(self, count: int) -> dict[str, int]:
        return dict(eventually(lambda: found if len(found := self.cluster.workers()) == count else None, 60))

    def said(self, pattern: str) -> re.Match[str] | None:
        state = self.cluster.job(self.job)["JobState"] if self.job else ""
        assert state not in ENDED, f"{state}: {self.text()[-3000:]}"
        return re.search(pattern, self.text())

    def text(self) -> str:
        return self.out.read_text() if self.out.exists() else ""

    def pending_again(self) -> None:
        eventually(lambda: self.said("goes back into the queue"), 60)
        eventually(lambda: self.cluster.job(self.job)["JobState"] == "PENDING", 60)
        assert self.cluster.job(self.job)["Restarts"] == "1"

    def goes_on(self) -> None:
        """From what it saved. Slurm itself would wait two minutes, from when the former run has ended."""
        time.sleep(2.5)  # slurmd refuses whatever was granted in the second of the requeueing, or before

        def restored() -> bool:
            """Asked for until it is: a node that refuses the job sends it back, to wait those two minutes again."""
            if self.cluster.job(self.job)["JobState"] == "PENDING":
                self.cluster.call("scontrol", "update", f"job={self.job}", "starttime=now", check=False)
            return len(re.findall(r"restored (\d+)", self.text())) == 3

        eventually(restored, 120)
        (restored,) = set(re.findall(r"restored (\d+)", self.text()))
        assert restored in re.findall(r"saved (\d+)", self.text()) and int(restored) > 0


@pytest.fixture
def trained(cluster: Slurm, tmp_path: Path) -> Trained:
    return Trained(cluster, tmp_path)


def left_of(folder: Path) -> list[int]:
    """Processes that still have this test's folder on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if str(folder / "logs").encode() in words and processes.is_alive(int(path.parent.name)):
            found.append(int(path.parent.name))
    return found


def test_a_spare_takes_a_lost_nodes_place_and_at_the_end_all_is_saved(cluster: Slurm, trained: Trained) -> None:
    trained.batch_script("--signal=B:USR1@60", more=("--drain-bad-nodes", "--save-before=0"))
    before = trained.workers(3)
    (spare,) = set(cluster.nodes) - set(before)
    lost = next(node for node in before if node != "n0")  # there the batch script runs
    cluster.lose(lost)
    eventually(lambda: trained.said(r"i1 SEV1: node lost \(rank \d on " + lost), 60)
    assert set(trained.workers(3)) == {*before, spare} - {lost}
    eventually(lambda: trained.said(r"plan \d+ grow"), 60)
    assert trained.workers(3).items() >= {(node, pid) for node, pid in before.items() if node != lost}
    eventually(lambda: trained.said(f"{lost} failed, and is drained"), 60)
    assert cluster.drained(lost).startswith("unicron: ")
    cluster.ends_in(trained.job, 55)  # Slurm looks every 30 s whom to signal
    cluster.down(lost)
    eventually(lambda: trained.said(f"{lost} is given up: Slurm took it out of the job"), 60)

    trained.pending_again()
    assert trained.said("cause: SIGUSR1")
    cluster.start(lost)
    cluster.call("scontrol", "update", f"nodename={lost}", "state=resume", check=False)
    trained.goes_on()
    assert len(trained.workers(3)) == 3
    assert not any(cluster.drained(node) for node in cluster.nodes)  # not again, and not for the former run's agents


def test_before_a_preemption_it_saves_and_the_urgent_job_runs(cluster: Slurm, trained: Trained, tmp_path: Path) -> None:
    trained.batch_script()
    done = tmp_path / "urgent.out"
    cluster.call("sbatch", "--partition=urgent", "--nodes=4", f"--output={done}", "--wrap=echo urgent work")
    trained.pending_again()
    eventually(lambda: done.exists() and "urgent work" in done.read_text(), 60)
    trained.goes_on()
    assert len(trained.workers(3)) == 3


def test_run_without_the_batch_script(cluster: Slurm, trained: Trained) -> None:
    """What the script says in options is not there: a notice is read from the job's end, a drained node is left."""
    run = shlex.join([*UNICRON, "run", "--requeue", *trained.words, *trained.script])
    trained.sbatch("--no-kill", "--open-mode=append", f"--wrap=exec {run}")
    before = trained.begins()
    (spare,) = set(cluster.nodes) - set(before)
    left = next(node for node in before if node != "n0")
    cluster.call("scontrol", "update", f"nodename={left}", "state=drain", "reason=a fan is loud")
    eventually(lambda: trained.said(f"{left} is drained in Slurm: a fan is loud: its roles move"), 60)
    eventually(lambda: set(cluster.workers()) == {*before, spare} - {left}, 60)
    lost = next(node for node in cluster.workers() if node != "n0")
    cluster.lose(lost)
    eventually(lambda: trained.said(r"SEV1: node lost \(rank \d on " + lost), 60)
    assert len(trained.workers(2)) == 2
    cluster.ends_in(trained.job, 55)
    cluster.down(lost)
    trained.pending_again()
    cluster.call("scontrol", "update", f"nodename={left}", "state=resume")
    cluster.start(lost)
    trained.goes_on()
    assert trained.said(f"{left} is no longer drained in Slurm: it is used again")


def test_run_under_salloc(cluster: Slurm, trained: Trained) -> None:
    run = [*UNICRON, "run", *trained.words, *trained.script]
    salloc = [program("salloc"), "--nodes=4", "--no-kill", *run]
    with Server(salloc, trained.out, cluster.environment) as command:
        before = trained.begins()
        (spare,) = set(cluster.nodes) - set(before)
        lost = next(iter(before))
        cluster.lose(lost)
        eventually(lambda: set(trained.workers(3)) == {*before, spare} - {lost}, 60)
        job = cluster.call("squeue", "--noheader", "--format=%i").split()[0]
        cluster.ends_in(job, 55)
        cluster.down(lost)
        assert command.process.wait(60) == slurm.EXIT_REQUEUE
        assert trained.said("suspended after")


def test_two_jobs_lend_their_nodes_to_a_coordinator_outside(cluster: Slurm, tmp_path: Path) -> None:
    """The notice of the first is a planned move to the nodes of the second."""
    with LocalCluster(0, imports="unicron._core", log_dir=tmp_path / "daemons") as outside:
        cluster.environment.update(UNICRON_COORDINATOR=outside.address, UNICRON_KEYS=str(outside.state / "keys"))
        agent = ["--slots", "1", "--understudies", "0", "--import", "unicron._core", "--metrics", ""]
        lend = ["sbatch", "--nodes=2", f"--output={tmp_path}/%j.out", str(BATCH), *agent]
        first = cluster.call(*lend).split()[-1]
        eventually(lambda: [(n["phase"], n["why"]) for n in outside.ask("nodes")] == [("up", "")] * 2, 60)
        task = outside.submit(plain_job("lent", tmp_path / "logs", iterations=1_000_000))
        eventually(lambda: {w.node for w in outside.workers(task)} == {"n0", "n1"}, 60)
        cluster.call(*lend)
        eventually(lambda: [(n["phase"], n["why"]) for n in outside.ask("nodes")] == [("up", "")] * 4, 60)
        cluster.call("scancel", "--batch", "--signal=USR1", first)
        eventually(lambda: {w.node for w in outside.workers(task)} == {"n2", "n3"}, 60)
        eventually(lambda: {i["outcome"] for i in happened(outside, task)} == {"healed"}, 60)
        outside.cancel(task)


def test_what_slurm_says_is_understood(cluster: Slurm) -> None:
    assert slurm.expand("n[0-1],m07") == ("n0", "n1", "m07")
    around = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_RESTART_COUNT": "2"}
    assert slurm.allocation(around) == Allocation("7", ("n0", "n1"), 2)
    assert slurm.allocation({**around, "SLURM_STEP_ID": INTERACTIVE_STEP}) is not None  # salloc's own shell
    slurm.drain("n1", "its store endpoint [::1] refuses connections")
    job = "JobId=7 JobState=RUNNING PreemptTime=None EndTime=2026-11-28T22:42:04 NodeList=n[0-1] BatchHost=n0"
    seen = sight(job, slurm.show_nodes(("n0", "n1")))
    assert seen.nodes == ("n0", "n1") and not seen.preempted
    assert time.localtime(seen.ends_s)[:6] == (2026, 11, 28, 22, 42, 4)
    assert seen.drained == {"n1": "unicron: its store endpoint [::1] refuses connections"}
    assert sight("NodeList=n1 EndTime=Unknown PreemptTime=2026-11-28T22:42:04", "") == Sight(("n1",), None, True)
    with pytest.raises(slurm.SlurmProblem, match=r"scontrol update: .*[Ii]nvalid node name"):
        slurm.drain("n9", "no such node")


def test_outside_of_an_allocation_nothing_is_asked() -> None:
    assert slurm.allocation({}) is None
    assert slurm.allocation({"SLURM_JOB_ID": "7"}) is None
    step = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_STEP_ID": "0"}
    assert slurm.allocation(step) is None  # a step is one of many: its batch script has the allocation
