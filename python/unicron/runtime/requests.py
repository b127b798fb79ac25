"""What the command line may ask of the coordinator: a look at the state, or an event for the
machine.
"""

from __future__ import annotations

import difflib
import os
from typing import Any, Literal

import msgspec

from unicron.coordinator.events import (
    CancelRequested,
    DrainRequested,
    Event,
    FaultRequested,
    ReshapeRequested,
    ResumeRequested,
    SuspendRequested,
    TaskSubmitted,
)
from unicron.coordinator.job import Job
from unicron.coordinator.requests import no_task
from unicron.coordinator.state import State, TaskState
from unicron.messages import Reply, Request
from unicron.runtime import files, views
from unicron.runtime.what_if import RequestProblem, what_if
from unicron.types import Rank

VERBS = (
    "submit", "cancel", "suspend", "resume", "reshape", "drain", "undrain", "inject", "ps", "describe", "incidents",
    "nodes", "cluster", "plan", "shutdown", "ping",
)  # fmt: skip


class _Empty(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _Submit(msgspec.Struct, forbid_unknown_fields=True):
    job: Job


class _Task(msgspec.Struct, forbid_unknown_fields=True):
    task: str


class _Reshape(msgspec.Struct, forbid_unknown_fields=True):
    task: str
    layout: dict[Literal["tp", "pp", "dp", "sharded"], int]


class _Node(msgspec.Struct, forbid_unknown_fields=True):
    node: str


class _Plan(msgspec.Struct, forbid_unknown_fields=True):
    events: tuple[str, ...] = ()


class _Incidents(msgspec.Struct, forbid_unknown_fields=True):
    task: str = ""
    id: str = ""
    after: int = 0  # number of the last one already known: only newer or open ones


class _Inject(msgspec.Struct, forbid_unknown_fields=True):
    task: str
    rank: Rank
    fault: str
    point: str = "now"
    iteration: int = -1
    micro_batch: int = -1


def answer(
    request: Request, request_id: str, state: State, seen: dict[str, Any], now_ms: float
) -> Reply | Event | None:
    """A reply at once, an event whose step will answer it, or None: shut down."""
    try:
        return _answer(request, request_id, state, seen, now_ms)
    except (files.FileProblem, RequestProblem) as problem:
        return Reply(False, str(problem))


def _answer(
    request: Request, request_id: str, state: State, seen: dict[str, Any], now_ms: float
) -> Reply | Event | None:
    arguments = request.arguments
    match request.verb:
        case "submit":
            job = files.convert(arguments, _Submit).job
            _refuse_shared_checkpoints(job, state)
            return TaskSubmitted(request_id, job)
        case "cancel":
            task = find_task(state, files.convert(arguments, _Task).task)
            return CancelRequested(request_id, task.name)
        case "suspend":
            return SuspendRequested(request_id, find_task(state, files.convert(arguments, _Task).task).name)
        case "resume":
            return ResumeRequested(request_id, find_task(state, files.convert(arguments, _Task).task).name)
        case "reshape":
            asked = files.convert(arguments, _Reshape)
            layout = {str(name): size for name, size in asked.layout.items()}
            return ReshapeRequested(request_id, find_task(state, asked.task).name, layout)
        case "drain" | "undrain":
            return DrainRequested(request_id, files.convert(arguments, _Node).node, request.verb == "drain")
        case "inject":
            wish = files.convert(arguments, _Inject)
            return FaultRequested(request_id, **msgspec.structs.asdict(wish))
        case "describe":
            task = find_task(state, files.convert(arguments, _Task).task)
            return Reply(True, result=views.describe_view(task, state, seen, now_ms))
        case "plan":
            return Reply(True, result=what_if(state, files.convert(arguments, _Plan).events))
        case "incidents":
            return Reply(True, result=_incidents(files.convert(arguments, _Incidents), state, now_ms))
        case "ps" | "nodes" | "cluster" | "ping" | "shutdown":
            files.convert(arguments, _Empty)
            return _look(request.verb, state, now_ms)
    close = difflib.get_close_matches(request.verb, VERBS, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise RequestProblem(f"the coordinator does not know {request.verb!r}{hint}")


def _refuse_shared_checkpoints(job: Job, state: State) -> None:
    """Two tasks that save into one folder remove each other's checkpoints, and load what is the other's."""
    for task in state.tasks.values():
        if task.name != job.name and not task.is_over and job.checkpoint_dir and _folder(task.job) == _folder(job):
            raise RequestProblem(
                f"checkpoint.dir {job.checkpoint_dir} is that of {task.name}, which is {task.phase.value}:"
                " each task needs a folder of its own"
            )


def _folder(job: Job) -> str:
    """As it is written: the nodes have it, not this machine."""
    return os.path.normpath(os.path.join(job.cwd, job.checkpoint_dir)) if job.checkpoint_dir else ""


def _look(verb: str, state: State, now_ms: float) -> Reply | None:
    match verb:
        case "ps":
            return Reply(True, result=views.tasks_view(state, now_ms))
        case "nodes":
            return Reply(True, result=views.nodes_view(state))
        case "cluster":
            return Reply(True, result=views.cluster_view(state, now_ms))
        case "ping":
            return Reply(True, result={"term": state.term, "gpu": state.gpu})
    return None


def find_task(state: State, name: str) -> TaskState:
    """By name; with one task only, '' is that one."""
    if not name and len(state.tasks) == 1:
        return next(iter(state.tasks.values()))
    task = state.tasks.get(name)
    if task is None:
        raise RequestProblem(no_task(name, [*state.tasks]))
    return task


def incidents_view(state: State, now_ms: float, **wish: Any) -> list[dict[str, Any]]:
    """wish: task, id. RequestProblem when there is no such incident."""
    return _incidents(_Incidents(**wish), state, now_ms)


def _incidents(wish: _Incidents, state: State, now_ms: float) -> list[dict[str, Any]]:
    chosen = [
        incident
        for incident in state.incidents.values()
        if (not wish.task or incident.task == wish.task)
        and (not wish.id or incident.id == wish.id)
        and (int(incident.id[1:]) > wish.after or incident.is_open)
    ]
    if wish.id and not chosen:
        raise RequestProblem(f"no incident {wish.id!r}: `unicron incidents` lists them")
    return [views.incident_view(incident, state, now_ms) for incident in chosen]
