"""One run of one system with one fault: start it, strike, wait for what there is to see, end it, leave nothing.

Everything that a run starts carries its folder in the environment (PEERS_RUN); by that it is found and ended, and by
nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers import job
from peers.systems import HERE, OUTER_FAULTS, STRUCK, Setting, System

START_S_MAX = 300.0
END_S_MAX = 20.0
POLL_S = 0.03
# The first word of anybody about the fault, but for the struck rank's own.
REACTION = re.compile(r"(?i)error|exception|fail|timed out|timeout|closing signal|abort|interrupt|restart|terminat")
NOT_A_REACTION = re.compile(rf"injected|\[INFO\]|\[rank{job.VICTIM}\]|^\s*raise |^\s*File ")


@dataclass
class Observed:
    """What a run left: its events by time, and what the driver saw."""

    events: list[dict[str, Any]]
    status: str  # "whole", "not whole", "no reaction", "ended: ...", "did not start"
    said: list[tuple[float, str]] = field(default_factory=list)  # reactions told on standard error
    detected_s: float | None = None  # where a system has a record of its own
    cpu_s: float | None = None  # of all its processes, over the steady iterations
    cpu_iterations: int = 0
    load: tuple[float, float] = (0.0, 0.0)
    nodes: int = 1


class Driver:
    """A run as the systems see it (systems.Run), and its processes."""

    def __init__(self, system: System, setting: str, fault: str) -> None:
        self.system, self.fault = system, fault
        self.setting: Setting = system.settings[setting]
        self.name = f"{system.name}-{setting}-{fault}"
        self.nodes = 2 if system.two_nodes_always or fault in OUTER_FAULTS else 1
        self.port = free_port()
        memory = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(prefix=f"peers-{self.name}-", dir=memory if memory.is_dir() else None))
        (self.folder / "events").mkdir()
        self.events: list[dict[str, Any]] = []
        self.said: list[tuple[float, str]] = []
        self._offsets: dict[Path, int] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, tuple[list[str], dict[str, str]]] = {}
        self._reader, self._writer = os.pipe()
        self._log = os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        threading.Thread(target=self._listen, daemon=True).start()

    # ------------------------------------------------------------ processes

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH", "")])])
        return {
            **os.environ,
            "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_CPP_LOG_LEVEL": "ERROR", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port),
            "PEERS_RUN": str(self.folder), "PEERS_FAULT": self.fault,
            "PEERS_RANKS": STRUCK.get(self.fault, str(job.VICTIM)),
        }  # fmt: skip

    def spawn(self, name: str, command: list[str], **environment: str) -> None:
        self._commands[name] = (command, environment)
        self._processes[name] = subprocess.Popen(
            command, env={**self.environment, **environment}, stdin=subprocess.DEVNULL, stdout=self._writer,
            stderr=self._writer, start_new_session=True, cwd=self.folder,
        )  # fmt: skip

    def respawn(self, name: str) -> None:
        command, environment = self._commands[name]
        self.spawn(name, command, **environment)

    def start(self) -> None:
        self.system.start(self, self.setting)

    def tend(self) -> None:
        """Ranks without a launcher that ended in failure come back."""
        for name, process in list(self._processes.items()):
            if self.system.respawns and name.startswith("rank") and process.poll() not in (None, 0):
                self.respawn(name)

    def is_over(self) -> str:
        """Why nothing more can come; "" while something can."""
        working = {n: p.poll() for n, p in self._processes.items() if n != "coordinator" or len(self._processes) == 1}
        if any(code is None for code in working.values()):
            return ""
        return "ended: " + ", ".join(f"{name} {code}" for name, code in sorted(working.items()))

    def strike(self, fault: str) -> None:
        """A fault from outside, now."""
        self.say("fault", job.FAULT_ITERATION, fault=fault)
        if fault == "node":
            for name in self.system.node:
                for pid in self._tree(self._processes[name].pid):
                    end(pid)
        else:
            end(self._processes[getattr(self.system, fault)].pid)

    def revive(self, fault: str) -> None:
        struck = self.system.node if fault == "node" else (getattr(self.system, fault),)
        for name in struck:
            if self._processes[name].poll() is not None and not (self.system.respawns and name.startswith("rank")):
                self.respawn(name)

    def detected_s(self) -> float | None:
        return None

    def stop(self) -> None:
        for pid in self.pids():
            end(pid)
        for process in self._processes.values():
            process.wait(10)
        os.close(self._writer)

    def forget(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def pids(self) -> list[int]:
        """Everything that carries this run's mark."""
        mark = f"PEERS_RUN={self.folder}\0".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (path / "environ").read_bytes():
                    found.append(int(path.name))
            except OSError:
                continue
        return found

    def _tree(self, root: int) -> list[int]:
        parents = {pid: int(fields[1]) for pid in self.pids() if (fields := stat(pid))}
        found = [root]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid and child not in found]
        return found

    def cpu_s(self) -> float:
        """Used so far by everything that lives."""
        ticks = sum(int(fields[11]) + int(fields[12]) for pid in self.pids() if (fields := stat(pid)))
        return ticks / os.sysconf("SC_CLK_TCK")

    # ------------------------------------------------------------ what is seen

    def say(self, event: str, iteration: int = -1, **facts: Any) -> None:
        line = {"t": time.monotonic(), "event": event, "rank": -1, "i": iteration, **facts}
        with open(self.folder / "events" / "driver.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")

    def look(self) -> list[dict[str, Any]]:
        """The events since the last look."""
        new = []
        for path in sorted((self.folder / "events").iterdir()):
            with open(path, "rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            new += [json.loads(line) for line in whole.splitlines()]
        self.events += new
        return new

    def _listen(self) -> None:
        with open(self._reader, "rb") as pipe:
            for line in pipe:
                now = time.monotonic()
                os.write(self._log, b"%.3f " % now + line)
                text = line.decode(errors="replace")
                if REACTION.search(text) and not NOT_A_REACTION.search(text):
                    self.said.append((now, text.strip()[:200]))


def stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; [] when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def free_port() -> int:
    """One with a few free behind it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---------------------------------------------------------------- the course of a run


class Watch:
    """Looks at a run until there is nothing more to see."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.struck_at: float | None = None
        self.begun_at = time.monotonic()
        self.next_commit_at: float | None = None
        self.whole_at: float | None = None
        self.newest = -1
        self._world_before = job.WORLD_SIZE
        self._commits: dict[int, dict[int, int]] = {}  # after the fault: iteration -> rank -> world
        self._revived = False
        self._cpu_before: tuple[float, int] | None = None
        self.cpu: tuple[float, int] | None = None  # seconds, iterations

    def run(self) -> str:
        """The status."""
        while True:
            time.sleep(POLL_S)
            for event in self.driver.look():
                self._take(event)
            self.driver.tend()
            self._act()
            self._require_whole()
            if status := self._status():
                return status

    def _take(self, event: dict[str, Any]) -> None:
        if event["event"] == "fault" and self.struck_at is None:
            self.struck_at = event["t"]
        if event["event"] != "commit":
            return
        self.newest = max(self.newest, event["i"])
        if self.struck_at is None:
            self._world_before = event["world"]
        if self.struck_at is None or event["t"] <= self.struck_at or event["i"] < job.FAULT_ITERATION:
            return
        self.next_commit_at = self.next_commit_at or event["t"]
        ranks = self._commits.setdefault(event["i"], {})
        ranks[event["rank"]] = event["world"]
        if len(ranks) == job.WORLD_SIZE and set(ranks.values()) == {job.WORLD_SIZE} and self._settled(event["t"]):
            self.whole_at = self.whole_at or event["t"]

    def _require_whole(self) -> None:
        if self.struck_at is not None and self._world_before != job.WORLD_SIZE:
            raise RuntimeError(
                f"before the fault {self._world_before} of {job.WORLD_SIZE} ranks trained: it hit nobody"
            )

    def _settled(self, now: float) -> bool:
        """Of a fault from outside, an iteration that was nearly done does not show that the width is whole again."""
        assert self.struck_at is not None
        return self.driver.fault not in OUTER_FAULTS or now > self.struck_at + job.REVIVE_S

    def _act(self) -> None:
        fault = self.driver.fault
        if fault == "none":
            self._count_cpu()
        elif fault in OUTER_FAULTS:
            if self.struck_at is None and self.newest >= job.FAULT_ITERATION - 1:
                self.driver.strike(fault)
                self.struck_at = time.monotonic()
            elif self.struck_at and not self._revived and time.monotonic() > self.struck_at + job.REVIVE_S:
                self._revived = True
                self.driver.revive(fault)

    def _count_cpu(self) -> None:
        if self._cpu_before is None and self.newest >= job.STEADY[0]:
            self._cpu_before = (self.driver.cpu_s(), self.newest)
        elif self._cpu_before and self.cpu is None and self.newest >= job.STEADY[1]:
            seconds, iteration = self._cpu_before
            self.cpu = (self.driver.cpu_s() - seconds, self.newest - iteration)

    def _status(self) -> str:
        now, compared = time.monotonic(), self.newest >= job.COMPARED + 1
        if self.driver.fault == "none":
            if self.cpu:
                return "whole"
            return "did not get on" if now > self.begun_at + START_S_MAX else self.driver.is_over()
        if self.struck_at is None:
            return "did not start" if now > self.begun_at + START_S_MAX else self.driver.is_over()
        if self.whole_at is not None and compared and self.newest > min(i for i in self._commits) + 2:
            return "whole"
        if self.next_commit_at is None and now > self.struck_at + job.REACTION_S_MAX:
            return "no reaction"
        if self.next_commit_at is not None and now > max(self.next_commit_at, self.struck_at) + job.FULL_S_MAX:
            return "not whole"
        return self.driver.is_over()


def carry_out(driver: Driver) -> Observed:
    """The whole run; the caller forgets the folder when it has taken the weights."""
    load = os.getloadavg()[0]
    watch = Watch(driver)
    status, detected = "did not start", None
    try:
        driver.start()
        status = watch.run()
        detected = driver.detected_s()
        bring_to_end(driver, watch)
    finally:
        driver.stop()
    driver.look()
    seconds, iterations = watch.cpu or (None, 0)
    events = sorted(driver.events, key=lambda event: float(event["t"]))
    return Observed(
        events, status, driver.said, detected, seconds, iterations, (load, os.getloadavg()[0]), driver.nodes
    )


def bring_to_end(driver: Driver, watch: Watch) -> None:
    """All ranks stop after the same iteration, so it is one that none of them has reached."""
    new = driver.folder / "end.new"
    new.write_text(str(max(watch.newest + 5, 0)))
    new.rename(driver.folder / "end")
    deadline = time.monotonic() + END_S_MAX
    while time.monotonic() < deadline and not driver.is_over():
        if any(event["event"] == "end" for event in driver.look()):
            deadline = min(deadline, time.monotonic() + 3.0)
        time.sleep(POLL_S)
