"""`unicron run` in a real Slurm job: on all its nodes, saved and queued again on a notice, its bad nodes named."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from clusters import PLAIN, eventually
from servers import ROOT
from slurm_servers import Slurm
from unicron.runtime import processes, slurm
from unicron.runtime.slurm import Allocation

pytestmark = pytest.mark.timeout(180)

BATCH = ROOT / "deploy" / "slurm" / "unicron.sbatch"


def submit(cluster: Slurm, folder: Path, *more: str) -> str:
    out = folder / "job.out"
    words = [
        "--agents", "2", "--managed", "--understudies", "0", "--import", "unicron._core",
        "--checkpoint-dir", str(folder / "ckpt"), "--log-dir", str(folder / "logs"), "--stopped-grace", "0", *more,
        str(PLAIN), "1000000", "10",
    ]  # fmt: skip
    said = cluster.call("sbatch", "--nodes=2", f"--output={out}", str(BATCH), *words)
    return said.split()[-1]


def test_a_job_saves_on_a_notice_and_goes_on_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICRON", f"{sys.executable} -m unicron.cli")
    out, logs = tmp_path / "job.out", tmp_path / "logs" / "plain_worker"
    with Slurm(tmp_path / "slurm", 2) as cluster:
        job = submit(cluster, tmp_path)

        def text(pattern: str) -> list[Path]:
            return [path for path in logs.rglob("stdout.log") if re.search(pattern, path.read_text())]

        def planned() -> bool:
            state = cluster.job(job)["JobState"]
            assert state in ("PENDING", "CONFIGURING", "RUNNING"), out.read_text()
            return len(text("plan 1 start")) == 2

        eventually(planned, 60)
        agents = sorted(path.name for path in (tmp_path / "logs" / f".unicron-{job}" / "daemons").glob("n*.err"))
        assert agents == ["n0.err", "n1.err"]
        cluster.call("scancel", "--batch", "--signal=USR1", job)  # as --signal does before the time is over
        eventually(lambda: "goes back into the queue" in out.read_text(), 60)
        eventually(lambda: cluster.job(job)["JobState"] == "PENDING", 60)
        saved = int(re.search(r"saved (\d+)", text("saved")[0].read_text())[1])  # type: ignore[index]
        time.sleep(2.5)  # slurmd refuses whatever was granted in the second of the requeueing, or before
        eventually(lambda: begins_again(cluster, job), 60)
        eventually(lambda: text("plan 2 restore"), 60)
        assert cluster.job(job)["Restarts"] == "1"
        assert saved >= 0
        cluster.call("scancel", job)
        eventually(lambda: cluster.job(job)["JobState"] == "CANCELLED", 60)
        eventually(lambda: not left_of(tmp_path), 30)
        assert out.read_text().count("goes back into the queue") == 1


def begins_again(cluster: Slurm, job: str) -> bool:
    """Slurm itself waits two minutes, from when the former run has ended."""
    if cluster.job(job)["JobState"] != "PENDING":
        return True
    cluster.call("scontrol", "update", f"job={job}", "starttime=now", check=False)
    return False


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


def test_a_drained_node_gets_no_other_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Slurm(tmp_path / "slurm", 2) as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        assert slurm.expand("n[0-1],m07") == ("n0", "n1", "m07")
        found = slurm.allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_RESTART_COUNT": "2"})
        assert found == Allocation("7", ("n0", "n1"), 2)
        slurm.drain("n1", "its store endpoint refuses connections")
        shown = cluster.call("scontrol", "show", "node", "n1")
        assert "DRAIN" in shown and "Reason=unicron: its store endpoint refuses connections" in shown
        with pytest.raises(slurm.SlurmProblem, match=r"scontrol update: .*[Ii]nvalid node name"):
            slurm.drain("n9", "no such node")


def test_outside_of_an_allocation_nothing_is_asked() -> None:
    assert slurm.allocation({}) is None
    assert slurm.allocation({"SLURM_JOB_ID": "7"}) is None
    step = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_STEP_ID": "0"}
    assert slurm.allocation(step) is None  # a step is one of many: its batch script has the allocation
