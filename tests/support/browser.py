"""A real Chromium, without a screen, driven by playwright; the test is skipped where there is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from servers import UNPACKED

ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip


def chromium() -> tuple[str, dict[str, str]]:
    """(program, environment it needs)."""
    found = shutil.which("chromium")
    if found:
        return found, dict(os.environ)
    unpacked = UNPACKED / "lib" / "chromium" / "chromium"
    if not unpacked.is_file():
        pytest.skip("chromium is not on this machine, and tests/servers.sh could not unpack it")
    libraries = UNPACKED / "lib" / "x86_64-linux-gnu"
    path = f"{libraries}:{libraries / 'pulseaudio'}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    return str(unpacked), {**os.environ, "LD_LIBRARY_PATH": path}


@contextmanager
def page(width: int = 1280, height: int = 900) -> Iterator[Any]:
    """A page whose errors fail the test."""
    program, environment = chromium()
    playwright = pytest.importorskip("playwright.sync_api")
    errors: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=ARGUMENTS, env=environment)
        try:
            opened = browser.new_page(viewport={"width": width, "height": height})
            opened.on("pageerror", lambda error: errors.append(str(error)))
            opened.on("console", lambda said: errors.append(said.text) if is_ours(said.type, said.text) else None)
            yield opened
        finally:
            browser.close()
    assert errors == [], errors


def is_ours(kind: str, text: str) -> bool:
    """The browser says itself that a server is away; a test may want just that."""
    return kind == "error" and "net::ERR_" not in text


def picture(opened: Any, path: Path) -> None:
    opened.screenshot(path=str(path), full_page=True)
