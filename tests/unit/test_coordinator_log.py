"""What the coordinator's log says of orders and refusals: whom, and once."""

from __future__ import annotations

import logging

import pytest

from unicron.coordinator.actions import Refused, SendAgent
from unicron.messages import AgentWelcome, EndWorker
from unicron.runtime.coordinator_process import CoordinatorProcess


def _lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def test_orders_name_their_worker_and_what_a_task_that_is_over_refuses_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    process = CoordinatorProcess.__new__(CoordinatorProcess)
    process._last_reasons = {}
    caplog.set_level(logging.DEBUG, logger="unicron.coordinator")
    process._log(SendAgent("vm", EndWorker("t", "vm.w3", "absent"), "not among the workers its agent has"))
    process._log(SendAgent("vm", AgentWelcome(1), "hello"))
    for task in ("a", "b"):
        for fact in ("WorkerLost", "WorkerExited", "WorkerLost"):
            process._log(Refused("task_over", f"{fact}: task {task} is done"))
    process._log(Refused("stale_epoch", "one"))
    process._log(Refused("stale_epoch", "another"))
    assert _lines(caplog, logging.INFO) == [
        "send EndWorker of vm.w3 to vm: not among the workers its agent has",
        "send AgentWelcome to vm: hello",
        "refused task_over: WorkerLost: task a is done (the like of this task: at DEBUG)",
        "refused task_over: WorkerLost: task b is done (the like of this task: at DEBUG)",
        "refused stale_epoch: one",
        "refused stale_epoch: another",
    ]
    assert len(_lines(caplog, logging.DEBUG)) == 4
