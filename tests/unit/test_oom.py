"""Was a SIGKILL the kernel's? Each witness alone, none at all, and one real kill where a control group can be made."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from unicron.runtime.oom import OomWatch

PID = 7_001
V2, V1 = "0::/job/a\n", "9:cpu:/\n4:memory:/job/a\n0::/\n"


class Machine:
    """Files as a kernel shows them."""

    def __init__(self, root: Path, cgroup: str) -> None:
        self.proc, self.cgroups, self.log = root / "proc", root / "cgroups", root / "kmsg"
        (self.proc / str(PID)).mkdir(parents=True)
        (self.proc / str(PID) / "cgroup").write_text(cgroup)
        self.watch = OomWatch(self.proc, self.cgroups, self.log)

    def count(self, name: str, number: int) -> None:
        path = self.cgroups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"oom 3\noom_kill {number}\n")

    def vmstat(self, number: int) -> None:
        (self.proc / "vmstat").write_text(f"pgfault 12\noom_kill {number}\n")


@pytest.mark.parametrize(("cgroup", "name"), [(V2, "job/a/memory.events"), (V1, "memory/job/a/memory.oom_control")])
@pytest.mark.parametrize("is_oom", [True, False])
def test_the_counter_of_its_control_group_decides(tmp_path: Path, cgroup: str, name: str, is_oom: bool) -> None:
    machine = Machine(tmp_path, cgroup)
    machine.count(name, 5)
    machine.vmstat(0)
    machine.watch.begin("w", PID)
    machine.count(name, 5 + is_oom)
    machine.vmstat(9)  # of others: the nearer counter is the witness
    witness = machine.watch.ended("w", PID)
    assert witness.oom is is_oom
    assert name in witness.text if is_oom else witness.text == "memory: the kernel killed nothing for memory"


def test_one_kill_is_not_the_cause_of_two_deaths(tmp_path: Path) -> None:
    machine = Machine(tmp_path, V2)
    machine.count("job/a/memory.events", 0)
    machine.watch.begin("w0", PID)
    machine.watch.begin("w1", PID)
    machine.count("job/a/memory.events", 1)
    assert machine.watch.ended("w0", PID).oom is True
    assert machine.watch.ended("w1", PID).oom is False


def test_the_machines_counter_where_there_is_no_nearer_one(tmp_path: Path) -> None:
    machine = Machine(tmp_path, V2)
    machine.vmstat(2)
    machine.watch.begin("w", PID)
    assert machine.watch.ended("w", PID).oom is False
    machine.vmstat(3)
    assert machine.watch.ended("w", PID).oom is True


def test_unknown_where_nothing_can_be_read(tmp_path: Path) -> None:
    machine = Machine(tmp_path, V2)
    machine.watch.begin("w", PID)
    witness = machine.watch.ended("w", PID)
    assert witness.oom is None and "can be read" in witness.text
    machine.watch.forget("w")
    assert machine.watch.ended("w", PID).oom is None


def test_the_kernel_log_names_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path, V2)
    namespace = machine.proc / "self" / "ns"
    namespace.mkdir(parents=True)
    (namespace / "pid").symlink_to("pid:[4026531836]")
    machine.log.write_text("6,1,2,-;Out of memory: Killed process 7001 (old) total-vm:1kB\n")
    watch = OomWatch(machine.proc, machine.cgroups, machine.log)
    watch.begin("w", PID)
    assert watch.ended("w", PID).oom is None, "a line from before says nothing"
    with machine.log.open("a") as log:
        log.write("6,9,8,-;Memory cgroup out of memory: Killed process 7001 (python) total-vm:99kB\n")
    line = watch.ended("w", PID)
    watch.close()
    assert line.oom is True and line.text.startswith("Memory cgroup out of memory: Killed process 7001 (python)")


# ---------------------------------------------------------------- a real one

EATER = """
import os, sys
print("up", flush=True)
sys.stdin.readline()
eaten = []
while True:
    eaten.append(bytearray(os.urandom(1 << 20)))
"""


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A memory control group of 48 MiB; skips where none can be made."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    fields = [line.split(":", 2) for line in lines]
    v1 = next((Path("/sys/fs/cgroup/memory") / f[2].lstrip("/") for f in fields if "memory" in f[1].split(",")), None)
    parent, limit = (v1, "memory.limit_in_bytes") if v1 else (Path("/sys/fs/cgroup"), "memory.max")
    group = parent / f"unicron-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        (group / limit).write_text(str(48 << 20))
    except OSError as error:
        group.rmdir()
        pytest.skip(f"no memory control group can be made here: {error}")
    yield group
    group.rmdir()


@pytest.mark.timeout(60)
def test_a_real_kill_is_told_from_anothers(small_group: Path) -> None:
    watch = OomWatch()
    verdicts = []
    for is_eater in (True, False):
        with subprocess.Popen(
            [sys.executable, "-c", EATER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:  # fmt: skip
            assert process.stdout is not None and process.stdin is not None
            assert process.stdout.readline() == b"up\n"
            (small_group / "cgroup.procs").write_text(str(process.pid))
            watch.begin("w", process.pid)
            if is_eater:
                process.stdin.write(b"\n")
                process.stdin.flush()
            else:
                process.kill()
            assert process.wait(40) == -signal.SIGKILL
            verdicts.append(watch.ended("w", process.pid).oom)
    watch.close()
    assert verdicts == [True, False]
