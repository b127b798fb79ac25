"""Every number that a policy's model assumes: its value, how far it may be off, and where it comes from.

Provenance: published (the system's own paper or documents), secondary (others say the paper says so), derived (by
arithmetic from such), remembered (not corroborated), guess, configured (a bound of this project's own defaults). A
scenario overrides them by name under `assume`; the report plays every one of them at both ends of its range.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Literal, NamedTuple

Provenance = Literal["published", "secondary", "derived", "remembered", "guess", "configured"]


class Parameter(NamedTuple):
    name: str  # policy.what_unit
    value: float
    low: float
    high: float
    provenance: Provenance
    source: str

    @property
    def policy(self) -> str:
        return self.name.partition(".")[0]


UNICRON = "Unicron, arXiv 2401.00134"
TRAINMOVER = "TrainMover, arXiv 2412.12636"
BYTEROBUST = "ByteRobust, SOSP 2025"
IMPLIED = "implied by Unicron's accumulated-WAF ratios on trace-a; 1: no independent measurement, so in its favour"

_ROWS: tuple[Parameter, ...] = (
    # ------------------------------------------------------------ everybody
    Parameter("common.detect_node_s", 5.6, 1.0, 30.0, "remembered", f"{UNICRON}, detection table, node killed"),
    Parameter("common.detect_process_s", 1.8, 0.3, 10.0, "remembered", f"{UNICRON}, detection table, process killed"),
    Parameter("common.detect_link_s", 0.3, 0.1, 10.0, "remembered", f"{UNICRON}, detection table, exception thrown"),
    Parameter("common.detect_hang_iterations", 3.0, 1.5, 10.0, "secondary", f"{UNICRON}: 3 x D_iter"),
    Parameter("common.infrastructure_s", 120.0, 0.0, 240.0, "published",
              f"{TRAINMOVER}: stop, clean up and reschedule, 0.52 + 1.50 min at 8,192 GPUs"),
    Parameter("common.framework_scale", 1.0, 0.5, 1.5, "published",
              f"{TRAINMOVER}: Megatron's restart takes 80/190/230/260/300 s at 32/128/256/512/1024 GPUs"),
    Parameter("common.checkpoint_interval_s", 1800.0, 300.0, 3600.0, "remembered",
              f"{UNICRON}: checkpoint baselines save every 30 min"),
    Parameter("common.checkpoint_stall_s", 6.8, 0.5, 13.0, "published", f"{BYTEROBUST}: 6.8-13 s a save"),
    # ------------------------------------------------------------ unicron
    Parameter("unicron.detect_node_s", 15.0, 0.5, 30.0, "configured",
              "silence_ms_max of the coordinator: a node without power says nothing; 0.25 s where it refuses"),
    Parameter("unicron.group_per_rank_s", 0.0024, 0.0, 0.0068, "derived",
              "MegaScale, NSDI 2024: groups of 2,048 GPUs in under 5 s; high: TrainMover's 7 s at 1,024"),
    Parameter("unicron.adopt_scale", 1.0, 0.5, 4.0, "derived", "the measured part, were it that much faster or slower"),
    Parameter("unicron.start_s", 120.0, 60.0, 300.0, "configured", "planner's default for a start from no slots"),
    Parameter("unicron_published.transition_s", 30.0, 10.0, 120.0, "guess", f"{UNICRON}: D_transition is not stated"),
    Parameter("unicron_published.restart_s", 30.0, 10.0, 120.0, "guess", f"{UNICRON}: process restart is not stated"),
    Parameter("unicron_published.retry_s", 5.0, 1.0, 30.0, "guess", f"{UNICRON}: a retry in place takes a few seconds"),
    # ------------------------------------------------------------ peers
    Parameter("trainmover.no_standby_s", 50.0, 20.0, 125.0, "derived", f"{TRAINMOVER}: implied by its projection"),
    Parameter("trainmover.scale", 1.0, 0.5, 2.0, "published",
              f"{TRAINMOVER}: 11.5-16.6 s expected, 19.6-21.1 s unexpected with a standby, 32-1,024 GPUs"),
    Parameter("megatron.detect_node_s", 5.7, 5.7, 1800.0, "remembered", f"{UNICRON}, detection table, baseline"),
    Parameter("megatron.detect_other_s", 600.0, 5.7, 1800.0, "published",
              f"{BYTEROBUST}: about 10 min; 30 min in {UNICRON}; low: the launcher sees a process that exits"),
    Parameter("varuna.detect_s", 30.0, 5.0, 600.0, "guess", "heartbeats of its manager"),
    Parameter("varuna.steady", 1.0, 0.25, 1.0, "derived", IMPLIED),
    Parameter("bamboo.detect_s", 5.0, 1.0, 30.0, "guess", "a broken connection between neighbours"),
    Parameter("bamboo.takeover_s", 10.0, 1.0, 60.0, "guess", "the predecessor takes its successor's layers over"),
    Parameter("bamboo.join_s", 60.0, 21.0, 200.0, "guess", "between Parcae's -1 and +1 as TrainMover measured them"),
    Parameter("bamboo.steady", 1.0, 0.33, 1.0, "derived", IMPLIED),
    Parameter("oobleck.detect_s", 5.0, 1.0, 30.0, "guess", "a few seconds"),
    Parameter("oobleck.leave_s", 57.0, 20.0, 120.0, "published", f"{TRAINMOVER}: -1 at 32 GPUs"),
    Parameter("oobleck.join_s", 100.0, 50.0, 200.0, "published", f"{TRAINMOVER}: +1 takes over 100 s at 32 GPUs"),
    Parameter("oobleck.steady", 1.0, 0.25, 1.0, "derived", IMPLIED),
    Parameter("torchft.stall_s", 10.0, 2.0, 180.0, "guess",
              "quorum and all-reduce time-out of the survivors; high: FT-HSDP's 3 min at 100K GPUs, arXiv 2602.00277"),
    Parameter("torchft.steady", 1.0, 0.95, 1.0, "guess", "a small overhead, not stated"),
    Parameter("nvrx.detect_s", 5.0, 1.0, 60.0, "guess", "exceptions at once; a hang by its soft time-out"),
    Parameter("nvrx.detect_hang_s", 60.0, 30.0, 90.0, "remembered", "NVRx defaults: soft 60 s, hard 90 s"),
    Parameter("nvrx.restart_s", 30.0, 10.0, 60.0, "guess", "abort, finalize, health check, barriers: tens of seconds"),
    Parameter("nvrx.checkpoint_interval_s", 300.0, 60.0, 1800.0, "guess", "local checkpoints with copies on peers"),
    Parameter("byterobust.detect_node_s", 30.0, 10.0, 60.0, "published", f"{BYTEROBUST}: GPU 10, NIC 30, switch 60 s"),
    Parameter("byterobust.detect_process_s", 2.0, 2.0, 10.0, "published", f"{BYTEROBUST}: kernel events 2 s"),
    Parameter("byterobust.detect_hang_s", 60.0, 50.0, 650.0, "published", f"{BYTEROBUST}: 5 rounds x 10 s of stacks"),
    Parameter("byterobust.wake_s", 50.0, 46.0, 110.0, "published", f"{BYTEROBUST}: hot update 46-65 s"),
    Parameter("byterobust.steady", 0.991, 0.991, 0.9929, "published", f"{BYTEROBUST}: 0.71-0.9 % of every step"),
)  # fmt: skip

PARAMETERS: dict[str, Parameter] = {row.name: row for row in _ROWS}


class ParameterProblem(ValueError):
    """A name or a value that no model knows; one line."""


class Values(dict[str, float]):
    """Values by name, and which of them a model has asked for."""

    def __init__(self, values: Mapping[str, float]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> float:
        self.read.add(name)
        return super().__getitem__(name)


def values_of(assume: Mapping[str, float]) -> Values:
    """All values by name, with those that a scenario states in place of ours. Raises ParameterProblem."""
    for name, value in assume.items():
        if name not in PARAMETERS:
            close = difflib.get_close_matches(name, PARAMETERS, n=1)
            raise ParameterProblem(f"assume: no parameter {name!r}" + (f"; did you mean {close[0]}?" if close else ""))
        if not 0 <= value < float("inf"):
            raise ParameterProblem(f"assume: {name} is {value}; give a number of 0 or more")
    return Values({name: assume.get(name, row.value) for name, row in PARAMETERS.items()})
