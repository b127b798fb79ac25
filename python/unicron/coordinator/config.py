"""Bounds of the coordinator's waits and queues: every wait has one, in milliseconds, none is forever.

Defaults are for one machine or one data centre; a test or the simulator passes its own.
"""

from __future__ import annotations

import math

import msgspec

MAY_BE_ZERO = ("_delay_ms", "transfer_")  # at once; never slow


class CoordinatorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    clock: str = ""  # whose monotonic clock the times are of
    gpu: str = ""  # type of the cluster's slots; "": no GPUs
    # nodes
    reconnect_grace_ms: float = 250.0  # between two probes of a node whose connection ended
    silence_ms: float = 2_000.0  # no heartbeat: suspicion, probe
    cut_off_delay_ms: float = 0.0  # a node that nobody hears is not lost before on the word of those who wait for it
    silence_ms_max: float = 15_000.0  # suspicion that long, and a second signal: lost
    # after our own restart: until an agent must have said hello again
    return_ms_max: float = 10_000.0
    # fitness
    check_delay_ms: float = 2_000.0  # from an incident on a node to its checks: the healing comes first
    check_ms_max: float = 300_000.0  # of all checks; then they are asked for again
    flaps_max: int = 5  # losses of a node; from then on it rests before it is used again
    rest_ms_min: float = 30_000.0  # doubled at every further loss
    rest_ms_max: float = 3_600_000.0
    calm_ms: float = 1_800_000.0  # up for so long: its losses are forgotten
    # symptoms
    # a failed collective without a death: how long a death may still arrive
    diagnose_ms: float = 30.0
    exception_exit_ms: float = 100.0  # from ExceptionRaised to the process's own end
    # until an ended worker must be reported lost; then the order is repeated
    end_ms: float = 2_000.0
    end_tries_max: int = 3
    reconnect_tries_max: int = 2  # RECONNECT in one iteration, before a worker is replaced
    # RECONNECT after a healing that nobody reported, before all start again
    heal_tries_max: int = 2
    last_heirs_max: int = 3  # plans for who is lost when others have finished
    # waits of a task
    join_ms_max: float = 300_000.0  # first start: imports and unicron.join() of every member
    ready_ms_max: float = 60_000.0  # a worker started for a lost role
    joiner_ms_max: float = 300_000.0  # a replica that comes back
    join_tries_max: int = 3  # per missing replica
    heal_ms_max: float = 60_000.0  # from a plan to the last member's account
    # a new understudy's imports must not slow the healing down
    understudy_delay_ms: float = 2_000.0
    finish_ms_max: float = 30_000.0  # from the last Finished, or a stop, to the last exit
    leave_ms_max: float = 120_000.0  # from the order to save to the complete checkpoint
    move_ms_max: float = 120_000.0  # from the announcement of a move until every joiner has its state
    layout_ms_max: float = 400_000.0  # from the request for another layout until everybody has it
    tables_delay_ms: float = 100.0  # after a decision, before the next one's plans are made
    # state that comes over a network while a task heals: when that is told as slow
    transfer_bytes_min: int = 16 << 20  # below, nothing is judged
    transfer_share_min: float = 0.25  # of the rated speed of its interface
    transfer_mb_s_enough: float = 500.0  # what is faster is not slow: one connection does not fill a large card
    transfer_mb_s_min: float = 50.0  # where the rated speed is not known
    # queues
    plans_kept_max: int = 64  # per task: what explains a late report
    incidents_kept_max: int = 1_000
    tasks_max: int = 256
    nodes_max: int = 16_384
    # unmanaged scripts
    master_port_first: int = 29_500
    master_port_count: int = 2_000

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if isinstance(value, str):
                continue
            may_be_zero = any(part in name for part in MAY_BE_ZERO)
            if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
                raise ValueError(f"{name} is {value}: give a number {'of 0 or more' if may_be_zero else 'above 0'}")
