"""What operators watch: a real Prometheus scrapes a real cluster, and the files under deploy/ fit what it finds."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from clusters import closed_incident, end, eventually, plain_job, running
from servers import ROOT, Prometheus, http, program
from unicron.runtime import exposition, loop_questions
from unicron.runtime.coordinator_settings import CoordinatorSettings
from unicron.runtime.exposition import Exposition, ExpositionProblem
from unicron.runtime.local_cluster import LocalCluster

pytestmark = pytest.mark.timeout(60)

DAEMONS = ("coordinator", "n0", "n1")
RULES = ROOT / "deploy" / "prometheus"
SCRAPE = (
    "global: {{scrape_interval: 200ms, evaluation_interval: 200ms}}\nrule_files: [{rules}]\nscrape_configs:\n{jobs}"
)
JOB = "  - {{job_name: {name}, static_configs: [{{targets: {targets}}}]}}\n"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    cluster = LocalCluster(
        2, 1, 1, imports="unicron._core", log_dir=tmp_path / "daemons", metrics=dict.fromkeys(DAEMONS, "127.0.0.1:0")
    )
    try:
        cluster.start(30)
        yield cluster
    finally:
        end(cluster)


def addresses(cluster: LocalCluster) -> dict[str, str]:
    """Where each daemon says that it serves metrics."""
    found = {}
    for path in cluster.log_dir.glob("*.log"):
        said = re.search(r"metrics at (\S+)", path.read_text())
        if said:
            found[path.name.split(".")[0]] = said[1]
    return found


def test_prometheus_sees_a_failure(cluster: LocalCluster, tmp_path: Path) -> None:
    at = addresses(cluster)
    assert sorted(at) == sorted(DAEMONS)
    jobs = JOB.format(name="unicron-coordinator", targets=[at["coordinator"]])
    jobs += JOB.format(name="unicron-agent", targets=[at["n0"], at["n1"]])
    with Prometheus(tmp_path, SCRAPE.format(rules=RULES / "unicron_rules.yml", jobs=jobs)) as prometheus:
        task = cluster.submit(plain_job("t", tmp_path, iterations=4000))
        running(cluster, task)
        eventually(lambda: prometheus.value("sum(up)") == 3)
        eventually(lambda: prometheus.value('unicron_tasks{state="running"}') == 1)
        eventually(lambda: prometheus.value("sum(unicron_agent_workers{phase='ready'})") == 4)
        os.kill(cluster.member(task, 0).pid, signal.SIGKILL)
        incident = closed_incident(cluster, task)
        counted = 'unicron_incidents_total{severity="SEV2",cause="worker lost"}'
        eventually(lambda: prometheus.value(counted) == 1)
        eventually(lambda: prometheus.value(f"increase({counted}[1m])"))  # it was 0 before, and is seen as a change
        spent = prometheus.value('unicron_recovery_phase_seconds_sum{phase="resume"}')
        assert spent == pytest.approx(incident["resume_ms"] / 1000)
        lost = prometheus.value("sum(unicron_lost_gpu_seconds_total)")
        assert lost == pytest.approx(incident["cost"]["total_gpu_s"])
        for age in prometheus.query("unicron_node_heartbeat_age_seconds"):
            assert 0 <= float(age["value"][1]) < 30
    texts = {name: http(f"http://{address}/metrics")[1] for name, address in at.items()}
    assert_nothing_secret(cluster, texts)
    assert_files_fit("".join(texts.values()))
    checked = subprocess.run(
        [program("promtool"), "check", "metrics"],
        input=texts["coordinator"],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def assert_nothing_secret(cluster: LocalCluster, texts: dict[str, str]) -> None:
    for path in (cluster.directory / "keys").glob("*.key"):
        pair = json.loads(path.read_text())
        for name, text in texts.items():
            assert pair["secret"] not in text and pair["public"] not in text, (name, path)


def assert_files_fit(text: str) -> None:
    """Every series that a rule or a panel asks for is one that a daemon has."""
    has = set(re.findall(r"^(unicron_\w+)", text, re.MULTILINE))
    rules = (RULES / "unicron_rules.yml").read_text()
    panels = (ROOT / "deploy" / "grafana" / "unicron.json").read_text()
    for source in (rules, panels):
        wanted = set(re.findall(r"\bunicron_[a-z_]+", source.replace("unicron_rules", "")))
        assert wanted and wanted <= has, sorted(wanted - has)
    assert len(json.loads(panels)["panels"]) >= 12


def test_health_and_readiness(cluster: LocalCluster) -> None:
    at = addresses(cluster)
    for address in at.values():
        assert http(f"http://{address}/healthz") == (200, "alive\n")
        assert http(f"http://{address}/readyz") == (200, "ready\n")
        assert http(f"http://{address}/secrets")[0] == 404
    cluster.kill_coordinator()
    eventually(lambda: http(f"http://{at['n0']}/readyz") == (503, "no coordinator\n"))
    assert http(f"http://{at['n0']}/healthz")[0] == 200
    os.kill(cluster.agent_pid("n0"), signal.SIGTERM)
    eventually(lambda: not listens(at["n0"]))


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def test_rules_fire_when_they_should() -> None:
    for words in (["check", "config", "prometheus.yml"], ["test", "rules", "unicron_rules_test.yml"]):
        ended = subprocess.run([program("promtool"), *words], cwd=RULES, capture_output=True, text=True, timeout=30)
        assert ended.returncode == 0, ended.stdout + ended.stderr


def test_every_alert_is_explained() -> None:
    alerts = re.findall(r"alert: (\w+)", (RULES / "unicron_rules.yml").read_text())
    manual = (ROOT / "docs" / "OPERATION.md").read_text()
    assert alerts and [name for name in alerts if f"**{name}**" not in manual] == []
    tested = (RULES / "unicron_rules_test.yml").read_text()
    assert [name for name in alerts if name not in tested] == []


# ---------------------------------------------------------------- the server alone


def test_a_loop_that_stands_still_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_questions, "LOOK_S_MAX", 0.1)
    shown = Exposition("127.0.0.1:0")
    try:
        shown.watch(lambda: [exposition.number("x", "X.", 3)], lambda: "waits")
        assert http(f"http://{shown.address}/healthz")[0] == 503  # nobody serves its questions
        monkeypatch.setattr(loop_questions, "LOOK_S_MAX", 5.0)
        stop = threading.Event()
        loop = threading.Thread(target=lambda: turn(shown, stop))
        loop.start()
        try:
            assert http(f"http://{shown.address}/healthz") == (200, "alive\n")
            assert http(f"http://{shown.address}/readyz") == (503, "waits\n")
            assert "unicron_x 3.0" in http(f"http://{shown.address}/metrics")[1]
        finally:
            stop.set()
            loop.join(5)
    finally:
        shown.close()


def turn(shown: Exposition, stop: threading.Event) -> None:
    import select

    while not stop.is_set():
        if select.select([shown.fileno()], [], [], 0.02)[0]:
            shown.serve()


def test_an_address_that_cannot_be_is_named(tmp_path: Path) -> None:
    first = Exposition("127.0.0.1:0")
    try:
        with pytest.raises(ExpositionProblem, match="in use: give another address"):
            Exposition(first.address)
    finally:
        first.close()
    for wrong in ("7071", "nowhere:x", "127.0.0.1:99999"):
        with pytest.raises(ExpositionProblem, match="cannot serve metrics"):
            Exposition(wrong)
    assert msgspec.convert({}, CoordinatorSettings).metrics.startswith("127.0.0.1:")  # never open by itself
