"""The native core. Regenerated from the built module and compared by tests/typing."""

from typing import final

class UnicronError(Exception): ...
class Timeout(UnicronError, TimeoutError): ...
class ArenaRefused(UnicronError): ...

__version__: str
cuda: bool  # built with nvcc: has kernels; arenas and NCCL need none

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
    def advance(self, stage: int, iteration: int, micro_batch: int, declared_ms: int = 0) -> None:
        """The loop moved: writes the numbers, since_ns and progress + 1. declared_ms: the script's own bound for it."""

    def waited(self, kind: int, begin_ns: int) -> None:
        """A wait in a collective of this types.WaitKind is over; it began at begin_ns."""

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

    def intervals(self, after: int) -> tuple[int, list[tuple[int, int, float]]]:
        """(number written so far, (stage, iteration, ms) of those after the first `after` that are still kept)."""

    def iterations(self, after: int) -> tuple[int, list[tuple[int, int, int, int, list[int]]]]:
        """The same of commits: (iteration, committed_ns, and sums since the worker began: compute_ns without waiting,
        micro-batches, ns waited by kind)."""
    @property
    def last_words(self) -> str: ...  # of std::terminate, '' as long as it was not called
    @property
    def declared_ms(self) -> int: ...
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

def announce_fatal_signals() -> None:
    """From now on a signal that ends this process (SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT) is known to its agent
    before faulthandler, or the kernel's core file, is done with it."""

@final
class WorkerMonitor:
    """Inside a worker: native threads that hold the robust mutex, beat, read the agent's frames and end stuck
    collectives.

    When the agent's connection ends, the process ends at once (_exit 75): a worker must not outlive its keeper unseen.
    """

    def __init__(self, control_fd: int, pulse: PulsePage) -> None:
        """Takes the mutex and starts the threads. The descriptor (socket.detach()) belongs to the monitor from here on,
        unless this raises."""

    def register_group(self, group: int, sockets: list[tuple[int, int]], ranks: list[int], cross: bool) -> None:
        """Sockets of one process group. cross: it spans replicas and is shut at every new epoch; else it is shut when a
        touched rank is one of `ranks`. Sockets without a peer any more are left out; raises UnicronError for what is no
        connected socket and for a number in use. A plan that came before shut nothing of it: compare newest_epoch()."""

    def forget_group(self, group: int) -> None:
        """An unknown number is no error."""

    def shut_groups(self, touched: list[int]) -> int:
        """As if a plan had arrived (used by tests and the reset fault); number of sockets shut and communicators
        whose ending began."""

    def group_state(self, group: int) -> str:
        """whole; shut: by a plan or shut_groups(); broken: a socket ended by itself; forgotten: not registered."""

    def attach_nccl(self, table: NcclTable) -> None:
        """A plan's arrival and shut_groups() end this table's communicators, too, and no more an earlier table's."""

    def newest_epoch(self) -> int:
        """Newest epoch announced by the agent; 0 before any. A plain atomic read."""

    def next_frame(self, timeout_ms: int) -> bytes | None:
        """Next unread message from the agent, in order; None after timeout_ms. Releases the GIL."""

    def send(self, message: bytes, timeout_ms: int) -> None:
        """Frame and send to the agent. Thread-safe. Raises Timeout or UnicronError."""

    def close(self) -> None: ...

@final
class Heart:
    """A native thread that beats for this process (an agent) and listens to thousands of others over UDP."""

    def __init__(self, host: str, port: int, look_ms: int) -> None:
        """host: a numeric address; port 0: any. Raises UnicronError when it cannot be bound."""

    @property
    def port(self) -> int: ...
    def fileno(self) -> int:
        """An eventfd, readable when take_changes() has something."""

    def watch(self, node: int, incarnation: int, key: bytes, period_ms: int) -> None:
        """Watched from now on, as unheard. key: 16 bytes."""

    def forget(self, node: int) -> None: ...
    def take_changes(self) -> list[tuple[int, str, int]]:
        """(node, heard | vouched | silent, ms since it was heard here); the newest change of each node."""

    def beat_as(
        self, node: int, incarnation: int, key: bytes, period_ms: int, loop_ms_max: int, targets: list[tuple[str, int]]
    ) -> None:
        """Beat to these numeric addresses, as long as turned() was called within loop_ms_max."""

    def turned(self) -> None: ...
    def facts(self) -> dict[str, int]:
        """Counts since the beginning, and cpu_ns of its thread."""

    def close(self) -> None: ...

@final
class BeatReplay:
    """The table that Heart keeps (csrc/monitor/liveness.h), in simulated time."""

    def __init__(self, num_nodes: int, period_ms: int, look_ms: int) -> None: ...
    def replay(
        self, nodes: object, sequences: object, at_ms: object, seen: object, pauses: object, until_ms: float
    ) -> list[tuple[float, int, str, int]]:
        """Read beats (arrays of int32, at_ms float64) in this order; seen: pairs (node, ms since the sender heard it;
        negative: never) of each, equally many; pauses (float64): begin and end of times without a look. Looks until
        until_ms; (at, node, heard | vouched | silent, ms since it was heard here) of what changed."""

BEAT_COORDINATOR: int  # the node number of the coordinator's answers

def write_beat(node: int, incarnation: int, sequence: int, key: bytes, seen: list[tuple[int, int]]) -> bytes:
    """One beat's datagram. seen: (node, ms since it was heard), at most 16."""

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

def process_activity(pid: int) -> tuple[int, int] | None:
    """(ns that its threads ran, ns that its main thread was runnable and had no processor); None when unknown."""

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

def box_digest(
    data: object,
    first_byte: int,
    item_bytes: int,
    extent: list[int],
    strides: list[int],
    offset: list[int],
    shape: list[int],
) -> int:
    """64-bit digest of a box of a global tensor that lies in a contiguous buffer: the sum over its elements, modulo
    2^64, of a hash of (place in the tensor, bits). strides: in elements. Releases the GIL. Raises UnicronError when the
    box reaches out of the buffer or the tensor."""

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
    epoch: int  # in which the state here last went back, to a checkpoint or a copy
    iteration: int  # committed steps that are in the parameters; the iteration being worked on
    stage: int
    dealt_replicas: int  # bit i: replica i was live when this iteration began (dp <= 64), else see records
    reduction: int  # 2 x segments reduced; + 1 while a complete result is copied from the staging area
    torn: bool  # parameters are being written
    summed: bool  # the local sums are complete and tied
    open_step: int  # undoable step: 0 none; 2 + 2 x chunks written, + 1 while the next one is
    ungathered: bool  # other replicas' shards of the newest step are not in the parameters yet
    has_commit: bool  # the five below are the commit's result of `commit_iteration`
    commit_iteration: int
    commit_tokens: float
    commit_sumsq: float
    commit_found_inf: float
    repeat: int  # exact mode: how often this iteration was computed before, at scales that were too large
    commit_repeat: int
    commit_loss_sum: float
    def set_done(self, micro_batches: bytes) -> None:
        """Numbers of the micro-batches in the local sums, as a bitmap (at most 2048 bytes)."""

    def done(self) -> bytes: ...
    def set_extra(self, data: bytes) -> None:
        """Small python-side state that must survive (lr schedule, rng …), at most 1024 bytes, with a checksum."""

    def extra(self) -> bytes: ...
    def open_step_on_stream(self, value: int, device: int, stream: int) -> None:
        """The GPU writes open_step when the stream (cudaStream_t as an integer) gets here: what was begun on it before
        is in memory then. UnicronError where it cannot."""

# ------------------------------------------------------------------ GPUs

def num_cuda_devices() -> int:
    """CUDA devices this process can use; 0 without a driver and without a device. Loads the driver: not to be called
    in a process that is to be forked (this holds for everything below)."""

def cuda_driver_version() -> int:
    """13000 for CUDA 13.0; 0 without a driver."""

def why_no_cuda() -> str:
    """What is missing where there is no driver; '' where there is one."""

def cuda_device_name(device: int) -> str:
    """Raises UnicronError for a device that is not there."""

def cuda_device_facts(device: int) -> tuple[int, int, bool, int]:
    """(compute capability's major and minor, memory can be exported as descriptors, bytes of memory)."""

def load_kernels(device: int) -> None:
    """Loads all kernels now, so that the first use costs nothing. Nothing to do in a build without any."""

def set_stack_bytes(device: int, nbytes: int) -> int:
    """Of each GPU thread in this process's context, which reserves so much for all that can run at once. Returns what
    it was. Raises UnicronError where the driver refuses, for want of memory too."""

ARENA_MALLOC: str  # functions of this library, by name, for torch's CUDAPluggableAllocator
ARENA_FREE: str

@final
class GpuArena:
    """Memory of one GPU that outlives its process: slabs of 256 MiB or more, cut into pieces in order.

    The same script allocates the same pieces in the same order, so an heir's slab k is its predecessor's. Without own
    memory (an understudy) all slabs show one block of 64 MiB: what is written there is nonsense."""

    def __init__(self, device: int, capacity_bytes: int, own_memory: bool) -> None:
        """capacity_bytes: of addresses; 0: four times the GPU's memory."""
    @property
    def device(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...  # held now
    def allocate(self, nbytes: int) -> int:
        """Address. Raises UnicronError, also when the GPU's memory is used up."""

    def free(self, address: int) -> None: ...
    def pieces(self) -> list[tuple[int, int, int]]:
        """(number, offset from address, bytes) of what is not freed, in order."""

    def slabs(self) -> list[tuple[int, int, int]]:
        """The same of the slabs that hold pieces."""

    def export_all(self) -> list[int]:
        """A descriptor per slab, in order; they belong to the caller and keep the memory alive."""

    def adopt(self, fds: list[int], sizes: list[int]) -> None:
        """The memory under all slabs becomes what the descriptors (which stay the caller's) hold. Waits for this GPU.
        Their owner's context must be gone: its kernels may still write. Raises ArenaRefused, before anything changed,
        when number or sizes differ; after another error the arena is unusable."""

    def let_go(self) -> None:
        """What an understudy's slabs show is taken from under them: to be done while its predecessor ends, and nothing
        may be read or written until adopt() or take_own_memory()."""

    def take_own_memory(self) -> None:
        """An understudy's slabs get memory of their own; the content is undefined."""

    def open(self) -> None:
        """torch's pluggable allocator takes memory from here on this GPU, until another is opened or this closed."""

    def close(self) -> None: ...

def arena_allocator_error() -> str:
    """Why the allocator that torch calls last failed; '' if it never did."""

@final
class GpuMapping:
    """Another process's slab, mapped to be read on `device`; the memory may lie on a peer. Ends with this object."""

    def __init__(self, fd: int, nbytes: int, device: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

def digest(data: object, offset: int) -> int:
    """64-bit digest of a contiguous buffer at byte `offset` (a multiple of 16) of a whole. Digests of neighbours add up
    modulo 2^64. The same as gpu_digest(). Releases the GIL."""

def gpu_digest(device: int, pieces: list[tuple[int, int, int]], timeout_ms: int) -> int:
    """The digest() of pieces of a GPU's memory, summed; (address, nbytes, offset) each, address and offset multiples of
    16. Not ordered after anybody's stream: synchronise first. Raises Timeout. Releases the GIL."""

@final
class GpuCopier:
    """Copies into the memory of one GPU, from a peer or from itself, with a digest of what arrived."""

    def __init__(self, device: int) -> None: ...
    def enable_peer(self, peer: int) -> None:
        """Ordinary allocations of the peer can be reached (exported memory needs no such word)."""

    def copy(self, to: int, source: int, nbytes: int, mode: str, timeout_ms: int) -> tuple[int, float]:
        """(digest, ms on the GPU). mode: plain (copy engine, digest 0), overlapped (copy engine, and a kernel that
        digests what has arrived), fused (one kernel). Addresses are multiples of 16. Raises Timeout; the copier is of
        no use then. Releases the GIL."""

def exact_accumulate(sums: object, terms: object, bf16: bool, exponent: int, num_terms: int) -> int:
    """sums (int64) += terms (float32, or bf16 as uint16) times 2^exponent, each rounded to the nearest integer. Returns
    flags: 1 not finite, 2 above the limit of a sum of num_terms; such terms are left out."""

def exact_to_float(values: object, sums: object, exponent: int) -> None:
    """values (float32) = sums (int64) / 2^exponent, rounded to nearest."""

def exact_sum_squares(parts: object, values: object, exponent: int) -> int:
    """parts (4 uint64: a 128-bit sum in 32-bit parts) += values^2 times 2^exponent, each rounded. Flags as above."""

def exact_wide_value(parts: object, exponent: int) -> float:
    """The 128-bit sum divided by 2^exponent, rounded once."""

def gpu_exact_accumulate(
    device: int, sums: int, terms: int, count: int, bf16: bool, exponent: int, num_terms: int, flags: int, stream: int
) -> None:
    """exact_accumulate() with addresses, in the order of a stream; flags: one uint64 that findings are or'ed into."""

def gpu_exact_to_float(device: int, values: int, sums: int, count: int, exponent: int, stream: int) -> None:
    """exact_to_float() with addresses, in the order of a stream."""

def gpu_exact_sum_squares(
    device: int, parts: int, values: int, count: int, exponent: int, flags: int, stream: int
) -> None:
    """exact_sum_squares() with addresses, in the order of a stream."""

# ------------------------------------------------------------------ NCCL

def add_nccl_path(path: str) -> None:
    """Where to look when the process has not loaded NCCL itself (torch's is found once torch is imported)."""

def nccl_version() -> int:
    """22809 for 2.28.9; 0 without NCCL."""

def why_no_nccl() -> str:
    """What is missing where there is no NCCL, or an older one than 2.27; '' where there is."""

def nccl_missing() -> list[str]:
    """Functions that unicron uses where they are, and this version lacks."""

def close_nccl_group_calls() -> None:
    """Ends this thread's open ncclGroupStart, if it has one, after an operation in it failed: nothing is launched."""

def make_nccl_id() -> bytes:
    """128 bytes that all members of one communicator must have."""

@final
class NcclCommunicator:
    """A communicator of unicron's own. No call waits for other members without a bound."""

    def __init__(self, device: int, num_ranks: int, rank: int, unique_id: bytes) -> None: ...
    @property
    def handle(self) -> int: ...  # 0 until it is ready
    @property
    def num_ranks(self) -> int: ...
    @property
    def rank(self) -> int: ...
    def wait_ready(self, timeout_ms: int) -> None:
        """Raises Timeout or UnicronError."""

    def all_reduce_f32(self, address: int, count: int, stream: int) -> None: ...
    def all_reduce_i64(self, address: int, count: int, stream: int) -> None: ...
    def abort(self) -> None: ...
    def split(self, color: int, key: int) -> NcclCommunicator:
        """wait_ready() of the new one before anything else is done with this one; the same for the next three."""

    def shrink(self, excluded: list[int], abort: bool) -> NcclCommunicator:
        """Without these ranks; abort: end first what is under way on this one."""

    def make_grow_id(self) -> bytes: ...
    def grow(self, num_ranks: int, grow_id: bytes) -> NcclCommunicator:
        """Existing members; grow_id b'' but for the one that made it."""

def join_grown(device: int, num_ranks: int, rank: int, grow_id: bytes) -> NcclCommunicator:
    """A new member's side of grow()."""

@final
class NcclTable:
    """Communicators by group, watched and ended by native threads: all affected ones at once, without the GIL."""

    def __init__(self) -> None: ...
    def register_torch(self, group: int, handle: int, device: int, ranks: list[int], cross: bool) -> None:
        """One that torch owns (ProcessGroupNCCL._comm_ptr()): it is revoked, never freed here."""

    def register_own(self, group: int, communicator: NcclCommunicator, ranks: list[int], cross: bool) -> None:
        """It belongs to the table from here on, and is aborted."""

    def forget(self, group: int, timeout_ms: int) -> bool:
        """False when a thread is still in it; then it stays registered."""

    def state(self, group: int) -> str:
        """whole, error, ending, ended, stuck (ending for more than 10 s) or forgotten."""

    def error(self, group: int) -> str: ...
    def end(self, touched: list[int]) -> int:
        """Those that span replicas and those that hold a touched rank; number of endings begun. Returns at once."""

    def end_all(self) -> int: ...
    def wait_ended(self, timeout_ms: int) -> bool: ...
    def ending_ms(self) -> list[tuple[int, float]]: ...

def create_counter_page() -> int:
    """A memfd for 256 groups' counters; returns the descriptor."""

@final
class CollectiveCounters:
    """Collectives begun (by the host) and ended (written by the GPU) of each group, in a page the agent reads too."""

    def __init__(self, fd: int) -> None: ...
    def begin(self, slot: int) -> int:
        """One more is enqueued; its number, from 1 on."""

    def end_on_stream(self, slot: int, number: int, device: int, stream: int) -> None:
        """When the stream gets here, all up to `number` have ended."""

    def begun(self, slot: int) -> int: ...
    def ended(self, slot: int) -> int: ...
    def reset(self, slot: int) -> None: ...

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

    def __init__(self, pool: int, overrides: list[PlannerOverride], cost_flop: float, running_s: float) -> None: ...

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

def planner_running_s(prior_failures: float, prior_slot_s: float, failures: float, slot_s: float, pool: int) -> float:
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

# ------------------------------------------------------------------ statistics of progress

class PhaseTimes:
    """How long a loop usually stays at each stage, and from when on it stays too long."""

    def __init__(self, sure_factor: float, floor_ms: float) -> None:
        """floor_ms: nothing shorter is a stall. Raises UnicronError when sure_factor is not above 1."""

    def add(self, stage: int, ms: float) -> None:
        """An interval that ended."""

    def budget(self, stage: int) -> tuple[float, float, float] | None:
        """(usual, suspect, sure) in ms; None while too little is known."""

    def replay(self, stages: object, ms: object, stood_ms: object) -> list[tuple[int, int, float, float]]:
        """Add intervals (arrays of int32 and float64); (index, 1 suspect or 2 sure, usual ms, budget ms) of those that
        would have been told while they lasted, of which an agent watched stood_ms."""

class PaceTable:
    """Who is slow among the ranks of a task: csrc/monitor/pace.h says how it is decided."""

    def __init__(self, stages: list[int], links: list[tuple[int, list[int]]], slow_ratio: float) -> None:
        """stages[rank]: its pipeline stage; links: (types.WaitKind, members)."""

    def add(self, rank: int, iteration: int, compute_ms: float, waits_ms: list[float]) -> None:
        """compute_ms of one micro-batch without waiting; waits_ms of the iteration, by kind."""

    def forget(self, rank: int) -> None:
        """Another process holds the role."""

    def look(self) -> list[tuple[str, int, float, float, int]]:
        """(rank | stage | link | drift, its index, usual ms, present ms, iteration since which) of what is slow now."""

    def replay(
        self, num_ranks: int, first: int, compute_ms: object, waits_ms: object, look_every: int
    ) -> list[tuple[int, str, int]]:
        """Add whole iterations (float64 [iteration][rank] and [iteration][rank][kind]); (iteration, kind, index) of
        what came to be slow."""
