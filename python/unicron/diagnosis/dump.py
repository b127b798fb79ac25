"""Reads a NCCL flight recorder's dump without ever running it. Pure: bytes in, plain values out.

torch writes dumps as pickles, and a pickle is a program: loading one that somebody prepared runs whatever it says. A
dump needs only dicts, lists, tuples, strings, numbers, None and booleans, so this reads the opcodes (the standard
library's pickletools knows them) and builds those; an opcode that names a class, a function or anything of the outside
is refused. We do not subclass the standard library's loader and forbid look-ups there, because what is not written
cannot be forgotten. The JSON form of a dump is read as well.
"""

from __future__ import annotations

import json
import pickletools
from collections.abc import Callable
from typing import Any

PICKLE_FIRST = b"\x80"  # protocol 2 and later, which is what torch writes
OPCODES_MAX = 50_000_000
DEPTH_MAX = 100  # marks open at once


class DumpProblem(Exception):
    """What is wrong with a dump, and where in it."""


class DumpRefused(DumpProblem):
    """It would have run something: somebody made it so, torch does not."""


class _Mark:
    """Where a list, tuple or dict began on the stack."""


_MARK = _Mark()
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_SCALARS = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
    "UNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINUNICODE",
}  # fmt: skip
_NOTHING = {"PROTO", "FRAME"}


class _Machine:
    """The stack and memory of the few opcodes that are allowed."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memory: dict[int, Any] = {}
        self.num_marks = 0

    def to_mark(self) -> list[Any]:
        items: list[Any] = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        self.num_marks -= 1
        items.reverse()
        return items

    def mark(self, _: Any) -> None:
        self.num_marks += 1
        if self.num_marks > DEPTH_MAX:
            raise DumpProblem(f"nested more than {DEPTH_MAX} deep")
        self.stack.append(_MARK)

    def pop(self, _: Any) -> None:
        self.stack.pop()

    def put(self, index: int) -> None:
        self.memory[index] = self.stack[-1]

    def memoize(self, _: Any) -> None:
        self.memory[len(self.memory)] = self.stack[-1]

    def get(self, index: int) -> None:
        self.stack.append(self.memory[index])

    def append(self, _: Any) -> None:
        item = self.stack.pop()
        self._list().append(item)

    def appends(self, _: Any) -> None:
        items = self.to_mark()
        self._list().extend(items)

    def set_item(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._fill([key, value])

    def set_items(self, _: Any) -> None:
        self._fill(self.to_mark())

    def make_dict(self, _: Any) -> None:
        items = self.to_mark()
        self.stack.append({})
        self._fill(items)

    def tuple_of(self, count: int) -> Callable[[Any], None]:
        def make(_: Any) -> None:
            items = [self.stack.pop() for _ in range(count)]
            self.stack.append(tuple(reversed(items)))

        return make

    def _list(self) -> list[Any]:
        target = self.stack[-1]
        if type(target) is not list:
            raise DumpProblem("appends to something that is no list")
        return target

    def _fill(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise DumpProblem("sets items of something that is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int | float | bool | None):
                raise DumpProblem(f"a dict's key is a {type(key).__name__}")
            target[key] = value

    def actions(self) -> dict[str, Callable[[Any], None]]:
        push = self.stack.append
        return {
            "MARK": self.mark,
            "EMPTY_DICT": lambda _: push({}),
            "EMPTY_LIST": lambda _: push([]),
            "EMPTY_TUPLE": lambda _: push(()),
            "TUPLE1": self.tuple_of(1),
            "TUPLE2": self.tuple_of(2),
            "TUPLE3": self.tuple_of(3),
            "TUPLE": lambda _: push(tuple(self.to_mark())),
            "LIST": lambda _: push(self.to_mark()),
            "DICT": self.make_dict,
            "APPEND": self.append,
            "APPENDS": self.appends,
            "SETITEM": self.set_item,
            "SETITEMS": self.set_items,
            **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), self.put),
            **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), self.get),
            "MEMOIZE": self.memoize,
            "POP": self.pop,
            **dict.fromkeys(_SCALARS, push),
            **{name: _pushes(push, value) for name, value in _CONSTANTS.items()},
        }


def _pushes(push: Callable[[Any], None], value: Any) -> Callable[[Any], None]:
    return lambda _: push(value)


def read_pickle(content: bytes) -> Any:
    """The plain value of a pickle.

    Raises:
        DumpRefused: it holds more than plain values.
        DumpProblem: it is no whole pickle.
    """
    machine = _Machine()
    actions = machine.actions()
    position: int | None = 0
    try:
        for count, (opcode, argument, position) in enumerate(pickletools.genops(content)):
            if count >= OPCODES_MAX:
                raise DumpProblem(f"more than {OPCODES_MAX} opcodes")
            if opcode.name == "STOP":
                break
            if opcode.name in _NOTHING:
                continue
            if opcode.name not in actions:
                what = f" ({argument})" if isinstance(argument, str) else ""
                raise DumpRefused(
                    f"holds more than plain values at byte {position}: {opcode.name}{what}; "
                    "not read, and do not load it: torch writes no such dump"
                )
            actions[opcode.name](argument)
        if len(machine.stack) != 1 or machine.stack[0] is _MARK:
            raise DumpProblem("is not a whole pickle")
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeError) as error:
        raise DumpProblem(f"is not a whole pickle: byte {position}: {error}") from None
    return machine.stack[0]


def read_dump(content: bytes) -> Any:
    """The plain value of a dump, be it a pickle or JSON.

    Raises:
        DumpProblem: it is neither, or holds more than plain values.
    """
    if content.startswith(PICKLE_FIRST):
        return read_pickle(content)
    if not content.strip():
        raise DumpProblem("is empty: the rank died before it wrote its dump")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DumpProblem(f"is neither a pickle nor JSON: {error}") from None
