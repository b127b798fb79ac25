"""Xid events: what the NVIDIA driver's numbers in the kernel log mean, and a decoder of such lines.

After the vendor's catalogue of October 2025 (162 and above, and the display-era numbers 16, 18, 19 and 56 to 58, are
less certain). Numbers with one meaning share a row. Three rows are not facts but ways to go on:

* 154 carries the vendor's own verdict on the GPU: what its payload says is done. It follows the Xid that caused it.
* 144 to 150 are NVLink 5 units; the words Fatal and Nonfatal and nvlink5.py decide.
* A number that the catalogue does not use, or that is newer than this table, is SEV2 and flags the GPU.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable

import msgspec

from unicron.diagnosis import nvlink5
from unicron.diagnosis.words import Category, Finding, Scope, Strength
from unicron.types import Severity


class Action(enum.StrEnum):
    """The vendor's first answer."""

    RESTART_APP = "restart app"
    RESET_GPU = "reset GPU"
    REBOOT = "reboot node"
    IGNORE = "ignore"
    SUPPORT = "contact support"
    WORKFLOW = "workflow"
    CABLES = "check power/cabling"
    UPDATE = "update SW/FW"
    CHECK_UVM = "check UVM"
    PAYLOAD = "do what the payload says"
    UNSTATED = ""


class Xid(msgspec.Struct, frozen=True):
    number: int
    words: str
    action: Action
    severity: Severity
    scope: Scope
    category: Category
    is_follower: bool = False  # printed because of another fault: never the root


_APP = (Action.RESTART_APP, Severity.SEV2, Scope.PROCESS)
_RESET = (Action.RESET_GPU, Severity.SEV1, Scope.GPU)
_COUNT = (Action.IGNORE, Severity.INFO, Scope.GPU)
_OLD = (Action.SUPPORT, Severity.SEV1, Scope.GPU)
_NOTICE = (Action.IGNORE, Severity.INFO, Scope.PROCESS)
_FABRIC = (Action.WORKFLOW, Severity.SEV1, Scope.LINK)
_NEW_GPU = (Action.UNSTATED, Severity.SEV1, Scope.GPU)
_NEW_LINK = (Action.UNSTATED, Severity.SEV1, Scope.LINK)
_POWER = (Action.UNSTATED, Severity.INFO, Scope.NODE)
_Rows = tuple[Iterable[int], str, tuple[Action, Severity, Scope], Category]

_ROWS: tuple[_Rows, ...] = (
    ((8,), "a channel was idle for too long and was ended", _APP, Category.OTHER_CUDA),
    ((11, 25, 32), "push buffer is damaged: program or driver; 32 again on one GPU: PCIe", _APP, Category.OTHER_CUDA),
    ((13,), "exception in a kernel: bad address or instruction", _APP, Category.ILLEGAL_MEMORY),
    ((14,), "test event", _COUNT, Category.NONE),
    ((16, 18, 19, 56, 57, 58), "display, bus master or frame buffer of old GPUs", _OLD, Category.GPU_DRIVER),
    ((31,), "page fault: a kernel used an address it does not have", _APP, Category.ILLEGAL_MEMORY),
    ((37, 38, 66, 67), "notice of the driver's firmware", _NOTICE, Category.GPU_DRIVER),
    ((39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)), "copy engine failed", _APP, Category.OTHER_CUDA),
    ((43,), "a channel was reset after the program's own fault; the GPU is healthy",
     (Action.IGNORE, Severity.SEV2, Scope.PROCESS), Category.OTHER_CUDA),
    ((44,), "fault while switching contexts", (Action.IGNORE, Severity.SEV2, Scope.GPU), Category.OTHER_CUDA),
    ((45,), "channels torn down because the program died or another Xid came first",
     (Action.WORKFLOW, Severity.SEV2, Scope.PROCESS), Category.OTHER_CUDA),
    ((46, 109, 158), "the GPU stopped answering", _RESET, Category.GPU_DRIVER),
    ((48,), "double-bit ECC error", (Action.WORKFLOW, Severity.SEV1, Scope.GPU), Category.ECC),
    ((54,), "auxiliary power is not connected", (Action.CABLES, Severity.SEV1, Scope.NODE), Category.GPU_DRIVER),
    ((59, 61), "power management controller stopped (older drivers)", _OLD, Category.GPU_DRIVER),
    ((60, 68, 69, 82, 83, 84, 86, 88, 89, *range(96, 106), 139), "a video, image or class engine failed", _APP,
     Category.OTHER_CUDA),
    ((62, 143), "a controller inside the GPU halted or did not start", _RESET, Category.GPU_DRIVER),
    ((63, 160), "a bad row or channel of memory was mapped out; takes effect at the next reset", _COUNT, Category.ECC),
    ((64,), "a bad row of memory could not be mapped out", _RESET, Category.ECC),
    ((74,), "NVLink error; peers report it too: suspect what they share", _FABRIC, Category.NVLINK),
    ((78,), "virtual GPU did not start", (Action.UPDATE, Severity.SEV2, Scope.NODE), Category.GPU_DRIVER),
    ((79,), "the GPU has fallen off the bus", (Action.REBOOT, Severity.SEV1, Scope.GPU), Category.GPU_DRIVER),
    ((80,), "data sent to the GPU was damaged", _APP, Category.OTHER_CUDA),
    ((92,), "many single-bit ECC errors", _COUNT, Category.ECC),
    ((93, 106, 107, 121, 152, 153), "for information", _COUNT, Category.NONE),
    ((94,), "memory error contained to one program: once a restart, again the GPU",
     (Action.RESTART_APP, Severity.SEV2, Scope.GPU), Category.ECC),
    ((95, 140), "memory error that was not contained", _RESET, Category.ECC),
    ((108,), "NVLink translation notice", _COUNT, Category.NVLINK),
    ((110,), "security fault", _RESET, Category.GPU_DRIVER),
    ((119, 120), "the GPU's system processor (GSP) does not answer", _RESET, Category.GPU_DRIVER),
    ((122, 123, 124, 125), "the board's flash memory (InfoROM) fails", _OLD, Category.GPU_DRIVER),
    ((136, 155), "an NVLink could not be trained or failed in software", (Action.RESET_GPU, Severity.SEV1, Scope.LINK),
     Category.NVLINK),
    ((137,), "NVLink access refused, mostly because a peer's process faulted",
     (Action.IGNORE, Severity.SEV2, Scope.PROCESS), Category.NVLINK),
    ((141,), "fast path error", (Action.IGNORE, Severity.SEV2, Scope.PROCESS), Category.OTHER_CUDA),
    ((142,), "video encoder failed", (Action.SUPPORT, Severity.SEV2, Scope.PROCESS), Category.OTHER_CUDA),
    (range(144, 151), "NVLink 5 unit error; Fatal or Nonfatal decides", _FABRIC, Category.NVLINK),
    ((151,), "key rotation failed", (Action.REBOOT, Severity.SEV1, Scope.NODE), Category.GPU_DRIVER),
    ((154,), "the driver's verdict on the GPU", (Action.PAYLOAD, Severity.SEV1, Scope.GPU), Category.GPU_DRIVER),
    ((156,), "a resource of the GPU was retired: reset to go on without it", _RESET, Category.ECC),
    ((157, 161), "a bad resource or channel could not be retired", (Action.IGNORE, Severity.SEV1, Scope.GPU),
     Category.ECC),
    ((159,), "error on the coherent interface, printed with others",
     (Action.CHECK_UVM, Severity.SEV2, Scope.PROCESS), Category.OTHER_CUDA),
    ((162, 163, 164, 165), "power smoothing changed", _POWER, Category.NONE),
    ((166, 170), "NVLink encryption is wrong", _NEW_LINK, Category.NVLINK),
    ((167,), "fatal PCIe timeout", (Action.UNSTATED, Severity.SEV1, Scope.NODE), Category.GPU_DRIVER),
    ((168, 169), "memory capacity reduced, or a security controller halted", _NEW_GPU, Category.GPU_DRIVER),
    ((171, 172), "details of an Xid 48", _NEW_GPU, Category.ECC),
)  # fmt: skip

FOLLOWERS = {43, 45, 137, 141, 159}
XIDS: dict[int, Xid] = {
    number: Xid(number, words, *how, category, number in FOLLOWERS)
    for numbers, words, how, category in _ROWS
    for number in numbers
}
NUMBER_MAX = 172  # of the catalogue; a number up to it that is not in XIDS is unused there

LINE = re.compile(
    r"(?<![A-Za-z])X[iI][dD](?: error| event| code)?s?[ :=]*"
    r"(?:\(PCI:(?P<pci>[0-9a-fA-F:.]+)\)|\((?P<bus>[0-9a-fA-F:.]+)\))?"
    r"[:=, ]*(?P<number>\d{1,5})\b(?P<rest>.*)"
)
_VERDICT = re.compile(r"\bto 0x[0-9a-fA-F]+ \((?P<action>[^)]*)\)")


def xid(number: int) -> Xid:
    """The row of a number; for one that is not in the table the row that says so (SEV2, flags the GPU)."""
    if number in XIDS:
        return XIDS[number]
    words = "not used on present GPUs" if 0 < number <= NUMBER_MAX else "newer than this table"
    words += ": restart, and flag the GPU"
    return Xid(number, words, Action.SUPPORT, Severity.SEV2, Scope.GPU, Category.GPU_DRIVER)


def decode(line: str) -> Finding | None:
    """The finding of a kernel line with an Xid, None when there is none in it. Never raises.

    ``NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=python, GPU has fallen off the bus.``
    """
    found = LINE.search(line)
    if found is None:
        return None
    row = xid(int(found["number"]))
    place = found["pci"] or found["bus"]
    where = f" on {place}" if place else ""
    reason = f"Xid {row.number}{where}: {row.words}"
    if row.number == 154:
        return _verdict(found["rest"], row, reason)
    if 144 <= row.number <= 150:
        unit = nvlink5.decode(row.number, found["rest"])
        strength = Strength.HARDWARE if unit.severity is Severity.SEV1 else Strength.NOISE
        if unit.severity is Severity.SEV2:
            strength = Strength.CAUSE
        return _finding(row, unit.severity, unit.scope, strength, f"Xid {row.number}{where}: {unit.reason}")
    return _finding(row, row.severity, row.scope, _strength(row), reason)


def _finding(row: Xid, severity: Severity, scope: Scope, strength: Strength, reason: str) -> Finding:
    return Finding(f"xid.{row.number}", severity, scope, row.category, strength, reason)


def _strength(row: Xid) -> Strength:
    if row.is_follower:
        return Strength.ECHO
    if row.severity is Severity.INFO:
        return Strength.NOISE
    return Strength.HARDWARE if row.scope is not Scope.PROCESS else Strength.CAUSE


def _verdict(rest: str, row: Xid, reason: str) -> Finding:
    """154 says what is to be done, not why: weaker than the Xid before it."""
    found = _VERDICT.search(rest)
    action = found["action"] if found else ""
    if action.lower() == "none":
        return _finding(row, Severity.INFO, row.scope, Strength.NOISE, f"{reason}: nothing to be done")
    scope = Scope.NODE if "reboot" in action.lower() else row.scope
    return _finding(row, row.severity, scope, Strength.CAUSE, f"{reason}: {action or 'not stated'}")
