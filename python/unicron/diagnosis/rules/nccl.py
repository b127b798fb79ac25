"""What NCCL and the process group around it say: networks, communicators, and the watchdog.

A watchdog's timeout says only that *some* rank is late; the rank that prints it is a witness. "Watchdog thread
terminated with exception: CUDA error" is a CUDA error: such a line meets a rule of the CUDA family as well, and a cause
outweighs an echo. An InfiniBand completion with status 12 names the peer: the pair is suspect, and the peer's own port
error settles it; status 5 is what is left of a queue pair that ended before.
"""

from __future__ import annotations

from unicron.diagnosis.words import Category, Family, Rule, Scope, Strength
from unicron.types import Severity

WATCHDOG = "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp"
IB = "NCCL src/transport/net_ib.cc"
SOCKET = "NCCL src/misc/socket.cc"
VERBS = "NCCL src/misc/ibvwrap.cc"

WATCHDOG_RULES = (
    Rule(
        "watchdog.first-collective",
        r"(?:Timeout|timeout): WorkNCCL\(SeqNum=[1-9],|Timeout at NCCL work: [1-9],",
        Severity.SEV2, Scope.JOB, Category.NCCL_TIMEOUT, Strength.ECHO,
        "one of the first collectives of a group never ended: peer access, network or set-up; trying again in place "
        "seldom helps",
        WATCHDOG,
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE, Timeout(ms)=600000)",
    ),
    Rule(
        "watchdog.stuck",
        r"(?i)watchdog (?:thread )?got stuck|heartbeat monitor timed out|watchdog hang|"
        r"without making progress in monitoring",
        Severity.SEV2, Scope.PROCESS, Category.TASK_HANG, Strength.DEATH,
        "this rank's own watchdog stands still: a call of CUDA or NCCL does not return, or a thread holds the "
        "GIL in one",
        WATCHDOG,
        "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued "
        "collectives.",
    ),
    Rule(
        "watchdog.timeout",
        r"(?i)Watchdog caught collective operation time.?out|Timeout at NCCL work|collective operation timeout|"
        r"detected by watchdog|Some NCCL operations have failed or timed out|Work[NHX]CCL\(.{0,300}(?:timed out|"
        r"Timeout\(ms\))|"
        r"\b(?:all_?reduce|all_?gather\w*|reduce_?scatter\w*|broadcast|barrier|all_?to_?all\w*|collective)\b"
        r".{0,40}\btimed out|\b(?:all_?reduce|all_?gather|reduce_?scatter|broadcast|barrier) timeout(?! set)|"
        r"(?:ran|running) for \d+ milliseconds before timing out|NCCL (?:watchdog )?time(?:d )?out|"
        r"taking the entire process down|Watchdog thread(?! terminated with exception: (?:NCCL|CUDA))|"
        r"HeartbeatMonitor|"
        r"NCCL communicator encountered error set by ProcessGroupNCCL",
        Severity.SEV3, Scope.JOB, Category.NCCL_TIMEOUT, Strength.ECHO,
        "some rank is late in a collective; who says so is a witness", WATCHDOG,
        "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=88, OpType=ALLREDUCE, ...)",
    ),
    Rule(
        "watchdog.hccl", r"\bHccl\w+, error code is \d|\bEI000[26]: ",
        Severity.SEV3, Scope.JOB, Category.NCCL_TIMEOUT, Strength.ECHO,
        "a collective between Ascend devices failed or timed out: some rank is late or gone", "CANN, HCCL error codes",
        "EI0006: [PID: 77] Getting socket times out. Reason: Remote Rank did not send the data in time.",
    ),
    Rule(
        "watchdog.told",
        r"(?i)observed flight recorder dump signal from another rank|"
        r"received a (?:dump|timeout) signal due to .{0,60}from\s{1,2}rank \d|"
        r"received a global (?:timeout|\w+ signal) from another rank|found key in store",
        Severity.SEV3, Scope.JOB, Category.NCCL_TIMEOUT, Strength.ECHO,
        "this rank was told that another one timed out, and had not timed out itself", WATCHDOG,
        "[Rank 2] Observed flight recorder dump signal from another rank via TCPStore.",
    ),
    Rule(
        "watchdog.own",
        r"(?i)received a (?:dump|timeout) signal (?:due to .{0,60})?from this local rank|"
        r"First PG on this rank to signal dumping",
        Severity.SEV3, Scope.JOB, Category.NCCL_TIMEOUT, Strength.ECHO,
        "a collective of this rank timed out: some rank is late in it", WATCHDOG,
        "[Rank 2] Received a dump signal due to a collective timeout from this local rank and we will try our best "
        "to dump the debug info.",
    ),
    Rule(
        "watchdog.waiting",
        r"received (?:a )?dump signal|To avoid data inconsistency|dumping debug info|"
        r"signal dumping|"
        r"FlightRecorder (?:dump|detected)|Timeout waiting for.{0,40}barrier|monitoredBarrier",
        Severity.SEV3, Scope.JOB, Category.NCCL_TIMEOUT, Strength.ECHO,
        "this rank ends because a collective timed out somewhere", WATCHDOG,
        "[Rank 2] To avoid data inconsistency, we are taking down the entire process.",
    ),
    Rule(
        "watchdog.stack",
        r"(?:distributed_c10d\.py|torch/distributed).{0,80}\bin (?:all_?reduce|all_?gather\w*|"
        r"reduce_?scatter\w*|broadcast\w*|"
        r"barrier|monitored_barrier|all_to_all\w*|recv|send|wait)\b|"
        r"\b(?:all_?reduce|all_?gather\w*|reduce_?scatter\w*|broadcast\w*|barrier|all_to_all\w*|recv|send|wait) "
        r"\(.{0,120}(?:distributed_c10d\.py|torch/distributed)|"
        r"torch/cuda/.{0,60}\bin synchronize\b|\bsynchronize \(.{0,120}torch/cuda/|"
        r"p2p_communication\.py.{0,40}\bin \w|\w \(.{0,120}p2p_communication\.py:|"
        r"(?i:(?:waiting in|(?:stuck|blocked|hangs?) (?:in|at|for)) .{0,40}(?:all_?reduce|all_?gather|barrier|"
        r"collective|nccl))",
        Severity.SEV3, Scope.JOB, Category.NCCL_TIMEOUT, Strength.ECHO,
        "a stack inside a collective: this rank waits", "faulthandler, py-spy",
        '  File "torch/distributed/distributed_c10d.py", line 2051 in all_reduce',
    ),
    Rule(
        "watchdog.pending",
        r"(?i)flight recorder.{0,400}state[=: ]+(?:scheduled|started)|"
        r"(?<!no )(?<!0 )\b(?:pending|in.?flight) collective|"
        r"\bcollectives? (?:is |are )?(?:still )?(?:pending|in flight)",
        Severity.SEV2, Scope.PROCESS, Category.TASK_HANG, Strength.ECHO,
        "this rank has started a collective that has not ended, and so has everybody: a hang", "torch FlightRecorder",
        "flight recorder: default_pg enqueued=8 completed=7; last entry nccl:all_reduce seq=8 state=scheduled",
    ),
    Rule(
        "watchdog.idle",
        r"(?i)flight recorder.{0,200}no (?:pending )?entr|"
        r"\bno (?:pending|outstanding|in.?flight) (?:collective|work|operation)",
        Severity.INFO, Scope.PROCESS, Category.TASK_HANG, Strength.NOISE,
        "this rank waits in no collective", "torch FlightRecorder", "flight recorder: no pending entries",
    ),
    Rule(
        "watchdog.aborted",
        r"(?i)NCCL communicator was aborted|ncclCommAbort|communicator (?:has been|was) aborted|ncclCommFinalize",
        Severity.SEV3, Scope.PROCESS, Category.NCCL_TIMEOUT, Strength.ECHO,
        "the communicator was ended, by a timeout or by whoever failed first", WATCHDOG,
        "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 5.",
    ),
)  # fmt: skip

NETWORK_RULES = (
    Rule(
        "nccl.flushed",
        r"(?i)status=(?:\w+\()?5\b|vendor[_ ]err(?:or)?[ =]249|Work Request Flushed|IBV_WC_WR_FLUSH_ERR|"
        r"completion with error 5\b|WR flush",
        Severity.SEV3, Scope.LINK, Category.OTHER_NETWORK, Strength.ECHO,
        "flushed out of a queue pair that had failed before", IB,
        "NET/IB : Got completion from peer 10.1.0.7<4791> with status=5 opcode=0 len=0 vendor err 249 (Recv)",

        is_final=True,
    ),
    Rule(
        "nccl.no-ack",
        r"(?i)(?:retry|retry count) exceeded|(?:status|with error)[= ]*(?:\w+\()?1[23]\b|"
        r"vendor[_ ]err(?:or)?[ =]129|IBV_WC_RETRY_EXC_ERR|"
        r"transport retry counter exceeded|"
        r"retry counter exceeded|RNR retry",
        Severity.SEV3, Scope.LINK, Category.OTHER_NETWORK, Strength.WITNESS,
        "packets to the peer were not acknowledged: link, or the peer is gone; the pair is suspect", IB,
        "NET/IB : Got completion from peer 10.1.0.7<4791> with status=12 opcode=0 len=32768 vendor err 129 (Send)",
    ),
    Rule(
        "nccl.remote-fault",
        r"(?i)(?:Got completion|wc).{0,160}(?:status|error)[= ]*(?:\w+\()?(?:4|9|10|11)\b|"
        r"IBV_WC_(?:LOC_PROT|REM_INV_REQ|REM_ACCESS|REM_OP)_ERR|vendor[_ ]err(?:or)?[ =]13[6-8]|"
        r"local protection error|"
        r"remote access error|remote operation error|remote invalid request",
        Severity.SEV2, Scope.PROCESS, Category.OTHER_NETWORK, Strength.WITNESS,
        "the two ends disagree on registered memory: a process died or is corrupt", IB,
        "NET/IB : Got completion from peer 10.1.0.7<4791> with status=10 opcode=0 len=0 vendor err 136 (Send)",
    ),
    Rule(
        "nccl.completion",
        r"Got completion (?:from|with)|NET/IB.{0,20}completion.{0,40}error",
        Severity.SEV3, Scope.LINK, Category.OTHER_NETWORK, Strength.WITNESS,
        "an InfiniBand request failed", IB,
        "NET/IB : Got completion from peer 10.1.0.7<4791> with status=1 opcode=0 len=0 vendor err 0",
    ),
    Rule(
        "nccl.device-fatal",
        r"(?i)async (?:fatal )?event.{0,60}(?:catastrophic|device fatal)|local catastrophic error|"
        r"IBV_EVENT_DEVICE_FATAL",
        Severity.SEV1, Scope.NODE, Category.OTHER_NETWORK, Strength.HARDWARE,
        "the network adapter of this node failed", IB,
        "NET/IB : mlx5_0:1 Got async fatal event: local catastrophic error",
    ),
    Rule(
        "nccl.port-up",
        r"(?i)async event.{0,60}port active|IBV_EVENT_PORT_ACTIVE",
        Severity.INFO, Scope.LINK, Category.LINK_FLAPPING, Strength.NOISE,
        "the port came back", IB, "NET/IB : mlx5_3:1 Got non-fatal async event: port active(9)",
        is_final=True,
    ),
    Rule(
        "nccl.port-event",
        r"(?i)async (?:fatal )?event.{0,60}(?:port error|GID|LID change|P_?Key|SM change|client reregister)|"
        r"IBV_EVENT_PORT_ERR|port error ?\(\d+\)",
        Severity.SEV3, Scope.LINK, Category.LINK_FLAPPING, Strength.LINK,
        "this rank's own port went down or changed: it may come back; if not, the node is to be isolated", IB,
        "NET/IB : mlx5_3:1 Got async event : port error",
    ),
    Rule(
        "nccl.async-event",
        r"(?i)Got (?:non-fatal |fatal )?async (?:fatal )?event",
        Severity.SEV3, Scope.LINK, Category.OTHER_NETWORK, Strength.LINK,
        "an event of this rank's network adapter", IB, "NET/IB : mlx5_3:1 Got async event: QP access error",
    ),
    Rule(
        "nccl.adapter-resources",
        r"(?i)ibv_(?:reg_mr\w*|create_cq|create_qp|alloc_pd|reg_dmabuf_mr|open_device)\b.{0,40}failed|memlock|"
        r"NET/OFI.{0,40}(?:Unable to register memory|Couldn't open)",
        Severity.SEV1, Scope.NODE, Category.OTHER_NETWORK, Strength.HARDWARE,
        "the adapter of this node gives no more resources (memlock limit, adapter limit): it stays so; all nodes: "
        "configuration", VERBS,
        "misc/ibvwrap.cc:252 NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory",
    ),
    Rule(
        "nccl.qp-invalid",
        r"(?i)ibv_modify_qp.{0,60}(?:Invalid argument|\b22\b)",
        Severity.FATAL, Scope.JOB, Category.OTHER_NETWORK, Strength.CAUSE,
        "addresses of the fabric are set up wrong (GID index, routing)", VERBS,
        "misc/ibvwrap.cc:310 NCCL WARN Call to ibv_modify_qp failed with error Invalid argument",
    ),
    Rule(
        "nccl.qp-unreachable",
        r"(?i)ibv_(?:modify_qp|post_send|post_recv|poll_cq)\b.{0,60}(?:failed|error|timed out)",
        Severity.SEV3, Scope.LINK, Category.OTHER_NETWORK, Strength.WITNESS,
        "the queue pair could not reach its peer", VERBS,
        "misc/ibvwrap.cc:310 NCCL WARN Call to ibv_modify_qp failed with error Connection timed out",
    ),
    Rule(
        "nccl.fabric-plugin",
        r"(?i)NET/OFI.{0,200}(?:error|RC: |undeliverable|fail)|fi_cq_readerr|UNDELIVERABLE|libfabric.{0,40}error|"
        r"NET/(?:FastSocket|Socket|UCX|SHARP|IBext).{0,80}(?:error|fail)",
        Severity.SEV3, Scope.LINK, Category.OTHER_NETWORK, Strength.WITNESS,
        "the network plugin could not deliver", "aws-ofi-nccl, libfabric fi_errno",
        "NET/OFI Request 0x7f completed with error. RC: 113. Error: 2 (UNDELIVERABLE)",
    ),
    Rule(
        "nccl.connect",
        r"(?i)^(?!.*client socket)(?=.*connect).*(?:Call to connect|socket\w*Connect\w*|connect to|"
        r"connecting to).{0,100}"
        r"(?:connection refused|connection abort|no route to host|timed out|unreachable|reset by peer|failed)|"
        r"^.*socketPollConnect",
        Severity.SEV3, Scope.LINK, Category.CONN_REFUSED_RESET, Strength.WITNESS,
        "a peer could not be reached; at every start it is configuration", SOCKET,
        "misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 10.0.0.8<38455> failed : Connection refused",
    ),
    Rule(
        "nccl.peer-closed",
        r"(?i)(?:Net|socket\w*|NCCL WARN|bootstrap).{0,120}(?:connection closed by remote peer|"
        r"connection reset by peer|"
        r"broken pipe|call to (?:recv|send|recv from|send to).{0,80}failed|remote process has? ?exited)|"
        r"Connection closed by remote peer|socketProgress\w*",
        Severity.SEV3, Scope.PROCESS, Category.CONN_REFUSED_RESET, Strength.ECHO,
        "a peer's process ended or closed its connection", SOCKET,
        "misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer node7<41210>",
    ),
)  # fmt: skip

USE_RULES = (
    Rule(
        "nccl.duplicate-gpu", r"(?i)Duplicate GPU detected|Multiple Ranks are using the same GPU",
        Severity.FATAL, Scope.JOB, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "two ranks were given one GPU: the launch is wrong", "NCCL src/init.cc",
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 50000",
        is_mutual=True,
    ),
    Rule(
        "nccl.no-interface",
        r"(?i)no socket interface found|bootstrap.{0,40}no (?:socket )?interface|is neither AF_INET|"
        r"NCCL_SOCKET_IFNAME.{0,60}(?:not found|no match|no such|invalid|does not)|"
        r"unable to find (?:address for|interface)|no usable (?:\w+ )?interface|"
        r"no device found (?:matching|after)|Invalid NCCL_COMM_ID",
        Severity.FATAL, Scope.JOB, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "the interface that NCCL was told to use does not exist or has no address", "NCCL src/bootstrap.cc",
        "NCCL WARN Bootstrap : no socket interface found",
    ),
    Rule(
        "nccl.mismatch",
        r"(?i)mismatched collective|message truncated|collective mismatch|Detected mismatch between collectives|"
        r"collectives? (?:fingerprint|differ)|mismatched? NCCL version|NCCL version mismatch|Mismatched n?rank\b|"
        r"op\.preamble\.length <= op\.nbytes|"
        r"NCCL library is (?:too old|not backwards)|compiled with too old version of NCCL|"
        r"all ranks must have identical|expects same model across all ranks|"
        r"appears not to match (?:sizes|strides) of the same param|collectives? (?:desync|out of (?:sync|order))",
        Severity.FATAL, Scope.JOB, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "ranks called different collectives, sizes or versions: code",
        "NCCL src/init.cc, torch ProcessGroupWrapper.cpp",
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: ALLREDUCE",
        is_mutual=True,
    ),
    Rule(
        "nccl.shared-memory",
        r"(?i)(?:shared memory segment|/dev/shm/nccl|posix_fallocate|shm_open|ncclShm\w*).{0,120}"
        r"(?:fail|error|no space|cannot|could not)|(?:error|fail).{0,60}(?:/dev/shm/nccl|shared memory segment)",
        Severity.FATAL, Scope.JOB, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "the container's /dev/shm is too small: configuration", "NCCL src/misc/shmutils.cc",
        "Error while creating shared memory segment /dev/shm/nccl-1pGc2M (size 9637888)",
    ),
    Rule(
        "nccl.too-many-files", r"(?i)too many open files",
        Severity.FATAL, Scope.JOB, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "the limit of open files (ulimit -n) is too low", "errno EMFILE",
        "NCCL WARN Call to socket failed : Too many open files",
    ),
    Rule(
        "nccl.nvls",
        r"(?i)(?:NVLS|cuMulticast|multicast).{0,80}(?:fail|error)|fabric (?:state|handle).{0,60}(?:fail|not)|"
        r"cuMem(?:Create|Import\w*|Export\w*).{0,60}fail|IMEX",
        Severity.SEV1, Scope.NODE, Category.NVLINK, Strength.HARDWARE,
        "NVLink sharing does not work on this node (fabric manager, IMEX)", "NCCL src/transport/nvls.cc",
        "NCCL WARN NVLS: cuMulticastBindMem failed",
    ),
    Rule(
        "nccl.invalid-usage",
        r"(?i)ncclInvalidUsage|ncclInvalidArgument|NCCL error:? (?:in.{0,80})?invalid (?:usage|argument)|"
        r"invalid usage of NCCL|Tensors must be (?:CUDA|contiguous)|Invalid (?:root|rank|comm)\b|"
        r"NCCL WARN (?!.*(?:NET/|Call to)).{0,100}(?:\binvalid|must be|not supported|unsupported|should not be)",
        Severity.FATAL, Scope.JOB, Category.OTHER_SOFTWARE, Strength.EXCEPTION,
        "NCCL was called wrongly", "NCCL ncclResult_t",
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
    ),
    Rule(
        "nccl.system-error",
        r"(?i)ncclSystemError|unhandled system error|ncclRemoteError|remote process exit|"
        r"possibly due to a network error|"
        r"ncclInternalError|internal error.{0,20}NCCL|Internal check failed|NCCL error|ncclUnhandledCudaError|"
        r"DistBackendError|transport/net\.cc|NCCL WARN",
        Severity.SEV3, Scope.LINK, Category.OTHER_NETWORK, Strength.ECHO,
        "NCCL lost a peer or a call of the system failed; the line below it says which", "NCCL ncclResult_t",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    ),
)  # fmt: skip

FAMILY = Family("nccl", (*WATCHDOG_RULES, *NETWORK_RULES, *USE_RULES))
