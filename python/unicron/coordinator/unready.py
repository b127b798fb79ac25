"""Deaths before anybody of a task was ready: a script that cannot be built dies the same way at every start.

One such death may be chance (a file system that was not mounted yet), and all who build at that moment share it. The
same words of the same rank from a worker that was started later prove the script wrong, whether it was meant for the
role (a member, a refill) or waited for it.
"""

from __future__ import annotations

from typing import NamedTuple

from unicron.coordinator.incident import Incident
from unicron.coordinator.state import State, TaskState
from unicron.types import Rank, Severity, Stage


class UnreadyDeath(NamedTuple):
    """The first of a rank with these words. Not journaled: after a coordinator's restart it is counted anew."""

    signature: str
    said: str
    there: frozenset[str]  # workers that were started by then: their deaths are the same moment's


def message_of(text: str) -> str:
    """An exception's own lines: of a traceback, what follows the last frame."""
    lines = text.rstrip().splitlines()
    if not lines or not lines[0].startswith("Traceback"):
        return text
    last = max((i for i, line in enumerate(lines) if line[:1].isspace()), default=0)
    return "\n".join(lines[last + 1 :]) or text


def note_unready(task: TaskState, incident: Incident, rank: Rank, worker: str) -> str:
    """Why the task must stop, when this is the second; else ''."""
    is_early = task.job.managed and not task.was_ready and task.iteration <= 0 and task.checkpoint is None
    if not is_early or rank < 0 or not _is_unready(incident):
        return ""
    signature, said = incident.signature, message_of(incident.text)
    known = task.unready.get(rank)
    if known is None or (known.signature, known.said) != (signature, said):
        task.unready[rank] = UnreadyDeath(signature, said, frozenset({*task.workers, worker}))
        return ""
    if worker in known.there:
        return ""
    kind = signature.partition(" at ")[0]
    return f"rank {rank} raised {kind} before it was ready, twice at the same place: the script is wrong"


def _is_unready(incident: Incident) -> bool:
    """An exception (it has a place) of a worker that was still building."""
    return incident.stage is Stage.STARTING and bool(incident.signature and incident.where)


def same_unready(state: State, seen: Incident) -> Incident | None:
    """The incident that says already what this death of somebody without a role says; that of its rank, if there is."""
    if not _is_unready(seen):
        return None
    known = [
        i for i in state.incidents.values()
        if i.task == seen.task and _is_unready(i) and i.severity is not Severity.FATAL
        and i.signature == seen.signature and message_of(i.text) == message_of(seen.text)
    ]  # fmt: skip
    return max(known, key=lambda i: i.rank == seen.rank, default=None)
