"""An agent speaks of its own node and of the workers there, whatever kind of message it says it in."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from machines import running
from unicron.coordinator.events import AgentMessage, AgentSays
from unicron.coordinator.speaking import foreign
from unicron.messages import WorkerUp
from wire_fuzz import instance, kinds


def named(content: Any) -> Iterator[str]:
    """Every worker named anywhere in a message, however deep; plans name those of all nodes."""
    if isinstance(content, dict):
        content.pop("plans", None)
        if "worker" in content:
            yield content["worker"]
        yield from (name for name in content.get("workers", ()) if isinstance(name, str))
        for inner in content.values():
            yield from named(inner)
    elif isinstance(content, list | tuple):
        for inner in content:
            yield from named(inner)


@pytest.mark.parametrize("kind", kinds(AgentSays), ids=lambda kind: kind.__name__)
def test_no_kind_of_message_speaks_of_another_nodes_worker(kind: type[msgspec.Struct]) -> None:
    rng = random.Random(kind.__name__)
    seen = set()
    for _ in range(300):
        message = msgspec.structs.replace(instance(kind, rng), node="n0")
        others = [worker for worker in named(msgspec.to_builtins(message)) if worker.rpartition(".")[0] != "n0"]
        assert (foreign("n0", message) is not None) == (others != []), message
        seen.add(bool(others))
    speaks_of_workers = any(any(True for _ in named(msgspec.to_builtins(instance(kind, rng)))) for _ in range(50))
    assert seen == ({False, True} if speaks_of_workers else {False})


def test_the_machine_refuses_it_by_name() -> None:
    driver = running()
    worker = driver.worker("n0.w0")
    false = msgspec.structs.replace(driver.status(worker), iteration=worker.iteration + 100)
    driver.feed(AgentMessage("n1", WorkerUp("n1", false)))
    assert driver.refusals() == ["wrong_node"] and worker.iteration < 100
    driver.feed(AgentMessage("n0", WorkerUp("n0", false)))
    assert driver.refusals() == [] and worker.iteration >= 99
