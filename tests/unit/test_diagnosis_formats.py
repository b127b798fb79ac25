"""The root in logs of many ranks as torch, NCCL, launchers, schedulers and servers print them: whose line it is in
every form of prefix, whom a line accuses, what a report compares, and where nobody can be named. Written after formats
seen in public threads on pytorch, Megatron-LM, NeMo, DeepSpeed, Lightning, vLLM, SGLang, Ray, JAX, Horovod, Slurm and
MPI.
"""

from __future__ import annotations

import pytest

from unicron.diagnosis import diagnose_ranks, diagnose_text

pytestmark = pytest.mark.timeout(30)

ILLEGAL = "RuntimeError: CUDA error: an illegal memory access was encountered"
MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
GONE = "NCCL error: remote process exited or there was a network error, NCCL version 2.21.5"
CLOSED = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:38032"
BARRIER_ECHO = (
    "RuntimeError: Rank {0} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
    "from rank 0. Please check rank 0 logs for faulty rank."
)
COMMAND = "['/usr/bin/python3', '-u', 'main.py', '--local_rank={0}', '--deepspeed']"
SPAWNED = f"[2026-04-14 13:00:00,000] [INFO] [launch.py:256:main] process {{1}} spawned with command: {COMMAND}"


def text(*rows: str) -> str:
    return "\n".join(rows)


def late(rank: int, number: int = 90, *, op: str = "ALLREDUCE", size: int = 4096, member: int | None = None) -> str:
    """A watchdog's timeout. `member`: the rank's number in the group, where that is another one."""
    return (
        f"[rank{rank}]:[E626 06:24:44.903881913 ProcessGroupNCCL.cpp:616] [Rank {rank if member is None else member}] "
        f"Watchdog caught collective operation timeout: WorkNCCL(SeqNum={number}, OpType={op}, NumelIn={size}, "
        f"NumelOut={size}, Timeout(ms)=600000) ran for 600020 milliseconds before timing out."
    )


def status(rank: int, enqueued: int, completed: int, group: str = "PG ID 0 PG GUID 0(default_pg)") -> str:
    """How far a rank is, in a new watchdog's words."""
    return (
        f"[rank{rank}]:[E603 17:48:01.005538748 ProcessGroupNCCL.cpp:2268] [{group} Rank {rank}]  failure detected by "
        f"watchdog at work sequence id: {completed + 1} PG status: last enqueued work: {enqueued}, last completed "
        f"work: {completed}"
    )


def dumped(rank: int, enqueued: int, completed: int) -> str:
    """What a rank says that was told of another one's timeout."""
    return (
        f"[rank{rank}]:[E723 01:58:45.667 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] "
        f"Received a dump signal due to a collective timeout from  rank 0 and we will try our best to dump the debug "
        f"info. Last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}.This is most likely caused "
        "by incorrect usages of collectives"
    )


def gone(rank: int) -> str:
    return f"[rank{rank}]: torch.distributed.DistBackendError: {GONE}"


def fingerprint(number: int, op: str, shape: str = "20, 10") -> str:
    return (
        f"CollectiveFingerPrint(SequenceNumber={number}, OpType={op}, TensorShape=[{shape}], TensorDtypes=Float, "
        "TensorDeviceTypes=TensorOptions(dtype=float (default), device=cuda))"
    )


def mismatch(one: int, its: str, other: int, others: str) -> str:
    """What a rank says that compares itself with another one (TORCH_DISTRIBUTED_DEBUG=DETAIL)."""
    return (
        f"[rank{one}]: RuntimeError: Detected mismatch between collectives on ranks. Rank {one} is running collective: "
        f"{its}, but Rank {other} is running collective: {others}.Collectives differ in the following aspects: Op type"
    )


def row(index: int, rank: int, code: int, clock: str = "06:18:55") -> str:
    """A rank in torchrun's summary."""
    return text(
        f"[{index}]:", f"  time      : 2026-10-22_{clock}", "  host      : n1",
        f"  rank      : {rank} (local_rank: {rank})", f"  exitcode  : {code} (pid: {4000 + rank})",
        "  error_file: <N/A>",
    )  # fmt: skip


def summary(first: str, *others: str) -> str:
    return text(
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", "train.py FAILED", "Failures:",
        *(others or ("  <NO_OTHER_FAILURES>",)), "Root Cause (first observed failure):", first,
    )  # fmt: skip


# Whose line it is: rank 11 says why it fails, others that it is gone.
PREFIXES = {
    "torch": "[rank{0}]: {1}",
    "torch twice": "[rank{0}]:[rank{0}]: {1}",
    "torch after torchrun's local rank": "[default3]:[rank{0}]: {1}",
    "torch after a host": "worker-1: [rank{0}]: {1}",
    "torch after a progress bar": "Tokenizing: 92%|### | 3/4 [29:58<12:05, 41.59 examples/s][rank{0}]: {1}",
    "torch after numbers of lines": "[8074{0}] [rank{0}]: {1}",
    "torch after a time": "2026-01-01 10:00:00,000 [rank{0}]: {1}",
    "torchrun": "[default{0}]:{1}",
    "in capitals": "[RANK {0}] 2026-05-19 10:10:30,112 [ERROR] {1}",
    "with a colon": "[2026-01-14 16:14:58,563] [ERROR] [axolotl.train:45] [PID:1673] [RANK:{0}] {1}",
    "in parentheses": "(rank {0}) {1}",
    "in angles": "<rank {0}> {1}",
    "before a bar": "rank{0} | {1}",
    "one letter": "r{0}| {1}",
    "of some": "[Rank {0}/16] {1}",
    "after a host": "node-1 [rank {0}] {1}",
    "after a host and a colon": "node-1:rank{0}: {1}",
    "after a level": "2026-01-01 10:00:00,100 ERROR rank {0}: {1}",
    "in a logger's head": "2026-01-01 10:00:00.123 | ERROR    | trainer:step:88 - [rank {0}] {1}",
    "NeMo's": "[NeMo E 2026-05-08 21:28:45 trainer:724 rank:{0}] {1}",
    "beside a local rank": "ERROR node-3 local rank 5 (global rank {0}): {1}",
    "a global rank's field": "[node-2] local_rank=1 global_rank={0} {1}",
    "a field": 'time=2026-01-01T10:00:00Z level=error rank={0} msg="{1}"',
    "a field in JSON": '{{"ts": "2026-01-01T10:00:00", "rank": {0}, "level": "ERROR", "message": "{1}"}}',
    "vLLM's": "(VllmWorker rank={0} pid=907) ERROR 03-15 17:24:17 [multiproc_executor.py:487] {1}",
    "vLLM's, tensor parallel": "(Worker_TP{0} pid=907) ERROR 03-15 17:24:17 [multiproc_executor.py:487] {1}",
    "SGLang's": "[2026-11-01 16:50:36 TP{0}] {1}",
    "Ray's": "(RayTrainWorker pid=9223{0}, ip=172.19.24.110) [rank{0}]: {1}",
    "mpirun's": "[1,{0}]<stderr>:{1}",
    "Composer's": "2026-08-30 11:06:12,920: rank{0}[208868][MainThread]: ERROR: {1}",
    "Composer's sections": "----------Begin global rank {0} STDERR----------\n{1}\n----------End global rank {0} "
    "STDERR------",
    "a section's title": "===== rank {0} =====\n{1}",
    "a section's title of its stream": "--- rank {0} stderr ---\n{1}",
    "tail's title": "==> rank_{0}.log <==\n{1}\n",
    "a traceback's title": "Traceback on rank {0}:\n{1}",
    "from a rank": "Error from rank {0}: {1}",
    "a worker's number": "[worker {0}] {1}",
    "with zeros before it": "rank0{0}: {1}",
    "TensorRT-LLM's": "[TRT-LLM] [RANK {0}] [E] {1}",
}

# One line that accuses somebody, among watchdogs of others.
ACCUSED = {
    "NVRx' monitor": ("34", ("[WARNING] [RankMonitorServer:34] Did not get subsequent heartbeat. Waited 171.92 "
        "seconds.")),
    "XLA's coordinator": (
        "3", ("UNAVAILABLE: Task /job:jax_worker/replica:0/task:3 heartbeat timeout. This indicates that the remote "
        "task has failed, got preempted, or crashed unexpectedly."),
    ),
    "XLA's list": ("6", "/job:jax_worker/replica:0/task:6"),
    "the flight recorder's analyzer": ("1", "missing ranks: {1}"),
    "its older words": ("2,3", ("Not all ranks joining collective for group 0:default_pg Missing ranks are {2, 3} "
        "[[4]]")),
    "its culprit": ("3", "error msg: Culprit rank 3; Error type: COLLECTIVE_TYPE_MISMATCH, Expected 'all_reduce'"),
    "desync debug": (
        "2,5", ("	 - To our best knowledge, ranks [2, 5] are the lagging ranks that caused this timeout. They never "
        "joined any")
    ),
    "Horovod": ("4", "Stalled ops:HorovodBroadcast_dense_1_bias_0 [missing ranks: 4]"),
    "torch's store": ("3", "DistStoreError: Timed out waiting on barrier on rank 0 (world_size=4, missing_ranks=[3])"),
    "NCCL's count": ("12", "  Rank 12 -- GPU 0 managed by process 60004 on node 10.4.109.13"),
    "a list of who did not join": ("12,14", "ALLREDUCE seq 88 timed out after 600s: ranks 12, 14 did not join"),
    "a list with and": ("12,14", "ranks 12 and 14 did not join the barrier within 1800 s"),
    "a field of who did not": ("4,9", "Collective timed out: joined=[0,1,2,3,5,6,7,8] not_joined=[4,9]"),
    "who is waited for": ("12,14", "pending collective allreduce #88: waiting for ranks [12, 14]"),
    "one who is waited for": ("6", "ALLREDUCE pending for 610 s, waiting for rank 6"),
    "so many of so many": ("7", "only 7/8 ranks joined allreduce #55, missing: [7]"),
    "who has not arrived": ("7", "barrier 'ckpt': 7/8 ranks arrived, rank 7 has not arrived after 300s"),
    "a lost heartbeat": ("9", "agent: heartbeat from rank 9 lost for 60s"),
    "a late heartbeat": ("9", "controller: rank 9 heartbeat timed out (last seen 61s ago)"),
    "no answer": ("9", "controller: rank 9 stopped responding"),
    "a hang": ("9", "monitor: rank 9 is hung (no progress for 700 s)"),
    "a lag": ("9", "lagging rank: 9 (seq 99, others 104)"),
    "a rank that is behind": ("9", "rank 9 is behind: seq 88 vs 89"),
    "a list of who came": ("2,3", "allreduce.conv1.weight [ready ranks: 1, 7, 5, 4, 6, 0]"),
    "a list of who came of so many": ("12,14", "allreduce #88 timed out; joined: [0-11, 13, 15] (14/16)"),
    "who is absent": ("3,4", "barrier timed out after 600 s, ranks [3, 4] absent"),
    "who is not in a barrier": ("3", "Timeout waiting for barrier; ranks not in barrier: [3]"),
    "one more": ("7", "waiting for 1 more rank: 7"),
    "what is pending on whom": ("12,14", "all_reduce #771: 14 of 16 ranks arrived; pending on ranks 12, 14"),
    "a missed heartbeat in JSON": ("4", '{"event":"heartbeat_missed","rank":4,"last_seen_s":61}'),
    "HCCL's remote rank": ("24", ("EI0002: The Notify register has not received the Notify record from remote rank: "
        "[24].")),
    "a missing rank": ("5", "barrier: have 0,1,2,3,4,6,7 need 8, missing rank 5"),
    "how many are waited for": ("5", "collective 812 incomplete: waiting on 1 rank (5)"),
    "nothing came from some": ("3,7", "allgather #55: no contribution from ranks 3 and 7"),
    "a peer that went": ("3", "peer rank 3 disconnected"),
    "by whom it was not joined": ("6", "  ALLREDUCE seq=88 joined by ranks 0-5,7; not joined by rank 6"),
    "numbers of several": ("2", "desync: rank 2 at seq 44, ranks 0,1,3 at seq 45"),
    "numbers in a row": ("2", "sequence numbers: rank 0: 45, rank 1: 45, rank 2: 44, rank 3: 45"),
    "guilty ranks": ("12,14", "guilty ranks: 12, 14"),
    "a suspect": ("12", "suspected faulty rank: 12"),
    "a root cause in words": ("12", "root cause: rank 12"),
    "what was expected": ("3", ("RuntimeError: rank 3 is running REDUCE_SCATTER but expected ALLREDUCE like other "
        "ranks")),
    "another collective's number": ("5", ("desync detected: rank 5 is at collective 88, all other ranks are at "
        "collective 89")),
    "another collective": ("5", "collective mismatch: rank 5 called ALLGATHER while all other ranks called ALLREDUCE"),
    "another shape": ("5", "ValueError: all_gather: tensor shape on rank 5 differs from the other ranks"),
    "a rank beside a list": ("5", "ranks 0-4,6-7 are in ALLREDUCE, rank 5 is in ALLGATHER"),
    "a straggler": ("76", ("STRAGGLER DETECTION WARNING: Some GPUs have worse relative performance. Affected ranks: "
        "{76}")),
    "stragglers": ("13,76", "STRAGGLER DETECTION WARNING: Some GPUs performance dropped. Affected ranks: [76, 13]"),
    "stragglers with their nodes": (
        "13,76", ("STRAGGLER DETECTION WARNING: Some GPUs performance dropped. Affected ranks: {StragglerId(rank=76, "
        "node='n-2'), StragglerId(rank=13, node='n-4')}"),
    ),
    "a straggler in words": ("5", "straggler report: rank 5 is 3.2x slower than median (GPU 5, node-0)"),
    "NaN by its rank": ("404", ("rank 404: found NaN in local grad norm in backward pass before data-parallel "
        "communication")),
    "NaN by Megatron's assertion": (
        "11", "AssertionError: Rank 11: found NaN in local grad norm in backward pass. Device: 3, node: n2"
    ),
    "NaN by Megatron's rerun machine": (
        "180", ("RuntimeError: Rank 180, node node-14, device 0, iteration 670314: Unexpected result nan "
        "(message='found NaN "
        "in local grad norm for bucket #0')"),
    ),
    "NaN seen by another": ("7", "NaN detected on rank 7 at step 1200: grad norm is nan"),
    "NaN in a loss": ("7", "loss from rank 7 is nan"),
    "NaN in fields": ("12", "step=900 rank=12 grad_norm=nan loss=nan"),
    "infinite on several": ("12,14", "ranks 12, 14: found Inf in local grad norm"),
    "not finite on several": ("12,14", "non-finite gradients on ranks 12, 14 at step 900"),
    "a checksum that differs": ("7", "SDC suspected: checksum of rank 7 differs from its replicas"),
    "a death": ("6", "agent: rank 6 died unexpectedly"),
    "deaths": ("6,7", "agent: ranks 6, 7 were killed by signal 9"),
    "a crash with its process": ("6", "agent: rank 6 (pid 812) crashed with SIGSEGV"),
    "an exit code": ("6", "agent: rank 6 exited with code -11"),
    "Composer": ("6", "ERROR:composer.cli.launcher:Rank 6 crashed with exit code -7."),
    "a worker's exit code": ("6", "launcher: worker for rank 6 failed with exit code 137"),
    "an exit in fields": ("6", "event=worker_exit rank=6 code=137"),
    "the kernel's work": ("6", "agent: rank 6 was OOM-killed by the kernel"),
    "lmdeploy": ("2", "RuntimeError: Rank[2] failed."),
    "vLLM": ("2", ("ERROR 07-04 [multiproc_executor.py:140] Worker proc VllmWorker-2 died unexpectedly, shutting "
        "down executor.")),
    "MPI_Abort": ("2", "MPI_ABORT was invoked on rank 2 in communicator MPI_COMM_WORLD"),
    "Open MPI's first": ("10", "  Process name: [[12167,1],10]"),
    "prterun": ("48", "prterun noticed that process rank 48 with PID 613162 on node n7 exited on signal 9 (Killed)."),
    "srun": ("17", "srun: error: node-3: task 17: Segmentation fault (core dumped)"),
    "Lightning": ("4", ("[rank: 4] Child process with PID 812 terminated with code -9. Forcefully terminating all "
        "other")),
    "a spawning parent": ("2", ("torch.multiprocessing.spawn.ProcessExitedException: process 2 terminated with "
        "signal SIGKILL")),
    "a kernel's line with a rank": ("11", ("node-1 rank 11: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the "
        "bus.")),
}  # fmt: skip

WATCHDOGS = {
    "who is behind, in new words": ("5", text(status(0, 747, 715), status(1, 747, 715), status(5, 715, 714), status(7,
        747, 715))),
    "who is behind, on Ascend": (
        "2", text(*(late(rank, 196 - (rank == 2)).replace("NCCL(", "HCCL(") for rank in range(4))),
    ),
    "nobody is behind": (None, text(status(0, 747, 715), status(1, 747, 715), status(2, 747, 715))),
    "who was told and waits in nothing": (
        "5", text(*(f"{late(rank, 137)}\n{status(rank, 137, 136)}" for rank in (0, 2, 3)), dumped(5, 136, 136)),
    ),
    "two who wait in nothing": (
        "5,6", text(*(f"{late(rank, 137)}\n{status(rank, 137, 136)}" for rank in (0, 2, 3)), dumped(5, 136, 136),
        dumped(6, 136, 136)),
    ),
    "who was told and waits too": (None, text(late(0, 137), dumped(1, 137, 136), dumped(2, 137, 136), status(0, 137,
        136))),
    "the rank in the world, not in the group": (
        "13", text(*(late(rank, 217 - (rank == 13), member=rank - 12) for rank in range(12, 16))),
    ),
    "the same members: several groups": (
        None, text(*(late(rank, 217 - (rank == 13), member=rank % 2) for rank in range(12, 16))),
    ),
    "groups that call themselves alike": (
        None, text(*(status(rank % 4, 50 - rank // 4, 49 - rank // 4, "PG 1").replace("[rank", f"[rank{rank // 4}")
        for rank in range(7))),
    ),
    "numbers of pairs are not those of a group": (
        None, text(late(0, 55, op="SEND"), late(1, 55, op="SEND"), late(2, 54, op="RECV")),
    ),
    "pending collectives, one behind": (
        "3", text(*(f"[rank{rank}] pending collective: ALLREDUCE seq={1042 - (rank == 3)}" for rank in range(4))),
    ),
    "pending collectives, another one": (
        "3", text(*(f"[rank{rank}] pending collective: {'ALLGATHER' if rank == 3 else 'ALLREDUCE'} seq=42"
        for rank in range(4))),
    ),
    "lines of Ray's process are of its rank": (
        "9", text("(Worker pid=92, ip=10.0.0.1) [rank9]: step 8", "(Worker pid=93, ip=10.0.0.1) [rank1]: step 8",
        f"(Worker pid=92, ip=10.0.0.1) {MEMORY}", f"(Worker pid=93, ip=10.0.0.1) {GONE}"),
    ),
    "who waits for whom": (
        "2", text("[rank0]: recv pending for 610 s, waiting for rank 1", "[rank1]: recv pending for 610 s, waiting "
        "for rank 2",
        "[rank2]: iteration 7", "[rank3]: recv pending for 610 s, waiting for rank 0"),
    ),
    "who is received from": ("3", text(*(f"[rank{one}]: recv from rank {one + 1} timed out after 600s" for one in (1,
        2, 0)))),
    "two wait for each other": (None, text("[rank0]: recv from rank 1 timed out", "[rank1]: recv from rank 0 timed "
        "out")),
    "two that are watched": (
        "34,58", text(*(f"[RankMonitorServer:{rank}] Did not get initial heartbeat. Waited 60.00 seconds."
        for rank in (34, 58)),
        late(0), late(1)),
    ),
    "a barrier's list": (
        "6,9", text("# of tasks that reached the barrier: 14/16.", "The first task at the barrier: "
        "/job:jax_worker/replica:0/"
        "task:13. Some timed out task names:", "/job:jax_worker/replica:0/task:6", "/job:jax_worker/replica:0/task:9"),
    ),
    "NCCL counts who is behind": (
        "7", text("  31 ranks have launched up to operation 641", "  1 rank has launched up to operation 640",
        "  Rank 7 -- GPU 7 managed by process 32 on node 10.0.0.4"),
    ),
    "NCCL counts who is ahead": (
        None, text("  30 ranks have launched up to operation 640", "  2 ranks have launched up to operation 641",
        "  Rank 12 -- GPU 4 managed by process 32 on node 10.0.0.4"),
    ),
    "the monitored barrier": (
        "2", text("[rank0]: RuntimeError: [Rank 0]: Rank 2 failed to pass monitoredBarrier in 1800000 ms",
        f"[rank0]: {CLOSED}",
        f"[rank1]: {BARRIER_ECHO.format(1)}", f"[rank3]: {BARRIER_ECHO.format(3)}"),
    ),
    "the monitored barrier's echo": (None, text(f"[rank1]: {BARRIER_ECHO.format(1)}", f"[rank3]: "
        f"{BARRIER_ECHO.format(3)}")),
    "a slow one, and one that died": (
        "9", text("STRAGGLER DETECTION WARNING: Some GPUs performance dropped. Affected ranks: {3}", "srun: error: "
        "n1: task 9: Killed", late(0)),
    ),
    "a slow one, and one that is behind": (
        "5", text("straggler: rank 3", status(0, 747, 715), status(1, 747, 715), status(5, 715, 714), status(3, 747,
        715)),
    ),
}  # fmt: skip

REPORTS = {
    "the odd one of four": (
        "2", text(*(mismatch(rank, fingerprint(8, "ALLREDUCE"), 2, fingerprint(8, "REDUCE")) for rank in (0, 1, 3)),
        mismatch(2, fingerprint(8, "REDUCE"), 0, fingerprint(8, "ALLREDUCE"))),
    ),
    "the odd one says nothing": (
        "7", text(*(mismatch(rank, fingerprint(101, "ALLGATHER", "1"), 7,
        "CollectiveFingerPrint(SequenceNumber=0OpType=REDUCE)")
        for rank in (0, 1))),
    ),
    "another shape": (
        "3", text(*(mismatch(rank, fingerprint(8, "ALLREDUCE", "64, 64"), 3, fingerprint(8, "ALLREDUCE", "64, 32"))
        for rank in (0, 1, 2))),
    ),
    "of two the one that is behind": ("1", mismatch(0, fingerprint(101, "ALLREDUCE"), 1, fingerprint(100,
        "ALLREDUCE"))),
    "two at the same number": (
        None, mismatch(1, fingerprint(31, "ALLREDUCE", "19"), 0, fingerprint(31, "ALLREDUCE", "51")),
    ),
    "two against two": (
        None, text(*(mismatch(one, fingerprint(8, "ALLREDUCE"), 2, fingerprint(8, "REDUCE")) for one in (0, 1)),
        *(mismatch(one, fingerprint(8, "REDUCE"), 0, fingerprint(8, "ALLREDUCE")) for one in (2, 3))),
    ),
    "what each of them runs": (
        "2", text(*(f"[I ProcessGroupWrapper.cpp:562] [Rank {rank}] Running collective: "
        f"{fingerprint(number, 'ALLREDUCE')}"
        for number in (1275, 1276, 1277) for rank in range(4) if (rank, number) != (2, 1277)), late(0)),
    ),
    "own words": (
        "3", text(*(f"[rank{rank}] collective mismatch at seq 18: ALLREDUCE numel={512 if rank == 3 else 1024}"
        for rank in range(4))),
    ),
    "a list, another operation": (
        "2", text("collective mismatch detected", *(f"rank {rank} seq=45 op=ALL{'GATHER' if rank == 2 else 'REDUCE'}"
        for rank in range(4))),
    ),
    "a list, another size": (
        "2", text("collective mismatch detected:", *(f"  rank {rank}: ALLREDUCE [{2048 if rank == 2 else 4096}]"
        for rank in range(4))),
    ),
    "a list of two, one behind": (
        "1", text("collective mismatch detected:", "  rank 0: ALLREDUCE seq=45", "  rank 1: ALLREDUCE seq=44"),
    ),
    "a list of two": (None, text("collective mismatch detected:", "  rank 0: ALLREDUCE seq=45", "  rank 1: "
        "ALLGATHER seq=45")),
    "a list of nothing": (None, text("last calls:", "  rank 0: ALLREDUCE [4096]", "  rank 1: ALLGATHER [96]", "  "
        "rank 2: ALLREDUCE [4096]")),
    "a model that differs from all": (
        "0", text(*(f"[rank{rank}]: RuntimeError: DDP expects same model across all ranks, but Rank {rank} has 64 "
        "params, while rank 0 has inconsistent 60 params." for rank in (1, 2, 3))),
    ),
    "two models": (
        None, ("[rank1]: RuntimeError: DDP expects same model across all ranks, but Rank 1 has 64 params, while "
        "rank 0 has inconsistent 60 params."),
    ),
    "around a rank is not at it": (None, ("NCCL WARN Mismatched collective detected, please check your calls at and "
        "around rank 39.")),
    "a table of memory is no report": (None, text("rank 0 has 12 GB, rank 1 has 13 GB", late(0), late(1))),
    "NaN spreads": (
        "3", text("[rank3]: 2026-01-01 10:00:01 Rank 3: found NaN in local forward loss calculation. Device: 3",
        "[rank7]: 2026-01-01 10:00:02 iteration 70 | lm loss: nan |"),
    ),
    "NaN on all": (None, text(*(f"[rank{rank}]: AssertionError: Rank {rank}: found NaN in local grad norm"
        for rank in range(8)))),
    "a loss that all print": (None, text(*(f"[rank{rank}] iteration 9 | lm loss: nan | grad norm: nan"
        for rank in range(4)))),
}  # fmt: skip

ENDS = {
    "torchrun saw a kill first": ("3", summary(row(0, 3, -9, "06:18:50"), *(row(rank, rank, -6) for rank in (0, 1,
        2)))),
    "torchrun saw one only": (
        "5", text("E0325 20:57:27.620000 2606 torch/distributed/elastic/multiprocessing/api.py:869] failed "
        "(exitcode: -9) "
        "local_rank: 5 (pid: 4005) of binary: /bin/python", summary(row(0, 5, -9))),
    ),
    "torchrun saw watchdogs' ends": (None, text(late(0), late(1), summary(row(0, 0, -6), row(1, 1, -6)))),
    "torchrun saw all, one says why": (
        "2", text("[rank2]: KeyError: 'labels'", gone(0), gone(1), summary(*(row(rank, rank, 1) for rank in (0, 1,
        2)))),
    ),
    "a traceback of nobody, and one that ended": (
        "2", text("Traceback (most recent call last):", "KeyError: 'x'",
        "WARNING:torch.distributed.elastic.multiprocessing.api:"
        "Sending process 91129 closing signal SIGTERM", summary(row(0, 2, 1))),
    ),
    "a traceback of nobody, and two that ended": (
        None, text("Traceback (most recent call last):", "KeyError: 'x'", summary(row(0, 0, 1), row(1, 1, 1))),
    ),
    "pdsh's hosts, two summaries": (
        "12", text(*(f"n{node}: {line}" for node, rows in ((1, row(0, 3, -6, "07:35:09")), (2, row(0, 12, -9,
        "07:25:01")))
        for line in summary(rows).split("\n"))),
    ),
    "srun ends the rest, many in a line": (
        "17", text("srun: error: node-3: task 17: Exited with exit code 1", "srun: error: node-1: tasks "
        "0-16,18-31: Killed"),
    ),
    "srun ends the rest, after it says so": (
        "1", text("srun: error: n1: task 1: Exited with exit code 1", "srun: Terminating StepId=7.0", "srun: "
        "error: n0: task 0: "
        "Killed"),
    ),
    "srun saw all end": (None, "srun: error: node-1: tasks 0-7: Killed"),
    "srun's want of memory": (
        "6", text("slurmstepd: error: Detected 1 oom_kill event in StepId=77.0. Some of the step tasks have been "
        "OOM Killed.",
        "srun: error: node-1: task 6: Out Of Memory", "srun: Terminating StepId=77.0", "srun: error: node-1: tasks "
        "0-5,7: Killed"),
    ),
    "Intel MPI": (
        "3", text("=   RANK 3 PID 4821 RUNNING AT n1", "=   KILLED BY SIGNAL: 9 (Killed)", "=   RANK 0 PID 4818 "
        "RUNNING AT n0",
        "=   KILLED BY SIGNAL: 15 (Terminated)"),
    ),
    "Open MPI's signal": ("3", f"[1,3]<stderr>:[n3:123] Signal: Segmentation fault (11)\n[1,0]<stderr>:{GONE}"),
    "a spawned process's traceback": ("2", (f"-- Process 2 terminated with the following error:\nValueError: "
        f"bad\n{gone(0)}")),
    "DeepSpeed names its last command": (
        None, text(f"[2026-04-14 13:11:27,885] [ERROR] [launch.py:434:sigkill_handler] {COMMAND.format(1)} exits "
        "with return code = -9"),
    ),
    "DeepSpeed's process by its number": (
        "1", text(SPAWNED.format(0, 13266), SPAWNED.format(1, 13267), "[2026-04-14 13:11:27,885] [ERROR] "
        "[launch.py:325] [13267] "
        "exits with return code = -9", f"[rank0]: {CLOSED}"),
    ),
    "a process by the number that it said": (
        "3", text("[rank3]: starting, pid=4242", "[rank0]: starting, pid=4240", "[2026-01-08 16:13:55,768] [ERROR] "
        "[launch.py:325:sigkill_handler] [4242] exits with return code = -9", f"[rank0]: {CLOSED}"),
    ),
    "a kernel's victim by its number": (
        "1", text(SPAWNED.format(0, 13266), SPAWNED.format(1, 13267), "kernel: Out of memory: Killed process 13267 "
        "(python3)",
        f"[rank0]: {CLOSED}"),
    ),
    "who was first by times before the prefix": (
        "5", text("2026-01-01 10:00:01 [rank5]: KeyError: 'x'", "2026-01-01 10:00:09 [rank2]: IndexError: list "
        "index out of range"),
    ),
    "local ranks of several nodes": (
        "11", text("[default3]:[rank11]: KeyError: 'x'", f"[default3]:{gone(3)}", f"[default0]:{gone(8)}"),
    ),
    "a status of each": ("4", text(*(f"rank {rank}: exit status {137 if rank == 4 else 143}" for rank in (0, 1, 4)))),
    "a child's status": ("4", text("agent n0: child rank=4 pid=77 status=-11", "agent n0: child rank=0 pid=73 "
        "status=-15")),
    "a death that was seen, not who is missed": (
        "5", text("[rank0]: lost connection to rank 3", gone(3), summary(row(0, 5, -9), row(1, 0, 1))),
    ),
    "a cause, not who waits for it": (
        "2", text(f"[rank2]: {MEMORY}", "[rank0]: waiting for rank 1 timed out", "[rank1]: waiting for rank 2 "
        "timed out"),
    ),
    "who failed in others' words": ("3", text(*(f"[rank{rank}]: RuntimeError: rank 3 failed, aborting" for rank in (4,
        5)))),
    "who failed in its own words, by an echo": (
        None, text(*(f"[rank{rank}]: rank {rank} failed due to NCCL error: remote process exited" for rank in (2, 3))),
    ),
    "a rank in a group, in words": (None, "TP rank 0: CUDA out of memory"),
    "all in one line": (None, text("ranks 0-7: found NaN in local grad norm", "[rank0]: stop")),
    "everybody was told to end": (None, text(*(f"[rank{rank}]: SignalException: Process 40 got signal: 15"
        for rank in range(4)))),
    "everybody died": (None, text(*(f"rank {rank} died with signal 9" for rank in range(4)))),
    "a peer that is everybody's": (None, f"[rank0]: {CLOSED}\n[rank1]: {CLOSED}"),
}  # fmt: skip

BY_RANK = {
    "NaN by its number in another's text": ("404", {"0": "rank 404: found NaN in local grad norm", "404": "",
        "7": "iteration 9"}),
    "two that did not join": (
        "12,14", {"0": "collective ALLREDUCE (seq 8812) pending for 600 s; not joined: ranks 12, 14", "12": "",
        "14": ""},
    ),
    "two that are behind": (
        "2,3", {str(rank): f"last enqueued work: {98 + 2 * (rank < 2)}, last completed work: 98" for rank in range(4)},
    ),
    "last numbers in another order": (
        "2", {str(rank): f"last completed seq {1041 - (rank == 2)}, last enqueued seq {1043 - 2 * (rank == 2)}"
        for rank in range(4)},
    ),
    "last numbers in JSON": ("2", {str(rank): f'{{"last_enqueued": {43 - (rank == 2)}, "last_completed": 41}}'
        for rank in range(4)}),
    "shapes at a number": ("2", {str(rank): f"all_gather seq 7 shape [{8 - (rank == 2)}, 4096]" for rank in range(3)}),
    "who has nothing pending": (
        "2", {str(rank): "no pending collective" if rank == 2 else "pending collective: allreduce seq 40"
        for rank in range(4)},
    ),
    "slow ones": ("17,18", {"0": "slow ranks: [17, 18] (2.1x median)", "17": "step 8", "18": "step 8"}),
    "numbers in fields": ("2", {str(rank): f"watchdog: seq={100 - (rank == 2)} op=ALLREDUCE timed out"
        for rank in range(4)}),
    "memory, and echoes": ("6", {"0": "ConnectionResetError: [Errno 104] Connection reset by peer", "6": MEMORY,
        "7": GONE}),
    "a mismatch": (
        "3", {str(rank): mismatch(rank, fingerprint(5, "ALLREDUCE"), 3, fingerprint(5, "BROADCAST")) for rank in (0,
        1)} | {"3": ""},
    ),
    "two that differ": (None, {str(rank): f"collective mismatch at seq 18: ALLREDUCE numel={rank}" for rank in (10,
        11)}),
    "torchrun's first, with times": (
        "2", {"torchrun": summary(row(0, 2, -11, "06:18:50"), row(1, 0, -6, "06:18:59")), "0": late(0),
        "2": "iteration 8"},
    ),
    "a host that gloo names": ("n3", {"n1": "Connection closed by peer [n3]:38032", "n2": "Connection closed by "
        "peer n3<41>", "n3": ""}),
    "a peer by the address that somebody has": (
        "2", {"0": CLOSED.replace("127.0.0.1", "10.0.0.4"), "1": CLOSED.replace("127.0.0.1", "10.0.0.4"),
        "3": "iteration 7",
        "2": "rank 2 runs on 10.0.0.4"},
    ),
    "a peer by an address that two have": (
        None, {"0": CLOSED.replace("127.0.0.1", "10.0.0.4"), "1": "rank 2 is on 10.0.0.4, and rank 3 too",
        "2": "rank 2 is on 10.0.0.4",
        "3": "rank 3 is on 10.0.0.4"},
    ),
    "a launcher's process by its number": (
        "3", {"launcher": "[4242] exits with return code = -9", "3": "starting, pid 4242", "0": "Connection reset "
        "by peer"},
    ),
    "stacks": ("0", {"0": "    get (queue.py:170)", "1": "    all_reduce (torch/distributed/distributed_c10d.py:2501)",
    "2": "    all_reduce (torch/distributed/distributed_c10d.py:2501)"}),
}  # fmt: skip

HEALTHY = (
    "[rank1]: Waiting for rank 0 to finish preprocessing",
    "heartbeat from rank 3 at step 9",
    "heartbeat from rank 3 received after 61 s",
    "rank 3 joined the group",
    "all 16 ranks joined",
    "rank 0 has 12 GB while other ranks have 10 GB",
    "rank 3 has shape [4, 4]; other dims are padded",
    "rank 3 is late binding the optimizer",
    "rank 3 dead weight tensors removed",
    "rank 3 exited with code 0",
    "rank 0 called barrier",
    "ranks [0, 1, 2, 3] are in group tp0; all other ranks are in group tp1",
    "collective timeout set to 600 s on rank 3",
    "max in-flight requests: 3",
    "no pending collectives",
    "missing_ranks=[]",
    "not joined: []",
    "rank 3: infinite data loader, loss is averaged over 4 ranks",
    "straggler detection is enabled on rank 0",
    "straggler threshold for rank 0: 0.7",
    "no stragglers detected among ranks 0-15",
    "slowest rank: 3 (512 ms), fastest rank: 0 (500 ms)",
    "  Rank=76 Node=n1 Score=0.98",
    "[Gloo] Rank 3 is connected to 7 peer ranks. Expected number of connected peer ranks is : 7",
    "worker_exit rank=6 code=0",
)


@pytest.mark.parametrize("form", PREFIXES.values(), ids=PREFIXES.keys())
def test_whose_line_it_is(form: str) -> None:
    found = diagnose_text(text(form.format(0, GONE), form.format(11, ILLEGAL), form.format(1, GONE)))
    assert found.root_rank == "11", found.evidence


@pytest.mark.parametrize(("root", "line"), ACCUSED.values(), ids=ACCUSED.keys())
@pytest.mark.parametrize("speaker", ["", "[rank0]: "], ids=["nobody", "rank 0"])
def test_whom_a_line_accuses(root: str, line: str, speaker: str) -> None:
    found = diagnose_text(text(speaker + line, late(0), late(1)))
    assert found.root_rank == root, (found.rule, found.reason)


@pytest.mark.parametrize(
    ("root", "log"),
    [pytest.param(*case, id=name) for table in (WATCHDOGS, REPORTS, ENDS) for name, case in table.items()],
)
def test_root(root: str | None, log: str) -> None:
    found = diagnose_text(log)
    assert found.root_rank == root, (found.rule, found.reason)


@pytest.mark.parametrize(("root", "ranks"), BY_RANK.values(), ids=BY_RANK.keys())
def test_root_by_rank(root: str | None, ranks: dict[str, str]) -> None:
    found = diagnose_ranks(ranks)
    assert found.root_rank == root, (found.rule, found.reason)


@pytest.mark.parametrize("line", HEALTHY)
def test_talk_of_ranks_is_no_failure(line: str) -> None:
    assert diagnose_text(line).root_rank is None
    assert diagnose_text(line).severity == "INFO"
