"""A rolling upgrade under training: what every step of it costs the task, from one version to another.

Both versions' daemons are started by their own commands, as an operator does. A task of two replicas trains; one
node is free. The coordinator is ended and that of the next version begins on its journal; then, node by node, the
free one first: drained, its agent ended and begun anew with the next version, used again. The task's roles move
each time, so in the end all of it runs the next version. `pause` is the longest time from commit to commit in that
step, less the median one before the first; what starts anew imports torch beside the task, on the same cores.
Losses must be those of a run without an upgrade, bit for bit; no iteration may be lost or run twice.

    make upgrade FROM=v0.1.0          (builds that version into build/upgrade, and calls this)
    python bench/bench_upgrade.py --from build/upgrade/v0.1.0/python --json
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

import common
from bench_moves import Run
from unicron.coordinator.job import Job
from unicron.demo import runner
from unicron.runtime import keys
from unicron.runtime.client import CoordinatorClient

HERE = Path(__file__).resolve().parents[1] / "python"
NODES = ("n0", "n1", "n2")
ITERATIONS = 1500
STEP_AFTER = 30  # iterations between two steps
END_S_MAX = 30.0
UP_S_MAX = 90.0


class Fleet:
    """``with Fleet(folder, old) as fleet:`` a coordinator and three agents of one slot, each of its own version."""

    def __init__(self, folder: Path, version: Path) -> None:
        self.folder, self._version = folder, version
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        pairs = keys.make_directory(folder / "keys")
        self._address = f"127.0.0.1:{runner.free_port()}"
        (folder / "cluster.yaml").write_text(
            f"listen: {self._address}\nkeys: {folder}/keys\njournal: {folder}/journal.db\nmetrics: ''\n"
        )
        self._client = CoordinatorClient(self._address, pairs["coordinator"].public, pairs["client"])

    def __enter__(self) -> Fleet:
        for name in ("coordinator", *NODES):
            self.begin(name, self._version)
        self.wait_up()
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(list(self._daemons.values())):
            _end(daemon)

    def begin(self, name: str, version: Path) -> None:
        command = ["coordinator", str(self.folder / "cluster.yaml")]
        if name != "coordinator":
            command = [
                "agent", "--coordinator", self._address, "--slots", "1", "--understudies", "0", "--node", name,
                "--keys", str(self.folder / "keys"), "--run-dir", str(self.folder / name), "--metrics", "",
                "--no-checks", "--import", runner.IMPORTS,
            ]  # fmt: skip
        environment = {
            **os.environ, "PYTHONPATH": str(version), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        with (self.folder / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [sys.executable, "-m", "unicron.cli", *command],
                env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def upgrade(self, name: str) -> None:
        _end(self._daemons[name])
        self.begin(name, HERE)
        self.wait_up()

    def wait_up(self) -> None:
        deadline = time.monotonic() + UP_S_MAX
        self._client.wait_until_up(int(1000 * UP_S_MAX))
        while [n["phase"] for n in self.ask("nodes")] != ["up"] * len(NODES):
            for name, daemon in self._daemons.items():
                if daemon.poll() is not None:
                    raise SystemExit(f"{name} ended with {daemon.returncode}; its log: {self.folder / name}.log")
            if time.monotonic() > deadline:
                raise SystemExit(f"not every agent is up within {UP_S_MAX:g} s; logs: {self.folder}")
            time.sleep(0.1)

    def ask(self, verb: str, **arguments: Any) -> Any:
        return self._client.ask(verb, timeout_ms=10_000, **arguments)

    def submit(self, job: Job) -> str:
        return str(self.ask("submit", job=msgspec.to_builtins(job))["task"])

    def task(self, task: str) -> dict[str, Any]:
        return dict(self.ask("describe", task=task))

    def incidents(self, task: str) -> list[dict[str, Any]]:
        return list(self.ask("incidents", task=task))


class Upgraded(Run):
    """One task of two replicas; steps: the iteration before each step of the upgrade, and what it was."""

    def __init__(self, folder: Path) -> None:
        super().__init__(runner.layout_of(1, 1, 2), "warm-up", folder, ITERATIONS)
        self.steps: list[tuple[int, str]] = []

    def carry_out(self, cluster: Any) -> None:
        task = cluster.submit(self._job())
        self._next_step("usual")
        self._next_step("coordinator")
        cluster.upgrade("coordinator")
        for node in reversed(NODES):
            self._next_step(node)
            cluster.ask("drain", node=node)
            self._wait(lambda gone=node: not self._used(cluster, gone))
            cluster.upgrade(node)
            cluster.ask("undrain", node=node)
        self._next_step("")
        iteration = self._read()
        if cluster.task(task)["phase"] != "running":
            raise SystemExit(f"after iteration {iteration} the task does not run: {cluster.task(task)}")
        others = [i for i in cluster.incidents(task) if i["fault"] not in ("move", "slow") or i["iterations_lost"]]
        if others:
            said = "\n".join(f"{i['fault']}: {i['cause']}: {i['text']}" for i in others)
            raise SystemExit(f"incidents that are no moves: {said}")
        cluster.ask("cancel", task=task)

    def _next_step(self, what: str) -> None:
        until = (self.steps[-1][0] if self.steps else 4) + STEP_AFTER
        self._wait(lambda: self._read() >= until)
        self.steps.append((self._read(), what))

    @staticmethod
    def _used(cluster: Any, node: str) -> bool:
        return bool(next(n for n in cluster.ask("nodes") if n["node"] == node)["used"])

    def pauses_ms(self) -> dict[str, float]:
        times = self.iteration_ms()
        usual = statistics.median(ms for i, ms in times.items() if self.steps[0][0] < i <= self.steps[1][0])
        found = {}
        for (begin, what), (end, _) in zip(self.steps, self.steps[1:], strict=False):
            found[what] = max(ms for i, ms in times.items() if begin < i <= end) - usual
        return found


class Undisturbed(Upgraded):
    """As far as the upgraded one came."""

    def __init__(self, folder: Path, iterations: int) -> None:
        super().__init__(folder)
        self.until = iterations

    def carry_out(self, cluster: Any) -> None:
        task = cluster.submit(self._job())
        self._wait(lambda: self._read() >= self.until)
        cluster.ask("cancel", task=task)


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(END_S_MAX)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait(END_S_MAX)


def version_of(path: Path) -> str:
    command = "from unicron import messages, __version__; print(__version__, 'protocol', messages.PROTOCOL_VERSION)"
    environment = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run(
        [sys.executable, "-c", command], env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def one_run(version: Path) -> dict[str, float]:
    with common.scratch() as top:
        (folder := top / "upgraded").mkdir()
        run = Upgraded(folder)
        with Fleet(folder, version) as fleet:
            run.carry_out(fleet)
        reached = max(run.losses)
        if sorted(run.losses) != list(range(reached + 1)):
            raise SystemExit(f"iterations are missing: {sorted(set(range(reached + 1)) - set(run.losses))[:9]}")
        (folder := top / "undisturbed").mkdir()
        reference = Undisturbed(folder, reached)
        with Fleet(folder, version) as fleet:
            reference.carry_out(fleet)
        wrong = [i for i in range(reached + 1) if run.losses[i] != reference.losses[i]]
        if wrong:
            raise SystemExit(f"from iteration {wrong[0]} on the losses are not those of the undisturbed run")
        return run.pauses_ms()


def main() -> int:
    parser = common.parser(__doc__.splitlines()[0], runs=3)
    parser.add_argument("--from", dest="old", type=Path, required=True, help="the older version's python folder")
    arguments = parser.parse_args()
    old = arguments.old.resolve()
    configuration = {"from": version_of(old), "to": version_of(HERE), "layout": "1,1,2", "nodes": len(NODES)}
    samples: dict[str, list[float]] = {}
    for _ in range(arguments.runs):
        for what, ms in one_run(old).items():
            samples.setdefault(what, []).append(ms)
    bench = common.Bench("upgrade", unit="ms", configuration=configuration)
    for what, pauses in samples.items():
        bench.add(f"{what}: pause" if what != "usual" else "longest without a step", pauses)
    bench.finish(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
