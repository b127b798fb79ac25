"""torch.distributed's own books of groups, where nothing but a handle is kept.

Private API (c10d._world), pinned by tests: destroy_process_group would end the groups, all of them for the default one.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

BY_GROUP = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "pg_coalesce_state")


def by_group() -> list[dict[Any, Any]]:
    """Those whose keys are groups."""
    return [getattr(c10d._world, name) for name in BY_GROUP]


def num_references(group: dist.ProcessGroup) -> int:
    """How often the books hold this group."""
    world = c10d._world
    tagged = sum(each is group for groups in world.tags_to_pg.values() for each in groups)
    return sum(group in book for book in by_group()) + tagged + (world.default_pg is group)


def books() -> list[Any]:
    """Every object that holds groups for torch itself."""
    world = c10d._world
    return [world, vars(world), *by_group(), *world.tags_to_pg.values()]


def forget_group(group: dist.ProcessGroup) -> None:
    """Take one group out of torch's registries."""
    for book in by_group():
        book.pop(group, None)
    for tagged in c10d._world.tags_to_pg.values():
        if group in tagged:
            tagged.remove(group)
    with contextlib.suppress(RuntimeError):  # it may never have been registered by name
        c10d._unregister_process_group(group.group_name)


def forget_all_groups() -> None:
    """torch as before init_process_group, without ending any group (destroy_process_group would)."""
    world = c10d._world
    c10d._update_default_pg(None)
    for registry in (*by_group(), world.tags_to_pg):
        registry.clear()
    c10d._unregister_all_process_groups()
    world.group_count = 0
