"""What the kernel said of the hardware: Xid and SXid of the NVIDIA driver, and machine checks, decoded by the tables.

A line is news once: a look reads what came since the one before, the first look everything since the boot. Whether the
GPU is fit by now is for the other checks to say; a repaired node's old lines do not keep it out.
"""

from __future__ import annotations

import os
import re

from unicron.diagnosis import sxid, xid
from unicron.runtime.checks.check import Check, Look, Reading, bad, ok, unknown
from unicron.types import Severity

RECORDS_MAX = 200_000
NAMED_MAX = 4

_MACHINE_CHECK = re.compile(r"\[Hardware Error\].*(?:Uncorrected|Fatal)|Machine check events logged.*Uncorrected", re.I)


def parse(record: bytes) -> tuple[int, str]:
    """(number, text) of a record of /dev/kmsg; -1 where it is none."""
    head, _, text = record.decode("utf-8", "replace").partition(";")
    fields = head.split(",")
    number = int(fields[1]) if len(fields) > 2 and fields[1].isdecimal() else -1
    return number, text.partition("\n")[0]


def meaning(line: str) -> tuple[Severity, str] | None:
    """What a kernel line says of the hardware."""
    found = xid.decode(line) or sxid.decode(line)
    if found is not None:
        return found.severity, found.reason
    if _MACHINE_CHECK.search(line):
        return Severity.SEV1, line.strip()[:200]
    return None


def read(fd: int) -> tuple[int, str] | None:
    """The next record of /dev/kmsg; None: there is none now. Raises OSError."""
    while True:
        try:
            return parse(os.read(fd, 8192))
        except BlockingIOError:
            return None
        except BrokenPipeError:  # overwritten while we read: go on with the oldest that is left
            continue


def kernel_log(look: Look) -> Reading:
    try:
        fd = os.open(look.kernel_log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as problem:
        return unknown(f"{look.kernel_log} cannot be read: {problem.strerror}")
    after = look.before.get("kernel_log", {}).get("number", -1)
    number, grave, count = after, [], 0
    try:
        for _ in range(RECORDS_MAX):
            record = read(fd)
            if record is None:
                break
            if record[0] <= after:
                continue
            number, count = record[0], count + 1
            said = meaning(record[1])
            if said is not None and said[0] is Severity.SEV1:
                grave.append(said[1])
    except OSError as problem:
        return unknown(f"{look.kernel_log} cannot be read: {problem.strerror}")
    finally:
        os.close(fd)
    look.now["kernel_log"] = {"number": number}
    if grave:
        named = list(dict.fromkeys(grave))
        more = f" and {len(named) - NAMED_MAX} more" if len(named) > NAMED_MAX else ""
        return bad("; ".join(named[:NAMED_MAX]) + more)
    return ok(f"nothing grave in {count} new records")


CHECKS = (Check("kernel_log", kernel_log),)
