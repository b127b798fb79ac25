"""Xid, SXid and NVLink 5: lines as the driver prints them, unknown numbers, and agreement with the vendor's tables."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from bench_classify import shared_data
from unicron.diagnosis import diagnose_text, nvlink5, sxid, xid
from unicron.diagnosis.words import Scope, Strength
from unicron.types import Severity

pytestmark = pytest.mark.timeout(30)

FAILURES = shared_data() / "failures"
needs_data = pytest.mark.skipif(not FAILURES.is_dir(), reason=f"{FAILURES} is not there (UNICRON_SHARED_DATA)")

# Where ours differs, and why. Numbers that the catalogue does not use have no severity there; ours restarts the process
# and flags the GPU, because an unknown Xid in a log is still an event of that GPU.
UNUSED = ("N/A", "unknown")


def rows(name: str) -> list[dict[str, str]]:
    with (FAILURES / name).open(newline="") as file:
        return list(csv.DictReader(file))


@needs_data
def test_xids_agree_row_by_row() -> None:
    wrong = []
    for row in rows("xid.csv"):
        ours = xid.xid(int(row["xid"]))
        if (row["severity"], row["suspect_scope"]) == UNUSED:
            assert ours.number not in xid.XIDS
            assert (ours.severity, ours.scope, ours.action) == (Severity.SEV2, Scope.GPU, xid.Action.SUPPORT)
            continue
        action = "" if row["action_plain"].startswith("(blank") else row["action_plain"]
        theirs = (row["severity"], row["suspect_scope"])
        if theirs != (ours.severity.value, ours.scope.value) or not action.startswith(ours.action.value):
            wrong.append((row["xid"], theirs, action, ours))
        if not ours.action.value:
            assert not action
    assert not wrong


@needs_data
def test_sxids_agree_row_by_row() -> None:
    actions = {"RebootSystem": "reboot system", "HardwareInspection": "inspect hardware"}
    table = rows("sxid.csv")
    for row in table:
        ours = sxid.SXIDS[int(row["sxid"])]
        wanted = tuple(actions[word] for word in row["gpud_actions"].split(";") if word)
        assert (ours.severity.value, ours.actions) == (row["severity"], wanted), row
    assert {int(row["sxid"]) for row in table} == sxid.SXIDS.keys()


@needs_data
def test_nvlink_units_agree_row_by_row() -> None:
    seen = set()
    for row in rows("nvlink5_decode.csv"):
        low = int(row["intrinfo_v1"].replace("-", "0")[-10:], 2)
        later = int(row["intrinfo_v2"].replace("-", "0")[-7:], 2)
        subcode = int(row["intrinfo_v1"][6:12], 2)
        names = tuple(row["unit"].split("/"))
        unit = nvlink5.unit_of(int(row["xid"]), names[-1], low)
        assert unit is not None, row
        assert (unit.names, unit.code, unit.code_later) == (names, low, later)
        found = nvlink5.lookup(unit, int(row["error_status"], 16), subcode)
        assert found is not None, row
        assert (found.severity.value, found.action) == (row["severity"], row["immediate"]), row
        seen.add((unit.xid, unit.names))
    assert seen == {(unit.xid, unit.names) for unit in nvlink5.UNITS}


def line(number: int, rest: str = "pid=7, name=python") -> str:
    return f"[ 12.5] NVRM: Xid (PCI:0000:3b:00): {number}, {rest}"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (line(79, "GPU has fallen off the bus."), "SEV1 gpu"),
        (line(31), "SEV2 process"),
        (line(63), "INFO gpu"),
        (line(163), "INFO node"),
        (line(7), "SEV2 gpu"),  # not used
        (line(4711), "SEV2 gpu"),  # newer than the table
        (line(154, "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"), "SEV1 gpu"),
        (line(154, "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"), "SEV1 node"),
        (line(154, "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"), "INFO gpu"),
        (line(145, "RLW_REMAP Fatal XC0 i0 Link 00 (0x00000004 0x00000040)"), "SEV1 gpu"),
        (line(145, "RLW_REMAP Nonfatal XC0 i0 Link 00 (0x00000004 0x00000100)"), "INFO link"),
        (line(149, "NETIR_LINK_EVT Fatal XC0 i0 Link 01 (0x021425c6 0x00000000)"), "SEV1 link"),
        (line(149, "NETIR_LINK_EVT Fatal XC0 i0 Link 01 (0x026425c6 0x00000000)"), "INFO link"),  # on purpose
        (line(149, "NETIR_BER_EVENT Nonfatal XC0 i0 Link 01"), "INFO link"),
        (line(150, "no words at all"), "SEV1 link"),
        ("Xid 79 on GPU 3", "SEV1 gpu"),
        ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 22003, Fatal, Link 12 Minion Halt", "SEV1 link"),
        ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 12 egress", "SEV2 process"),
        ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20001, Non-fatal, Link 12 replay", "INFO link"),
        ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 99999, Link 12", "SEV1 link"),
    ],
)
def test_a_line_means(text: str, wanted: str) -> None:
    found = diagnose_text(text)
    assert f"{found.severity} {found.scope}" == wanted, found.reason


def test_a_follower_is_never_the_root() -> None:
    for number in (43, 45, 137):
        found = xid.decode(line(number))
        assert found is not None
        assert found.strength is Strength.ECHO


@pytest.mark.parametrize("text", ["look at dmesg for Xid errors", "the taxid 12 is wrong", "Xid", "SXid (PCI:0): none"])
def test_words_that_are_no_events(text: str) -> None:
    assert xid.decode(text) is None
    assert sxid.decode(text) is None


def test_where_it_happened_is_said() -> None:
    assert "0000:3b:00" in diagnose_text(line(79)).reason


def test_tables_are_whole() -> None:
    assert all(number == row.number and row.words for number, row in xid.XIDS.items())
    assert max(xid.XIDS) == xid.NUMBER_MAX
    assert all(unit.fatal or unit.counted for unit in nvlink5.UNITS)
    values: list[Any] = [unit.code for unit in nvlink5.UNITS if unit.names[0] not in ("TLW_RX", "TLW_TX")]
    assert len(set(values)) == len(values)


def test_the_data_is_looked_for_where_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICRON_SHARED_DATA", "/somewhere")
    assert shared_data() == Path("/somewhere")
