"""How fast state came over the network while a task healed, and whether that was slow. Pure.

A link that fell back to a tenth of its speed, or a healing that goes over the wrong interface, breaks nothing: the next
recovery only takes minutes. So every transfer is told in the incident, and one that was large enough to judge is
compared with what the interfaces are rated for, or with a floor where the kernel does not know that. What stays on one
machine says nothing of a network and is not judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from unicron.coordinator.config import CoordinatorConfig
from unicron.coordinator.incident import StateTransfer
from unicron.coordinator.state import NodeState
from unicron.types import Network, Transfer

MB = 1e6
MBIT_PER_MB = 8
KEPT_MAX = 64  # of one incident
NAME_CHARS_MAX = 64
MS_MIN = 0.001  # what a worker rounds to; below, a speed would be nonsense
LOOPBACK = "lo"


def judged_all(
    transfers: Iterable[Transfer], nodes: dict[str, NodeState], config: CoordinatorConfig
) -> tuple[StateTransfer, ...]:
    """Where there are too many to keep, the slow ones stay."""
    every = [judged(transfer, nodes, config) for transfer in transfers if _is_possible(transfer)]
    every.sort(key=lambda each: (not each.slow, each.rank))
    return tuple(every[:KEPT_MAX])


def judged(transfer: Transfer, nodes: dict[str, NodeState], config: CoordinatorConfig) -> StateTransfer:
    source, target = nodes.get(transfer.source), nodes.get(transfer.target)
    is_local = _is_local(transfer, source, target)
    rated_mbit = 0 if is_local else _rated_mbit(transfer.interface, source, target)
    told = StateTransfer(
        rank=transfer.rank,
        source=transfer.source[:NAME_CHARS_MAX],
        target=transfer.target[:NAME_CHARS_MAX],
        interface=transfer.interface[:NAME_CHARS_MAX],
        nbytes=transfer.nbytes,
        ms=transfer.ms,
        is_local=is_local,
        rated_mb_s=rated_mbit / MBIT_PER_MB,
    )
    return msgspec.structs.replace(told, slow=_why_slow(told, config))


def _why_slow(told: StateTransfer, config: CoordinatorConfig) -> str:
    if told.is_local or told.nbytes < config.transfer_bytes_min:
        return ""
    if told.rated_mb_s:
        share = told.rated_mb_s * config.transfer_share_min
        least = min(share, config.transfer_mb_s_enough)
        part = f"{config.transfer_share_min:.0%} of the rated" if least == share else "expected of a card with rated"
        why = f"{part} {told.rated_mb_s:.0f} MB/s"
    else:
        least, why = config.transfer_mb_s_min, "the floor where the rated speed is not known"
    return f"below {least:.0f} MB/s, {why}" if told.mb_s < least else ""


def words(told: StateTransfer) -> str:
    """'512.0 MB for rank 1, n0 to n1 over eth0, in 4200 ms: 121.9 MB/s'"""
    way = f"inside {told.target}" if told.source == told.target else f"{told.source} to {told.target}"
    over = f" over {told.interface}" if told.interface else ""
    where = " (one machine)" if told.is_local and told.source != told.target else ""
    slow = f", slow: {told.slow}" if told.slow else ""
    amount = f"{told.nbytes / MB:.1f} MB for rank {told.rank}"
    return f"{amount}, {way}{over}{where}, in {told.ms:.0f} ms: {told.mb_s:.1f} MB/s{slow}"


def slow_words(transfers: Iterable[StateTransfer]) -> str:
    """'' when none was."""
    return "; ".join(f"state came slowly: {words(each)}" for each in transfers if each.slow)


def _is_possible(transfer: Transfer) -> bool:
    return transfer.nbytes > 0 and math.isfinite(transfer.ms) and transfer.ms >= MS_MIN


def _is_local(transfer: Transfer, source: NodeState | None, target: NodeState | None) -> bool:
    """One node, or two agents whose monotonic clock is the same machine's, or loopback by its name."""
    if transfer.source == transfer.target or transfer.interface == LOOPBACK:
        return True
    return source is not None and target is not None and bool(source.clock) and source.clock == target.clock


def _rated_mbit(interface: str, source: NodeState | None, target: NodeState | None) -> int:
    """Of the slower end. Where the groups take another interface than the node's agent chose nothing is known."""
    ends = [node.state_network for node in (source, target) if node is not None]
    known: list[Network] = [end for end in ends if end is not None]
    if interface not in {end.interface for end in known}:
        return 0
    return min((end.rated_mbit for end in known if end.rated_mbit > 0), default=0)
