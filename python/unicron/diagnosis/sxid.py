"""SXid events of NVSwitches: what the numbers mean, and a decoder of their lines.

After the vendor's Fabric Manager guide. The line's own word (Fatal, Non-fatal) outweighs the table, because the same
number can be either: a non-fatal one ends the program that met it and leaves the switch usable.
"""

from __future__ import annotations

import re

import msgspec

from unicron.diagnosis.words import Category, Finding, Scope, Strength
from unicron.types import Severity


class Sxid(msgspec.Struct, frozen=True):
    number: int
    words: str
    severity: Severity  # SEV1 or INFO
    needs_inspection: bool = False  # reboot alone does not clear it: look at the hardware

    @property
    def actions(self) -> tuple[str, ...]:
        """What the vendor asks for."""
        if self.severity is Severity.INFO:
            return ()
        return ("reboot system", "inspect hardware") if self.needs_inspection else ("reboot system",)


# Counted only. The first list is corrected single-bit errors.
_CORRECTED = (11012, 11021, 11022, 11023, 12021, 12023, 15008, 15011, 19049, 19055, 19057, 19059, 19062, 19065, 19068,
              19071, 24001, 24002, 24003)  # fmt: skip
_COUNTED = {
    10001: "host privileged access error", 10002: "host privileged access timeout",
    10003: "host interrupt nobody handled",
    10004: "thermal event began", 10005: "thermal event ended", 12030: "egress control parity error",
    20001: "packet sent again", 20009: "short-term receive error rate", 20012: "connection is broken or inconsistent",
    22013: "link controller asks for a downgrade",
}  # fmt: skip
_REBOOT = {11004: "ingress access list is invalid", 12028: "egress privileged access error (non-posted)",
           19084: "heartbeat of a unit timed out"}  # fmt: skip
_INSPECT = {
    11001: "ingress command is invalid", 11009: "ingress virtual channel set is invalid",
    11013: "ingress header, double-bit",
    11018: "ingress routing id, double-bit", 11019: "ingress lane table, double-bit", 11020: "ingress control parity",
    12001: "egress crossbar overflow", 12002: "egress packet route", 12020: "egress sequence id",
    12022: "egress input, double-bit",
    12024: "egress output, double-bit", 12025: "egress credit overflow", 12026: "egress destination of a request",
    12027: "egress destination of a response", 12031: "egress credit parity", 12032: "egress flit type",
    14017: "address translation timed out", 15001: "route buffer over- or underflow",
    15006: "route counter over- or underflow",
    15009: "route table, double-bit", 15010: "route parity", 15012: "route input, double-bit",
    15013: "route credit parity",
    19047: "interconnect header, double-bit", 19048: "interconnect data, double-bit",
    19054: "header memory, double-bit",
    19056: "data memory 0, double-bit", 19058: "data memory 1, double-bit",
    19060: "request header memory, double-bit",
    19061: "request data memory, double-bit", 19063: "response header memory, double-bit",
    19064: "response data memory, double-bit", 19066: "completion header memory, double-bit",
    19067: "completion data memory, double-bit", 19069: "response 1 header memory, double-bit",
    19070: "response 1 data memory, double-bit", 20034: "link went down in training", 22003: "link controller halted",
    22011: "link controller: external error", 22012: "link controller: no answer",
    23001: "ingress source buffer overflow",
    23002: "ingress source buffer underflow", 23003: "egress credit overflow", 23004: "egress credit underflow",
    23005: "ingress packet burst", 23006: "ingress packet sticky", 23007: "gaps at ingress",
    23008: "ingress destination",
    23009: "ingress packet parity", 23010: "ingress source buffer overflow", 23011: "ingress source buffer underflow",
    23012: "egress credit overflow", 23013: "egress credit underflow", 23014: "ingress packet burst",
    23015: "ingress packet sticky", 23016: "gaps at ingress", 23017: "ingress credit parity",
    24004: "source tracking 0, double-bit", 24005: "source tracking 0 data, double-bit",
    24006: "source tracking 1, double-bit",
    24007: "source tracking timed out",
}  # fmt: skip

SXIDS: dict[int, Sxid] = {
    **{n: Sxid(n, "single-bit error, corrected", Severity.INFO) for n in _CORRECTED},
    **{n: Sxid(n, words, Severity.INFO) for n, words in _COUNTED.items()},
    **{n: Sxid(n, words, Severity.SEV1) for n, words in _REBOOT.items()},
    **{n: Sxid(n, words, Severity.SEV1, needs_inspection=True) for n, words in _INSPECT.items()},
}

LINE = re.compile(r"SXid[ :]*(?:\(PCI:(?P<pci>[0-9a-fA-F:.]+)\))?[: ]*(?P<number>\d{1,6})\b(?P<rest>.*)")
ECHO = re.compile(r"(?i)detected NVSwitch (?P<word>non-fatal|fatal) error (?P<number>\d{1,6})\b(?P<rest>.*)")
_WORD = re.compile(r"(?i)\b(?P<word>non-?fatal|fatal)\b")


def sxid(number: int) -> Sxid:
    """The row of a number; one that is not in the table is SEV1 unless its line says Non-fatal."""
    return SXIDS.get(number) or Sxid(number, "not in this table", Severity.SEV1)


def decode(line: str) -> Finding | None:
    """The finding of a line with an SXid, or of the fabric manager's echo of one; None when there is neither."""
    found = LINE.search(line) or ECHO.search(line)
    if found is None:
        return None
    row = sxid(int(found["number"]))
    is_echo = found.re is ECHO
    word = found["word"] if is_echo else next((m["word"] for m in [_WORD.search(found["rest"])] if m), "")
    severity = row.severity
    scope = Scope.LINK
    if word.lower().startswith("non"):
        severity = Severity.INFO if row.severity is Severity.INFO else Severity.SEV2
        scope = Scope.LINK if severity is Severity.INFO else Scope.PROCESS
    elif word:
        severity = Severity.SEV1
    strength = {Severity.INFO: Strength.NOISE, Severity.SEV2: Strength.CAUSE}.get(severity, Strength.HARDWARE)
    if is_echo and severity is not Severity.SEV1:
        strength = Strength.ECHO
    reason = f"NVSwitch SXid {row.number}{f' ({word.lower()})' if word else ''}: {row.words}"
    return Finding(f"sxid.{row.number}", severity, scope, Category.NVLINK, strength, reason)
