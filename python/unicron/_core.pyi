"""The native core. Regenerated from the built module and compared by tests/typing."""

from typing import final

class UnicronError(Exception): ...
class Timeout(UnicronError, TimeoutError): ...
class ArenaRefused(UnicronError): ...

__version__: str
cuda: bool  # built with CUDA sources

# ------------------------------------------------------------------ monitor

PULSE_PAGE_BYTES: int  # 4096

def create_pulse_pages(num_slots: int) -> int:
    """A memfd of num_slots pulse pages with initialised robust mutexes; returns the descriptor (caller owns it)."""

@final
class PulsePage:
    """One worker's page of shared facts: written by its loop in nanoseconds, read by its agent."""

    def __init__(self, fd: int, slot: int) -> None: ...
    def reset(self) -> None:
        """Agent: prepare the page for a new worker (mutex re-initialised, fields zeroed). unwatch() it
        first. Raises UnicronError while a living process holds the mutex."""

    # worker side
    def advance(self, stage: int, iteration: int, micro_batch: int) -> None:
        """The loop moved: writes the three numbers, since_ns and progress + 1."""

    def set_waiting(self, waiting: bool) -> None:
        """The loop's thread is inside a collective (waiting for others)."""

    def committed(self, iteration: int, loss: float) -> None: ...
    def take_fault(self, point: int, iteration: int, micro_batch: int) -> int:
        """Kind of the armed fault if it is armed for exactly here (and disarm it, write fault_ns), else 0."""

    # agent side
    def arm_fault(self, kind: int, point: int, iteration: int, micro_batch: int) -> None:
        """iteration or micro_batch -1: any; point 0: any."""

    def mark_fault(self) -> None:
        """fault_ns := now (a fault done from outside)."""
    @property
    def stage(self) -> int: ...
    @property
    def iteration(self) -> int: ...
    @property
    def micro_batch(self) -> int: ...
    @property
    def since_ns(self) -> int: ...
    @property
    def progress(self) -> int: ...
    @property
    def waiting(self) -> bool: ...
    @property
    def committed_iteration(self) -> int: ...  # -1 before the first
    @property
    def committed_ns(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def beat_ns(self) -> int: ...  # native thread, 4 Hz: the process is alive and scheduled
    @property
    def fault_ns(self) -> int: ...
    @property
    def owner_pid(self) -> int: ...  # 0 until the holder thread has the mutex

@final
class WorkerMonitor:
    """Inside a worker: native threads that hold the robust mutex, beat, read the agent's frames and end stuck
    collectives.

    When the agent's connection ends, the process ends at once (_exit 75): a worker must not outlive its keeper unseen.
    """

    def __init__(self, control_fd: int, pulse: PulsePage) -> None:
        """Takes the mutex and starts the threads. The descriptor (socket.detach()) belongs to the monitor from here on,
        unless this raises."""

    def register_group(self, group: int, fds: list[int], ranks: list[int], cross: bool) -> None:
        """Sockets of one process group. cross: it spans replicas and is shut at every new epoch; else it is shut when a
        touched rank is one of `ranks`. Sockets without a peer any more are left out; raises UnicronError for what is no
        connected socket and for a number in use. A plan that came before shut nothing of it: compare newest_epoch()."""

    def forget_group(self, group: int) -> None:
        """An unknown number is no error."""

    def shut_groups(self, touched: list[int]) -> int:
        """As if a plan had arrived (used by tests and the reset fault); number of sockets shut."""

    def group_state(self, group: int) -> str:
        """whole; shut: by a plan or shut_groups(); broken: a socket ended by itself; forgotten: not registered."""

    def newest_epoch(self) -> int:
        """Newest epoch announced by the agent; 0 before any. A plain atomic read."""

    def next_frame(self, timeout_ms: int) -> bytes | None:
        """Next unread message from the agent, in order; None after timeout_ms. Releases the GIL."""

    def send(self, message: bytes, timeout_ms: int) -> None:
        """Frame and send to the agent. Thread-safe. Raises Timeout or UnicronError."""

    def close(self) -> None: ...

@final
class Supervisor:
    """In the agent: one native thread waits on the robust mutexes of up to 127 workers (futex_waitv; Linux < 5.16: one
    thread each). A clean exit is a death too."""

    def __init__(self) -> None: ...
    def fileno(self) -> int:
        """An eventfd, readable when take_deaths() has something."""

    def watch(self, pulse: PulsePage, slot: int) -> None:
        """Until its death, which ends the watch, or unwatch(). The worker need not exist yet. A page whose last owner
        died is reported at once: reset() it for a new one."""

    def unwatch(self, slot: int) -> None:
        """Also drops a death that was not taken yet. A slot that is not watched is no error."""

    def take_deaths(self) -> list[tuple[int, int]]:
        """(slot, monotonic ns when the kernel woke us)."""

    def close(self) -> None: ...

def owner_gone(pid: int) -> bool:
    """Every thread has PF_EXITING, or the process is gone: nothing of it can write to shared memory any more."""

def wait_owner_gone(pid: int, timeout_ms: int) -> bool:
    """owner_gone() within timeout_ms. Releases the GIL."""

def process_state(pid: int) -> str:
    """State letter of /proc/PID/stat ('T' stopped, 't' traced, 'Z', ...), '' when gone."""

def connected_sockets() -> list[tuple[int, int]]:
    """(descriptor, inode) of this process's connected, not listening, stream sockets (AF_INET/AF_INET6).

    Compare pairs: a descriptor's number alone is handed out again as soon as it is closed."""

def monotonic_ns() -> int: ...

# ------------------------------------------------------------------ state

ARENA_HEADER_BYTES: int  # 4096; the content starts after it

def create_arena(nbytes: int) -> int:
    """A memfd of header + nbytes, rounded up to pages; returns the descriptor."""

def map_fixed(address: int, fd: int, nbytes: int) -> None:
    """mmap(MAP_SHARED | MAP_FIXED) of the first nbytes of fd over the page-aligned region at address.
    Raises ArenaRefused when fd is smaller, address is not aligned or the region is not one mapping of this process."""

def checksum(data: object) -> int:
    """64-bit digest of a contiguous buffer (for transfers and adoption after a memory fault). Releases the GIL."""

def num_cuda_devices() -> int:
    """CUDA devices this process can use; 0 in a build without CUDA sources, without a driver and without a device.
    Loads the driver: not to be called in a process that is to be forked."""

@final
class ArenaHeader:
    """The header page of an arena (worker and agent map the same page): may the content be used, and how far is it?

    Every field is one aligned word; `stage` is written last when going forward.
    """

    def __init__(self, fd: int) -> None: ...
    def format(self, layout_digest: str, nbytes: int) -> None:
        """Write magic, version, digest and size; everything else zero."""

    def check(self, layout_digest: str, nbytes: int) -> str:
        """'' when this arena can be adopted, else why not (magic, version, other layout, other size)."""
    @property
    def version(self) -> int: ...
    @property
    def layout_digest(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    epoch: int
    iteration: int  # committed steps that are in the parameters; the iteration being worked on
    stage: int
    dealt_replicas: int  # bit i: replica i was live when this iteration began (dp <= 64), else see records
    reduction: int  # 2 x segments reduced; + 1 while a complete result is copied from the staging area
    torn: bool  # parameters are being written
    summed: bool  # the local sums are complete and tied
    open_step: int  # sharded optimizer: 0 none; 2 + 2 x chunks written, + 1 while the next one is
    ungathered: bool  # other replicas' shards of the newest step are not in the parameters yet
    has_commit: bool  # the five below are the commit's result of `commit_iteration`
    commit_iteration: int
    commit_tokens: float
    commit_sumsq: float
    commit_found_inf: float
    commit_loss_sum: float
    def set_done(self, micro_batches: bytes) -> None:
        """Numbers of the micro-batches in the local sums, as a bitmap (at most 2048 bytes)."""

    def done(self) -> bytes: ...
    def set_extra(self, data: bytes) -> None:
        """Small python-side state that must survive (lr schedule, rng …), at most 1024 bytes, with a checksum."""

    def extra(self) -> bytes: ...

# ------------------------------------------------------------------ planner

@final
class PlannerTask:
    """One task of a problem: what it holds, and what each reachable number of slots earns and takes to get to.

    The three buffers have one dimension and the same length: counts int32 ascending (0: not running), flops float64
    F(t, x') in FLOP/s, transition_s float64 D_transition(x -> x') in seconds of a healthy task. TypeError for another
    type of buffer."""

    def __init__(
        self, current: int, current_flops: float, counts: object, flops: object, transition_s: object
    ) -> None: ...

@final
class PlannerOverride:
    """What an event changes of one task: None: it is gone. Else seconds of a faulted task, one per count (float64),
    counted where its number of slots stays the same too; infinity: that number cannot be reached this way."""

    def __init__(self, task: int, transition_s: object) -> None: ...

@final
class PlannerAlternative:
    """One way to answer an event: slots to give out, changed tasks (ascending), what is spent in FLOP, and the
    seconds over which rewards are counted (below 0: D_running(pool)), the same for all alternatives of an event."""

    def __init__(
        self, pool: int, overrides: list[PlannerOverride], cost_flop: float, running_s: float
    ) -> None: ...

@final
class PlannerPlan:
    """The best allocation of an event's best alternative."""

    @property
    def alternative(self) -> int: ...
    @property
    def allocation(self) -> list[int]: ...  # slots per task
    @property
    def reward_flop(self) -> float: ...
    @property
    def moves(self) -> int: ...  # slots that change hands

@final
class PlannerTable:
    """Plans made before they are needed: one per event, looked up by its number."""

    @property
    def num_events(self) -> int: ...
    def lookup(self, event: int) -> PlannerPlan:
        """O(1). Raises UnicronError outside [0, num_events)."""

    def lookup_ns(self, num_lookups: int) -> list[int]:
        """Nanoseconds of so many look-ups inside the core, the clock's own included; for measurements."""

@final
class PlannerProblem:
    """Tasks that share a cluster (Unicron, plan generation): running_s[n'] is D_running in seconds (float64) for pools
    0 ... size - 1, transition_s_max bounds every finite transition. Raises UnicronError for lengths that differ, counts
    that do not ascend, and numbers that are negative or not finite."""

    def __init__(self, tasks: list[PlannerTask], running_s: object, transition_s_max: float) -> None: ...
    def solve(self, alternatives: list[PlannerAlternative]) -> PlannerPlan:
        """The best of them, each by the exact dynamic program; among equal rewards the fewest moves. Raises
        UnicronError when none has a plan. Releases the GIL."""

    def table(self, events: list[list[PlannerAlternative]]) -> PlannerTable:
        """solve() of every event, sharing sums between them. Releases the GIL."""

def planner_running_s(
    prior_failures: float, prior_slot_s: float, failures: float, slot_s: float, pool: int
) -> float:
    """D_running of `pool` slots in seconds: failures per slot-second with a Gamma prior, its mean inverted."""

def planner_instructions() -> str:
    """Vector instructions that the dynamic program uses on this machine: avx512f, avx2 or generic."""

def planner_place(
    nodes: list[tuple[int, int, int]], tasks: list[tuple[int, int, list[int]]]
) -> tuple[list[list[int]], list[int], int]:
    """Counts to nodes with few moves. nodes: (healthy slots, failure domain, remembered faults); tasks: (slots, slots
    of a group that must share a node, slots on each node now). Returns slots [task][node], slots per task that no node
    has room for, and the number of moved slots. Raises UnicronError for negative numbers, counts that are no multiple
    of their group, and wrong lengths. Releases the GIL."""
