"""Conversations with the machines as text files (etcd raft's interaction tests): command, ----, expected output.

A file is a list of blocks separated by blank lines: comment lines (#) tell the story, then one command, `----`, and
what the machine answered, one action a line. `UNICRON_REWRITE=1 pytest tests/transcripts` writes the answers anew.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from machines import TASK, Agent, Coordinator, pulse
from unicron.agent import events as agent_on
from unicron.coordinator import events as on
from unicron.messages import (
    ArenaRequest,
    ChildStatus,
    EndWorker,
    ExceptionRaised,
    Finished,
    FinishUnderstudies,
    PublishEpoch,
    StopTask,
)
from unicron.types import EpochPlan, Layout, Member, PlanKind, Stage


def run_file(path: Path, *, rewrite: bool) -> tuple[str, str]:
    """(what the file says, what it would say now)"""
    text = path.read_text()
    talk = CoordinatorTalk() if path.name.startswith("coordinator") else AgentTalk()
    blocks = []
    for block in text.strip("\n").split("\n\n"):
        lines = block.split("\n")
        command = next((i for i, line in enumerate(lines) if line and not line.startswith("#")), None)
        if command is None:
            blocks.append(block)
            continue
        output = talk.say(lines[command])
        blocks.append("\n".join([*lines[: command + 1], "----", *(output or ["ok"])]))
    now = "\n\n".join(blocks) + "\n"
    if rewrite:
        path.write_text(now)
    return text, now


def arguments_of(words: list[str]) -> tuple[list[str], dict[str, Any]]:
    plain = [w for w in words if "=" not in w]
    named: dict[str, Any] = {}
    for word in words:
        key, is_named, value = word.partition("=")
        if is_named:
            named[key] = {"yes": True, "no": False}.get(value, int(value) if value.lstrip("-").isdigit() else value)
    return plain, named


def describe(action: Any) -> str:
    kind = type(action).__name__
    match kind:
        case "WriteJournal":
            what = f"journal {type(action.entry).__name__}{_plan(getattr(action.entry, 'plan', None))}"
        case "SendAgent":
            what = f"send {action.node} {_message(action.message)}"
        case "SendCoordinator":
            what = f"send {_message(action.message)}"
        case "SendWorker":
            what = f"frame {action.worker} {_message(action.message)} touched {list(action.touched)}"
        case "SetTimer":
            what = f"set {action.name} at {action.at_ms:g}"
        case "CancelTimer":
            what = f"cancel {action.name}"
        case "ProbeAgent":
            what = f"probe {action.node}"
        case "RecordIncident":
            i = action.incident
            what = f"incident {i.id} {i.fault} {i.severity} rank {i.rank} {i.outcome or 'open'}"
        case "Answer":
            what = f"answer {action.reply.result if action.reply.ok else 'error'}"
        case "Refused":
            what = f"refused {action.name}"
        case _:
            shown = [str(getattr(action, f)) for f in ("worker", "arena", "slot", "pid") if hasattr(action, f)]
            what = " ".join([kind, *shown])
    return f"{what} | {action.reason}"


def _plan(plan: Any) -> str:
    if plan is None:
        return ""
    members = " ".join(f"{m.rank}:{m.worker}" for m in plan.members)
    return f" {plan.epoch} {plan.kind} [{members}] touched {list(plan.touched)} heirs {list(plan.heirs)}"


def _message(message: Any) -> str:
    kind = type(message).__name__
    if kind == "PublishEpoch":
        return f"PublishEpoch {message.plan.epoch}"
    if kind == "StartWorkers":
        return "StartWorkers " + " ".join(f"{n}:{r}{'~' if w else ''}" for n, _, r, w in message.workers)
    if kind == "FromWorker":
        return f"FromWorker {type(message.body).__name__}"
    if kind == "WorkerLost":
        return f"WorkerLost {message.worker} {message.cause or '?'}"
    worker = getattr(message, "worker", "")
    return f"{kind} {worker}".strip()


class CoordinatorTalk:
    """Commands are the driver's method names; `submit tp=1 dp=2 m=4`, `advance 100`, `restart`, `incidents`."""

    def __init__(self) -> None:
        self.driver = Coordinator()

    def say(self, line: str) -> list[str]:
        verb, *words = shlex.split(line)
        plain, named = arguments_of(words)
        driver = self.driver
        if verb == "incidents":
            return [self._incident(msgspec.to_builtins(i)) for i in driver.machine.state.incidents.values()]
        if verb == "phase":
            return [f"{driver.task.phase.value} {driver.task.cause}".strip()]
        if verb == "each":  # several workers, one command: each healed n0.w0 n1.w0
            return [line for name in plain[1:] for line in self._do(plain[0], [name], named)]
        return self._do(verb, plain, named)

    def _do(self, verb: str, plain: list[str], named: dict[str, Any]) -> list[str]:
        driver = self.driver
        if verb == "submit":
            shape = {k: named.pop(k) for k in ("tp", "pp", "dp") if k in named}
            driver.submit(Layout(**shape, num_micro_batches=named.pop("m", 4)), **named)
        elif verb == "cancel":
            driver.feed(on.CancelRequested("c", TASK))
        elif verb == "inject":
            driver.feed(on.FaultRequested("f", TASK, named["rank"], "kill", "compute"))
        elif verb == "advance":
            driver.now_ms += float(plain[0])
            return []
        else:
            method: Callable[..., Any] = getattr(driver, verb)
            method(*plain, **named)
        return [describe(a) for a in driver.actions]

    def _incident(self, i: dict[str, Any]) -> str:
        fields = ("id", "fault", "severity", "node", "rank", "method", "cause", "detect_ms", "kind", "outcome")
        costs = ("lost_ms", "state_source", "micro_batches_recomputed", "iterations_lost")
        return " ".join(f"{name}={i[name]}" for name in (*fields, *costs))


class AgentTalk:
    def __init__(self) -> None:
        self.agent = Agent()

    def say(self, line: str) -> list[str]:
        verb, *words = shlex.split(line)
        plain, named = arguments_of(words)
        method: Callable[..., None] = getattr(self, f"_{verb}")
        method(*plain, **named)
        return [describe(a) for a in self.agent.actions]

    def _connected(self) -> None:
        self.agent.feed(agent_on.CoordinatorConnected())

    def _disconnected(self) -> None:
        self.agent.feed(agent_on.CoordinatorDisconnected())

    def _start(self, *workers: str, managed: bool = True) -> None:
        """name:rank, with ~ for a waiting one."""
        split = [w.removesuffix("~").split(":") for w in workers]
        orders = [
            (name, int(name.partition(".w")[2]), int(rank), text.endswith("~"))
            for (name, rank), text in zip(split, workers, strict=True)
        ]
        self.agent.start(*orders, managed=managed)

    def _forked(self, name: str, pid: int = 50) -> None:
        self.agent.feed(agent_on.WorkerForked(name, pid))

    def _join(self, name: str) -> None:
        self.agent.join(name)

    def _ready(self, name: str) -> None:
        self.agent.ready(name)

    def _raised(self, name: str) -> None:
        words = ExceptionRaised(name, 0, 1, 5, 1, Stage.COMPUTE, "ValueError", "bad", "train.py:7", 1)
        self.agent.say(name, words)

    def _finished(self, name: str) -> None:
        self.agent.say(name, Finished(name, 0))

    def _released(self, name: str) -> None:
        self.agent.feed(agent_on.MutexReleased(name, 9_000_000, pulse(fault_ns=8_900_000)))

    def _status(self, name: str, kind: str, status: int = 0, pid: int = 50) -> None:
        event = agent_on.ChildStatusSeen(ChildStatus(name, pid, kind, status), 60_000_000, pulse())
        self.agent.feed(event)

    def _arena(self, name: str, rank: int = 0, adopt: bool = False) -> None:
        request = ArenaRequest(TASK, name, rank, 4096, "d", adopt)
        self.agent.feed(agent_on.ArenaRequested(f"r{name}", request))

    def _looked(self, name: str, gone: bool = True) -> None:
        self.agent.feed(agent_on.OwnerLooked(name, gone))

    def _plan(self, *members: str, epoch: int = 1, kind: str = "start", touched: int = -1) -> None:
        split = [m.split(":") for m in members]
        plan = EpochPlan(
            TASK, epoch, PlanKind(kind), Layout(dp=len(members)), tuple(range(len(members))),
            tuple(Member(int(r), n.partition(".")[0], n) for r, n in split),
            (touched,) if touched >= 0 else (), reason="as decided",
        )  # fmt: skip
        self.agent.order(PublishEpoch(plan))

    def _end(self, name: str, reason: str = "evidence") -> None:
        self.agent.order(EndWorker(TASK, name, reason))

    def _stop(self) -> None:
        self.agent.order(StopTask(TASK, "cancelled"))

    def _finish(self) -> None:
        self.agent.order(FinishUnderstudies(TASK, "the task is done"))

    def _fire(self, timer: str) -> None:
        self.agent.fire(timer)
