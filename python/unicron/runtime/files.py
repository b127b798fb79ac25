"""YAML files of people, decoded into structs: an unknown field is an error that names it and the
nearest known one.
"""

from __future__ import annotations

import difflib
import os
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

import msgspec

FILE_BYTES_MAX = 1 << 20
INT_MIN, INT_MAX = -(1 << 63), (1 << 63) - 1  # what a message, and a C++ core, takes

T = TypeVar("T")


class FileProblem(ValueError):
    """A file that cannot be taken; one line that says what to do."""


def write_atomically(path: Path, text: str) -> None:
    """Whoever sees the file sees all of it."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    staging.write_text(text, encoding="utf-8")
    os.replace(staging, path)


def make_folder(path: Path, what: str) -> None:
    """For us alone; what: what it is to whoever named it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        why = "it is a file" if path.is_file() else error.strerror
        raise FileProblem(f"{path} cannot be the {what} ({why}): give a folder that you may make and write") from None


def load_yaml(path: Path, kind: type[T]) -> T:
    import yaml  # type: ignore[import-untyped]  # late: workers do without it

    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise FileProblem(f"{path} is larger than {FILE_BYTES_MAX} bytes")
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileProblem(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise FileProblem(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise FileProblem(f"{path} is nested too deep: no field has so many levels") from None
    try:
        return convert({} if content is None else content, kind)
    except FileProblem as problem:
        raise FileProblem(f"{path}: {problem}") from None


def convert(content: Any, kind: type[T]) -> T:
    """Plain values into a struct, with errors for people."""
    _check_fields(content, kind, "")
    _check_numbers(content, "")
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise FileProblem(str(error).replace("`$.", "`")) from None


def _check_fields(content: Any, kind: Any, where: str) -> None:
    struct = _struct_of(kind)
    if struct is None or not isinstance(content, dict):
        return
    fields = {f.encode_name: f.type for f in msgspec.structs.fields(struct)}
    for name, value in content.items():
        if name not in fields:
            raise FileProblem(f"unknown field {where}{name}{_nearest(str(name), list(fields))}")
        _check_fields(value, fields[name], f"{where}{name}.")


def _check_numbers(content: Any, where: str) -> None:
    if isinstance(content, int) and not INT_MIN <= content <= INT_MAX:
        raise FileProblem(f"{where or 'it'} is a number of more than 64 bits: give a smaller one")
    if isinstance(content, dict):
        for name, value in content.items():
            _check_numbers(name, f"{where} (a name)" if where else "a name")
            _check_numbers(value, f"{where}.{name}" if where else str(name))
    elif isinstance(content, list | tuple):
        for number, value in enumerate(content):
            _check_numbers(value, f"{where}[{number}]")


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known are {', '.join(known)}"


def _struct_of(kind: Any) -> type[msgspec.Struct] | None:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return next((s for s in map(_struct_of, typing.get_args(kind)) if s is not None), None)
    return kind if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else None
