"""How a failure spreads from one rank to the others, and who of them is named: whichever rank it is, of however many,
in whatever order their texts come. The texts are written for this, in the words of torch, NCCL, gloo, the kernel,
Slurm, Ray, Kubernetes and JAX.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from unicron.diagnosis import diagnose_ranks, diagnose_text

pytestmark = pytest.mark.timeout(30)

Texts = dict[str, str]
PREFIX = "[rank{0}]:[E214 03:10:00.5 ProcessGroupNCCL.cpp:1900] [PG ID 0 PG GUID 0(default_pg) Rank {0}] "
CLOSED = "RuntimeError: [/src/gloo/transport/tcp/pair.cc:700] Connection closed by peer [10.9.9.9]:4711"
REMOTE = (
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:9, remote process exited or there was a network "
    "error, NCCL version 2.27.3\nncclRemoteError: A call failed possibly due to a network error or a remote process "
    "exiting prematurely."
)
STORE = "[W214 TCPStore.cpp:9] [c10d] recvValue failed on SocketImpl(fd=9, addr=[n2]:1, remote=[n1]:2): Broken pipe"
LEADER = (
    "F0101 00:00:00 client.h:1] Terminating process because the JAX distributed service detected fatal errors. absl: "
    "UNAVAILABLE: Failed to send RPC to coordination service. Either the leader task was preempted/died/restarted "
    "unexpectedly or this task is experiencing network issues."
)
GOOD = "iteration 12 | lm loss: 2.5"
BROKEN = "Traceback (most recent call last):\nmylib.OddShardError: shard 4 is bad"
RAY_REASONS = (
    "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. End "
    "of file. There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high "
    "memory usage. (2) ray stop --force is called. (3) The worker is crashed unexpectedly due to SIGSEGV."
)


def text(*rows: str) -> str:
    return "\n".join(rows)


def counted(enqueued: int, completed: int) -> str:
    return f"Last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}.This is most likely caused by"


def told(rank: int, by: int, counts: str = "") -> str:
    """What a rank prints that hears of the timeout of another one."""
    head = PREFIX.format(rank)
    seen = f"{head}Observed flight recorder dump signal from another rank via TCPStore."
    if not counts:
        return seen
    return text(
        seen, f"{head}Received a dump signal due to a collective timeout from  rank {by} and we will dump. {counts}"
    )


def own(rank: int, counts: str = "") -> str:
    """What a rank prints that timed out itself."""
    return f"{PREFIX.format(rank)}Received a dump signal due to a collective timeout from this local rank. {counts}"


def srun(task: int | str, end: str) -> str:
    return f"srun: error: n5: task{'s' if isinstance(task, str) else ''} {task}: {end}"


STEP_ENDS = "srun: launch/slurm: _step_signal: Terminating StepId=55.0"


def spread(num_ranks: int, root: int, root_says: str, others_say: Callable[[int], str]) -> Texts:
    return {str(rank): root_says if rank == root else others_say(rank) for rank in range(num_ranks)}


def named(ranks: Texts) -> str | None:
    """The root, in whatever order the texts come."""
    found = {diagnose_ranks(dict(order)).root_rank for order in (ranks.items(), reversed(ranks.items()))}
    assert len(found) == 1
    return found.pop()


# For every rank and number of ranks: the root's text, and that of another rank.
Case = Callable[[int, int], Texts]
SPREAD: dict[str, Case] = {
    "it ran ahead alone, the others heard of it": lambda n, root: spread(
        n, root, own(root, counted(410, 300)), lambda rank: told(rank, root, counted(300, 300))
    ),
    "it never entered what all others timed out in": lambda n, root: spread(n, root, told(root, (root + 1) % n), own),
    "it was killed, the others crash behind what they lost": lambda n, root: spread(
        n, root, "", lambda rank: text(REMOTE, "terminate called after throwing", f"[n{rank}:7] Caught signal 11")
    ),
    "it is elsewhere, the others wait in words": lambda n, root: spread(
        n, root, "in the data loader", lambda rank: "waiting in allreduce"
    ),
    "the interpreter aborted": lambda n, root: spread(
        n, root, "Fatal Python error: PyGILState_Release: thread state must be current", lambda rank: "Killed"
    ),
    "gloo's error over two lines": lambda n, root: spread(
        n, root, "Killed", lambda rank: CLOSED.replace("] Connection", "]\nConnection")
    ),
    "an error in words, others are killed by srun": lambda n, root: spread(
        n, root, text("FATAL the shard is bad", srun(root, "Exited with exit code 3")),
        lambda rank: srun(rank, "Killed"),
    ),
    "a call of MPI failed, others are killed": lambda n, root: spread(
        n, root, text(f"[n{root}:9] *** An error occurred in MPI_Bcast", srun(root, "Exited with exit code 9")),
        lambda rank: srun(rank, "Killed"),
    ),
    "an abort, many others are killed at once": lambda n, root: spread(
        n, root, srun(root, "Aborted (core dumped)"),
        lambda rank: srun(",".join(str(task) for task in range(4) if task != root), "Killed"),
    ),
    "srun ends the step for it, others crash too": lambda n, root: spread(
        n, root, text(srun(root, "Bus error"), STEP_ENDS), lambda rank: srun(rank, "Bus error (core dumped)")
    ),
    "srun ends the step for an exit, others are killed or exit": lambda n, root: spread(
        n, root, text(srun(root, "Exited with exit code 7"), STEP_ENDS),
        lambda rank: srun(rank, "Killed" if rank % 2 else "Exited with exit code 1"),
    ),
    "it exited, others were told to end and killed": lambda n, root: spread(
        n, root, "exited with 3", lambda rank: "Received SIGTERM: 15\nKilled"
    ),
    "the agent has to kill the others": lambda n, root: spread(
        n, root, "exitcode: -9 (pid: 77)",
        lambda rank: f"Unable to shutdown process 8{rank} via Signals.SIGTERM, forcefully exiting via Signals.SIGKILL",
    ),
    "a parent that kills all others when one ended": lambda n, root: spread(
        n, root, f"[rank: {root}] Child process with PID 8 terminated with code 4. Forcefully terminating all other "
        "processes to avoid zombies", lambda rank: "Killed",
    ),
    "an older srun ends the step": lambda n, root: spread(
        n, root, text(srun(root, "Exited with exit code 2"), "srun: Terminating job step 55.0"),
        lambda rank: srun(rank, "Killed"),
    ),
    "Ray's executor tells of a worker": lambda n, root: {"engine": f"OddProc rank=[{root}] died unexpectedly, stopping"}
    | spread(n, root, "", lambda rank: GOOD),
    "an AMD GPU's fault": lambda n, root: spread(
        n, root, "Memory access fault by GPU node-4 (Agent handle: 0x1) on address 0x2. Reason: Unknown.",
        lambda rank: GOOD,
    ),
    "Ray tells of its worker": lambda n, root: spread(
        n, root, "Worker exit type: SYSTEM_ERROR, code 2 (End of file)", lambda rank: GOOD
    ),
    "Ray tells of it by number": lambda n, root: {"driver": f"OddWorker rank {root} (pid 31{root}) died"}
    | spread(n, root, "", lambda rank: told(rank, 0)),
    "Ray's driver is no rank": lambda n, root: {"driver": "ActorDiedError: The actor died unexpectedly before"}
    | spread(n, root, "", lambda rank: REMOTE),
    "it says nothing, the others heard of a timeout": lambda n, root: spread(n, root, "", lambda rank: told(rank, 0)),
    "it says nothing, the kernel killed somebody": lambda n, root: {"node": "Out of memory: Killed process 7 (python)"}
    | spread(n, root, "", lambda rank: CLOSED),
    "its pod was deleted": lambda n, root: spread(
        n, root, f'pod "trainer-{root}" force deleted', lambda rank: text(REMOTE, "Segmentation fault (core dumped)")
    ),
    "a status in fields": lambda n, root: spread(
        n, root, f"TASK {root}: failed exit=139 duration=3s", lambda rank: f"worker_failed exit=0 (sibling {root} gone)"
    ),
    "Slurm's account of it": lambda n, root: spread(n, root, "55.0 python ExitCode=0:11", lambda rank: GOOD),
    "Horovod's others": lambda n, root: spread(
        n, root, "Killed", lambda rank: "horovod.common.exceptions.HorovodInternalError: Horovod has been shut down."
    ),
    "an engine's others": lambda n, root: spread(
        n, root, "exited with -9", lambda rank: "RuntimeError: Engine core initialization failed. See root cause above."
    ),
    "TensorFlow's others": lambda n, root: spread(
        n, root, BROKEN, lambda rank: "errors_impl.UnavailableError: Collective ops is aborted by: failed to connect"
    ),
    "lost, and killed afterwards": lambda n, root: spread(
        n, root, GOOD, lambda rank: text(CLOSED, "Killed") if rank % 2 else CLOSED
    ),
    "told to end, and crashed": lambda n, root: spread(
        n, root, "exited with 3", lambda rank: text("Received SIGTERM: 15", "Segmentation fault (core dumped)")
    ),
    "it called MPI_Abort": lambda n, root: {"mpiexec": f"application called MPI_Abort(MPI_COMM_X, 1) - process {root}"}
    | spread(n, root, "", lambda rank: GOOD),
    "its machine was taken back": lambda n, root: spread(n, root, "The instance was preempted", lambda rank: REMOTE),
    "a shell tells of its end": lambda n, root: spread(
        n, root, "run.sh: line 9: 31337 Killed                  python train.py", lambda rank: GOOD
    ),
    "a communicator's number that it did not set": lambda n, root: spread(
        n, root, GOOD, lambda rank: f"DistBackendError: [{rank}] is setting up NCCL communicator and retrieving "
        f"ncclUniqueId from [{root}] via c10d key-value store by key '0', but store->get('0') got error: x",
    ),
    "a port that gRPC could not take": lambda n, root: spread(
        n, root, "No address added out of total 2 resolved for '[::]:9999'", lambda rank: GOOD
    ),
}  # fmt: skip


@pytest.mark.parametrize(("num_ranks", "root"), [(3, 0), (3, 2), (4, 1), (4, 3)])
@pytest.mark.parametrize("case", SPREAD.values(), ids=SPREAD.keys())
def test_the_root_whichever_it_is(case: Case, num_ranks: int, root: int) -> None:
    assert named(case(num_ranks, root)) == str(root)


def test_one_that_ran_ahead_is_code_where_the_others_wait_elsewhere() -> None:
    ranks = {"0": told(0, 2, counted(7, 7)), "1": told(1, 2, counted(7, 7)), "2": own(2, counted(20, 7))}
    alone = diagnose_ranks(ranks)
    assert (alone.root_rank, alone.severity, alone.scope) == ("2", "SEV2", "process")
    waits = "RuntimeError: [/src/gloo/transport/tcp/unbound_buffer.cc:9] Timed out waiting 9000ms for recv operation"
    found = diagnose_ranks({**ranks, "3": waits})
    assert (found.root_rank, found.severity, found.scope) == ("2", "FATAL", "job")


@pytest.mark.parametrize("root", [0, 1])
@pytest.mark.parametrize("says", ["", "FATAL shard 9 is beyond the end"], ids=["nothing", "what no rule knows"])
def test_of_a_pair_the_one_that_lost_nobody(root: int, says: str) -> None:
    assert named(spread(2, root, says, lambda rank: CLOSED)) == str(root)


@pytest.mark.parametrize("lost", [STORE, LEADER], ids=["the store", "the coordination service"])
@pytest.mark.parametrize("silent", [("0",), ("0", "2")], ids=["alone", "with another one"])
def test_what_lives_in_rank_0_was_lost(lost: str, silent: tuple[str, ...]) -> None:
    assert named({str(rank): "" if str(rank) in silent else lost for rank in range(4)}) == "0"


def test_a_list_of_what_may_have_been_is_no_cause() -> None:
    for said in (RAY_REASONS, LEADER):
        found = diagnose_text(said)
        assert (found.root_rank, found.scope) == (None, "process"), found.rule
        assert found.rule not in ("process.out-of-memory", "process.time-limit", "process.segfault")


def test_memory_that_ray_watches_is_the_host_s() -> None:
    found = diagnose_text("ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.")
    assert (found.severity, found.scope) == ("SEV2", "node")


@pytest.mark.parametrize(
    "lost",
    [
        "ORTE has lost communication with a remote daemon.\n  Remote daemon: [[7,0],2] on node n2",
        "n2.site.gov: shepherd died from signal 9",
    ],
)
def test_a_lost_daemon_is_on_the_node_that_is_named(lost: str) -> None:
    assert named({"n0": lost, "n1": "", "n2": ""}) == "n2"


@pytest.mark.parametrize(
    ("says", "root"), [(STEP_ENDS, "0"), ("slurmstepd: *** STEP 5.0 ON n0 CANCELLED AT x ***", "2")]
)
def test_who_says_that_the_step_ends(says: str, root: str) -> None:
    """srun says it behind the end that made it so; the daemon of a node says it there, whatever happened elsewhere."""
    ranks = {"0": text(srun(0, "Exited with exit code 1"), says), "1": GOOD, "2": srun(2, "Segmentation fault")}
    assert named(ranks) == root


def test_one_was_killed_and_many_exited_for_it() -> None:
    assert named({"4": srun(4, "Killed"), **dict.fromkeys("0123", srun("0-3", "Exited with exit code 1"))}) == "4"


# Nobody is named: it cannot be known, or there is somebody else to look at.
NOBODY: dict[str, Texts] = {
    "two heard of a timeout": {"0": own(0), "1": told(1, 0), "2": told(2, 0), "3": own(3)},
    "who heard of it has begun the same": {"0": own(0), "1": own(1), "2": told(2, 0, counted(8, 7))},
    "two that are not at the same number": {"0": counted(500045, 500044), "1": counted(500047, 500044)},
    "one ahead, and nobody says where the others are": {
        "0": counted(77, 77), "4": counted(77, 77), "1": f"{own(1)} {counted(79, 77)}"
    },
    "one ahead of the few that are shown of a large job": {
        "0": told(0, 1, counted(77, 77)), "6": told(6, 1, counted(77, 77)), "1": own(1, counted(79, 77))
    },
    "two that heard of the timeout of a group that they are not in": {
        **{rank: text(PREFIX.format(rank).replace("PG ID 0 PG GUID 0(default_pg)", "PG ID 4 PG GUID 17(tp)")
           + "failure detected by watchdog at work sequence id: 8 PG status: last enqueued work: 9, last completed "
           "work: 7", own(int(rank), counted(593, 593))) for rank in "0123"},
        **{rank: told(int(rank), 0, counted(593, 593)) for rank in "45"},
    },
    "all crash behind what they lost": dict.fromkeys("012", f"{REMOTE}\nSegmentation fault"),
    "killed and exited, in no order": {"0": srun(0, "Exited with exit code 255"), "1": srun(1, "Killed")},
    "two steps that end": {
        "0": text(srun(0, "Killed"), STEP_ENDS), "1": text(srun(1, "Killed"), STEP_ENDS), "2": srun(2, "Killed")
    },
    "two that say nothing": {"0": CLOSED, "1": CLOSED, "2": "", "3": ""},
    "one that says nothing, of a pair, beside a timeout": {"0": own(0), "1": ""},
    "one of few texts of a large job": {"7": CLOSED, "3": ""},
    "others have no name": {"others": BROKEN, "3": own(3)},
    "a node has no rank": {"node": "Out of memory: Killed process 7 (python)", "0": own(0), "1": own(1)},
    "an interpreter that is ending anyway": {
        "0": "Fatal Python error: _enter_buffered_busy: could not acquire lock at interpreter shutdown", "1": CLOSED
    },
    "who tells of a lost node is not on it": {
        **dict.fromkeys("01", "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01 DUE TO NODE FAILURE ***"),
        "2": "[2] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store",
    },
    "the step was cancelled, and all were killed": {
        "0": text("slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-01 ***", srun("0-3", "Killed")),
        "1": srun("0-3", "Killed"),
    },
    "refused is no file system": {"0": "sleeping", "1": "socketPollConnect: Connection refused, exceeded error count"},
    "sizes that differ": {"0": "[enforce fail at pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4", "1": CLOSED},
}  # fmt: skip


@pytest.mark.parametrize("ranks", NOBODY.values(), ids=NOBODY.keys())
def test_nobody_is_named(ranks: Texts) -> None:
    assert named(ranks) is None


CODES = {
    "process.segfault": ("exit=139", "exit code 139", "exitcode -11", "exitcode: -11", "returncode=-11", "exited (139)",
        "exited with -11", "exit: 139", "exit status 139", "exit_code=139", "ExitCode=0:11"),
    "process.killed": ("exit=137", "exit code 137", "exitcode -9", "Exited (137) 2 minutes ago", "returncode=-9",
        "exit_code: 137", "return code = -9", "ExitCode=0:9"),
    "process.aborted": ("exit=134", "exit code 134", "exitcode -6", "exited with -6", "exit: 134", "ExitCode=0:6"),
}  # fmt: skip


@pytest.mark.parametrize(("rule", "said"), [(rule, said) for rule, forms in CODES.items() for said in forms])
def test_a_signal_in_any_spelling(rule: str, said: str) -> None:
    assert diagnose_text(f"the worker ended: {said}").rule == rule


@pytest.mark.parametrize("said", ["exit=0", "exit 0", "exited (0)", "returncode=0", "exited with 0", "exit: 0"])
def test_a_good_end_is_no_failure(said: str) -> None:
    assert diagnose_text(f"the worker ended: {said}").severity == "INFO"
