"""The dashboard in a real browser: what happens in the cluster is on the page without asking."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from browser import page, picture
from clusters import closed_incident, end, eventually, happened, plain_job, running
from etcd_members import free_ports
from unicron.runtime.dashboard_settings import DashboardSettings
from unicron.runtime.local_cluster import LocalCluster

SEEN_S_MAX = 10.0  # on a machine that does other things; measured in bench/bench_dashboard.py


@pytest.mark.timeout(120)
def test_an_incident_is_seen_as_it_happens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    cluster = LocalCluster(
        2, 1, 1, imports="unicron._core", log_dir=tmp_path / "daemons", dashboard=DashboardSettings(address)
    )
    try:
        cluster.start(30)
        task = cluster.submit(plain_job("gpt-small", tmp_path, iterations=1_000_000))
        running(cluster, task)
        with page() as opened:
            opened.goto(f"http://{address}/")
            opened.wait_for_selector('#link[data-state="live"]')
            opened.wait_for_selector("#tasks td:has-text('gpt-small')")
            before = opened.inner_text("#tasks tbody td:nth-child(5)")
            eventually(lambda: opened.inner_text("#tasks tbody td:nth-child(5)") != before, SEEN_S_MAX)
            assert "2 up" in opened.inner_text("#node-counts") and "1 (solved)" in opened.inner_text("#decision")
            opened.hover("#map", position={"x": 4, "y": 4})
            assert "n0: up; gpt-small rank" in opened.inner_text("#node")

            os.kill(next(w.pid for w in cluster.workers(task) if w.is_member), signal.SIGKILL)
            died_s = time.monotonic()
            opened.wait_for_selector("#incidents td:has-text('worker lost')", timeout=1000 * SEEN_S_MAX)
            seen_s = time.monotonic() - died_s
            incident = closed_incident(cluster, task)["id"]
            opened.wait_for_selector("#incidents td:has-text('healed')", timeout=1000 * SEEN_S_MAX)
            assert "next iteration committed after" in opened.inner_text("#incident")
            assert len(opened.query_selector_all("#incident li")) >= 3
            picture(opened, tmp_path / "dashboard.png")

            cluster.kill_coordinator()
            opened.wait_for_selector('#link[data-state="lost"]', timeout=1000 * SEEN_S_MAX)
            cluster.start_coordinator()
            opened.wait_for_selector('#link[data-state="live"]', timeout=1000 * SEEN_S_MAX)
            opened.wait_for_selector(f'#incidents tr[data-id="{incident}"]', timeout=1000 * SEEN_S_MAX)
            assert [i["id"] for i in happened(cluster, task)] == [incident]
            with capsys.disabled():
                print(f" incident on the page {seen_s:.2f} s after the death", end="")
    finally:
        end(cluster)
