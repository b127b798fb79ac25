"""Planted mistakes: what the checkers and the liveness phase must find. Each was a real one, or would have been.

Without a plant every function here gives back what it was given. PLANTS says of each what finds it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from unicron.agent.config import AgentConfig
from unicron.coordinator import actions as ask
from unicron.coordinator.config import CoordinatorConfig
from unicron.coordinator.journal import Entry, EpochDecided
from unicron.coordinator.state import State
from unicron.healing.machine import HealingMachine
from unicron.healing.record import Record
from unicron.messages import PublishEpoch
from unicron.sim.memory import NUM_SEGMENTS
from unicron.sim.plants_healing import HEALING_PLANTS
from unicron.types import Layout, PlanKind, Rank

# plant -> (what is wrong, words of the violation that finds it)
PLANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "keep-healthy-cross-group": (
        "MECHANICS 1.1: a group between replicas that lost nobody is kept (worker.py, worker_healing.py)",
        ("nobody advanced", "no progress"),
    ),
    "tie-after-reduce": (
        "MECHANICS 1.2: a collective inside the replica after those between replicas",
        ("nobody advanced", "no progress"),
    ),
    "no-confirm": (
        "one rank of a whole replica steps, another, whose commit was interrupted, goes to the meeting",
        ("nobody advanced", "no progress", "members wait in"),
    ),
    "eager-without-heirs": (
        "an heir does not reduce under the backward, and the others of its position do",
        ("reduces eagerly",),
    ),
    "late-at-hold": (
        "parameters are still under way when everybody saves, or hands roles over",
        ("without the others' shards",),
    ),
    "late-unawares": (
        "who has heard of a plan gathers its parameters at once, and the others late",
        ("gathers late", "members wait in"),
    ),
    "keep-sums": (
        "who computes an iteration again adds to what it had (worker_training.py)",
        ("with micro-batches",),
    ),
    "use-torn-state": ("an heir takes a state whose step was not finished for whole", ("state is torn",)),
    "kill-the-slow": ("an agent calls a loop stalled after 20 ms", ("killed without evidence",)),
    "forget-epoch": ("plans that replace a worker are not journaled", ("was sent before",)),
    "send-first": ("what a step decided is sent before it is journaled", ("was sent before",)),
    "no-sync": ("now and then nothing is synced", ("was sent before", "was journaled, replay knows", "replay differs")),
    "read-torn": (
        "what a crash left of a transaction is read without a look at its checksums (disk.py)",
        ("cannot be read", "replay knows", "replay differs", "coordinator: "),
    ),
    "no-lease": (
        "a leader goes on whether its lease ran out or not, and its agents stay with it (leading.py)",
        ("sends after", "journals in term", "no progress"),
    ),
    "no-fence": (
        "the journal in etcd takes what anybody writes who led once (leading.py)",
        ("journals in term", "begins term", "replay differs", "replay knows"),
    ),
    "old-line": (
        "an older life of a node that says hello gets the node's line (coordinator_host.py)",
        ("no progress", "nobody advanced"),
    ),
    "drop-newest": ("a restart does not read the newest entry", ("was journaled, replay knows", "replay differs")),
    "deaf-reconnect": ("an agent that reconnects is not told the epoch it missed", ("nobody advanced", "no progress")),
    "wrong-row": ("the table of plans is read one row off", ("solved again",)),
    "keep-all": ("what only explains the past is never dropped", ("are kept",)),
    "save-without-parts": ("the last word of a leaving task does not wait for all parts", ("without the parts",)),
}


def machine_for(plant: str, rank: Rank, layout: Layout) -> HealingMachine:
    return HEALING_PLANTS.get(plant, HealingMachine)(rank, layout, NUM_SEGMENTS)


def record_of(plant: str, record: Record) -> Record:
    return msgspec.structs.replace(record, has_state=True) if plant == "use-torn-state" else record


def agent_config(plant: str, config: AgentConfig) -> AgentConfig:
    return msgspec.structs.replace(config, stall_ms_min=20.0) if plant == "kill-the-slow" else config


def coordinator_config(plant: str, config: CoordinatorConfig) -> CoordinatorConfig:
    return msgspec.structs.replace(config, plans_kept_max=1 << 30) if plant == "keep-all" else config


def ordered(plant: str, actions: Sequence[ask.Action]) -> tuple[Sequence[ask.Action], Sequence[ask.Action]]:
    """Those carried out before anything is journaled, and those after it."""
    if plant != "send-first":
        return (), actions
    sent = [action for action in actions if isinstance(action, ask.SendAgent)]
    return sent, [action for action in actions if not isinstance(action, ask.SendAgent)]


def is_unsynced(plant: str, rng: random.Random) -> bool:
    return plant == "no-sync" and rng.random() < 0.3


def forgets(plant: str, entry: Entry) -> bool:
    return plant == "forget-epoch" and isinstance(entry, EpochDecided) and entry.plan.kind is PlanKind.REPLACE


def read_back(plant: str, entries: list[bytes]) -> list[bytes]:
    return entries[:-1] if plant == "drop-newest" else entries


def is_lost(plant: str, action: ask.SendAgent) -> bool:
    missed = isinstance(action.message, PublishEpoch) and "missed epoch" in action.reason
    return plant == "deaf-reconnect" and missed


def tamper(plant: str, state: State) -> None:
    planner = state.planner
    if plant == "wrong-row" and planner is not None and not hasattr(planner, "is_planted"):
        events, rows = list(planner._index), list(planner._index.values())
        planner._index = dict(zip(events, rows[1:] + rows[:1], strict=True))
        planner.is_planted = True  # type: ignore[attr-defined]
