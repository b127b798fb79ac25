"""What a simulated history is made of: drawn from its seed (run.py, swarm.py), or given."""

from __future__ import annotations

from dataclasses import dataclass, field

from unicron.coordinator.job import Job
from unicron.types import Budgets, Layout

TASK = "task"
# Of new workers, and in a new layout: a hang there must end before progress is demanded, and twice this is sure.
FIRST_ITERATION_MS = 10_000.0
EVALUATION_MS = 15_000.0  # what a script does behind its loop is shorter (worker_training.py)


@dataclass
class TaskOptions:
    """One task of a swarm. at_ms: when it is submitted."""

    name: str = TASK
    layout: Layout = field(default_factory=Layout)
    iterations: int = 1_000_000
    checkpoint_every: int = 0
    replicas_min: int = 0
    standbys: int = 0
    weight: float = 1.0
    priority: int = 0
    speed: float = 1.0  # exponent of its T(t, x): below 1 the more slots, the less each earns
    has_directory: bool = True  # for checkpoints
    at_ms: float = 20.0
    overflows: float = 0.0  # share of tries of an iteration whose sums fit no scale: it is computed again by all

    def job(self, stopped_grace_ms: int) -> Job:
        layout = self.layout
        size = layout.replica_size
        return Job(
            name=self.name,
            command=("train.py",),
            layout=layout,
            stopped_grace_ms=stopped_grace_ms,
            checkpoint_dir="ckpt" if self.has_directory else "",
            checkpoint_every=self.checkpoint_every,
            restart_max=1_000,
            weight=self.weight,
            priority=self.priority,
            replicas_min=self.replicas_min,
            standbys=self.standbys,
            throughput={
                r * size: 1e12 * (r * size) ** self.speed
                for r in range(self.replicas_min or 1, layout.num_replicas + 1)
            },
            measured=False,
            budgets=Budgets(first_iteration_ms=FIRST_ITERATION_MS, evaluation_ms=EVALUATION_MS),
        )


@dataclass
class Options:
    """Drawn from the seed (run.py), or given."""

    seed: int
    tasks: tuple[TaskOptions, ...] = (TaskOptions(),)
    coordinators: int = 1  # several: they wait for each other, with their journal in etcd
    num_nodes: int = 1
    slots: int = 1
    num_wishes: int = 0  # what people ask for meanwhile: drain, suspend, resume, cancel
    only_drains: bool = False  # of them, only drain and undrain
    stopped_grace_ms: int = 0
    delay_ms: tuple[float, float] = (0.1, 1.0)
    twice: float = 0.0  # a message of an agent arrives twice
    num_faults: int = 3
    faults_ms: float = 4_000.0  # length of the phase in which faults happen
    crash_rate: float = 0.0
    plant: str = ""
    weights: dict[str, float] = field(default_factory=dict)  # of kinds of faults; {}: faults.py's own
    killed_in: tuple[str, ...] = ()  # actions in which workers are killed; (): any
    drift: float = 0.0  # clocks run by up to this share fast or slow
    keep_log: bool = False

    def of(self, task: str) -> TaskOptions:
        return next(t for t in self.tasks if t.name == task)

    @property
    def layout(self) -> Layout:
        """Of the first task."""
        return self.tasks[0].layout
