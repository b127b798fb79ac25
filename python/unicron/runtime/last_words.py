"""What a dead worker left in its files: torch's error file, and the end of its stderr.

A plain script says nothing to its agent; a process that a signal ended cannot any more. But torch's record() writes an
error file before it unwinds, faulthandler writes the stacks of a fatal signal, and Python its traceback. Read once, a
bounded piece, after the death.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unicron.messages import cut

READ_BYTES_MAX = 32_768
ERROR_FILE_BYTES_MAX = 1 << 20
ERROR_FILE = "error.json"  # beside stderr.log; TORCHELASTIC_ERROR_FILE names it to the script

# Where the last words begin, the most telling first: of each the last that is there.
_BEGINNINGS = (
    re.compile(r"^Fatal Python error: ", re.MULTILINE),
    re.compile(r"^terminate called ", re.MULTILINE),
    re.compile(r"^Traceback \(most recent call last\):$", re.MULTILINE),
)
_FRAME = re.compile(r'^ +File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class LastWords:
    text: str = ""
    where: str = ""  # file:line


def last_words(stderr: str) -> LastWords:
    """stderr: path of its log, '' where it has none."""
    if not stderr:
        return LastWords()
    return _of_error_file(Path(stderr).with_name(ERROR_FILE)) or _of_log(Path(stderr)) or LastWords()


def _of_error_file(path: Path) -> LastWords | None:
    """torch.distributed.elastic writes {"message": text} or {"message": {"message": text, "extraInfo": {...}}}."""
    try:
        with path.open("rb") as file:
            said = json.loads(file.read(ERROR_FILE_BYTES_MAX))
    except (OSError, ValueError):
        return None
    message: Any = said.get("message") if isinstance(said, dict) else None
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        stack = extra.get("py_callstack", "") if isinstance(extra, dict) else ""
        text = f"{stack}\n{message.get('message', '')}"
    else:
        text = str(message or "")
    text = text.strip()
    return LastWords(cut(text), _place(text)) if text else None


def _of_log(path: Path) -> LastWords | None:
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(file.tell() - READ_BYTES_MAX, 0))
            text = file.read(READ_BYTES_MAX).decode(errors="replace")
    except OSError:
        return None
    for beginning in _BEGINNINGS:
        found = list(beginning.finditer(text))
        if found:
            words = text[found[-1].start() :].strip()
            is_traceback = beginning is _BEGINNINGS[-1]
            return LastWords(cut(words), _place(words, last=is_traceback))
    return None


def _place(text: str, *, last: bool = True) -> str:
    """Of a traceback the last frame is the innermost, of faulthandler's stacks the first."""
    frames = _FRAME.findall(text)
    return ":".join(frames[-1 if last else 0]) if frames else ""
