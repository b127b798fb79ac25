"""How processes end, told by the launcher, the scheduler or the process itself.

"Root Cause (first observed failure)" of torchrun is what *its* agent saw first, not the root. SIGTERM comes from
whoever tidies up. SIGABRT behind a watchdog's timeout is the watchdog's own doing. SIGKILL without more is unknown:
look for the kernel's out-of-memory line.
"""

from __future__ import annotations

from unicron.diagnosis.words import Category, Family, Rule, Scope, Strength
from unicron.types import Severity

ELASTIC = "torch/distributed/elastic/multiprocessing"
# How launchers introduce the status of a process that ended: exitcode  : -9, exits with return code = 1.
CODE = (
    r"(?:(?:exit|return)[ _]?(?:code|status)|\bstatus(?==-)|exit rank=\d+ code|\b(?:exit|returncode)(?==)|"
    r"\bexit(?:ed)?(?=:? \(?(?:-\d|13[2-9])\b)|\bexited with(?= -?\d)|"
    r"(?:terminated|exit(?:s|ed)?|died|failed) with (?:code|status))\s*[:=]?\s*\(?"
)
SLURM = "Slurm src/slurmd/slurmstepd, src/srun"
KUBERNETES = "Kubernetes pod and node status reasons"

SCHEDULER_RULES = (
    Rule(
        "process.node-failed",
        r"(?i)node[ _]fail(?:ure|ed)?\b|NODE_FAIL|DUE TO NODE FAILURE|nodes? .{0,40}(?:not responding|went down|"
        r"is down)|"
        r"NodeNotReady|NodeLost|node(?:\.kubernetes\.io)?/(?:unreachable|not-ready)|node .{0,60}(?:unreachable|"
        r"NotReady)|"
        r"lost (?:connection to|contact with) (?:node|agent|host)|Communication connection failure|"
        r"Remote daemon\s*:.{0,40} on node \S|shepherd died from signal 9\b|"
        r"agent .{0,40}(?:lost|dead|heartbeat (?:timeout|lost|missed))|unexpectedly rebooted|"
        r"Instance .{0,40}terminated",
        Severity.SEV1, Scope.NODE, Category.LOST_CONNECTION, Strength.HARDWARE,
        "the scheduler lost the node", f"{SLURM}; {KUBERNETES}; Open MPI orte; Cray PALS",
        "slurmstepd: error: *** JOB 77 ON node-3 CANCELLED AT 2026-01-01T00:00:00 DUE TO NODE FAILURE ***",
    ),
    Rule(
        "process.node-unfit",
        r"(?i)(?:prolog|epilog)\w* (?:error|fail\w*|timed? ?out)|kill task failed|Low RealMemory|"
        r"node configuration differs|"
        r"NHC:.{0,80}(?:fail|drain)|health ?check.{0,40}(?:failed|drain)|reason set to: (?!none)",
        Severity.SEV1, Scope.NODE, Category.NONE, Strength.HARDWARE,
        "the scheduler or its checks found the node unfit", SLURM,
        "update_node: node n3 reason set to: Kill task failed",
    ),
    Rule(
        "process.controller-away",
        r"(?i)unable to contact slurm controller|slurm_\w+(?: error)?:.{0,60}(?:timed out|connect failure)|"
        r"munge.{0,60}(?:error|fail)",
        Severity.SEV3, Scope.PROCESS, Category.OTHER_NETWORK, Strength.ECHO,
        "the scheduler does not answer: ask again", SLURM,
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
    ),
    Rule(
        "process.time-limit",
        r"(?i)DUE TO TIME LIMIT|DUE TO PREEMPTION|TIMEOUT \*\*\*|PREEMPTED(?!\s?/|,? or )|DeadlineExceeded|Preempting|"
        r"time limit (?:reached|exceeded)|SIGUSR[12].{0,60}(?:time|preempt|"
        r"checkpoint)|"
        r"DUE to SIGNAL (?:User defined|Terminated)",
        Severity.SEV2, Scope.JOB, Category.NONE, Strength.CAUSE,
        "the scheduler took the allocation back: start again when there is one", SLURM,
        "slurmstepd: error: *** STEP 9.0 ON node-1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***",
        is_mutual=True,
    ),
    Rule(
        "process.node-taken",
        r"(?i)spot (?:instance )?interruption|\b(?:node|instance|vm|host|machine|pod|slice)\b.{0,30}"
        r"\b(?:was|been|got|is being) preempted(?!\s?/|,? or )",
        Severity.SEV2, Scope.NODE, Category.NONE, Strength.CAUSE,
        "this machine was taken back: start again with another one", "EC2 spot notices, GCE preemption",
        "the VM was preempted by the provider",
        is_final=True,
    ),
    Rule(
        "process.evicted",
        r"(?i)\bEvicted\b|node was low on resource|DiskPressure|MemoryPressure|ephemeral.storage.{0,60}exceed",
        Severity.SEV1, Scope.NODE, Category.EXITED_ABNORMALLY, Strength.CAUSE,
        "the node's keeper put the process out for want of memory or disk", KUBERNETES,
        "Pod train-3 Evicted: The node was low on resource: ephemeral-storage.",
    ),
    Rule(
        "process.out-of-memory-many",
        r"(?i)Detected (?:[2-9]|[1-9]\d+) oom.?kill events?",
        Severity.SEV2, Scope.NODE, Category.EXITED_ABNORMALLY, Strength.CAUSE,
        "the node's memory ran out, not that of one process alone", SLURM,
        "slurmstepd: error: Detected 3 oom_kill events in StepId=77.0. Some of the step tasks have been OOM Killed.",
    ),
    Rule(
        "process.out-of-memory",
        r"(?i)^(?!.*(?:common|potential|possible|likely) (?:root )?(?:cause|reason)).*(?:oom.?kill|"
        r"task \d+: Out Of Memory|Exceeded (?:job|step) memory limit|OUT_OF_MEMORY|OUT_OF_ME\+|"
        r"oom_kill event|OOMKilled|killed.{0,40}out of memory|memory cgroup out of memory|out of memory: killed|"
        r"exceeded memory limit|(?:killed|terminated) by the (?:linux )?oom|some of the step tasks have been OOM)",
        Severity.SEV2, Scope.PROCESS, Category.EXITED_ABNORMALLY, Strength.CAUSE,
        "the host's memory (or the cgroup's) ran out: once is a restart, the same place again is code", SLURM,
        "slurmstepd: error: Detected 1 oom_kill event in StepId=77.0. Some of the step tasks have been OOM Killed.",
    ),
    Rule(
        "process.fork-failed",
        r"(?i)fork.{0,30}(?:resource temporarily unavailable|cannot allocate memory)|can't start new thread|"
        r"pthread_create failed|MemoryError\b|std::bad_alloc|Cannot allocate memory",
        Severity.SEV2, Scope.NODE, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "the host has no more memory or process numbers", "errno EAGAIN, ENOMEM",
        "OSError: [Errno 12] Cannot allocate memory",
    ),
    Rule(
        "process.image",
        r"ImagePullBackOff|ErrImagePull|InvalidImageName|CreateContainerConfigError|pull access denied|"
        r"manifest unknown",
        Severity.FATAL, Scope.JOB, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "the container's image or settings are wrong", KUBERNETES, "Failed to pull image: ErrImagePull",
    ),
    Rule(
        "process.volume",
        r"FailedMount|FailedAttachVolume|Unable to attach or mount volumes|MountVolume\.\w+ failed|mount\.nfs: ",
        Severity.SEV2, Scope.STORAGE, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "a volume could not be mounted on this node", KUBERNETES,
        "Warning FailedMount Unable to attach or mount volumes: timed out waiting for the condition",
    ),
    Rule(
        "process.cancelled",
        r"(?i)\bCANCELLED\b|Job step aborted|forcing job termination|task launch .{0,40}aborted|"
        r"Terminating (?:StepId|job step)|"
        r"(?:srun|slurmstepd).{0,40}(?:terminated|killing)|First task exited|Force Terminated|Job step .{0,30}signal",
        Severity.SEV2, Scope.PROCESS, Category.EXITED_ABNORMALLY, Strength.ECHO,
        "the scheduler ends what is left after a task failed or somebody cancelled", SLURM,
        "slurmstepd: error: *** STEP 77.0 ON node-1 CANCELLED AT 2026-01-01T00:00:00 ***",
    ),
)  # fmt: skip

END_RULES = (
    Rule(
        "process.forced-end",
        r"forcefully exiting via|(?i:bypassing sigterm)|escalating to SIGKILL|did not (?:exit|stop|terminate) "
        r".{0,60}(?:sending|send|using) SIGKILL",
        Severity.SEV2, Scope.PROCESS, Category.EXITED_ABNORMALLY, Strength.ECHO,
        "the launcher told it to end, and waited in vain", f"{ELASTIC}/api.py",
        "Unable to shutdown process 417 via Signals.SIGTERM, forcefully exiting via Signals.SIGKILL",
        is_final=True,
    ),
    Rule(
        "process.ray-memory",
        r"ray\.exceptions\.OutOfMemoryError|due to the node running low on memory|NODE_OUT_OF_MEMORY|"
        r"killed due to memory pressure",
        Severity.SEV2, Scope.NODE, Category.EXITED_ABNORMALLY, Strength.CAUSE,
        "the node's memory ran low, and Ray's monitor killed a worker",
        "Ray memory_monitor.cc, worker_killing_policy.cc",
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
        is_final=True,
    ),
    Rule(
        "process.ray-worker",
        r"Worker exit type: (?:SYSTEM_ERROR|USER_ERROR)|\bworker died or was killed while executing|"
        r"(?i:(?:actor|task|worker)\b.{0,40}\b(?:is dead|died|failed) because (?:its|the) worker process has died)|"
        r"[Aa]ctor died unexpectedly before|Worker unexpectedly exits with a connection error",
        Severity.SEV2, Scope.PROCESS, Category.EXITED_ABNORMALLY, Strength.DEATH,
        "a worker's process died; the reasons that Ray lists behind it are what may have been",
        "Ray core_worker, gcs_actor_manager.cc",
        "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2.",
        is_final=True,
    ),
    Rule(
        "process.pod-deleted",
        r"(?i)\bpod\b.{0,80}\bforce[- ]?(?:fully )?deleted|\bforce[- ]deleted pod\b|Marking for deletion Pod",
        Severity.SEV2, Scope.PROCESS, Category.EXITED_ABNORMALLY, Strength.DEATH,
        "somebody deleted the pod without letting it end", "kubectl delete --force; Kubernetes taint manager",
        'pod "trainer-1" force deleted',
    ),
    Rule(
        "process.interpreter",
        r"Fatal Python error: (?!Aborted|Segmentation fault|Bus error|Illegal instruction|Floating|Killed|.{0,200}"
        r"at interpreter shutdown)",
        Severity.SEV2, Scope.PROCESS, Category.EXITED_ABNORMALLY, Strength.CAUSE,
        "the interpreter found its own state broken and ended the process",
        "CPython Python/pylifecycle.c, Py_FatalError",
        "Fatal Python error: none_dealloc: deallocating None",
    ),
    Rule(
        "process.mpi",
        r"\*\*\* An error occurred in MPI_|MPI_ERRORS_ARE_FATAL|[Ff]atal error in (?:internal_|P)?P?MPI_\w+: (?!.{0,80}"
        r"(?:process failed|Connection|closed))|PMI2?_Abort\((?!0)",
        Severity.SEV2, Scope.PROCESS, Category.OTHER_SOFTWARE, Strength.EXCEPTION,
        "a call of MPI failed, and the library ends the job for it",
        "Open MPI errhandler_predefined.c, MPICH errutil.c",
        "[n1:9] *** An error occurred in MPI_Send",
    ),
    Rule(
        "process.terminated",
        r"(?i)SIGTERM|Received 15 death signal|death signal|got signal: ?(?:15|2|1)\b|signal 15\b|SIGINT|SIGHUP|"
        rf"{CODE}(?:-15|-2|-1\b|143|130)\b|KeyboardInterrupt|SignalException|"
        r"Sending process \d+ closing signal|"
        r"shutting down workers|Terminating process|by signal: (?:15\b|Terminated|Interrupt)|"
        r"(?<!tate): Terminated$|line \d+: +\d{2,8} Terminated\b|task \d+: Terminated|closing signal",
        Severity.SEV2, Scope.PROCESS, Category.EXITED_ABNORMALLY, Strength.ECHO,
        "ended from outside, by the launcher that tidies up or by a person", f"{ELASTIC}/api.py",
        "WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 417 closing signal SIGTERM",
    ),
    Rule(
        "process.shared-memory",
        r"(?i)Bus error: nonexistent physical address|insufficient shared memory|"
        r"unable to open shared memory|unable to (?:write to file|allocate shared memory).{0,40}(?:torch|shm)|"
        r"No space left on device.{0,60}/dev/shm|/dev/shm.{0,60}No space left|increase.{0,20}shm",
        Severity.FATAL, Scope.JOB, Category.EXITED_ABNORMALLY, Strength.CAUSE,
        "the container's /dev/shm is full or too small: configuration", "UCX signal handler, torch dataloader.py",
        "==== Caught signal 7 (Bus error: nonexistent physical address) ====",
    ),
    Rule(
        "process.data-loader",
        r"(?i)DataLoader worker(?!.{0,60}by signal: (?:Terminated|Interrupt))"
        r".{0,60}(?:killed|exited|died|is killed|terminated|timed? ?out)|"
        r"DataLoader timed out",
        Severity.SEV2, Scope.PROCESS, Category.EXITED_ABNORMALLY, Strength.CAUSE,
        "a helper process that reads data was ended", "torch/utils/data/dataloader.py",
        "RuntimeError: DataLoader worker (pid 812) is killed by signal: Killed.",
    ),
    Rule(
        "process.segfault",
        rf"(?i)SIGSEGV|\bExitCode[= ]\d+:11\b|WTERMSIG 11\b|segmentation fault|signal 11\b|{CODE}(?:-11|139)\b|"
        r"segfault at|SIGILL|SIGFPE|"
        rf"{CODE}(?:-4|-8|132|136)\b|illegal instruction \(core|signal (?:4|8)\b|Access violation|"
        r"stack smashing|double free|corrupted size|free\(\): invalid|malloc\(\):|munmap_chunk|heap corruption",
        Severity.SEV2, Scope.PROCESS, Category.EXITED_ABNORMALLY, Strength.CAUSE,
        "the process touched memory it does not have", "signal(7), glibc malloc",
        "Fatal Python error: Segmentation fault",
    ),
    Rule(
        "process.bus-error",
        rf"(?i)SIGBUS|bus error|signal 7\b|{CODE}(?:-7|135)\b",
        Severity.SEV2, Scope.PROCESS, Category.EXITED_ABNORMALLY, Strength.CAUSE,
        "a page of a mapped file was not there: shared memory, or a disk", "signal(7)",
        "srun: error: node-2: task 17: Bus error",
    ),
    Rule(
        "process.killed",
        rf"(?i)SIGKILL|\bExitCode[= ]\d+:9\b|WTERMSIG 9\b|signal[: ]+9\b|{CODE}(?:-9|137)\b|"
        r"task \d+: Killed|line \d+: +\d{2,8} Killed\b|(?:^|: |"
        r"\s)Killed$|"
        r"(?:was|is|been) killed by (?:signal|sigkill)|status=9/KILL|Killed by signal(?!\W{1,3}(?:15|2|1)\b)",
        Severity.SEV2, Scope.PROCESS, Category.EXITED_ABNORMALLY, Strength.DEATH,
        "killed: by the kernel for memory, or by hand", "signal(7)",
        "exitcode  : -9 (pid: 14750)",
    ),
    Rule(
        "process.aborted",
        rf"(?i)SIGABRT|\bExitCode[= ]\d+:6\b|signal[: ]+6\b|{CODE}(?:-6|134)\b|Fatal Python error: Aborted|: Aborted\b|"
        r"terminate called (?:after|without)|Aborted \(core dumped\)|\bcore dumped\b|std::terminate|abort\(\) called",
        Severity.SEV2, Scope.PROCESS, Category.EXITED_ABNORMALLY, Strength.ABORT,
        "the process gave up by itself: the line before says why", "signal(7)",
        "terminate called after throwing an instance of 'c10::Error'",
    ),
    Rule(
        "process.exit-code",
        rf"(?i){CODE}[1-9]\d*\b|Exited with exit code [1-9]|non-zero exit|returned non-zero|"
        r"exit status [1-9]|"
        r"died with <Signals|ChildFailedError|process \d+ terminated with|exited with (?:code|status) [1-9]",
        Severity.SEV2, Scope.PROCESS, Category.EXITED_ABNORMALLY, Strength.ABORT,
        "a process ended with an error; its own log says which", f"{ELASTIC}/errors",
        "srun: error: node-2: task 17: Exited with exit code 1",
    ),
    Rule(
        "process.residue",
        r"(?i)leaked (?:semaphore|shared_memory)|resource_tracker|sem_unlink|atexit|_run_finalizers|"
        r"destroy_process_group\(\) was not called|Exception ignored in|OSError: \[Errno 9\]|listener-[0-9a-z]|"
        r"invalid context, skipping further processing|nv_get_p2p_free_callback|ProcessGroupNCCL.{0,40}destructor",
        Severity.INFO, Scope.PROCESS, Category.OTHER_SOFTWARE, Strength.NOISE,
        "left behind by a process that ended without tidying up",
        "multiprocessing/resource_tracker.py, nvidia-peermem",
        "resource_tracker: There appear to be 4 leaked semaphore objects to clean up at shutdown",
        is_final=True,
    ),
)  # fmt: skip

FAMILY = Family("process", (*SCHEDULER_RULES, *END_RULES))
