"""The root among many ranks: causes before echoes, whoever is behind when nobody says why, and no root where "
"none is."""

from __future__ import annotations

import pytest

from unicron.diagnosis import diagnose_ranks, diagnose_text

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


def recorded(enqueued: int, completed: int) -> str:
    return f"flight recorder: default_pg enqueued={enqueued} completed={completed}; last entry nccl:x state=scheduled"


def summary(rank: int, code: int) -> str:
    """torchrun's, of a rank that failed."""
    fields = f"  rank      : {rank} (local_rank: 0)\n  exitcode  : {code} (pid: 7)"
    return f"Root Cause (first observed failure):\n[0]:\n{fields}"


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


@pytest.mark.parametrize(
    ("root", "wanted", "ranks"),
    [pytest.param(*row, id=name) for rows in (CAUSES, BEHIND, NOBODY) for name, row in rows.items()],
)
def test_root(root: str | None, wanted: str, ranks: dict[str, str]) -> None:
    found = diagnose_ranks(ranks)
    assert (found.root_rank, f"{found.severity} {found.scope}") == (root, wanted), (found.rule, found.reason)


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
