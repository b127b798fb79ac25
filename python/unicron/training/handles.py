"""Every place that holds a handle of a stand-in group, so that the real group can be put there.

A walk from the model, the optimizer, the scheduler and parallel_state through whatever a script may put there: objects
of any package, slots, containers, tuples, partials, bound methods, closures, attributes of classes. What cannot be
changed (a tuple) is made anew in the place where it stands. missed_handles.py says whether this was all of them.

The walk stays out of what is not the script's: modules, the standard library's objects (loggers, threads, sockets),
tensors' content, and torch but for its modules and optimizers.
"""

from __future__ import annotations

import collections
import functools
import logging
import operator
import sys
import threading
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from unicron.training.registries import books
from unicron.training.stand_ins import Ranks, StandIn, stand_ins

PLACES_MAX = 2_000_000  # that a walk looks at: a second or two

Put = Callable[[Any, Any, Any], None]  # (holder, key, value)
Place = tuple[Put, Any, Any, Any]  # how to change it, holder, key, value


class Site:
    """One place that holds a group handle. `ranks` are its members when every replica is alive."""

    __slots__ = ("_holder", "_key", "_put", "ranks")

    def __init__(self, put: Put, holder: Any, key: Any, ranks: Ranks) -> None:
        self._put, self._holder, self._key, self.ranks = put, holder, key, ranks

    def bind(self, group: Any) -> None:
        self._put(self._holder, self._key, group)


# ---------------------------------------------------------------- how a value is put where it stands


def _put_in_vars(holder: Any, name: str, value: Any) -> None:
    vars(holder)[name] = value  # not setattr: a property or a frozen dataclass may stand before it


def _put_in_slot(holder: Any, descriptor: Any, value: Any) -> None:
    descriptor.__set__(holder, value)


def _put_in_cell(cell: Any, _key: Any, value: Any) -> None:
    cell.cell_contents = value


def _put_in_partial(made: Any, name: str, value: Any) -> None:
    state = {"func": made.func, "args": made.args, "keywords": made.keywords, name: value}
    made.__setstate__((*state.values(), vars(made) or None))


class _Member:
    """A value as an element of a set, or as a key of a dictionary. By its id: a reference more would be counted."""

    __slots__ = ("collection", "present")

    def __init__(self, collection: Any, value: Any) -> None:
        self.collection, self.present = collection, id(value)

    def put(self, _key: Any, value: Any) -> None:
        present = next(each for each in self.collection if id(each) == self.present)
        if isinstance(self.collection, dict):
            self.collection[value] = self.collection.pop(present)
        else:
            self.collection.remove(present)
            self.collection.add(value)
        self.present = id(value)


class _Frozen:
    """A value that cannot be changed, and the place where another one is put instead."""

    __slots__ = ("holder", "key", "parts", "put_whole", "value")

    def __init__(self, place: Place) -> None:
        self.put_whole, self.holder, self.key, self.value = place
        self.parts: list[Any] | None = None  # from the first change on

    def put(self, index: int, part: Any) -> None:
        self.parts = self._taken_apart() if self.parts is None else self.parts
        self.parts[index] = part
        self.value = self._made_of(self.parts)
        self.put_whole(self.holder, self.key, self.value)

    def try_out(self) -> None:
        """Raises what a change would raise."""
        self._made_of(self._taken_apart())
        _try_out(self.put_whole, self.holder, self.key, self.value)

    def _taken_apart(self) -> list[Any]:
        return [self.value.__self__] if isinstance(self.value, types.MethodType) else [*self.value]

    def _made_of(self, parts: list[Any]) -> Any:
        if isinstance(self.value, types.MethodType):
            return types.MethodType(self.value.__func__, parts[0])
        make = getattr(type(self.value), "_make", type(self.value))  # _make: of a named tuple
        return make(parts)


def _try_out(put: Put, holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, _Frozen):
        holder.try_out()
    else:
        put(holder, key, value)


FOR_SITES = (_Member, _Frozen)

# ---------------------------------------------------------------- what is looked into

_ATOMS = (
    str, bytes, bytearray, int, float, complex, bool, type(None), range, slice, types.ModuleType, types.CodeType,
    types.FrameType, types.TracebackType, logging.Logger, logging.Handler, threading.Thread, torch.dtype, torch.device,
    torch.Generator, StandIn,
)  # fmt: skip
_CONTAINERS = (list, dict, set, deque, types.CellType, functools.partial, property, staticmethod, classmethod)
_CLOSED = {*sys.stdlib_module_names, "torch", "numpy", "unicron", "triton", "zmq", "msgspec", "pybind11_builtins"}
_OPEN = ("__main__.", "unicron.demo.", "argparse.")
_OPEN_OF_TORCH = ("torch.nn.", "torch.optim.")  # objects: code of torch leads through its compilers
_OPEN_OF_STDLIB = (types.SimpleNamespace, collections.UserDict, collections.UserList)


@functools.lru_cache(maxsize=4096)
def _is_open(module: str) -> bool:
    """Are this module's functions and classes looked into?"""
    return f"{module}.".startswith(_OPEN) or module.partition(".")[0] not in _CLOSED


def _is_class_open(kind: type) -> bool:
    return _is_open(str(kind.__module__))


@functools.lru_cache(maxsize=4096)
def _slots(kind: type) -> tuple[Any, ...]:
    return tuple(
        each for base in kind.__mro__ for each in vars(base).values() if isinstance(each, types.MemberDescriptorType)
    )


@functools.lru_cache(maxsize=4096)
def _interest(kind: type) -> str:
    """What decides whether an object of this class is looked into."""
    if issubclass(kind, _ATOMS):
        return "never"
    if issubclass(kind, type):
        return "class"
    if issubclass(kind, torch.Tensor):
        return "attributes"  # what is put on a parameter, and hooks
    if kind is types.FunctionType:
        return "function"
    if issubclass(kind, (*_CONTAINERS, *_OPEN_OF_STDLIB)) or str(kind.__module__).startswith(_OPEN_OF_TORCH):
        return "always"
    return "always" if any(map(_is_class_open, kind.__mro__)) else "never"


def _is_worth_it(value: Any) -> bool:
    kind: Any = type(value)
    interest = _interest(kind)
    if interest == "function":
        has_any = value.__closure__ or value.__defaults__ or value.__kwdefaults__ or value.__dict__
        return bool(has_any) and _is_open(str(value.__module__))
    if interest == "attributes":
        return bool(value.__dict__)
    return interest == "always" or (interest == "class" and _is_class_open(value))


def places(holder: Any) -> Iterator[Place]:
    """Every value that stands directly in this object, and how another one is put there."""
    kind: Any = type(holder)
    if issubclass(kind, dict):
        for key, value in holder.items():
            yield operator.setitem, holder, key, value
            if issubclass(type(key), (tuple, StandIn)):
                yield _Member.put, _Member(holder, key), ("key", id(key)), key
    elif issubclass(kind, (list, deque)):
        for index, value in enumerate(holder):
            yield operator.setitem, holder, index, value
    elif issubclass(kind, set):
        for value in holder:
            yield _Member.put, _Member(holder, value), id(value), value
    elif issubclass(kind, types.CellType):
        try:
            yield _put_in_cell, holder, None, holder.cell_contents
        except ValueError:
            return  # empty
    elif issubclass(kind, functools.partial):
        for name in ("func", "args", "keywords"):
            yield _put_in_partial, holder, name, getattr(holder, name)
    elif issubclass(kind, types.FunctionType):
        for name in ("__defaults__", "__kwdefaults__", "__closure__"):
            yield setattr, holder, name, getattr(holder, name)
    elif issubclass(kind, (property, staticmethod, classmethod)):
        names = ("fget", "fset", "fdel") if issubclass(kind, property) else ("__func__",)
        for name in names:
            yield setattr, holder, name, getattr(holder, name)
    elif issubclass(kind, type):
        for name, value in [*vars(holder).items()]:
            if name not in ("__dict__", "__weakref__", "__doc__"):
                yield setattr, holder, name, value
        return
    yield from _attributes(holder)


def _attributes_of(holder: Any) -> dict[str, Any]:
    try:
        return vars(holder)
    except TypeError:
        return {}


def _attributes(holder: Any) -> Iterator[Place]:
    for name, value in _attributes_of(holder).items():
        yield _put_in_vars, holder, name, value
    kind: Any = type(holder)
    for descriptor in _slots(kind):
        try:
            yield _put_in_slot, holder, descriptor, descriptor.__get__(holder)
        except AttributeError:
            continue  # not set


class Walk:
    """sites: those found. references: how many of each stand-in (by id) are explained by them."""

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self.references: Counter[int] = Counter()
        self.num_places = 0
        self._counted: set[tuple[int, Any]] = set()
        # Kept, so that an id is not another object's meanwhile. torch's books are not ours to change.
        self._seen: dict[int, Any] = {id(book): book for book in [*books(), stand_ins()]}
        self._without: dict[int, Any] = {}  # tuples with nothing in them
        self._stack: list[Any] = []

    def run(self, roots: Iterable[Any]) -> None:
        self._stack = [*roots]
        while self._stack and self.num_places < PLACES_MAX:
            self.look_into(self._stack.pop())

    def look_into(self, holder: Any) -> None:
        if id(holder) in self._seen:
            return
        self._seen[id(holder)] = holder
        bases = holder.__bases__ if issubclass(type(holder), type) else (type(holder),)
        self._stack += [kind for kind in bases if id(kind) not in self._seen and _is_class_open(kind)]
        for place in [*places(holder)]:
            self._take(place)

    def _take(self, place: Place) -> bool:
        """Is a stand-in there, or in a value there that cannot be changed?"""
        self.num_places += 1
        put, holder, key, value = place
        kind = type(value)  # not isinstance(), which asks the object for its __class__
        if kind is StandIn:
            return self._found(put, holder, key, value)
        if issubclass(kind, (tuple, frozenset)):
            return self._take_frozen(place, value)
        if kind is types.MethodType:
            return self._take_frozen(place, (value.__self__,))
        if id(value) not in self._seen and _is_worth_it(value):
            self._stack.append(value)
        return False

    def _take_frozen(self, place: Place, parts: Iterable[Any]) -> bool:
        """Looked at for each place where it stands: each is given the new one."""
        value = place[3]
        if id(value) in self._without:
            return False
        whole = _Frozen(place)
        found = [self._take((_Frozen.put, whole, index, part)) for index, part in enumerate(parts)]
        if not any(found):
            self._without[id(value)] = value
        return any(found)

    def _found(self, put: Put, holder: Any, key: Any, group: StandIn) -> bool:
        # A reference is the object's that has it: a tuple that stands in two places has one.
        owner = holder.value if isinstance(holder, _Frozen) else holder
        owner = owner.collection if isinstance(owner, _Member) else owner
        try:
            _try_out(put, holder, key, group)
        except Exception:
            return True  # it cannot be changed: not a site, so the count will not agree
        self.sites.append(Site(put, holder, key, group.ranks))
        reference = (id(owner), key if isinstance(key, (int, str, tuple)) else id(key))
        if reference not in self._counted:
            self._counted.add(reference)
            self.references[id(group)] += 1
        return True

    def known(self) -> set[int]:
        """Ids of what was looked into; whatever of a stand-in stands there is a site, or cannot be one."""
        of_objects = [_attributes_of(each) for each in self._seen.values()]
        return {*self._seen, *map(id, of_objects), *(owner for owner, _ in self._counted)}
