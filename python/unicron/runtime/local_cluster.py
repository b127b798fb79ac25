"""A whole cluster on this machine: coordinator, N agents (as if N nodes) and one template, as child
processes.

`unicron run` and the demo use it. Nothing outlives it: every process has a lifeline (a pipe whose
other end only the owner holds) and carries the cluster's mark in its environment, by which ``stop``
finds whatever is left; a janitor does the same when the owner was killed. Every wait is bounded.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from unicron.coordinator.config import CoordinatorConfig
from unicron.coordinator.job import Job
from unicron.runtime import keys, processes
from unicron.runtime.agent_process import AgentSettings
from unicron.runtime.client import (
    ADDRESS_FILE,
    LOCAL_PREFIX,
    OWNER_FILE,
    CoordinatorClient,
    CoordinatorSilent,
)
from unicron.runtime.coordinator_settings import CoordinatorSettings
from unicron.runtime.dashboard_settings import DashboardSettings
from unicron.runtime.kept_journal import NAME, keep_earlier

START_S_MAX = 120.0
STOP_S_MAX = 5.0
POLL_S = 0.05
LOOK_MS_MAX = 2_000  # a coordinator that is silent for so long is dead or being started again
# daemons that die more often than this have a reason that a restart does not remove
RESTARTS_MAX = 20
IMPORTS = "torch,megatron.core"
DEFAULT_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # the template is forked: it must ask for GPUs without starting CUDA
}
OVER = ("done", "stopped")


class ClusterProblem(Exception):
    """The cluster could not do it; the text says what was seen and where to look."""


@dataclass(frozen=True)
class LiveWorker:
    worker: str
    node: str
    rank: int
    pid: int
    is_member: bool


class LocalCluster:
    """``with LocalCluster(num_agents=2, slots=2) as cluster: cluster.submit(job)``. Nodes are n0,
    n1, ...
    """

    def __init__(
        self,
        num_agents: int = 1,
        slots: int = 1,
        understudies: int = 0,
        *,
        imports: str = IMPORTS,
        log_dir: Path | None = None,
        environment: Mapping[str, str] | None = None,
        coordinator: CoordinatorConfig | None = None,
        agent_bounds: Mapping[str, float] | None = None,
        metrics: Mapping[str, str] | None = None,
        nodes: Sequence[str] = (),
        state: Path | None = None,
        checks: bool = False,
        owner: str = "",
        dashboard: DashboardSettings | None = None,
        address: str = "127.0.0.1",
        networks: tuple[str, str] = ("", ""),
    ) -> None:
        """log_dir: of the daemons (None: inside the cluster's directory, gone with it). metrics: address of a daemon's
        (coordinator, n0, ...); no other has one. nodes: their names. state: where keys and journal are kept (None:
        inside the cluster's directory). checks: each agent looks at the hardware, which is the same machine's. owner:
        the command that it is for, told to whoever finds it. dashboard: where its page is served. address: where the
        coordinator listens. networks: of the agents, for control and for state, as agent/interfaces.py takes them."""
        self.nodes = tuple(nodes) or tuple(f"n{index}" for index in range(num_agents))
        self._slots = slots
        self._understudies = understudies
        self._imports = imports
        self._coordinator_config = coordinator or CoordinatorConfig()
        self._agent_bounds = dict(agent_bounds or {})
        self._metrics = dict(metrics or {})
        self._checks = checks
        self._dashboard = dashboard
        self._interface, self._state_interface = networks
        self.directory = Path(tempfile.mkdtemp(prefix=LOCAL_PREFIX))
        (self.directory / OWNER_FILE).write_text(owner, encoding="utf-8")
        self.state = state or self.directory
        self.log_dir = log_dir or self.directory / "logs"
        self._environment = {
            **DEFAULT_ENVIRONMENT,
            **os.environ,
            **(environment or {}),
            processes.MARK: str(self.directory),
        }
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._incarnations = dict.fromkeys(self.nodes, 0)
        self._address = f"{address}:0"
        self.journal_pages_max = 0  # of the next coordinator; 0: what the disk has
        self._client: CoordinatorClient | None = None
        self._tended = 0
        self._last_workers: list[LiveWorker] = []
        self._lifeline_end, self._lifeline = os.pipe()  # both close on exec; children get the first
        self._janitor = self._start_janitor()
        known = self.state / "keys"
        self._pairs = keys.load_directory(known) if known.is_dir() else keys.make_directory(known)

    # ------------------------------------------------------------ life of the cluster

    def start(self, timeout_s: float = START_S_MAX) -> None:
        """Everything up and every agent's hello heard."""
        self.start_template()
        self.start_coordinator()
        for node in self.nodes:
            self.start_agent(node)
        self.wait_for_nodes(timeout_s)

    def wait_for_nodes(self, timeout_s: float = START_S_MAX) -> None:
        deadline = time.monotonic() + timeout_s
        while sum(n["phase"] == "up" for n in self.ask("nodes")) < len(self.nodes):
            self._check_alive()
            if time.monotonic() > deadline:
                raise ClusterProblem(f"not every agent came up in {timeout_s:g} s: see {self.log_dir}")
            time.sleep(POLL_S)

    def stop(self) -> list[int]:
        """End everything; the processes that had to be killed by their mark (should be none)."""
        if self._client is not None:
            self._client.close()
            self._client = None
        self._terminate(("coordinator",))  # first: that agents end now is no failure of their nodes
        self._terminate((*self.nodes, "template"))  # workers end with their agents
        spared = frozenset({self._janitor.pid})
        left = [pid for pid in processes.find(self.directory) if pid not in spared]
        processes.end_all(self.directory, STOP_S_MAX, spare=spared)
        for daemon in self._daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(STOP_S_MAX)
        self._daemons.clear()
        self._keep_journal()
        shutil.rmtree(self.directory, ignore_errors=True)
        self._end_lifeline()
        return left

    def _keep_journal(self) -> None:
        """Beside the daemons' logs, where these outlive the cluster: `unicron incidents --log-dir` reads it."""
        if self.state == self.directory and not self.log_dir.is_relative_to(self.directory) and self.log_dir.is_dir():
            keep_earlier(self.log_dir)
            for path in self.directory.glob(f"{NAME}*"):
                with contextlib.suppress(OSError):
                    shutil.move(path, self.log_dir / path.name)

    def _terminate(self, names: Sequence[str]) -> None:
        daemons = [self._daemons[name] for name in names if name in self._daemons]
        for daemon in daemons:
            if daemon.poll() is None:
                daemon.send_signal(signal.SIGCONT)
                daemon.terminate()
        deadline = time.monotonic() + STOP_S_MAX
        for daemon in daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(max(0.1, deadline - time.monotonic()))

    def _end_lifeline(self) -> None:
        for fd in (self._lifeline, self._lifeline_end):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._lifeline = self._lifeline_end = -1
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._janitor.wait(2 * STOP_S_MAX)

    def __enter__(self) -> LocalCluster:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ------------------------------------------------------------ daemons

    def start_template(self) -> None:
        command = ["--socket", str(self._template_socket), "--import", self._imports]
        mark = {processes.TEMPLATE_MARK: str(self._template_socket)}
        self._start("template", "unicron.runtime.template", command, mark)

    def start_coordinator(self) -> None:
        """First time, or again after ``kill_coordinator``: same port, same journal."""
        settings = CoordinatorSettings(
            listen=self._address,
            keys=str(self.state / "keys"),
            journal=str(self.state / "journal.db"),
            journal_pages_max=self.journal_pages_max,
            metrics=self._metrics.get("coordinator", ""),
            dashboard=self._dashboard,
            machine=self._coordinator_config,
        )
        ready = self.directory / ADDRESS_FILE
        ready.unlink(missing_ok=True)
        config = self._write_config("coordinator", settings)
        log = ["--log", str(self.log_dir / "coordinator.log"), "--ready", str(ready)]
        self._start("coordinator", "unicron.runtime.coordinator_daemon", [*config, *log])
        deadline = time.monotonic() + START_S_MAX
        while not ready.exists():
            self._check_alive("coordinator")
            if time.monotonic() > deadline:
                raise ClusterProblem(f"the coordinator does not listen: see {self.log_dir}")
            time.sleep(0.01)
        self._address = ready.read_text(encoding="utf-8").removeprefix("tcp://")
        if self._client is None:
            server_key = self._pairs["coordinator"].public
            address = f"tcp://{self._address}"
            self._client = CoordinatorClient(address, server_key, self._pairs["client"])
        self._client.wait_until_up(int(START_S_MAX * 1000))

    def start_agent(self, node: str) -> None:
        """First time, or again after it was killed: a new incarnation of the node."""
        self._incarnations[node] += 1
        settings = AgentSettings(
            node=node,
            coordinator=self._address,
            keys=str(self.state / "keys"),
            slots=self._slots,
            understudies=self._understudies,
            run_dir=str(self.directory / node),
            template=str(self._template_socket),
            incarnation=self._incarnations[node],
            metrics=self._metrics.get(node, ""),
            checks=self._checks,
            interface=self._interface,
            state_interface=self._state_interface,
            machine=self._agent_bounds,
        )
        log = self.log_dir / f"{node}.{self._incarnations[node]}.log"
        config = self._write_config(node, settings)
        self._start(node, "unicron.runtime.agent_process", [*config, "--log", str(log)])

    def kill_coordinator(self) -> None:
        self._kill("coordinator")

    def kill_agent_alone(self, node: str) -> None:
        self._kill(node)

    def kill_agent(self, node: str) -> None:
        """As if the node had lost its power: the agent first, so that it tells nobody, then all its
        workers.
        """
        pids = [w.pid for w in self.workers() if w.node == node and w.pid]
        daemon = self._daemons[node]
        daemon.kill()
        for pid in pids:
            processes.kill(pid)
        daemon.wait(STOP_S_MAX)

    def tend(self) -> list[str]:
        """Start again what died unasked; the names. Workers of a dead template are dead, too."""
        ended = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
        if ended:
            self._tended += 1
            if self._tended > RESTARTS_MAX:
                self._check_alive()
        if "template" in ended:
            for node in self.nodes:
                self._kill(node)
            ended = ["template", *(n for n in ended if n not in ("template", *self.nodes))]
            ended += self.nodes
        for name in ended:
            if name == "template":
                self._template_socket.unlink(missing_ok=True)
                self.start_template()
            elif name == "coordinator":
                self.start_coordinator()
            else:
                self.start_agent(name)
        return ended

    def is_running(self, daemon: str) -> bool:
        """Is this agent (by its node's name), coordinator or template alive?"""
        found = self._daemons.get(daemon)
        return found is not None and found.poll() is None

    def agent_pid(self, node: str) -> int:
        return self._daemons[node].pid

    def wait_for_coordinator(self, timeout_s: float) -> int:
        """Its exit code, when it ends by itself."""
        return self._daemons["coordinator"].wait(timeout_s)

    @property
    def coordinator_pid(self) -> int:
        return self._daemons["coordinator"].pid

    def _kill(self, name: str) -> None:
        self._daemons[name].kill()
        self._daemons[name].wait(STOP_S_MAX)

    # ------------------------------------------------------------ tasks

    def ask(self, verb: str, *, timeout_ms: int = 10_000, **arguments: Any) -> Any:
        if self._client is None:
            raise ClusterProblem("the cluster has no coordinator yet")
        return self._client.ask(verb, timeout_ms=timeout_ms, **arguments)

    def drain(self, node: str) -> None:
        self.ask("drain", node=node)

    def undrain(self, node: str) -> None:
        self.ask("undrain", node=node)

    def submit(self, job: Job) -> str:
        """The task's name."""
        return str(self.ask("submit", job=msgspec.to_builtins(job))["task"])

    def suspend(self, task: str) -> None:
        self.ask("suspend", task=task)

    def resume(self, task: str) -> None:
        self.ask("resume", task=task)

    def reshape(self, task: str, **layout: int) -> dict[str, Any]:
        """tp, pp, dp, sharded: of the layout that it shall go over to."""
        return dict(self.ask("reshape", task=task, layout=layout))

    @property
    def address(self) -> str:
        """host:port of the coordinator, for other programs' --coordinator."""
        return self._address

    def cancel(self, task: str) -> None:
        self.ask("cancel", task=task)

    def task(self, task: str) -> dict[str, Any]:
        """What `unicron describe` shows."""
        return dict(self.ask("describe", task=task))

    def workers(self, task: str = "") -> list[LiveWorker]:
        """Living workers with a process; the last that were known while there is no coordinator."""
        try:
            names = [task] if task else [t["task"] for t in self.ask("ps", timeout_ms=LOOK_MS_MAX)]
            views = [self.ask("describe", task=name, timeout_ms=LOOK_MS_MAX) for name in names]
        except CoordinatorSilent:
            return [w for w in self._last_workers if processes.is_alive(w.pid)]
        found = [
            LiveWorker(w["worker"], w["node"], w["rank"], w["pid"], w["is_member"])
            for view in views
            for w in view["workers"]
            if w["pid"] and processes.is_alive(w["pid"])
        ]
        self._last_workers = found
        return found

    def member(self, task: str, rank: int) -> LiveWorker:
        """Who holds this role now."""
        for worker in self.workers(task):
            if worker.is_member and worker.rank == rank:
                return worker
        raise ClusterProblem(f"nobody holds rank {rank} of {task} now")

    def incidents(self, task: str = "", after: int = 0) -> list[dict[str, Any]]:
        """All of them, or only those that are open or newer than the number of the last one known."""
        return list(self.ask("incidents", timeout_ms=LOOK_MS_MAX, task=task, after=after))

    def arm_fault(
        self,
        task: str,
        rank: int,
        fault: str,
        point: str = "now",
        iteration: int = -1,
        micro_batch: int = -1,
    ) -> None:
        self.ask(
            "inject",
            task=task,
            rank=rank,
            fault=fault,
            point=point,
            iteration=iteration,
            micro_batch=micro_batch,
        )

    def wait(self, task: str, timeout_s: float) -> dict[str, Any]:
        """Until the task is over; its view. ClusterProblem when the time is over first."""
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(CoordinatorSilent):  # killed, and coming back
                view = self.task_row(task)
                if view["phase"] in OVER:
                    return view
            if time.monotonic() > deadline:
                raise ClusterProblem(f"{task} is not over after {timeout_s:g} s")
            time.sleep(POLL_S)

    def task_row(self, task: str) -> dict[str, Any]:
        """What `unicron ps` shows of it."""
        return next(dict(t) for t in self.ask("ps", timeout_ms=LOOK_MS_MAX) if t["task"] == task)

    # ------------------------------------------------------------ inside

    @property
    def _template_socket(self) -> Path:
        return self.directory / "template.sock"

    def _start_janitor(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "unicron.runtime.janitor", str(self.directory)],
            stdin=self._lifeline_end,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _write_config(self, name: str, settings: msgspec.Struct) -> list[str]:
        path = self.directory / f"{name}.json"
        path.write_bytes(msgspec.json.encode(settings))
        return ["--config", str(path)]

    def _gpus_of(self, node: str) -> dict[str, str]:
        """The nodes of one machine share out its GPUs, slot by slot; of several that are named to us, only those."""
        count = len([path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()])
        named = self._environment.get("CUDA_VISIBLE_DEVICES")
        gpus = [str(number) for number in range(count)]
        if named is not None:
            gpus = [name for part in named.split(",") if (name := part.strip())]
        if node not in self.nodes or not count or (named is not None and len(gpus) < 2):
            return {}
        first = self.nodes.index(node) * self._slots
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[(first + slot) % len(gpus)] for slot in range(self._slots))}

    def _start(self, name: str, module: str, arguments: Sequence[str], more: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, "-m", module, *arguments, "--lifeline", str(self._lifeline_end)]
        self._spawn(name, command, more)

    def _spawn(self, name: str, command: Sequence[str], more: Mapping[str, str] | None = None) -> None:
        if self.is_running(name):
            raise ClusterProblem(f"{name} is running already")
        self.log_dir.mkdir(parents=True, exist_ok=True)
        with (self.log_dir / f"{name}.err").open("ab") as errors:
            self._daemons[name] = subprocess.Popen(
                command,
                env={**self._environment, **self._gpus_of(name), **(more or {})},
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                pass_fds=(self._lifeline_end,),
                start_new_session=True,  # Ctrl-C is for the owner, who ends the rest in order
            )

    def _check_alive(self, only: str = "") -> None:
        for name, daemon in self._daemons.items():
            if daemon.poll() is not None and only in ("", name):
                path = self.log_dir / f"{name}.err"
                last = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
                said = last[0] if last else f"exit code {daemon.returncode}"
                raise ClusterProblem(f"{name} ended: {said}")
