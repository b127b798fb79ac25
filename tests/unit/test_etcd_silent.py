"""etcd that does not answer: one line that says where and why, not urllib3's."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest

from unicron.cli import main
from unicron.runtime.coordinator_daemon import _wait_to_lead, _Waiting
from unicron.runtime.coordinator_settings import CoordinatorSettings, EtcdSettings
from unicron.runtime.ending import Ending
from unicron.runtime.journal_sqlite import SqliteJournal

pytest.importorskip("etcd3gw")


@pytest.fixture
def nobody() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


def test_a_copy_into_etcd_that_is_down(tmp_path: Path, nobody: str, capsys: pytest.CaptureFixture[str]) -> None:
    SqliteJournal(tmp_path / "journal.db").close()
    config = tmp_path / "c.yaml"
    config.write_text(f"etcd: {{endpoints: [{nobody!r}]}}\n")
    assert main(["coordinator", str(config), "--copy-from", str(tmp_path / "journal.db")]) == 1
    assert capsys.readouterr().err == (
        f"unicron coordinator: etcd does not answer at {nobody} (connection refused): start it,"
        " or mend etcd.endpoints\n"
    )


def test_one_that_waits_says_it_as_shortly(
    nobody: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ending = Ending(-1)
    looked = _Waiting.look

    def look(self: _Waiting, why: str, wait_ms: int) -> None:
        looked(self, why, wait_ms)
        ending.reason = "seen"

    monkeypatch.setattr(_Waiting, "look", look)
    etcd = EtcdSettings((nobody,))
    with caplog.at_level(logging.INFO, "unicron.coordinator"):
        assert _wait_to_lead(CoordinatorSettings(etcd=etcd, metrics=""), etcd, ending) is None
    ending.close()
    assert caplog.messages == [f"waits: etcd does not answer: {nobody}: connection refused"]
