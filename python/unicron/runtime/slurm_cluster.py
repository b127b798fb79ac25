"""A cluster inside a Slurm allocation: the coordinator beside `unicron run` in the batch script, an agent on every
node, each a step of its own.

Keys and journal lie in a folder that all nodes see and that outlives the job, so that a job that is requeued finds its
task where it was. A step that ends is begun again, a few times; then its node is left to the others' healing.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from unicron.agent.interfaces import is_loopback
from unicron.runtime.client import CoordinatorRefused, CoordinatorSilent
from unicron.runtime.local_cluster import POLL_S, START_S_MAX, ClusterProblem, LocalCluster
from unicron.runtime.networks import Networks, choose_networks
from unicron.runtime.slurm import REASON, Allocation, SlurmProblem, node_name, own_address
from unicron.runtime.slurm_watch import SlurmWatch

STEPS_MAX = 5  # per node
STEP_WAIT_S = 5.0  # between two on one node
LIVES_MAX = 1000  # of an agent in one run of the job
ANY_PORT = 1  # of an address to which only the way is asked
LATE_S = 15.0  # that a standby is waited for when all nodes that the task needs are up


def own_networks(allocation: Allocation, interface: str, state_interface: str) -> Networks:
    """Of the batch script's node, where the coordinator listens: by its name, as the other nodes call it. Where its own
    files say that this is loopback (Debian's do), by the route to another node."""
    # One other node only: a name that is not known says it for all, and may take seconds.
    others = [node for node in allocation.nodes if node != node_name(os.environ)][:1]
    try:
        own = own_address()
    except SlurmProblem:
        if not others:
            raise
        own = ""
    hosts = [own] if own and not is_loopback(own) else [*others, *([own] if own else [])]
    return choose_networks([f"tcp://{host}:{ANY_PORT}" for host in hosts], interface, state_interface, os.environ)


class SlurmCluster(LocalCluster):
    def __init__(
        self, allocation: Allocation, slots: int, understudies: int, *, needed: int, state: Path, **options: Any
    ) -> None:
        """needed: nodes that the task uses, the others stand by. state: folder for keys and journal, on a file system
        that all nodes share."""
        networks = own_networks(allocation, *options.get("networks", ("", "")))
        super().__init__(
            len(allocation.nodes), slots, understudies, nodes=allocation.nodes, state=state,
            address=networks.control.address, **options,
        )  # fmt: skip
        self._allocation = allocation
        self._needed = needed
        self._incarnations = dict.fromkeys(self.nodes, allocation.restarts * LIVES_MAX)
        self._begun_s: dict[str, list[float]] = {node: [] for node in self.nodes}
        self._watch = SlurmWatch(allocation)
        self._drained_file = state / "drained-in-slurm"  # outlives the job, as the journal does, where they are drained
        said = self._drained_file.read_text(encoding="utf-8").split() if self._drained_file.exists() else []
        self._drained = set(said) & set(self.nodes)  # by us, because they are in Slurm
        self._kept: set[str] = set()  # drained in Slurm, and needed here
        self.given_up: list[str] = []
        self.news = [*networks.doubts]  # for whoever shows them, and takes them out

    def start_template(self) -> None:
        """Each agent brings its own."""

    def start_agent(self, node: str) -> None:
        self._incarnations[node] += 1
        self._begun_s[node].append(time.monotonic())
        words = [
            sys.executable, "-m", "unicron.cli", "agent", "--coordinator", self._address, "--node", node,
            "--slots", str(self._slots), "--understudies", str(self._understudies),
            "--interface", self._interface, "--state-interface", self._state_interface,
            "--keys", str(self.state / "keys"), "--import", self._imports, "--metrics", "",
            "--run-dir", f"/tmp/unicron-{os.getuid()}-{self._allocation.job}-{node}",
            "--incarnation", str(self._incarnations[node]),
        ]  # fmt: skip
        self._spawn(node, self._allocation.agent_command(node, words))

    def wait_for_nodes(self, timeout_s: float = START_S_MAX) -> None:
        """All of them, or those that the task needs where a standby does not come."""
        deadline = time.monotonic() + timeout_s
        enough_s: float | None = None
        while (up := sum(n["phase"] == "up" for n in self.ask("nodes"))) < len(self.nodes):
            self.tend()
            now_s = time.monotonic()
            if up >= self._needed:
                enough_s = enough_s or now_s
                if now_s - enough_s > LATE_S:
                    self.news.append(f"{len(self.nodes) - up} of {len(self.nodes)} nodes are not up: on without them")
                    return
            elif now_s > deadline or len(self.nodes) - len(self.given_up) < self._needed:
                raise ClusterProblem(f"{up} nodes are up of {self._needed} that the task needs: see {self.log_dir}")
            time.sleep(POLL_S)

    def tend(self) -> list[str]:
        self._heed()
        again = []
        for name, daemon in self._daemons.items():
            if daemon.poll() is None or name in self.given_up:
                continue
            begun = self._begun_s.get(name)
            if begun is None:
                again.append(name)  # the coordinator
            elif len(begun) >= STEPS_MAX:
                self._give_up(name, f"its agent ended {STEPS_MAX} times")
            elif time.monotonic() - begun[-1] >= STEP_WAIT_S:
                again.append(name)
        for name in again:
            if name == "coordinator":
                self.start_coordinator()
            else:
                self.start_agent(name)
        return again

    def ending(self, within_s: float) -> str:
        """Why the job is over in less than that; empty: it is not."""
        seen = self._watch.seen
        if seen.ends_s is None or seen.ends_s - time.time() > within_s:
            return ""
        return "pre-empted" if seen.preempted else "the job's time is over soon"

    def stop(self) -> list[int]:
        self._watch.close()
        return super().stop()

    def _give_up(self, node: str, reason: str) -> None:
        self.given_up.append(node)
        self.news.append(f"{node} is given up: {reason}")

    def _heed(self) -> None:
        """A node that the job lost does not come back into it. One that is drained is left, where another stands by:
        Slurm wants it empty, and waits for the job's end else."""
        seen = self._watch.seen
        for node in self.nodes:
            if node in self.given_up:
                continue
            if node not in seen.nodes:
                self._give_up(node, "Slurm took it out of the job")
                continue
            reason = seen.drained.get(node)
            if reason is None:
                self._kept.discard(node)
                if node in self._drained:
                    self._tell(node, drained=False, reason="no longer drained in Slurm")
            elif node not in self._drained and not reason.startswith(REASON):  # ours: the coordinator knows it
                self._leave(node, f"drained in Slurm: {reason}")

    def _leave(self, node: str, reason: str) -> None:
        usable = {*self.nodes} - {*self.given_up} - self._drained
        if len(usable) > self._needed:
            self._tell(node, drained=True, reason=reason)
        elif node not in self._kept:
            self._kept.add(node)
            self.news.append(f"{node} is {reason}; it is used on, because no node stands by")

    def _tell(self, node: str, *, drained: bool, reason: str) -> None:
        try:
            (self.drain if drained else self.undrain)(node)
            self.news.append(f"{node} is {reason}: " + ("its roles move" if drained else "it is used again"))
        except CoordinatorSilent:
            return  # again at the next turn
        except CoordinatorRefused:
            pass  # a person did it already
        (self._drained.add if drained else self._drained.discard)(node)
        self._drained_file.write_text(" ".join(sorted(self._drained)), encoding="utf-8")
