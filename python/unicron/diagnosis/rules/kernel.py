"""What the kernel and firmware of a node say: dmesg, machine checks, disks, adapters. Xid and SXid lines have their
own decoders (xid.py, sxid.py); here is the rest. A kernel line speaks of the machine: it outweighs what a process says.

The kernel's own "watchdog: BUG: soft lockup" is not NCCL's watchdog. Good news (a link came up) must not be taken
for a fault because it has the word link in it.
"""

from __future__ import annotations

from unicron.diagnosis.words import Category, Family, Rule, Scope, Strength
from unicron.types import Severity

LINUX = "Linux kernel"

RULES = (
    Rule(
        "kernel.fell-off-bus",
        r"(?i)fallen off the bus|GPU at PCI:.{0,40}has fallen|GPU crash dump|NVRM.{0,60}GPU.{0,40}(?:is lost|"
        r"not responding)",
        Severity.SEV1, Scope.GPU, Category.GPU_DRIVER, Strength.HARDWARE,
        "the GPU does not answer on PCIe any more: reboot the node, then check it", "NVIDIA driver",
        "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.",
    ),
    Rule(
        "kernel.fabric-query", r"NV_WARN_NOTHING_TO_DO",
        Severity.INFO, Scope.PROCESS, Category.NONE, Strength.NOISE,
        "the fabric manager asked for what is done already", "NVIDIA Fabric Manager",
        "[ERROR] request to query NVSwitch failed with error:WARNING Nothing to do [NV_WARN_NOTHING_TO_DO]",
        is_final=True,
    ),
    Rule(
        "kernel.fabric-manager",
        r"(?i)aborting fabric manager|fabric ?manager.{0,60}(?:failed to (?:start|initialize|find|config)|"
        r"exited|crashed)",
        Severity.SEV1, Scope.NODE, Category.GPU_DRIVER, Strength.HARDWARE,
        "the fabric manager of this node ended: its NVLinks cannot be used", "NVIDIA Fabric Manager",
        "nvidia-fabricmanager: failed to initialize fabric manager",
    ),
    Rule(
        "kernel.driver-init",
        r"(?i)RmInitAdapter failed|rm_init_adapter failed|nvidia.{0,40}probe.{0,40}failed|"
        r"GSP (?:RM )?.{0,20}(?:heartbeat|lockdown|fail)|kgsp\w*.{0,40}fail|nvidia-modprobe.{0,40}fail|"
        r"NVRM:.{0,100}(?:failed to (?:initialize|allocate|copy vbios)|unable to|assertion failed)|krcWatchdog|"
        r"nvidia_uvm.{0,60}(?:error|fatal)|NVRM: (?:osInitNvMapping|nvCheckOkFailed)",
        Severity.SEV1, Scope.GPU, Category.GPU_DRIVER, Strength.HARDWARE,
        "the driver could not bring the GPU up", "NVIDIA driver",
        "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x62:0x40:2393)",
    ),
    Rule(
        "kernel.nvlink",
        r"(?i)NVRM:.{0,60}(?:knvlink|nvlink)\w*.{0,120}(?:fail|error)|nvidia-nvlink.{0,80}(?:fail|error)",
        Severity.SEV1, Scope.NODE, Category.NVLINK, Strength.HARDWARE,
        "the driver could not set up NVLink on this node", "NVIDIA driver",
        "NVRM: knvlinkUpdatePostRxDetectLinkMask_IMPL: Failed to update Rx Detect Link mask!",
    ),
    Rule(
        "kernel.lockup",
        r"(?i)soft lockup|hard LOCKUP|rcu\w*.{0,40}(?:self-detected|detected) stalls?|Kernel panic|"
        r"BUG: unable to handle|"
        r"Oops: |general protection fault.{0,40}\[#|NMI watchdog: .{0,30}(?:BUG|LOCKUP)|kernel BUG at|"
        r"scheduling while atomic|"
        r"Fatal exception",
        Severity.SEV1, Scope.NODE, Category.GPU_DRIVER, Strength.HARDWARE,
        "the kernel itself is stuck or broken", LINUX,
        "watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [kworker/3:1:812]",
    ),
    Rule(
        "kernel.machine-check-corrected",
        r"(?i)(?<!un)corrected error|CE memory|\d+ CE\b|EDAC.{0,40} CE |(?<!un)corrected.{0,20}(?:memory|"
        r"hardware) error|"
        r"severity[=:] ?corrected|\b(?<!un)correctable|Hardware Error.{0,60}\bcorrected",
        Severity.INFO, Scope.NODE, Category.NONE, Strength.NOISE,
        "corrected by the hardware: count it", LINUX,
        "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0",
        is_final=True,
    ),
    Rule(
        "kernel.machine-check",
        r"(?i)Machine check|\bmce: .{0,30}(?:Machine Check|Uncorrect)|MCE.{0,20}(?:error|exception)|"
        r"Hardware Error\]|EDAC.{0,60}\bUE\b|"
        r"uncorrect\w+ (?:memory )?error|"
        r"Uncorrected (?:hardware|memory)|Memory failure: 0x|memory failure.{0,40}(?:recovery|kill)|"
        r"AER:.{0,60}(?:Uncorrect\w*|Fatal|multiple)|PCIe Bus Error: severity=Uncorrect|DPC: containment|"
        r"fatal hardware error",
        Severity.SEV1, Scope.NODE, Category.NONE, Strength.HARDWARE,
        "memory, processor or PCIe of this node failed", LINUX,
        "mce: [Hardware Error]: Machine check events logged",
    ),
    Rule(
        "kernel.pcie-link",
        r"(?i)pciehp.{0,60}(?:Link Down|Card not present)|limited by.{0,80}PCIe.{0,20}link|"
        r"pcie.{0,60}(?:link (?:is )?down|width)|"
        r"link training failed|AER: .{0,40}(?:recovery failed|device recovery)",
        Severity.SEV1, Scope.NODE, Category.NONE, Strength.HARDWARE,
        "a PCIe link of this node is down or has lost width", LINUX,
        "pcieport 0000:d0:01.0: pciehp: Slot(5): Link Down",
    ),
    Rule(
        "kernel.out-of-memory",
        r"(?i)Out of memory: Kill(?:ed)? process|Memory cgroup out of memory|invoked oom-killer|oom-kill:|oom_reaper",
        Severity.SEV2, Scope.PROCESS, Category.EXITED_ABNORMALLY, Strength.CAUSE,
        "the kernel ended a process because memory ran out", LINUX,
        "Out of memory: Killed process 2201 (python3) total-vm:912345kB, anon-rss:812345kB",
    ),
    Rule(
        "kernel.segfault",
        r"segfault at [0-9a-f]+ ip|traps: .{0,60}(?:general protection|trap)|trap invalid opcode|trap divide error",
        Severity.SEV2, Scope.PROCESS, Category.EXITED_ABNORMALLY, Strength.CAUSE,
        "a process touched memory it does not have", LINUX,
        "python3[812]: segfault at 0 ip 00007f0000000000 sp 00007ffe00000000 error 4 in libtorch_cuda.so[7f00+1000]",
    ),
    Rule(
        "kernel.disk",
        r"(?i)nvme.{0,60}(?:Disabling device|controller is down|Device not ready|removing after probe failure|"
        r"reset failure|"
        r"Abort status|I/O.{0,30}timeout)|md/raid.{0,60}(?:Disk failure|failing|not enough)|blk_update_request|"
        r"Remounting filesystem read-only|Buffer I/O error|I/O error, dev|critical (?:medium|target) error|"
        r"EXT4-fs error|"
        r"XFS.{0,60}(?:Corruption|shutdown|metadata I/O error|Shutting down)|BTRFS.{0,40}(?:error|critical)|"
        r"lost async page write|no available path|access beyond end of device|Medium Error|"
        r"ata\d+.{0,60}(?:failed command|"
        r"exception Emask)|"
        r"JBD2.{0,40}(?:Error|abort)|"
        r"Read-only file ?system",
        Severity.SEV1, Scope.NODE, Category.NONE, Strength.HARDWARE,
        "a disk or file system of this node failed", LINUX,
        "blk_update_request: I/O error, dev nvme0n1, sector 2048 op 0x0:(READ)",
    ),
    Rule(
        "kernel.link-up",
        r"(?i)Link (?:is )?(?:ACTIVE|up)\b|Link up\b|link becomes ready|NIC Link is Up|state (?:changed|"
        r"change).{0,30}(?:ACTIVE|up)\b",
        Severity.INFO, Scope.LINK, Category.NONE, Strength.NOISE,
        "a link came up", LINUX, "mlx5_core 0000:1a:00.0 mlx5_0: Port: 1 Link ACTIVE",
        is_final=True,
    ),
    Rule(
        "kernel.link-down",
        r"(?i)(?:mlx[45]\w*|bnxt\w*|i40e|ice|ixgbe|ena|eth\w+|ib\d+|rdma|roce|infiniband|bond\w*).{0,80}"
        r"(?:Link (?:is )?DOWN|link down|link status definitely down|NIC Link is Down|port (?:is )?down|"
        r"carrier lost|loses? carrier)|"
        r"NIC Link is Down|Link DOWN\b|link is flapping|link flap",
        Severity.SEV3, Scope.LINK, Category.LINK_FLAPPING, Strength.LINK,
        "a network link of this node went down: it may come back", LINUX,
        "mlx5_core 0000:1a:00.0 mlx5_0: Port: 1 Link DOWN",
    ),
    Rule(
        "kernel.cable",
        r"(?i)port module event|module \d+.{0,60}(?:cable|unplugged)",
        Severity.SEV1, Scope.LINK, Category.LINK_FLAPPING, Strength.HARDWARE,
        "a cable or its optics is bad: it goes on flapping until it is changed", LINUX,
        "mlx5_core 0000:1a:00.0: Port module event[error]: module 0, Cable error, Bus stuck",

        is_final=True,
    ),
    Rule(
        "kernel.adapter-notice",
        r"(?i)ACCESS_REG.{0,80}failed|Delayed init of the lockup detector|insufficient power on the PCIe slot",
        Severity.INFO, Scope.NODE, Category.NONE, Strength.NOISE,
        "a question the adapter does not answer, or a warning it gives at every start", LINUX,
        "mlx5_core 0000:1a:00.0: mlx5_cmd_out_err: ACCESS_REG(0x805) op_mod(0x1) failed, status bad operation(0x2)",

        is_final=True,
    ),
    Rule(
        "kernel.adapter",
        r"(?i)mlx[45].{0,100}(?:health (?:compromised|poll failed|recovery)|device's health|"
        r"(?<!non-)fatal (?:error|reporter)|assert_var|unhealthy|"
        r"will cause (?:a leak|leak)|cmd.{0,20}timeout|wait_func|reset flow|firmware.{0,30}(?:error|"
        r"not respond)|syndrome)|NETDEV WATCHDOG|transmit queue \d+ timed out|"
        r"bnxt_en.{0,60}(?:Firmware|fatal)",
        Severity.SEV1, Scope.NODE, Category.OTHER_NETWORK, Strength.HARDWARE,
        "the network adapter of this node does not answer or reports an error of its own", LINUX,
        "mlx5_core 0000:1a:00.0: device's health compromised - reached miss count",
    ),
    Rule(
        "kernel.heat",
        r"(?i)cpu clock throttled|temperature above threshold|thermal (?:event|shutdown|throttl)|over.?temperature|"
        r"high temperature|power (?:brake|supply).{0,40}(?:fail|lost|redundan)|HW (?:Thermal )?Slowdown|"
        r"critical temperature",
        Severity.INFO, Scope.NODE, Category.NONE, Strength.NOISE,
        "heat or power: slower, not broken; count it", LINUX,
        "CPU12: Core temperature above threshold, cpu clock throttled (total events = 7)",
    ),
    Rule(
        "kernel.blocked-thread",
        r"(?i)task (?:jbd2|kworker|kswapd|md\d|nvme|xfs|dm|flush|kcompactd|UVM|nv_queue|"
        r"nvidia)[^ ]{0,40} blocked for more than",
        Severity.SEV1, Scope.NODE, Category.NONE, Strength.HARDWARE,
        "a thread of the kernel itself waits for a disk or a driver", LINUX,
        "INFO: task jbd2/md0-8:812 blocked for more than 120 seconds.",
    ),
    Rule(
        "kernel.files-exhausted", r"(?i)file-max limit \d+ reached",
        Severity.SEV1, Scope.NODE, Category.NONE, Strength.CAUSE,
        "this node has no more file handles", LINUX, "VFS: file-max limit 1000 reached",
    ),
    Rule(
        "kernel.blocked-storage-client",
        r"(?i)task (?:jfs|juicefs|nfs|rpciod|mmfs|gpfs|ll_|ptlrpc|ldlm|beegfs|ceph|fuse|s3fs|goofys|gcsfuse|"
        r"wekanode|dfuse)"
        r"[^ ]{0,40} blocked for more than",
        Severity.SEV3, Scope.STORAGE, Category.TASK_HANG, Strength.CAUSE,
        "the client of a shared file system waits for its servers", LINUX,
        "INFO: task ptlrpcd_00_01:812 blocked for more than 120 seconds.",
    ),
    Rule(
        "kernel.blocked-task",
        r"(?i)blocked for more than \d+ seconds|hung_task|task .{0,60} blocked",
        Severity.SEV2, Scope.PROCESS, Category.TASK_HANG, Strength.DEATH,
        "a task waits in the kernel, for a driver or a file system", LINUX,
        "INFO: task python3:812 blocked for more than 120 seconds.",
    ),
    Rule(
        "kernel.remote-storage-lost",
        r"(?i)Lustre\w*.{0,160}(?:evicted|was lost|refused)|(?:nfs|lock).{0,60}reclaim failed|nfs.{0,60}(?:lost|"
        r"stale)|"
        r"ceph.{0,60}(?:session lost|blocklisted)|GPFS.{0,60}(?:unmount|lost)",
        Severity.SEV2, Scope.STORAGE, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "a shared file system dropped this node: its open files are gone", f"{LINUX}, Lustre",
        "LustreError: This client was evicted by scratch-OST0007; in progress operations using this service "
        "will fail.",
    ),
    Rule(
        "kernel.remote-storage",
        r"(?i)nfs: server .{0,80}not responding|Lustre\w*.{0,160}(?:lost|timed out|error|was)|"
        r"ceph.{0,60}(?:socket closed|mds.{0,20}(?:hung|down)|osd.{0,20}down)|GPFS.{0,60}error|beegfs.{0,60}error",
        Severity.SEV3, Scope.STORAGE, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "a shared file system does not answer this node: its client tries again", f"{LINUX}, Lustre",
        "nfs: server storage1 not responding, still trying",
    ),
    Rule(
        "kernel.remote-storage-back", r"(?i)nfs: server .{0,80}\bOK\b|Lustre.{0,120}Connection restored",
        Severity.INFO, Scope.STORAGE, Category.NONE, Strength.NOISE,
        "a shared file system answers again", f"{LINUX}, Lustre", "nfs: server storage1 OK",
        is_final=True,
    ),
)  # fmt: skip

FAMILY = Family("kernel", RULES)
