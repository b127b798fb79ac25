"""Roles: the signal that a worker gets another one, and what a script says of its own that its task does not."""

from __future__ import annotations

from unicron.types import Layout

RUN_OPTIONS = {"micro_batch": "micro-batch", "num_micro_batches": "micro-batches"}  # of unicron run


class RoleChanged(BaseException):
    """An understudy was built for another role than it now gets: the runner runs the script again.

    A BaseException, so that `except Exception` in a script does not swallow it.
    """


def overruled(said: dict[str, int], layout: Layout) -> str:
    """What join() was told, and is not so in this task; '' where there is nothing of the kind."""
    others = {name: value for name, value in said.items() if value > 1 and value != getattr(layout, name)}
    if not others:
        return ""
    words = ", ".join(f"{name}={value}" for name, value in others.items())
    options = " ".join(f"--{RUN_OPTIONS.get(name, name)} {value}" for name, value in others.items())
    task = ", ".join(f"{name} {getattr(layout, name)}" for name in others)
    return f"join({words}) is for runs without unicron; this task has {task} (unicron run {options} would have yours)"
