"""Was a handle of a stand-in group missed? It would keep a group whose collectives do nothing: wrong, and silent.

Python knows how many references each stand-in has. Those of the sites that the walk found, of torch's own books and of
one list of ours must be all of them; then nothing is missed, whatever else this process holds, and knowing it took a
fraction of a millisecond. Where the numbers differ, garbage is collected, and then every object of the process is
looked at. A holder that can be changed (a module's global, an attribute of an object that the walk stays out of) is one
more site. One that cannot is refused by name. What no object holds is held by a function that is running (or by native
code): that is said and left, because a stand-in raises when it is used after its time (stand_ins.py).

Rejected: gc.get_referrers. It does not see what the template froze before it forked, which is every module that it
imported, and takes 50 ms for each generation of holders. Rejected: only to search. It takes a second, in every worker.
"""

from __future__ import annotations

import gc
import inspect
import sys
import types
from collections import Counter, deque
from collections.abc import Mapping, Sequence, Set
from typing import Any

from unicron.training import handles, registries
from unicron.training.handles import Site, Walk
from unicron.training.stand_ins import StandIn, stand_ins

DEPTH_MAX = 6  # of values in values that cannot be changed
NAMED_MAX = 5  # holders in one message
PATH_MAX = 12


WHAT_TO_DO = (
    ": a process group that is kept there cannot be replaced when ranks come and go. Take it from parallel_state where "
    "you need it, or keep it in an attribute, a list, a dictionary or a tuple"
)
SAID = (
    "unicron: a process group from before manage() is held by {where}. That one is not replaced and raises StandInUsed "
    "when it is used: take it from parallel_state where you need it"
)


class MissedHandle(RuntimeError):
    """Something holds a group from before manage() where it cannot be replaced."""


def find_handles(roots: Mapping[str, Any]) -> list[Site]:
    """Every place that holds a stand-in, wherever in this process. roots: where to begin. Raises MissedHandle."""
    walk = Walk()
    walk.run(roots.values())
    if not _lacking(walk):
        return walk.sites
    walk.run(_globals_with_handles())
    if not _lacking(walk):
        return walk.sites
    gc.collect()
    lacking, variables = _lacking(walk), _variables()
    if lacking and Counter(group for group, _ in variables) != lacking:
        refused = _search(walk, roots)
        if refused:
            raise MissedHandle(_listed(refused, "; ") + WHAT_TO_DO)
        lacking = _lacking(walk)
    if lacking:
        where = _listed([text for group, text in variables if group in lacking], ", ")
        print(SAID.format(where=where or "something that Python does not show"), file=sys.stderr)
    return walk.sites


def _listed(texts: Sequence[str], between: str) -> str:
    more = f" and {len(texts) - NAMED_MAX} more" if len(texts) > NAMED_MAX else ""
    return between.join(texts[:NAMED_MAX]) + more


# ---------------------------------------------------------------- counting


def _num_references(groups: list[Any], index: int) -> int:
    return sys.getrefcount(groups[index])


def _lacking(walk: Walk) -> dict[int, int]:
    """Stand-ins (by their place in the list) with references that are not explained, and how many."""
    groups = stand_ins()
    own = _num_references([object()], 0)
    found: dict[int, int] = {}
    for index in range(len(groups)):
        explained = own + registries.num_references(groups[index]) + walk.references[id(groups[index])]
        if (count := _num_references(groups, index) - explained) != 0:
            found[index] = count
    return found


def _globals_with_handles() -> list[Any]:
    """Of the script's modules, those that hold a group in a global. Not searched further: most have none."""
    modules = [*sys.modules.items()]
    return [
        vars(module) for name, module in modules
        if type(module) is types.ModuleType and not name.startswith("torch.")
        and any(type(value) is StandIn for value in [*vars(module).values()])
    ]  # fmt: skip


def _variables() -> list[tuple[int, str]]:
    """Of functions that are running: (place of the stand-in in the list, where it is)."""
    places = {id(group): index for index, group in enumerate(stand_ins())}
    return [
        (places[id(value)], f"{name} of {frame.f_code.co_name}() ({frame.f_code.co_filename}:{frame.f_lineno})")
        for frame in _running() for name, value in frame.f_locals.items()
        if id(value) in places and name not in (*frame.f_code.co_cellvars, *frame.f_code.co_freevars)
    ]  # fmt: skip


def _running() -> list[types.FrameType]:
    frames: list[types.FrameType] = []
    for top in sys._current_frames().values():
        frame: types.FrameType | None = top
        while frame is not None:
            if frame.f_code.co_flags & inspect.CO_OPTIMIZED and frame.f_code.co_filename != __file__:
                frames.append(frame)
            frame = frame.f_back
    return frames


# ---------------------------------------------------------------- searching


def _search(walk: Walk, roots: Mapping[str, Any]) -> list[str]:
    """More sites for the walk. Returns what holds a stand-in and cannot be changed, by name."""
    groups = stand_ins()
    targets = {id(groups[index]) for index in _lacking(walk)}
    refused: list[str] = []
    for _ in range(DEPTH_MAX):
        frozen: set[int] = set()
        for holder, name in _holders(targets, walk, roots):
            before = len(walk.sites)
            if isinstance(holder, (tuple, frozenset, types.MethodType)):
                frozen.add(id(holder))  # who holds this one is looked for next
            elif not isinstance(holder, types.FrameType):
                walk.look_into(holder)
                refused += [name] * (len(walk.sites) == before)
        if not frozen:
            break
        targets = frozen
    return refused if _lacking(walk) else []


def _holders(targets: Set[int], walk: Walk, roots: Mapping[str, Any]) -> list[tuple[Any, str]]:
    """Objects that refer to a target and are not known yet, each with a way to it. First ways that have a name."""
    everything = gc.get_objects()  # before the containers of this search are among them
    modules = {name: module.__dict__ for name, module in [*sys.modules.items()] if type(module) is types.ModuleType}
    named = {**modules, **roots}
    known = walk.known() | {id(frame.f_locals) for frame in _running()}  # a copy, not the variables
    seen = {id(walk), id(vars(walk)), *map(id, vars(walk).values())}
    parents: dict[int, Any] = {}
    found: dict[int, Any] = {}
    # Before the dictionaries in them. (isinstance() would ask objects for their __class__, and some answer anything.)
    classes = [each for each in everything if issubclass(type(each), type)]
    for start in (*named.values(), *classes, *everything):
        if id(start) in seen or type(start) in _CLOSED:
            continue
        seen.add(id(start))
        queue = deque([start])
        while queue:
            each = queue.popleft()
            for referent in _referents(each, seen):
                if id(referent) in targets:
                    if id(each) not in known:
                        found[id(each)] = each
                elif id(referent) not in seen and type(referent) not in _CLOSED:
                    seen.add(id(referent))
                    parents[id(referent)] = each
                    queue.append(referent)
    names = {id(root): name for name, root in named.items()}
    ways = [(each, _way_to(each, parents, names)) for each in found.values()]
    parents.clear()  # something in it may lead back to it, and to what is counted
    return ways


_OURS = (handles.Site, handles.Walk, *handles.FOR_SITES)
_CLOSED = {str, bytes, int, float, bool, type(None), types.CodeType, StandIn, *_OURS}


def _referents(each: Any, seen: set[int]) -> list[Any]:
    if not issubclass(type(each), type):
        return gc.get_referents(each)
    # A class's dictionary must not be written to but through the class.
    seen.update(id(part) for part in gc.get_referents(each) if type(part) is dict)
    return [*vars(each).values(), *each.__bases__]


# ---------------------------------------------------------------- saying


def _way_to(each: Any, parents: Mapping[int, Any], names: Mapping[int, str]) -> str:
    steps: list[str] = []
    child = each
    while id(child) in parents and id(child) not in names and len(steps) < PATH_MAX:
        parent = parents[id(child)]
        steps.insert(0, _step(parent, child))
        child = parent
    begin = names.get(id(child)) or f"a {_kind(child)}"
    return f"{begin}{''.join(steps)} ({_kind(each)})"


def _kind(each: Any) -> str:
    kind = type(each)
    name = getattr(each, "__qualname__", "") if not isinstance(each, type) else ""
    text = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{text} {name}".strip()


def _step(parent: Any, child: Any) -> str:
    """How the child is reached: .name, [index], or its kind."""
    if isinstance(parent, (list, tuple, deque)):
        return next((f"[{index}]" for index, each in enumerate(parent) if each is child), "")
    attributes = parent if isinstance(parent, dict) else getattr(parent, "__dict__", {})
    if child is attributes:
        return ""
    for key, each in [*attributes.items()]:
        if each is child:
            return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r:.40}]"
    return f" -> {_kind(child)}"
