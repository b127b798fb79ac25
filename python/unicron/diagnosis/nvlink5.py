"""NVLink 5 events, Xid 144 to 150: which unit of the link speaks, and what its error bits mean.

A line names the unit, Fatal or Nonfatal, the link, and two words: interrupt information and error status.

    Xid (PCI:0009:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 01 (0x021425c6 0x00000000)

The low bits of the first word are the unit's code (10 bits in the first layout of the word, 7 in the second), its bits
20 to 25 a sub-code that only the link-down unit uses. A bit of the second word says what happened. When the words are
missing or unknown here, the line's own word decides: Fatal is SEV1, Nonfatal is counted.
"""

from __future__ import annotations

import re

import msgspec

from unicron.diagnosis.words import Scope
from unicron.types import Severity

IGNORE, RESET_GPU, VERDICT = "IGNORE", "RESET_GPU", "XID_154_EVAL"  # the vendor's immediate actions


class Unit(msgspec.Struct, frozen=True):
    """Error status values by what they ask for: counted, what Xid 154 then says, fatal."""

    xid: int
    names: tuple[str, ...]
    code: int  # first layout, 10 bits
    code_later: int  # second layout, 7 bits
    counted: tuple[int, ...] = ()
    verdict: tuple[int, ...] = ()
    fatal: tuple[int, ...] = ()


class Meaning(msgspec.Struct, frozen=True):
    severity: Severity
    action: str
    words: str
    outweighs_line: bool = False  # whatever word the line has


class Event(msgspec.Struct, frozen=True):
    """What a line means."""

    severity: Severity
    scope: Scope
    reason: str


_TOP = 0x80000000
_PIPE = {"counted": (0x1, 0x2, _TOP), "fatal": (0x4,)}
UNITS: tuple[Unit, ...] = (
    Unit(144, ("SAW_MVB",), 0b0000100001, 0b0000001, counted=(0x1, 0x4, 0x8, 0x20), fatal=(0x2, 0x10)),
    Unit(145, ("RLW_CTRL",), 0b0001100010, 0b0000011, counted=(_TOP,)),
    Unit(145, ("RLW_REMAP",), 0b0010000010, 0b0000100, counted=(0x100, 0x200, _TOP),
         verdict=(0x1, 0x2, 0x4, 0x8, 0x10, 0x20), fatal=(0x40, 0x80)),
    Unit(145, ("RLW_RSPCOL",), 0b0010100010, 0b0000101, counted=(0x1, _TOP), fatal=(0x2,)),
    Unit(145, ("RLW_RXPIPE",), 0b0011000010, 0b0000110, counted=(0x1, 0x2, 0x4, 0x8, _TOP)),
    Unit(145, ("RLW_SRC_TRACK",), 0b0011100010, 0b0000111, counted=(0x2, _TOP), verdict=(0x4, 0x8),
         fatal=(0x1, 0x10, 0x20)),
    Unit(145, ("RLW_TAGSTATE",), 0b0100000010, 0b0001000, counted=(0x1, 0x10000, _TOP),
         fatal=(0x2, 0x20000, 0x100000)),
    Unit(146, ("TLW_CTRL",), 0b0100100011, 0b0001001, **_PIPE),
    Unit(146, ("TLW_RX", "TLW_RX_PIPE0"), 0b0101000011, 0b0001010, **_PIPE),
    Unit(146, ("TLW_RX", "TLW_RX_PIPE1"), 0b0101000011, 0b0001011, **_PIPE),
    Unit(146, ("TLW_TX", "TLW_TX_PIPE0"), 0b0101100011, 0b0001100, **_PIPE),
    Unit(146, ("TLW_TX", "TLW_TX_PIPE1"), 0b0101100011, 0b0001101, **_PIPE),
    Unit(147, ("TREX",), 0b0110000100, 0b0001110, counted=(0x1, _TOP)),
    Unit(148, ("NVLPW_CTRL", "NVLPW"), 0b0000000101, 0b0001111, counted=(_TOP,)),
    Unit(149, ("NETIR", "NETIR_INT"), 0b0000000110, 0b0011000, fatal=(0x0,)),
    Unit(149, ("NETIR_BER_EVENT",), 0b1000100110, 0b0010011, counted=(0x0, 0x1, 0x2, 0x3)),
    Unit(149, ("NETIR_LINK_EVT", "NETIR_LINK_DOWN"), 0b0111000110, 0b0010001, fatal=(0x0,)),
    Unit(149, ("NETIR_MFDE_EVENT",), 0b1001000110, 0b0010100, counted=(0x3,), fatal=(0x1, 0x4, 0x5, 0x7)),
    Unit(150, ("MSE_WATCHDOG",), 0b0000000000, 0b0000000, fatal=(0x0,)),
)  # fmt: skip

# Sub-code of NETIR_LINK_EVT: where the vendor would look. All lose the link; all but two ask for a reset.
LINK_DOWN: dict[int, str] = {
    0b000000: "another Xid", 0b000001: "nothing, unless daily", 0b000010: "signal", 0b000100: "signal",
    0b001010: "signal", 0b001111: "software", 0b010000: "software, then signal", 0b010001: "software",
    0b010010: "software, then signal",
    0b010101: "the other end", 0b010110: "software", 0b100000: "the other end", 0b100001: "the other end",
    0b100010: "the other end", 0b100011: "the other end", 0b100100: "the other end", 0b100101: "the other end",
    0b100110: "software", 0b101000: "the host", 0b101010: "signal and cables", 0b101011: "signal and cables",
}  # fmt: skip
_IGNORED_DOWN = 0b100110  # the link was taken down on purpose
_HOST_DOWN = 0b101000  # fatal, but a reset does not help: the host did it

_NAME = re.compile(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*\b")
_NAMES = frozenset(name for unit in UNITS for name in unit.names)
_STATUS = re.compile(r"\((?P<information>0x[0-9a-fA-F]{1,8}) (?P<status>0x[0-9a-fA-F]{1,8})")
_FATAL = re.compile(r"(?i)\b(?P<fatal>non-?fatal|fatal)\b")


def lookup(unit: Unit, status: int, subcode: int = 0) -> Meaning | None:
    """What an error status of a unit means, None when the table does not have it.

    Args:
        status: the whole second word; the most serious of its bits that the table has counts (0 is a value of its own).
        subcode: bits 20 to 25 of the first word.
    """
    if "NETIR_LINK_EVT" in unit.names:
        return _link_down(subcode)
    for values, severity, action in (
        (unit.fatal, Severity.SEV1, RESET_GPU),
        (unit.verdict, Severity.SEV2, VERDICT),
        (unit.counted, Severity.INFO, IGNORE),
    ):
        if status in values or (unit.xid != 149 and any(value & status for value in values)):
            return Meaning(severity, action, f"status {status:#x}")
    return None


def _link_down(subcode: int) -> Meaning | None:
    if subcode not in LINK_DOWN:
        return None
    words = f"link down, code {subcode:06b}: look at {LINK_DOWN[subcode]}"
    if subcode == _IGNORED_DOWN:
        return Meaning(Severity.INFO, IGNORE, words, outweighs_line=True)
    return Meaning(Severity.SEV1, IGNORE if subcode == _HOST_DOWN else RESET_GPU, words)


def unit_of(xid: int, name: str, information: int) -> Unit | None:
    """The unit by its name and, where two share a name, by its code in the first word."""
    named = [unit for unit in UNITS if unit.xid == xid and name in unit.names]
    exact = [unit for unit in named if information & 0x3FF == unit.code or information & 0x7F == unit.code_later]
    return next(iter(exact or named), None)


def decode(xid: int, rest: str) -> Event:
    """What follows the number of an Xid 144 to 150 in its line. Never raises."""
    name = next((found[0] for found in _NAME.finditer(rest) if found[0] in _NAMES), "")
    numbers = _STATUS.search(rest)
    word = _FATAL.search(rest)
    is_fatal = word is not None and not word["fatal"].lower().startswith("non")
    meaning = None
    if numbers is not None:
        information = int(numbers["information"], 16)
        unit = unit_of(xid, name, information)
        if unit is not None:
            meaning = lookup(unit, int(numbers["status"], 16), information >> 20 & 0x3F)
    severity = _severity(meaning, is_fatal, has_word=word is not None)
    # A link event is the link's; a fatal error inside another unit is the GPU's.
    is_gpu = severity is Severity.SEV1 and bool(name) and not name.startswith("NETIR")
    said = " ".join(filter(None, (name or "NVLink 5", word["fatal"] if word else "", meaning.words if meaning else "")))
    return Event(severity, Scope.GPU if is_gpu else Scope.LINK, said)


def _severity(meaning: Meaning | None, is_fatal: bool, *, has_word: bool) -> Severity:
    """The word decides between fatal and not; the table, whether what is not fatal still ends the program."""
    if meaning is not None and (meaning.outweighs_line or not has_word):
        return meaning.severity
    if is_fatal or not has_word:
        return Severity.SEV1
    return Severity.SEV2 if meaning is not None and meaning.severity is Severity.SEV2 else Severity.INFO
