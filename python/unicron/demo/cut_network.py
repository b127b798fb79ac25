"""A node whose network is cut: nothing of it dies, and nobody hears it. How long until it is known, and healed.

Three nodes train the demo's GPT; node n1 lives in a network namespace of its own, joined to the others by one link,
with a template and workers of its own in it. The link is taken down: no packet comes, no connection ends, its
processes live on. Beats stay away (suspicion), the probe is not answered, the others wait in a collective: then the
node is lost, and the others go on without it. The link comes back, so does the node. Nothing outside the namespace is
touched; no rights are needed but those that `unshare --user --net` gives.

    python -m unicron.demo.cut_network --rounds 3 --json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from unicron.coordinator.job import Job
from unicron.demo.runner import IMPORTS, NEVER_RESTS, SCRIPT, layout_of
from unicron.runtime.local_cluster import ClusterProblem, LocalCluster

NODES, FAR, FAR_TEMPLATE = 3, "n1", "far-template"
LINK, HOME_ADDRESS, FAR_ADDRESS = "veth0", "10.77.0.1", "10.77.0.2"  # the link's name is the same at both ends
INSIDE = ("unshare", "--user", "--map-root-user", "--net")
SET_UP_S_MAX = 10.0
TOGETHER_ITERATIONS = 5
WAIT_S_MAX = 90.0
LOOK_S = 0.01
ENDLESS = 1_000_000


def lacks() -> str:
    """Why it cannot run here; '' when it can."""
    if shutil.which("ip") is None or shutil.which("nsenter") is None:
        return "it needs the programs ip and nsenter"
    command = [*INSIDE, "ip", "link", "add", LINK, "type", "veth", "peer", "name", "other"]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=SET_UP_S_MAX)
    return f"no network namespace with a link can be made here: {tried.stderr.strip()}" if tried.returncode else ""


class FarNode:
    """A network namespace, there while its holder is, and the link to it."""

    def __init__(self) -> None:
        # It reads from us: it ends with us, however we end.
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo here; read -r _"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        said = self._holder.stdout
        assert said is not None
        if not select.select([said], [], [], SET_UP_S_MAX)[0] or said.readline() != b"here\n":
            raise ClusterProblem("the node's network namespace could not be made")
        self.enter = ("nsenter", f"--net=/proc/{self._holder.pid}/ns/net", "--")
        _ip("link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", str(self._holder.pid))
        for prefix, address in (((), HOME_ADDRESS), (self.enter, FAR_ADDRESS)):
            _ip("address", "add", f"{address}/24", "dev", LINK, prefix=prefix)
            for device in ("lo", LINK):
                _ip("link", "set", device, "up", prefix=prefix)
        for prefix in ((), self.enter):
            self._comes_up(prefix)

    @staticmethod
    def _comes_up(prefix: Sequence[str]) -> None:
        """The kernel notes that a link works up to a second after it does; an agent takes none before that."""
        deadline = time.monotonic() + SET_UP_S_MAX
        while "state UP" not in _ip("link", "show", "dev", LINK, prefix=prefix):
            if time.monotonic() > deadline:
                raise ClusterProblem(f"{LINK} did not come up within {SET_UP_S_MAX} s")
            time.sleep(0.02)

    def cut(self) -> None:
        _ip("link", "set", LINK, "down", prefix=self.enter)

    def join(self) -> None:
        _ip("link", "set", LINK, "up", prefix=self.enter)

    def close(self) -> None:
        self._holder.communicate(timeout=SET_UP_S_MAX)


def _ip(*arguments: str, prefix: Sequence[str] = ()) -> str:
    """What it said."""
    done = subprocess.run([*prefix, "ip", *arguments], capture_output=True, text=True, timeout=SET_UP_S_MAX)
    if done.returncode:
        raise ClusterProblem(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


class SplitCluster(LocalCluster):
    """The agent of the far node, its template and so its workers are in the far node's network."""

    def __init__(self, far: FarNode, **settings: Any) -> None:
        super().__init__(NODES, 1, 1, address=HOME_ADDRESS, networks=(LINK, LINK), **settings)
        self._far = far
        self._is_far = False

    @property
    def _template_socket(self) -> Path:
        return self.directory / (f"{FAR_TEMPLATE}.sock" if self._is_far else "template.sock")

    @contextlib.contextmanager
    def _there(self) -> Iterator[None]:
        self._is_far = True
        try:
            yield
        finally:
            self._is_far = False

    def start_template(self) -> None:
        super().start_template()
        with self._there():
            super().start_template()

    def start_agent(self, node: str) -> None:
        with self._there() if node == FAR else contextlib.nullcontext():
            super().start_agent(node)

    def _spawn(self, name: str, command: Sequence[str], more: Mapping[str, str] | None = None) -> None:
        if self._is_far:
            name, command = FAR_TEMPLATE if name == "template" else name, [*self._far.enter, *command]
        super()._spawn(name, command, more)

    def _terminate(self, names: Sequence[str]) -> None:
        super()._terminate((*names, FAR_TEMPLATE) if "template" in names else names)


class Rounds:
    def __init__(self, cluster: LocalCluster, far: FarNode, folder: Path) -> None:
        self._cluster, self._far = cluster, far
        arguments = ("--iterations", str(ENDLESS), "--gradients", "", "--results", str(folder / "results"))
        self._task = cluster.submit(
            Job(
                name="cut", command=(sys.executable, *SCRIPT, *arguments), layout=layout_of(1, 1, NODES),
                cwd=str(folder), log_dir=str(folder), stopped_grace_ms=0, understudies=1, restart_max=1_000_000,
            )
        )  # fmt: skip

    def one(self) -> dict[str, float]:
        """ms from the cut until the node was suspect, was lost, and the others had committed an iteration more."""
        self._wait_whole()
        known = {incident["id"] for incident in self._cluster.incidents(self._task)}
        begun_ms = time.monotonic_ns() / 1e6
        self._far.cut()
        try:
            self._until(lambda: self._phase() != "up", "its silence to be noticed")
            suspect_ms = time.monotonic_ns() / 1e6 - begun_ms
            self._until(lambda: bool(self._new(known)), "an incident")
            incident = self._new(known)[0]
            if (incident["fault"], incident["severity"]) != ("node lost", "SEV1"):
                raise ClusterProblem(f"expected a lost node, got {incident['fault']}: {incident['cause']}")
            at = self._iteration()
            self._until(lambda: self._iteration() > at + 1, "the others to go on")
            healed = next(i for i in self._new(known) if i["id"] == incident["id"])
            lost_ms = float(incident["timeline"][0][0]) - begun_ms
            committed_ms = next(at_ms for at_ms, text in healed["timeline"] if "committed" in text)
            return {"suspect_ms": suspect_ms, "lost_ms": lost_ms, "resumed_ms": committed_ms - begun_ms}
        finally:
            self._far.join()

    def done_again(self) -> None:
        """Whole after the last round: the node is back."""
        self._wait_whole()

    def _new(self, known: set[str]) -> list[dict[str, Any]]:
        found = self._cluster.incidents(self._task)
        return [i for i in found if i["id"] not in known and not i["is_only_told"]]

    def _phase(self) -> str:
        return str(next(row["phase"] for row in self._cluster.ask("nodes") if row["node"] == FAR))

    def _iteration(self) -> int:
        return int(self._cluster.task(self._task)["iteration"])

    def _wait_whole(self) -> None:
        begun: list[int] = []

        def is_whole() -> bool:
            view = self._cluster.task(self._task)
            ready = [w for w in view["workers"] if w["phase"] == "ready"]
            members = [w["iteration"] for w in ready if w["is_member"]]
            if view["phase"] != "running" or len(members) != NODES or len(ready) != 2 * NODES:
                begun.clear()
                return False
            begun.extend(members[:1])
            return min(members) >= begun[0] + TOGETHER_ITERATIONS

        self._until(is_whole, "all three nodes to train together")

    def _until(self, good: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S_MAX
        while not good():
            if time.monotonic() > deadline:
                raise ClusterProblem(f"waited {WAIT_S_MAX:g} s for {what}; logs: {self._cluster.log_dir}")
            time.sleep(LOOK_S)


def rounds(count: int, folder: Path) -> list[dict[str, float]]:
    far = FarNode()
    try:
        with SplitCluster(
            far, imports=IMPORTS, log_dir=folder / "cluster", owner=__name__, coordinator=NEVER_RESTS
        ) as cluster:
            course = Rounds(cluster, far, folder)
            found = []
            for number in range(count):
                found.append(course.one())
                words = ", ".join(f"{name} {value:.0f}" for name, value in found[-1].items())
                print(f"round {number + 1} of {count}: {words}", file=sys.stderr, flush=True)
            course.done_again()
            return found
    finally:
        far.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="how often the node is cut off")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--folder", type=Path, help="logs and records (default: removed when all is well)")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:
        if problem := lacks():
            print(f"cut_network: {problem}", file=sys.stderr)
            return 2
        os.execvp(INSIDE[0], [*INSIDE, sys.executable, "-m", "unicron.demo.cut_network", "--inside", *sys.argv[1:]])
    folder = options.folder or Path(tempfile.mkdtemp(prefix="unicron-cut-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        found = rounds(options.rounds, folder.resolve())
    except ClusterProblem as problem:
        print(f"cut_network: {problem}", file=sys.stderr)
        return 1
    if options.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print(json.dumps({"rounds": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
