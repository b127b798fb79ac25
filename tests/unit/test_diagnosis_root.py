"""The root among many ranks: causes before echoes, whoever is behind when nobody says why, and no root where "
"none is."""

from __future__ import annotations

import pytest

from unicron.diagnosis import diagnose_ranks, diagnose_text
from unicron.diagnosis.naming import Keys, ended, numbers, own_addresses, peer

pytestmark = pytest.mark.timeout(30)

RESET = "NCCL WARN Call to recv from 10.0.0.2<1> failed : Connection reset by peer"
TERMINATED = "Signal 15 (SIGTERM) received by PID 1"
ABORTED = "Signal 6 (SIGABRT) received by PID 1"
NO_ACK = "NET/IB : Got completion from peer 10.0.0.13<36315> with status=12 opcode=0 len=32696 vendor err 129 (Send)"
UNIQUE_ID = "[{}] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key"
MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
CLOSED = "socketProgress: Connection closed by remote peer n7<41210>"
STACK = 'File "torch/distributed/distributed_c10d.py", line 2051 in all_reduce'


def late(number: int, op: str = "ALLREDUCE", size: int = 4, group: str = "") -> str:
    """A watchdog's timeout."""
    return (
        f"{group}Watchdog caught collective operation timeout: WorkNCCL(SeqNum={number}, OpType={op}, NumelIn={size}, "
        "Timeout(ms)=600000) ran for 600000 milliseconds before timing out."
    )


def seen(rank: int, work: int, enqueued: int, completed: int, group: str = "0") -> str:
    """A watchdog's words on how far its rank is."""
    return (
        f"[PG ID {group} PG GUID {group} Rank {rank}] Exception (either an error or timeout) detected by watchdog at "
        f"work: {work}, last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}."
    )


def recorded(enqueued: int, completed: int) -> str:
    return f"flight recorder: default_pg enqueued={enqueued} completed={completed}; last entry nccl:x state=scheduled"


def summary(rank: int, code: int) -> str:
    """torchrun's, of a rank that failed."""
    fields = f"  rank      : {rank} (local_rank: 0)\n  exitcode  : {code} (pid: 7)"
    return f"Root Cause (first observed failure):\n[0]:\n{fields}"


def failed(rank: int, code: int, time: str) -> str:
    """A rank in torchrun's summary, as it is printed today."""
    return f"  time      : 2026-01-01_{time}\n  host      : n1\n{summary(rank, code).partition('[0]:')[2].lstrip()}"


CAUSES = {
    "a helper process killed": (
        "3", "SEV2 process",
        {"0": late(90), "1": late(90), "3": "DataLoader worker (pid 1) is killed by signal: Killed."}
    ),
    "a segfault": ("2", "SEV2 process", {"0": RESET, "1": "NCCL communicator was aborted on rank 1.",
    "2": "Segmentation fault"}),
    "a GPU": (
        "n2", "SEV1 gpu",
        {"n1": "NCCL error: unhandled system error",
        "n2": "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."},
    ),
    "an exception beats a timeout": ("1", "FATAL job", {"0": late(90), "1": "[rank1]: KeyError: 'labels'"}),
    "a full disk": ("0", "FATAL storage", {"0": "OSError: [Errno 28] No space left on device", "1": late(90)}),
    "a CUDA error behind a watchdog's words": (
        "5", "SEV1 gpu",
        {"4": RESET, "5": "watchdog thread terminated with exception: CUDA error: uncorrectable ECC error encountered"},
    ),
    "the port, not who noticed": ("7", "SEV3 link",
    {"0": NO_ACK, "7": "NET/IB : mlx5_3:1 Got async event : port error"}),
    "a death beats SIGTERM": ("2", "SEV2 process",
    {"0": TERMINATED, "1": TERMINATED, "2": "exitcode  : -9 (pid: 3)"}),
    "a death beats aborts of watchdogs": (
        "3", "SEV2 process", {"0": f"{late(90)}\n{ABORTED}", "1": f"{late(90)}\n{ABORTED}",
        "3": "exitcode  : -9 (pid: 3)"}
    ),
    "torchrun's summary is about its rank": ("3", "SEV2 process", {"0": RESET, "launcher": summary(3, -11), "3": ""}),
    "the scheduler is about its node": (
        "n7", "SEV1 node", {"controller": "error: Nodes n7 not responding", "n6": late(90), "n7": ""}
    ),
    "of two fatal links the one with the driver's verdict": (
        "n9", "SEV1 gpu",
        {
            "n8": "Xid (PCI:0008:01:00): 149, NETIR_LINK_EVT Fatal",
            "n9": "Xid (PCI:0009:01:00): 149, NETIR_LINK_EVT Fatal\nXid (PCI:0009:01:00): 154, GPU recovery "
            "action changed "
            "from 0x0 (None) to 0x4 (Drain and Reset)",
        },
    ),
    "a kernel's line is about who died of it": (
        "3", "SEV2 process", {"dmesg": "Out of memory: Killed process 7 (python)", "3": "exitcode  : -9 (pid: 3)",
        "0": ""}
    ),
    "srun's line is about its task": (
        "4", "SEV2 process", {"srun": "srun: error: n1: task 4: Segmentation fault", "0": late(90), "4": ""}
    ),
    "torch compared the ranks": (
        "1", "SEV2 process", {"0": "[1] finished collective #8, but didn't join collective #9", "1": "iteration 7"}
    ),
    "two broken GPUs are both to blame": (
        "n1,n2", "SEV1 gpu", {"n1": "GPU is lost", "n2": "GPU is lost", "n3": late(90), "n4": late(90)}
    ),
    "who spoke first": (
        "1", "SEV2 process",
        {"0": "2026-01-01 10:00:05 CUDA error: illegal memory access",
        "1": "2026-01-01 10:00:01 CUDA error: illegal memory access"},
    ),
}  # fmt: skip

BEHIND = {
    "a lower number in the group": ("1", "SEV2 process", {"0": late(90), "1": late(89), "2": late(90)}),
    "numbers of other groups are not compared": (
        None, "SEV3 job", {"0": late(90, group="[PG 1 Rank 0] "), "1": late(12, group="[PG 2 Rank 1] ")}
    ),
    "the same number everywhere": (None, "SEV3 job", {"0": late(90), "1": late(90)}),
    "who is named by all": (
        "0", "SEV2 process", {"0": "starting", "1": UNIQUE_ID.format(1), "2": UNIQUE_ID.format(2)}
    ),
    "the host that all name": (
        "n7", "SEV2 process", {"n1": CLOSED, "n2": CLOSED, "n7": ""}
    ),
    "whose stack is not in a collective": (
        "2", "SEV2 process", {"0": STACK, "1": STACK, "2": 'File "data.py", line 7 in decode'}
    ),
    "who does not wait": ("2", "SEV2 process", {"0": late(90), "1": late(90), "2": "iteration 7"}),
    "who saves": ("0", "SEV2 storage", {"0": "saving checkpoint at iteration 500", "7": late(90)}),
    "no entry while all others have one": (
        "1,3", "SEV2 process",
        {"0": recorded(9, 8), "1": "flight recorder: no pending entries",
        "2": recorded(8, 8), "3": "flight recorder: no entries",
         "4": recorded(9, 8)},
    ),
    "fewer done": ("2", "SEV2 process", {"0": recorded(9, 8), "1": recorded(9, 8), "2": recorded(9, 7)}),
    "another size": (
        "0", "FATAL job",
        {"0": late(90, size=8, group="[PG 1] "), "1": late(90, group="[PG 1] "), "2": late(90, group="[PG 1] ")},
    ),
    "another operation": (
        None, "FATAL job",
        {"0": late(90, "BROADCAST", group="[PG 1] "), "1": late(90, group="[PG 1] ")},
    ),
}  # fmt: skip

NOBODY = {
    "only echoes": (None, "SEV3 process", {"0": RESET, "1": RESET}),
    "a cause that all share": (None, "FATAL job", {"0": "ValueError: bad", "1": "ValueError: bad", "2": RESET}),
    "memory on all": (None, "FATAL job", {"0": MEMORY, "1": MEMORY}),
    "the pair, not the speaker": (None, "SEV3 link", {"0": NO_ACK, "7": NO_ACK}),
    "a mismatch is everybody's": (
        None, "FATAL job", {"0": "RuntimeError: Detected mismatch between collectives on ranks.", "1": late(90)}
    ),
    "a kernel's line without a victim": (
        None, "SEV2 process", {"dmesg": "Out of memory: Killed process 7 (python)", "0": late(90)}
    ),
    "the clock of a kernel is its own": (
        None, "SEV2 process",
        {"0": "[12.5] python[1]: segfault at 0 ip 0 sp 0 error 4",
        "1": "[11.5] python[1]: segfault at 0 ip 0 sp 0 error 4"},
    ),
}  # fmt: skip


NAMED = {
    "all that torch's comparison lists": (
        "1,3", "SEV2 process",
        {"0": "  - [1, 3] finished collective #8, but didn't join collective #9", "1": "", "2": late(90), "3": ""},
    ),
    "all that the barrier misses": (
        "1,2", "SEV2 process",
        {"0": "[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 2000 ms", "1": "", "2": "", "3": late(90)},
    ),
    "who did not come, by the store's barrier": (
        "2", "SEV2 process",
        {"0": "DistStoreError: Timed out waiting on barrier on rank 0 (missing_ranks=[2])", "1": late(90), "2": ""},
    ),
    "who did not join": ("3", "SEV2 process", {"0": "rank 3 did not join within 600 s", "1": late(90), "3": "step 10"}),
    "whose heart is not heard": ("6", "SEV2 process", {"monitor": "no heartbeat from rank 6", "0": late(90), "6": ""}),
    "horovod's stalled rank": ("2", "SEV2 process", {"0": "Missing ranks:\n2: [allreduce.grad_1]", "1": "", "2": ""}),
    "who misses all others is no judge": (
        None, "SEV2 process", {"0": "missing_ranks=[1, 2, 3]", "1": late(90), "2": late(90), "3": late(90)}
    ),
    "an accused that is not there: the accuser is not meant": (
        None, "SEV3 job", {"0": "[Rank 0]: Rank 3 failed to pass monitoredBarrier in 2000 ms", "1": late(90)}
    ),
    "mpirun's rank": (
        "3", "SEV2 process",
        {"mpirun": "process rank 3 with PID 812 on node n1 exited on signal 9 (Killed).", "0": RESET, "3": ""},
    ),
    "the child of a spawning parent": (
        "1", "SEV2 process", {"parent": "ProcessExitedException: process 1 terminated with signal SIGKILL", "1": ""}
    ),
    "a list of srun's tasks": (
        "4", "SEV2 process",
        {"srun": "srun: error: n1: task 4: Killed\nsrun: error: n1: tasks 0-3: Exited with exit code 1", "0": RESET,
        "1": RESET, "4": ""},
    ),
    "names with numbers": (
        "rank3", "SEV2 process", {"rank0": RESET, "torchrun": summary(3, -9), "rank3": "", "rank4": RESET}
    ),
    "a pod by its name": (
        "train-worker-3", "SEV2 process",
        {"events": "Pod train-worker-3 OOMKilled", "train-worker-0": RESET, "train-worker-3": ""},
    ),
    "a node by torch's name of it": (
        "n3", "SEV1 node",
        {"n1": "node(s) ['n3_812_0'] have been removed from the rendezvous 'x' since they had no heartbeat.", "n3": ""},
    ),
    "a process by the kernel's number": (
        "2", "SEV2 process",
        {"dmesg": "Out of memory: Killed process 812 (python)", "1": "exitcode  : -6 (pid: 813)",
        "2": "exitcode  : -9 (pid: 812)"},
    ),
    "the one who is lost, by a kernel's line": (
        "2", "SEV2 process", {"dmesg": "Out of memory: Killed process 7 (python)", "0": RESET, "1": RESET, "2": ""}
    ),
    "a survivor tells of a lost node": (
        "n3", "SEV1 node",
        {"n1": f"slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO NODE FAILURE ***\n{RESET}",
        "n2": RESET, "n3": ""},
    ),
    "a kernel's log with its node's name": (
        "n2", "SEV1 gpu", {"n2/dmesg": "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", "n1": RESET,
        "n2": ""}
    ),
    "names with a rank and a host": (
        "rank 1 (n2)", "SEV2 process",
        {"rank 0 (n1)": "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 5 ms", "rank 1 (n2)": ""},
    ),
    "a rank's line in the launcher's log": ("3", "FATAL job", {"launcher": "[rank3]: KeyError: 'x'", "0": RESET,
    "3": ""}),
    "a host with its domain": (
        "n7", "SEV2 process", {"n1": CLOSED.replace("n7", "n7.cluster.local"), "n2": "iteration 7", "n7": ""}
    ),
    "an address that a rank says is its own": (
        "1", "SEV2 process",
        {"0": "Connection closed by peer [10.0.0.4]:1042", "3": RESET, "2": "iteration 7",
        "1": "h1:1:2 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.4<0>"},
    ),
    "the common end of all that failed": (
        "c", "SEV3 link",
        {"a": NO_ACK.replace("10.0.0.13", "c"), "b": NO_ACK.replace("10.0.0.13", "c"),
        "c": NO_ACK.replace("10.0.0.13", "a")},
    ),
}  # fmt: skip

ORDER = {
    "a crash after its own echo is clean-up": (
        "3", "SEV2 process", {"0": f"{late(90)}\nSegmentation fault", "1": late(90), "3": "exitcode  : -9 (pid: 3)"}
    ),
    "the same crash without an echo before it": (
        "3", "SEV2 process", {"0": f"{RESET}\nSegmentation fault", "3": "Segmentation fault"}
    ),
    "an exception that nobody knows after an echo": (
        "3", "SEV2 process", {"0": f"{RESET}\nx.StrangeError: gone", "3": "exitcode  : -9 (pid: 3)"}
    ),
    "an exit without an echo": (
        "2", "SEV2 process",
        {"0": f"{RESET}\nexitcode  : 1 (pid: 1)", "1": f"{late(90)}\nexitcode  : 1", "2": "exitcode  : 1"},
    ),
    "what torchrun saw first, by its times": (
        "3", "SEV2 process",
        {"launcher": f"{failed(1, 1, '10:00:05')}\n{failed(3, 1, '10:00:01')}", "0": "", "1": "", "3": ""},
    ),
    "what torchrun saw first, by its word": (
        "3", "SEV2 process",
        {"launcher": f"{summary(3, 1)}\nOther Failures:\n{summary(1, 1).partition('[0]:')[2]}", "1": "", "3": ""},
    ),
    "of several agents the one that saw it first": (
        "n1", "SEV2 process", {"n0": failed(1, 1, "10:00:09"), "n1": failed(11, 1, "10:00:01")}
    ),
    "long before the one that says more": (
        "0", "SEV2 process",
        {"0": "2026-01-01 10:00:00 CUDA error: an illegal memory access was encountered",
        "1": "2026-01-01 10:10:00 DataLoader worker (pid 7) exited\n2026-01-01 10:10:01 Segmentation fault"},
    ),
    "glog's times have no year": (
        "1", "SEV2 process",
        {"0": "[rank0]:[E1101 12:25:57.436 x.cpp:697] CUDA error: an illegal memory access",
        "1": "[2026-11-01 12:20:00] CUDA error: unspecified launch failure"},
    ),
    "a GPU before the link to it": (
        "n2", "SEV1 gpu",
        {"n1": "NVRM: Xid (PCI:0000:3b:00): 74, NVLink error",
        "n2": "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."},
    ),
    "a link that stayed down": (
        "n2", "SEV3 link",
        {"n1": "mlx5_0: Port: 1 Link DOWN\nmlx5_0: Port: 1 Link ACTIVE", "n2": "mlx5_0: Port: 1 Link DOWN"},
    ),
    "a number that is none spreads": (
        "3", "SEV2 gpu", {"3": "found NaN in local grad norm", "7": "iteration 70 | lm loss: nan |"}
    ),
    "a reader ended by SIGTERM is clean-up": (
        "1", "SEV2 process",
        {"0": "DataLoader worker (pid 1) is killed by signal: Terminated.",
        "1": "DataLoader worker (pid 2) is killed by signal: Killed."},
    ),
    "a particular cause before a general one": (
        "2", "FATAL storage", {"0": "ValueError: bad", "1": "ValueError: bad", "2": "Errno 28: No space left on device"}
    ),
}  # fmt: skip

WAITING = {
    "programs run ahead differently: nobody is behind": (
        None, "SEV3 job", {str(rank): seen(rank, 90, ahead, 89) for rank, ahead in enumerate((95, 93, 94, 95))}
    ),
    "who has not started what the others wait in": (
        "2", "SEV2 process", {"0": seen(0, 90, 95, 89), "1": seen(1, 90, 93, 89), "2": seen(2, 89, 89, 88)}
    ),
    "who waits elsewhere is not behind": (
        "1", "SEV2 process",
        {"0": f"{seen(0, 50, 50, 49, '1')}\n{seen(0, 50, 10, 10, '2')}", "1": seen(1, 49, 49, 49, "1"),
        "2": seen(2, 11, 11, 10, "2"), "3": seen(3, 11, 11, 10, "2")},
    ),
    "numbers far apart are of two groups": (
        None, "SEV3 job", {"0": late(126639, "COALESCED"), "1": late(126639, "COALESCED"), "8": late(8812)}
    ),
    "numbers close to each other are of one": (
        "2", "SEV2 process", {"0": late(4157), "1": late(4158), "2": late(4155), "3": late(4158)}
    ),
    "one other, with a stack": ("1", "SEV2 process", {"0": late(90), "1": '  File "data.py", line 7 in decode'}),
    "stacks of py-spy": (
        "2", "SEV2 process",
        {"0": "    all_reduce (torch/distributed/distributed_c10d.py:2501)",
        "1": "    all_reduce (torch/distributed/distributed_c10d.py:2501)", "2": "    read (fsspec/spec.py:1846)"},
    ),
    "a wait for the device is a wait": (
        None, "SEV3 job", {"0": late(90), "1": 'File "torch/cuda/__init__.py", line 892 in synchronize'}
    ),
    "of several silent ones who saves": (
        "0", "SEV2 storage", {"0": "saving checkpoint at iteration 5", "1": "iteration 5", "7": late(90), "8": late(90)}
    ),
    "what it has done it does no more": (
        None, "SEV3 job",
        {"0": "saving checkpoint at iteration 5\nsuccessfully saved checkpoint at iteration 5", "1": "iteration 5",
        "7": late(90)},
    ),
    "what it did long ago neither": (
        None, "SEV3 job", {"0": "saving checkpoint at iteration 5" + "\niteration 6" * 20, "1": "", "7": late(90)}
    ),
    "a launcher is no rank that is silent": (None, "SEV3 job", {"launcher": "starting", "0": late(90), "1": late(90)}),
    "the others under one name": ("5", "SEV2 process", {"others": late(90), "5": ""}),
}  # fmt: skip

TEXTS = {
    "mpirun's tags": ("3", f"[1,0]<stderr>:{RESET}\n[1,3]<stderr>:Traceback\n[1,3]<stderr>:KeyError: 'x'"),
    "a time before the prefix": (
        "2",
        f"2026-01-01T10:00:00.1 [rank0]: {RESET}\n2026-01-01T10:00:00.2 [rank2]: KeyError: 1",
    ),
    "a rank's name": ("3", f"rank0: {RESET}\nrank3: KeyError: 'x'"),
    "pods": ("w-3", f"[pod/w-0/pytorch] {RESET}\n[pod/w-3/pytorch] KeyError: 'x'"),
    "containers": ("w-3", f"w-0  | {RESET}\nw-3  | KeyError: 'x'"),
    "a table says nothing of the lines after it": (None, "rank 0: 12 GB\nrank 1: 12 GB\nTraceback\nKeyError: 'x'"),
}


@pytest.mark.parametrize(
    ("root", "wanted", "ranks"),
    [
        pytest.param(*row, id=name)
        for rows in (CAUSES, BEHIND, NOBODY, NAMED, ORDER, WAITING)
        for name, row in rows.items()
    ],
)
def test_root(root: str | None, wanted: str, ranks: dict[str, str]) -> None:
    found = diagnose_ranks(ranks)
    assert (found.root_rank, f"{found.severity} {found.scope}") == (root, wanted), (found.rule, found.reason)


@pytest.mark.parametrize(("root", "text"), TEXTS.values(), ids=TEXTS.keys())
def test_prefixes(root: str | None, text: str) -> None:
    assert diagnose_text(text).root_rank == root


def test_whom_a_line_names() -> None:
    assert numbers("0, 2-4 and 7") == ("0", "2", "3", "4", "7")
    assert len(numbers("0-9999999")) == 64
    assert ended("srun: error: n1: tasks 4,6-7: Killed") == ("4", "6", "7")
    assert ended("[rank: 2] Child process with PID 812 terminated with code -9") == ("2",)
    assert ended("rank 3 will be killed if it does not answer") == ()
    assert peer("Connection closed by peer [10.0.0.4]:1042") == "10.0.0.4"
    assert peer("NCCL WARN Call to recv from 10.0.0.2<1> failed") == "10.0.0.2"
    assert own_addresses("h1.lan:1:2 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.4<0>") == ("h1", "10.0.0.4")


def test_keys_by_what_others_call_them() -> None:
    keys = Keys(["rank03", "logs/n1/rank_4.log", "n7.lan", "worker-5", "6", "r8", "rank8"])
    named = {name: keys.find(name) for name in ("3", "4", "n7", "N7.other", "5", "6", "8", "9")}
    assert named == {
        "3": "rank03", "4": "logs/n1/rank_4.log", "n7": "n7.lan", "N7.other": "n7.lan", "5": "", "6": "6", "8": "",
        "9": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    "text", [late(90), RESET, TERMINATED, UNIQUE_ID.format(4), f"[rank3]: {ABORTED}", summary(3, -6)]
)
def test_an_echo_alone_names_nobody(text: str) -> None:
    assert diagnose_text(text).root_rank is None


def test_prefixes_tell_ranks_apart() -> None:
    found = diagnose_text(f"[rank0]: {late(90)}\n[rank1]: Traceback (most recent call last):\n[rank1]: KeyError: 'x'")
    assert found.root_rank == "1"
    assert [finding.rank for finding in found.evidence] == ["1", "0"]


def test_srun_labels_tell_ranks_apart() -> None:
    lines = [
        "0: iteration 1",
        "1: iteration 1",
        f"0: {late(90)}",
        "1: RuntimeError: CUDA error: device-side assert triggered",
    ]
    assert diagnose_text("\n".join(lines)).root_rank is None  # a traceback's frames look the same
    from unicron.diagnosis.lines import is_labelled
    from unicron.diagnosis.reader import Reader
    from unicron.diagnosis.root import diagnose

    reader = Reader()
    reader.read_unranked(lines, labelled=is_labelled(lines))
    assert diagnose(reader.ranks).root_rank == "1"


def test_evidence_has_the_root_first_and_its_line() -> None:
    found = diagnose_ranks({"0": late(90), "1": "all is well\nKeyError: 'x'\nKeyError: 'y'"})
    first = found.evidence[0]
    assert (first.rank, first.line, first.count, first.text) == ("1", 2, 2, "KeyError: 'x'")
    assert [finding.rule for finding in found.evidence[1:]] == ["watchdog.timeout"]
