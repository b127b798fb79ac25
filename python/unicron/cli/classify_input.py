"""What `unicron classify` is given, and how it is read: always in bounded memory, never by running what is in it.

    text       a log, of one rank or of many with prefixes; srun's labels are found by themselves
    jsonl      {"id", "text"} or {"id", "ranks": {rank: text}} in each line; other fields are left alone
    torchrun   torchelastic's error.json
    flight     NCCL flight recorder dumps: a folder of one per rank, one file, or a file with all of them
    logs       a folder of logs, one folder or file per rank (torchrun's and unicron's own log folders)

The kind is found by looking at the name and the first bytes; --kind says it where that goes wrong.
"""

from __future__ import annotations

import enum
import io
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from unicron.cli.common import Problem
from unicron.diagnosis import Diagnosis, diagnose, diagnose_ranks, diagnose_text, lines
from unicron.diagnosis.dump import PICKLE_FIRST, DumpProblem, DumpRefused, read_dump
from unicron.diagnosis.flight import RankDump, diagnose_dumps, parse_dump
from unicron.diagnosis.reader import Reader

HEAD_BYTES = 64 << 10
BINARY_SHARE = 16  # a line with one undecodable character in so many is no text
LINE_BYTES = 64 << 10  # of text; a longer line comes in pieces
ROW_BYTES_MAX = 64 << 20  # a line of JSON lines
WHOLE_BYTES_MAX = 1 << 30  # a file that has to be read as one
FILES_MAX = 65_536
WANTED = 'wanted is {"id", "text"} or {"id", "ranks": {rank: text}} in each line'
LOG_NAMES = ("stderr.log", "stdout.log", "stderr", "stdout")
_RANK_AT_END = re.compile(r"(\d{1,7})(?:\.(?:json|pkl|pickle|pt|bin|log|txt|out|err))?$")


class Kind(enum.StrEnum):
    AUTO = "auto"
    TEXT = "text"
    SLURM = "slurm"
    JSONL = "jsonl"
    TORCHRUN = "torchrun"
    FLIGHT = "flight"
    LOGS = "logs"


class Row(msgspec.Struct):
    """A line of JSON lines."""

    id: str | int | None = None
    text: str | None = None
    ranks: dict[str, str] | None = None


class Answer(msgspec.Struct):
    id: str
    diagnosis: Diagnosis


def answers(name: str, kind: Kind) -> Iterator[Answer]:
    """The diagnoses of a file, a folder or (name "-") of what comes in.

    Raises:
        Problem: it cannot be read, or is not what `kind` says; the text says where and what to do.
    """
    if name == "-":
        yield from _of_stream("-", sys.stdin.buffer, kind)
        return
    path = Path(name)
    if not path.exists():
        raise Problem(f"{path} does not exist: give a log, JSON lines, an error.json or a folder of dumps")
    if path.is_dir():
        yield from _of_folder(path, kind)
        return
    with path.open("rb") as stream:
        yield from _of_stream(name, stream, kind)


# ---------------------------------------------------------------- one stream


def _of_stream(name: str, stream: BinaryIO, kind: Kind) -> Iterator[Answer]:
    head = stream.read(HEAD_BYTES)
    if kind is Kind.AUTO:
        kind = _kind_of(head)
    if kind is Kind.JSONL:
        yield from _rows(name, head, stream)
    elif kind in (Kind.TORCHRUN, Kind.FLIGHT):
        content = head + stream.read(WHOLE_BYTES_MAX - len(head) + 1)
        if len(content) > WHOLE_BYTES_MAX:
            raise Problem(f"{name}: larger than {WHOLE_BYTES_MAX >> 20} MiB; --kind text reads it as a log")
        yield _of_whole(name, content, kind)
    elif kind is Kind.LOGS:
        raise Problem(f"{name} is not a folder: --kind logs wants one with a log per rank", 2)
    else:
        found = _of_text(head, stream, kind)
        if not found.evidence and not _is_text(head):
            raise Problem(f"{name} is not text in UTF-8: give a log, JSON lines, an error.json or a folder of dumps")
        yield Answer(name, found)


def _kind_of(head: bytes) -> Kind:
    if head.startswith(PICKLE_FIRST):
        return Kind.FLIGHT
    begin = head.lstrip()[:1]
    if begin not in (b"{", b"["):
        return Kind.TEXT
    first, _, rest = head.lstrip().partition(b"\n")
    value = _json(first)
    if isinstance(value, dict) and {"text", "ranks"} & value.keys():
        return Kind.JSONL
    if isinstance(value, dict) and "message" in value and rest.strip():
        return Kind.TEXT  # structured logging
    # One value over many lines, or one long line; anything else that begins with a bracket is a log.
    if value is None and not re.match(rb"[\[{]\s*(?:[\"\]{}\[]|$)", head.lstrip()):
        return Kind.TEXT
    return Kind.FLIGHT if re.search(rb'"(?:entries|pg_config|dumps|record_id)"', head) else Kind.TORCHRUN


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _rows(name: str, head: bytes, stream: BinaryIO) -> Iterator[Answer]:
    decoder = msgspec.json.Decoder(Row)
    for number, line in enumerate(_whole_lines(name, head, stream), 1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Problem(f"{name}:{number}: {error}; {WANTED}") from None
        if row.text is None and row.ranks is None:
            raise Problem(f"{name}:{number}: has neither the field text nor the field ranks; {WANTED}")
        found = diagnose_ranks(row.ranks) if row.ranks is not None else diagnose_text(row.text or "")
        yield Answer(str(number if row.id is None else row.id), found)


def _whole_lines(name: str, head: bytes, stream: BinaryIO) -> Iterator[bytes]:
    """Lines of any length up to ROW_BYTES_MAX, beginning with what was read already."""
    *whole, rest = head.split(b"\n")
    yield from whole
    while True:
        more = stream.readline(ROW_BYTES_MAX)
        rest += more
        if len(rest) >= ROW_BYTES_MAX:
            raise Problem(f"{name}: a line is longer than {ROW_BYTES_MAX >> 20} MiB; --kind text reads it as a log")
        yield rest
        if not more:
            return
        rest = b""


def _of_text(head: bytes, stream: BinaryIO, kind: Kind) -> Diagnosis:
    first = head.decode("utf-8", "replace").splitlines()
    reader = Reader()
    reader.read_unranked(text_lines(head, stream), labelled=kind is Kind.SLURM or lines.is_labelled(first))
    return diagnose(reader.ranks)


def _is_text(head: bytes) -> bool:
    text = head.decode("utf-8", "replace")
    return (text.count("\ufffd") + text.count("\0")) * BINARY_SHARE <= len(text)


def text_lines(head: bytes, stream: BinaryIO) -> Iterator[str]:
    """Lines of a text, whatever is in it: what is not UTF-8 is replaced, long lines come in pieces."""
    *whole, rest = head.split(b"\n")
    more = iter(lambda: stream.readline(LINE_BYTES), b"")
    pieces = itertools.chain(whole, [rest + stream.readline(LINE_BYTES)], more)
    for piece in pieces:
        for line in piece.decode("utf-8", "replace").rstrip("\r\n").split("\r"):
            yield line if line.count("\ufffd") * BINARY_SHARE <= len(line) else ""


# ---------------------------------------------------------------- files that are read as one


def _of_whole(name: str, content: bytes, kind: Kind) -> Answer:
    value = _dump(name, content)
    if kind is Kind.FLIGHT:
        dumps = value.get("dumps") if isinstance(value, dict) else None
        if isinstance(dumps, dict):
            ranks = {rank: dump for rank, dump in dumps.items() if rank.isdigit()}
            return Answer(name, diagnose_dumps({int(rank): _parsed(name, int(rank), ranks[rank]) for rank in ranks}))
        rank = _rank_of(Path(name)) or 0
        return Answer(name, diagnose_dumps({rank: _parsed(name, rank, value)}))
    if isinstance(value, dict) and "message" in value:
        return Answer(name, _of_error_file(name, value["message"]))
    if isinstance(value, dict) and {"text", "ranks"} & value.keys():
        return next(_rows(name, json.dumps(value).encode(), io.BytesIO()))
    what = "neither an error.json of torchrun, nor a flight recorder dump, nor JSON lines"
    raise Problem(f"{name}: JSON, but {what}; --kind text reads it as a log")


def _of_error_file(name: str, message: Any) -> Diagnosis:
    """torchelastic writes {"message": {"message": ..., "extraInfo": {"py_callstack": ...}}}, or {"message": text}."""
    texts = [message] if isinstance(message, str) else []
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        stack = extra.get("py_callstack") if isinstance(extra, dict) else None
        texts = [text for text in (stack, message.get("message")) if isinstance(text, str)]
    if not texts:
        raise Problem(f"{name}: an error file without a message; torchrun fills it when main() is decorated by @record")
    # <log folder>/<attempt>/<rank>/error.json
    folder = Path(name).resolve().parent.name
    return diagnose_ranks({folder if folder.isdigit() else "": "\n".join(texts)})


def _dump(name: str, content: bytes) -> Any:
    try:
        return read_dump(content)
    except DumpProblem as problem:
        raise Problem(f"{name}: {problem}") from None


def _parsed(name: str, rank: int, value: Any) -> RankDump:
    try:
        return parse_dump(rank, value)
    except ValueError as error:
        raise Problem(f"{name}: {error}; --kind text reads it as a log") from None


# ---------------------------------------------------------------- folders


def _rank_of(path: Path) -> int | None:
    found = _RANK_AT_END.search(path.name)
    return int(found[1]) if found else None


def _of_folder(folder: Path, kind: Kind) -> Iterator[Answer]:
    logs = {} if kind is Kind.FLIGHT else _logs(folder)
    if logs:
        reader = Reader(known={str(rank) for rank in logs})
        for rank, path in sorted((rank, path) for rank, paths in logs.items() for path in paths):
            with path.open("rb") as stream:
                for line in text_lines(b"", stream):
                    for piece in lines.pieces(line):
                        reader.feed(str(rank), piece)
        yield Answer(str(folder), diagnose(reader.ranks))
        return
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    if kind not in (Kind.AUTO, Kind.FLIGHT) or not files:
        raise Problem(
            f"{folder} holds neither dumps (nccl_trace_rank_0, ...) nor logs by rank (0/stderr.log, ...): "
            "give the folder that holds them, or a file"
        )
    yield from _of_dumps(folder, files[:FILES_MAX])


def _logs(folder: Path) -> dict[int, list[Path]]:
    """rank -> its log files, in folders named by rank."""
    found: dict[int, list[Path]] = {}
    for path in itertools.islice(sorted(folder.iterdir()), FILES_MAX):
        if path.is_dir() and path.name.isdigit():
            paths = [path / name for name in LOG_NAMES if (path / name).is_file()]
            if paths:
                found[int(path.name)] = paths
    return found


def _of_dumps(folder: Path, files: list[Path]) -> Iterator[Answer]:
    """One answer for the dumps named by rank, and one for each file that holds a whole set."""
    dumps: dict[int, RankDump] = {}
    names: dict[int, Path] = {}
    for path in files:
        if path.stat().st_size > WHOLE_BYTES_MAX:
            raise Problem(f"{path}: larger than {WHOLE_BYTES_MAX >> 20} MiB: not a flight recorder dump")
        rank = _rank_of(path)
        if rank is None:
            yield _of_whole(str(path), path.read_bytes(), Kind.FLIGHT)
            continue
        if rank in names:
            raise Problem(f"two dumps of rank {rank}: {names[rank].name} and {path.name}; move one of them away")
        names[rank] = path
        try:
            dumps[rank] = _parsed(str(path), rank, read_dump(path.read_bytes()))
        except DumpRefused as problem:
            raise Problem(f"{path}: {problem}") from None
        except DumpProblem as problem:
            sys.stderr.write(f"unicron classify: {path}: {problem}; counted as no dump\n")
    if dumps:
        yield Answer(str(folder), diagnose_dumps(dumps))
    elif names:
        raise Problem(f"{folder}: none of {len(names)} dumps can be read")
