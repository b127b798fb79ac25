"""What a user's own package might hold: model classes with handles of process groups in every kind of place."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel

Pair = namedtuple("Pair", "tp dp")

TP_GROUP: Any = None  # a module's global
HELD: list[Any] = []


def tp() -> Any:
    return parallel_state.get_tensor_model_parallel_group()


def dp() -> Any:
    return parallel_state.get_data_parallel_group()


class MyGPT(GPTModel):  # type: ignore[misc]
    """A class that is neither megatron's nor __main__'s."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.my_group = dp()
        self.mine = Mine()


class Mine(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.group = tp()


class Slotted:
    __slots__ = ("group", "unset")

    def __init__(self, group: Any) -> None:
        self.group = group


@dataclass(frozen=True)
class Frozen:
    group: Any


class WithProperty:
    """The attribute's name is hidden by a property without a setter."""

    def __init__(self, group: Any) -> None:
        self.__dict__["group"] = group

    @property
    def group(self) -> Any:
        return self.__dict__["group"]


class OfClass:
    group: Any = None


class Holder:
    """Whatever a test puts there, and how to read a handle out of it."""

    def __init__(self, what: Any, read: Callable[[Any], Any]) -> None:
        self.what, self._read = what, read

    def groups(self) -> list[Any]:
        found = self._read(self.what)
        return list(found) if isinstance(found, (list, tuple, set, frozenset)) else [found]


def closure() -> Callable[[], Any]:
    group = dp()
    return lambda: group


def with_defaults() -> Callable[..., Any]:
    def reduce(x: Any, group: Any = None, *, other: Any = None) -> tuple[Any, Any]:
        return group, other

    reduce.__defaults__, reduce.__kwdefaults__ = (dp(),), {"other": tp()}  # as `group=dp()` in the signature gives
    return reduce


def generator() -> Iterator[Any]:
    group = dp()
    yield 1
    yield group


def hidden() -> Iterator[Any]:
    """An object of the interpreter's with a group in it that nobody can change."""
    return iter((dp(), tp()))


def of_class() -> type:
    class Fresh(OfClass):
        pass

    Fresh.group = dp()
    return Fresh


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "attribute": (lambda: Mine(), lambda x: x.group),
    "slot": (lambda: Slotted(dp()), lambda x: x.group),
    "frozen dataclass": (lambda: Frozen(dp()), lambda x: x.group),
    "attribute behind a property": (lambda: WithProperty(dp()), lambda x: x.group),
    "attribute of a class": (of_class, lambda x: x.group),
    "list": (lambda: [dp(), [tp()]], lambda x: [x[0], x[1][0]]),
    "tuple": (lambda: (dp(), (tp(), 3)), lambda x: [x[0], x[1][0]]),
    "named tuple": (lambda: Pair(tp(), dp()), lambda x: [x.tp, x.dp]),
    "tuple in a list": (lambda: [(dp(), tp()), 7], lambda x: x[0]),
    "set": (lambda: {dp(), tp()}, lambda x: x),
    "frozen set": (lambda: {"all": frozenset({dp(), tp()})}, lambda x: x["all"]),
    "key of a dictionary": (
        lambda: {dp(): "dp", (tp(), 1): "tp"},
        lambda x: [k[0] if isinstance(k, tuple) else k for k in x],
    ),
    "partial": (lambda: functools.partial(print, dp(), file=tp()), lambda x: [x.args[0], x.keywords["file"]]),
    "partial of a group's method": (lambda: functools.partial(dp().size), lambda x: x.func.__self__),
    "bound method of a group": (lambda: dp().size, lambda x: x.__self__),
    "bound method of an object": (lambda: Mine().forward, lambda x: x.__self__.group),
    "closure": (closure, lambda x: x()),
    "default arguments": (with_defaults, lambda x: x(0)),
    "attribute of a function": (lambda: vars(f := (lambda: 0)).update(group=dp()) or f, lambda x: x.group),
    "attribute of a parameter": (lambda: with_attribute(), lambda x: x.group),
    "hook of a tensor": (lambda: with_hook(), lambda x: x.hook()),
}


def with_attribute() -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.zeros(1))
    param.group = dp()
    return param


def with_hook() -> torch.nn.Module:
    module = Mine()
    hook = closure()
    module.register_forward_hook(lambda *_: hook())
    module.hook = lambda: next(iter(module._forward_hooks.values()))(0, 0, 0)
    return module
