"""Servers of others that tests run against: real ones, each with its own folder and port, ended with the test.

They come from PATH or from where `make test` unpacks them (tests/servers.sh); without them the test is skipped, and
says why.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNPACKED = ROOT / ".venv" / "servers" / "usr"
START_S_MAX = 30.0


def program(name: str) -> str:
    """Where it is; skips the test when it is nowhere."""
    places = [str(UNPACKED / "bin"), str(UNPACKED / "sbin"), "/usr/sbin", str(Path(sys.executable).parent)]
    found = shutil.which(name) or shutil.which(name, path=":".join(places))
    if found is None:
        pytest.skip(f"{name} is not on this machine, and tests/servers.sh could not unpack it")
    return found


def libraries() -> list[Path]:
    """Of the programs that tests/servers.sh unpacked."""
    return sorted((UNPACKED / "lib").glob("*-linux-gnu"))


def http(url: str, timeout_s: float = 5.0) -> tuple[int, str]:
    """(status, text), also of an error."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


class Server:
    """A process whose log says when it is up."""

    def __init__(self, command: list[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        """environment: None: ours."""
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The line of its log that says so."""
        deadline = time.monotonic() + START_S_MAX
        while True:
            found = re.search(pattern, self.log.read_text(errors="replace"))
            if found:
                return found
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-2000:]
            time.sleep(0.02)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Prometheus(Server):
    def __init__(self, folder: Path, config: str) -> None:
        binary = program("prometheus")
        path = folder / "prometheus.yml"
        path.write_text(config)
        command = [binary, f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}"]
        super().__init__([*command, "--web.listen-address=127.0.0.1:0"], folder / "prometheus.log")
        self.address = self.wait_for(r'"Listening on" address=(\S+)')[1]
        self.wait_for("Server is ready")

    def query(self, expression: str) -> list[dict[str, Any]]:
        """[{"metric": labels, "value": [time, text]}]"""
        question = urllib.parse.urlencode({"query": expression})
        status, text = http(f"http://{self.address}/api/v1/query?{question}")
        assert status == 200, text
        return list(json.loads(text)["data"]["result"])

    def value(self, expression: str) -> float | None:
        """Of an expression with at most one series."""
        found = self.query(expression)
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else None
