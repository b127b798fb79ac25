"""What single texts mean, family by family: severity, scope and category of lines as PyTorch, CUDA, NCCL, Slurm, the
kernel and Python print them. "~" stands for a line's end.
"""

from __future__ import annotations

import pytest

from unicron.diagnosis import diagnose_text

pytestmark = pytest.mark.timeout(30)

TEXTS: dict[str, list[tuple[str, str]]] = {
    "cuda": [
        ("SEV2 process illegal_memory", "RuntimeError: CUDA error: an illegal memory access was encountered"),
        (
            "SEV2 process illegal_memory",
            (
                "terminate called after throwing an instance of 'c10::Error'~  what():  CUDA error: an illegal "
                "memory access was encountered~Exception raised from create_event_internal at "
                "../c10/cuda/CUDACachingAllocator.cpp:1211"
            ),
        ),
        (
            "SEV2 process illegal_memory",
            (
                "[Rank 3] NCCL watchdog thread terminated with exception: CUDA error: an illegal memory access "
                "was encountered"
            ),
        ),
        (
            "SEV2 process other_cuda",
            (
                "[rank1]:[E ProcessGroupNCCL.cpp:1414] [PG 0 Rank 1] Process group watchdog thread terminated "
                "with exception: CUDA error: unspecified launch failure"
            ),
        ),
        (
            "SEV1 gpu ecc",
            (
                "[PG 0 Rank 1] Process group watchdog thread terminated with exception: CUDA error: "
                "uncorrectable ECC error encountered"
            ),
        ),
        (
            "FATAL job other_cuda",
            (
                "cuda runtime error (59) : device-side assert triggered at "
                "/pytorch/aten/src/THC/generic/THCTensorMath.cu:26"
            ),
        ),
        ("SEV2 process illegal_memory", "cuda runtime error (77) : an illegal memory access was encountered at ..."),
        (
            "FATAL job other_cuda",
            ("RuntimeError: cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/generic/THCStorage.cu:58"),
        ),
        ("FATAL job other_cuda", "RuntimeError: CUDA error: invalid device ordinal"),
        (
            "FATAL job other_cuda",
            "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        ),
        ("SEV2 process other_cuda", "RuntimeError: CUDA error: misaligned address"),
        ("SEV2 process other_cuda", "RuntimeError: CUDA error: the launch timed out and was terminated"),
        ("SEV2 process other_cuda", "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        ("SEV2 process other_cuda", "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
        (
            "SEV2 process other_cuda",
            "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        ),
        (
            "SEV2 process other_cuda",
            (
                "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, "
                "opa, opb, m, n, k, &alpha, a, lda, b, ldb, &beta, c, ldc)`"
            ),
        ),
        ("SEV1 node gpu_driver", "Failed to initialize NVML: Driver/library version mismatch"),
        (
            "SEV1 node gpu_driver",
            (
                "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that "
                "the latest NVIDIA driver is installed and running."
            ),
        ),
        ("SEV1 node gpu_driver", "Error 802: system not yet initialized (function cudaGetDeviceCount)"),
        ("SEV1 gpu gpu_driver", "Unable to determine the device handle for GPU 0000:C1:00.0: Unknown Error"),
        ("SEV2 process other_cuda", "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable"),
        (
            "FATAL job other_cuda",
            (
                "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, "
                "you must use the 'spawn' start method"
            ),
        ),
        ("SEV2 process other_cuda", "RuntimeError: CUDA error: an illegal instruction was encountered"),
        ("SEV2 process other_cuda", "CUDA error: hardware stack error"),
        (
            "SEV2 process gpu_driver",
            (
                "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment, e.g. "
                "changing env variable CUDA_VISIBLE_DEVICES after program start."
            ),
        ),
    ],
    "kernel": [
        (
            "SEV1 gpu gpu_driver",
            (
                "NVRM: GPU at PCI:0000:5d:00: GPU-5f2c~NVRM: GPU Board Serial Number: 165~NVRM: The NVIDIA GPU "
                "0000:5d:00.0 has fallen off the bus."
            ),
        ),
        (
            "SEV1 gpu gpu_driver",
            "NVRM: A GPU crash dump has been created. If possible, please run nvidia-bug-report.sh",
        ),
        ("SEV1 gpu gpu_driver", "NVRM: RmInitAdapter failed! (0x26:0x56:1474)"),
        (
            "SEV1 node gpu_driver",
            (
                "NVRM: API mismatch: the client has the version 535.54.03, but this kernel module has the "
                "version 535.104.05."
            ),
        ),
        ("SEV1 node none", "mce: [Hardware Error]: CPU 12: Machine Check: 0 Bank 7: fe00000000801136"),
        ("INFO node none", "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0"),
        ("SEV1 node none", "EDAC MC1: 1 UE memory read error on CPU_SrcID#1"),
        ("SEV1 node none", "pcieport 0000:00:01.0: AER: Uncorrected (Fatal) error received: 0000:01:00.0"),
        ("INFO node none", "pcieport 0000:00:01.0: AER: Corrected error received: 0000:01:00.0"),
        (
            "SEV2 process exited_abnormally",
            "Out of memory: Killed process 12345 (python) total-vm:100kB, anon-rss:90kB",
        ),
        ("SEV2 process exited_abnormally", "Memory cgroup out of memory: Killed process 2312 (pt_main_thread)"),
        (
            "SEV2 process exited_abnormally",
            "python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
        ),
        ("SEV3 link link_flapping", "mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link DOWN"),
        (
            "SEV1 node other_network",
            ("mlx5_core 0000:ab:00.0: poll_health:739:(pid 0): device's health compromised - reached miss count"),
        ),
        ("SEV1 node gpu_driver", "Kernel panic - not syncing: Fatal exception in interrupt"),
        ("SEV2 process task_hang", "INFO: task python:12345 blocked for more than 122 seconds."),
        ("SEV1 node none", "nvme nvme0: I/O 128 QID 12 timeout, aborting"),
        ("SEV1 node none", "XFS (nvme0n1p1): Corruption of in-memory data detected. Shutting down filesystem"),
        ("SEV1 node none", "blk_update_request: critical medium error, dev sda, sector 12"),
        ("INFO node none", "CPU0: Core temperature above threshold, cpu clock throttled (total events = 1)"),
        (
            "SEV2 process exited_abnormally",
            (
                "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=123.0. Some of your processes may "
                "have been killed by the cgroup out-of-memory handler."
            ),
        ),
    ],
    "xid": [
        ("SEV1 gpu gpu_driver", "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus."),
        (
            "SEV1 gpu ecc",
            (
                "NVRM: Xid (PCI:0000:3b:00): 48, pid=1234, An uncorrectable double bit error (DBE) has been "
                "detected on GPU in the framebuffer at physical address"
            ),
        ),
        (
            "INFO gpu ecc",
            (
                "NVRM: Xid (PCI:0000:3b:00): 63, pid=1234, Row Remapper: New row marked for remapping, reset gpu "
                "to activate."
            ),
        ),
        ("SEV1 gpu ecc", "NVRM: Xid (PCI:0000:3b:00): 64, pid='<unknown>', name=<unknown>, Row Remapper: failed"),
        (
            "SEV1 link nvlink",
            (
                "NVRM: Xid (PCI:0000:3b:00): 74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected "
                "on link 2(0x10000, 0x0, 0x0)"
            ),
        ),
        ("SEV2 gpu ecc", "NVRM: Xid (PCI:0000:3b:00): 94, pid=7194, Contained: SM (0x1). RST: No, D-RST: No"),
        ("SEV1 gpu ecc", "NVRM: Xid (PCI:0000:3b:00): 95, pid=7194, Uncontained: LTC TAG"),
        ("SEV1 gpu gpu_driver", "NVRM: Xid (PCI:0000:3b:00): 62, pid=0, 2025(2d90) 8ca8(0004)"),
        ("SEV2 gpu gpu_driver", "NVRM: Xid (PCI:0000:3b:00): 999, pid=1"),
        ("SEV2 process other_cuda", "NVRM: Xid (PCI:0000:3b:00): 45, pid=88, name=python, Ch 00000010"),
        (
            "SEV2 process other_cuda",
            "NVRM: Xid (PCI:0000:3b:00): 32, pid=88, name=python, Channel ID 00000010 intr0 00040000",
        ),
        ("SEV1 link nvlink", "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 22003, Fatal, Link 12 Minion Halt"),
        ("INFO link nvlink", "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20001, Non-fatal, Link 12 TX Replay Error"),
        (
            "SEV2 process nvlink",
            (
                "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV "
                "error (First)"
            ),
        ),
    ],
    "nccl": [
        ("SEV1 node gpu_driver", "NMI watchdog: Watchdog detected hard LOCKUP on cpu 7"),
        (
            "SEV3 job nccl_timeout",
            (
                "[rank0]:[E1120 10:00:00.123 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective "
                "operation timeout: WorkNCCL(SeqNum=1234, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
                "Timeout(ms)=600000) ran for 600024 milliseconds before timing out."
            ),
        ),
        (
            "SEV3 job nccl_timeout",
            (
                "Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels, "
                "subsequent GPU operations might run on corrupted/incomplete data. To avoid data inconsistency, "
                "we are taking the entire process down."
            ),
        ),
        (
            "SEV3 job nccl_timeout",
            (
                "[Rank 2] Watchdog caught collective operation timeout~terminate called after throwing an "
                "instance of 'std::runtime_error'~Signal 6 (SIGABRT) received by PID 3"
            ),
        ),
        (
            "SEV3 link other_network",
            (
                "NET/IB : Got completion from peer 10.0.0.13<36315> with error 12, opcode 32698, len 32696, "
                "vendor err 129"
            ),
        ),
        ("SEV3 link other_network", "NET/IB: Got completion with error 5, opcode 0, len 0, vendor err 249"),
        (
            "SEV3 link conn_refused_reset",
            "misc/socket.cc:456 NCCL WARN Net : Connect to 10.0.0.82<38455> failed : Connection refused",
        ),
        (
            "SEV3 link other_network",
            (
                "torch.distributed.DistBackendError: NCCL error in: "
                "../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1331, unhandled system error (run with "
                "NCCL_DEBUG=INFO for details), NCCL version 2.18.1"
            ),
        ),
        (
            "SEV3 process conn_refused_reset",
            ("misc/socket.cc:49 NCCL WARN Net : Call to recv from 10.0.0.2<41234> failed : Connection reset by peer"),
        ),
        ("SEV1 node other_network", "NET/IB : mlx5_3:1 Got async event : local catastrophic error"),
        (
            "FATAL job other_software",
            "NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 50000",
        ),
        ("FATAL job other_software", "NCCL WARN Bootstrap : no socket interface found"),
        ("FATAL job other_software", "NCCL WARN Message truncated : received 1024 bytes instead of 256"),
        (
            "FATAL job other_software",
            (
                "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-WQ3 (size 9637888), error: "
                "No space left on device (28)"
            ),
        ),
        (
            "FATAL job other_software",
            "include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left on device",
        ),
        ("FATAL job other_software", "ncclInvalidArgument: Invalid value for an argument."),
        ("FATAL job other_software", "mismatched NCCL version detected : NCCL version 2.18 vs 2.20"),
        (
            "SEV1 node other_network",
            "misc/ibvwrap.cc:284 NCCL WARN Call to ibv_create_qp failed with error Cannot allocate memory",
        ),
        (
            "SEV3 link other_network",
            "misc/ibvwrap.cc:310 NCCL WARN Call to ibv_modify_qp failed with error Connection timed out",
        ),
        (
            "SEV1 node nvlink",
            (
                "transport/nvls.cc:155 NCCL WARN Cuda failure 1 'invalid argument' ~NCCL WARN NVLS: Failed to "
                "bind multicast object"
            ),
        ),
        (
            "SEV3 process other_network",
            (
                "[2] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value "
                "store by key '0', but store->get('0') got error: Connection reset by peer"
            ),
        ),
    ],
    "store": [
        (
            "SEV3 process conn_refused_reset",
            (
                "[W socket.cpp:601] [c10d] The client socket has failed to connect to [node1]:29500 (errno: 111 "
                "- Connection refused)."
            ),
        ),
        (
            "SEV3 process other_network",
            ("torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 3/4 clients joined."),
        ),
        ("SEV3 process other_network", "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError"),
        ("SEV3 process conn_refused_reset", "torch.distributed.DistNetworkError: Broken pipe"),
        (
            "SEV3 process conn_refused_reset",
            "[rank3]:[W TCPStore.cpp:106] sendBytes failed on SocketImpl(fd=5): Broken pipe",
        ),
        (
            "SEV2 process other_software",
            (
                "RuntimeError: The server socket has failed to listen on any local network address. port: 29500, "
                "useIpv6: 0, code: -98, name: EADDRINUSE, message: address already in use"
            ),
        ),
    ],
    "process": [
        (
            "SEV2 process exited_abnormally",
            (
                "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -11) local_rank: 3 (pid: "
                "1234) of binary: /usr/bin/python"
            ),
        ),
        (
            "SEV2 process exited_abnormally",
            "failed (exitcode: 1) local_rank: 0 (pid: 1234) of binary: /usr/bin/python",
        ),
        (
            "SEV2 process exited_abnormally",
            ("WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 1234 closing signal SIGTERM"),
        ),
        (
            "SEV2 process exited_abnormally",
            "torch.distributed.elastic.multiprocessing.api.SignalException: Process 1234 got signal: 15",
        ),
        ("SEV2 process exited_abnormally", "srun: error: node-3: task 17: Killed"),
        ("SEV2 process exited_abnormally", "srun: error: node-3: task 17: Segmentation fault (core dumped)"),
        ("SEV2 process exited_abnormally", "srun: error: node-3: tasks 0-7: Exited with exit code 1"),
        (
            "SEV2 process exited_abnormally",
            "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
        ),
        (
            "SEV1 node lost_connection",
            (
                "slurmstepd: error: *** JOB 123 ON node-2 CANCELLED AT 2024-05-05T10:00:00 DUE TO NODE FAILURE, "
                "SEE SLURMCTLD LOG FOR DETAILS ***"
            ),
        ),
        (
            "SEV2 job none",
            "slurmstepd: error: *** JOB 123 ON node-2 CANCELLED AT 2024-05-05T10:00:00 DUE TO PREEMPTION ***",
        ),
        ("SEV2 process exited_abnormally", "RuntimeError: DataLoader worker (pid 1234) is killed by signal: Killed."),
        ("SEV2 process exited_abnormally", "RuntimeError: DataLoader worker (pid(s) 1234, 1235) exited unexpectedly"),
        ("SEV2 process exited_abnormally", "command terminated with exit code 137"),
        ("SEV2 process exited_abnormally", "Last State: Terminated  Reason: OOMKilled  Exit Code: 137"),
        ("SEV2 process exited_abnormally", "Fatal Python error: Segmentation fault"),
        ("SEV1 node lost_connection", "srun: error: Node failure on node-7"),
    ],
    "storage": [
        ("FATAL storage other_software", "OSError: [Errno 28] No space left on device"),
        (
            "FATAL storage other_software",
            "RuntimeError: [enforce fail at inline_container.cc:424] . unexpected pos 1152 vs 1046",
        ),
        ("SEV2 storage other_software", "OSError: [Errno 121] Remote I/O error"),
        ("SEV2 storage other_software", "OSError: [Errno 107] Transport endpoint is not connected"),
        ("SEV2 storage other_software", "OSError: [Errno 108] Cannot send after transport endpoint shutdown"),
        (
            "SEV3 storage other_network",
            ('botocore.exceptions.EndpointConnectionError: Could not connect to the endpoint URL: "s3://bucket/x"'),
        ),
        (
            "SEV3 storage other_network",
            (
                "botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the PutObject "
                "operation (reached max retries: 4): Please reduce your request rate."
            ),
        ),
        (
            "SEV3 storage other_network",
            (
                "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='hub', port=443): Max retries "
                "exceeded with url: /x"
            ),
        ),
        (
            "SEV3 storage other_network",
            (
                "ConnectionResetError: [Errno 104] Connection reset by "
                "peer~botocore.exceptions.ConnectionClosedError: Connection was closed before we received a "
                "valid response from endpoint URL"
            ),
        ),
        ("SEV3 storage other_software", "OSError: [Errno 16] Device or resource busy: '.nfs000000'"),
    ],
    "program": [
        ("FATAL job other_software", "ModuleNotFoundError: No module named 'flash_attn'"),
        ("FATAL job other_software", "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 16x2)"),
        (
            "FATAL job other_software",
            "RuntimeError: Error(s) in loading state_dict for GPT: size mismatch for embed.weight",
        ),
        ("FATAL job other_software", "KeyError: 'labels'"),
        ("FATAL job other_software", "AttributeError: 'NoneType' object has no attribute 'shape'"),
        ("FATAL job other_software", "torch.nn.modules.module.ModuleAttributeError: x"),
        (
            "FATAL job other_software",
            ("RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one."),
        ),
        ("FATAL job other_software", "FileNotFoundError: [Errno 2] No such file or directory: '/data/train.bin'"),
        ("FATAL job other_software", "omegaconf.errors.ConfigAttributeError: Key 'x' is not in struct"),
        (
            "FATAL job other_software",
            "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
        ),
        (
            "FATAL job other_software",
            (
                "iteration     1200/  500000 | lm loss: nan | loss scale: 1.0 | grad norm: nan | number of nan "
                "iterations: 1"
            ),
        ),
        (
            "FATAL job other_software",
            "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
        ),
        (
            "SEV2 gpu other_software",
            "AssertionError: Rank 3: found NaN in local forward loss calculation. Device: 3, node: n1",
        ),
        (
            "SEV2 gpu other_software",
            (
                "found NaN in local grad norm in backward pass before data-parallel communication collective. "
                "Device: 3, node: x"
            ),
        ),
        (
            "INFO process none",
            (
                "iteration 100/1000 | consumed samples: 1000 | elapsed time per iteration (ms): 512.1 | learning "
                "rate: 1.0E-4 | lm loss: 3.2"
            ),
        ),
    ],
    "more": [
        ("FATAL job other_cuda", "RuntimeError: Triton Error [CUDA]: device kernel image is invalid"),
        (
            "FATAL job other_cuda",
            (
                "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 135200, "
                "Hardware limit: 101376."
            ),
        ),
        ("FATAL job other_software", "RuntimeError: FlashAttention only supports Ampere GPUs or newer."),
        ("FATAL job other_cuda", "RuntimeError: CUDA error: operation not permitted when stream is capturing"),
        (
            "SEV2 process illegal_memory",
            ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered"),
        ),
        ("SEV2 process other_cuda", "RuntimeError: CUDA driver error: unknown error"),
        ("SEV1 gpu gpu_driver", "NVML: GPU is lost"),
        ("SEV1 node gpu_driver", "Failed to initialize NVML: GPU access blocked by the operating system"),
        (
            "SEV2 process gpu_driver",
            (
                "RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "
                '"../c10/cuda/CUDACachingAllocator.cpp":1154, please report a bug to PyTorch.'
            ),
        ),
        (
            "SEV1 node gpu_driver",
            (
                "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions "
                "before calling NumCudaDevices() that might have already set an error? Error 802: system "
                "not yet initialized"
            ),
        ),
        (
            "SEV1 gpu gpu_driver",
            (
                "nvidia-smi: Unable to determine the device handle for GPU0000:CB:00.0: GPU is lost.  "
                "Reboot the system to recover this GPU"
            ),
        ),
        (
            "FATAL job other_cuda",
            (
                "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 79.35 "
                "GiB total capacity; 77.53 GiB already allocated)"
            ),
        ),
        ("SEV2 process other_cuda", "CUDA error 719 at kernel.cu:33"),
        ("SEV2 process other_cuda", "RuntimeError: CUDA error: invalid resource handle"),
        (
            "SEV3 link other_network",
            ("UCX  ERROR Transport retry count exceeded on mlx5_0:1/IB (synd 0x15 vend 0x81 hw_synd 0/0)"),
        ),
        (
            "SEV1 node other_network",
            ("NET/OFI Unable to register memory (type = 2) for device 0. RC: -12, Error: Cannot allocate memory"),
        ),
        (
            "SEV3 link other_network",
            ("NET/OFI Request 0x7 completed with error. RC: 16. Error: 4107 (Unknown error). Completed length: 0"),
        ),
        ("SEV3 link conn_refused_reset", "NCCL INFO Call to connect returned Connection refused, retrying"),
        (
            "SEV3 link conn_refused_reset",
            ("misc/socket.cc:456 NCCL WARN Net : Connect to 10.0.0.1<1234> failed : No route to host"),
        ),
        ("FATAL job other_software", "NET/Socket : message truncated : receiving 100 bytes instead of 50"),
        (
            "SEV2 process exited_abnormally",
            ("torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with signal SIGKILL"),
        ),
        ("SEV2 process exited_abnormally", "Bus error (core dumped)"),
        ("SEV2 process exited_abnormally", "double free or corruption (!prev)"),
        ("SEV2 process exited_abnormally", "slurmstepd: error: *** JOB 5 ON n1 CANCELLED AT 2024-01-01T00:00:00 ***"),
        (
            "SEV1 node lost_connection",
            ("srun: error: Task launch for StepId=5.0 failed on node n3: Communication connection failure"),
        ),
        ("SEV1 node lost_connection", "slurmctld: error: Nodes gpu-12 not responding, setting DOWN"),
        ("SEV1 node none", "update_node: node gpu-7 reason set to: Prolog error"),
        ("SEV1 node none", "update_node: node gpu-7 reason set to: Kill task failed"),
        ("SEV1 node lost_connection", "Node gpu-3 status is now: NodeNotReady"),
        ("SEV2 job none", "Preempted by preemptor/high-prio"),
        ("SEV3 process other_network", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"),
        ("FATAL storage other_software", "EOFError: Ran out of input"),
        ("FATAL job other_software", "OSError: [Errno 24] Too many open files"),
        ("SEV1 node none", "OSError: [Errno 30] Read-only file system: '/local/ckpt'"),
        ("SEV2 storage other_software", "OSError: [Errno 5] Input/output error: '/lustre/ckpt'"),
        ("SEV3 storage other_network", "google.api_core.exceptions.ServiceUnavailable: 503 GET"),
        ("SEV3 storage other_network", "azure.core.exceptions.HttpResponseError: ServerBusy 503"),
        (
            "SEV3 storage other_network",
            ('botocore.exceptions.ConnectTimeoutError: Connect timeout on endpoint URL: "s3"'),
        ),
        ("FATAL job other_software", "botocore.exceptions.NoCredentialsError: Unable to locate credentials"),
        (
            "INFO job other_software",
            ("[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768"),
        ),
        (
            "INFO job other_software",
            ("Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 16384.0"),
        ),
        (
            "SEV1 link nvlink",
            (
                "[ERROR] [tid 12727] detected NVSwitch fatal error 20034 on fid 0 on NVSwitch pci bus id "
                "00000000:86:00.0 physical id 3 port 33"
            ),
        ),
        (
            "INFO process none",
            (
                "[ERROR] request to query NVSwitch device information from NVSwitch driver failed with "
                "error:WARNING Nothing to do [NV_WARN_NOTHING_TO_DO]"
            ),
        ),
        ("SEV1 node gpu_driver", "nv-fabricmanager: Aborting fabric manager"),
        (
            "FATAL job other_software",
            (
                "RuntimeError: The size of tensor a (128) must match the size of tensor b (64) at "
                "non-singleton dimension 1"
            ),
        ),
        (
            "FATAL job other_software",
            ("ImportError: libcudart.so.12: cannot open shared object file: No such file or directory"),
        ),
        (
            "FATAL job other_software",
            (
                "RuntimeError: Given groups=1, weight of size [64, 3, 7, 7], expected input[1, 1, 224, 224] "
                "to have 3 channels, but got 1 channels instead"
            ),
        ),
        ("FATAL job other_software", "RuntimeError: Trying to backward through the graph a second time"),
        ("FATAL job other_software", "pydantic.error_wrappers.ValidationError: 1 validation error for Config"),
        (
            "FATAL job other_software",
            ("RuntimeError: a leaf Variable that requires grad is being used in an in-place operation."),
        ),
        ("FATAL job other_software", "yaml.scanner.ScannerError: mapping values are not allowed here"),
        ("FATAL job other_software", "hydra.errors.ConfigCompositionException: Could not override 'x'"),
        ("FATAL job other_software", "RuntimeError: world_size (16) is not divisible by 3"),
        ("FATAL job other_software", "huggingface_hub.utils._errors.RepositoryNotFoundError: 401 Client Error"),
        (
            "FATAL job other_software",
            ("datasets.exceptions.DatasetNotFoundError: Dataset 'x' doesn't exist on the Hub"),
        ),
        (
            "SEV3 storage other_network",
            (
                "requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='x', port=443): Read timed out. "
                "(read timeout=10)"
            ),
        ),
        (
            "SEV3 process conn_refused_reset",
            (
                "[E socket.cpp:957] [c10d] The client socket has timed out after 60000ms while trying to "
                "connect to (10.0.0.1, 29500)."
            ),
        ),
        (
            "SEV3 process other_network",
            (
                "RuntimeError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via "
                "c10d key-value store by key '0', but store->get('0') got error: Broken pipe"
            ),
        ),
        (
            "SEV2 process task_hang",
            (
                "[rank5]:[F ProcessGroupNCCL.cpp:1224] [PG 0 Rank 5] [PG 0 Rank 5] ProcessGroupNCCL's "
                "watchdog got stuck for 480 seconds without making progress in monitoring enqueued "
                "collectives. This typically indicates a NCCL/CUDA API hang"
            ),
        ),
        (
            "SEV3 job nccl_timeout",
            (
                "[rank5]:[E ProcessGroupNCCL.cpp:1282] [PG 0 (default_pg) Rank 5] First PG on this rank to "
                "signal dumping."
            ),
        ),
        (
            "SEV3 process conn_refused_reset",
            (
                "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:525] Read error "
                "[10.0.0.1]:4242: Connection reset by peer"
            ),
        ),
        (
            "SEV1 node none",
            (
                "EXT4-fs error (device nvme0n1p2): ext4_find_entry:1455: inode #2: comm python: reading "
                "directory lblock 0"
            ),
        ),
        ("SEV1 node none", "sd 0:0:0:0: [sda] tag#0 Sense Key : Medium Error [current]"),
        ("SEV1 node none", "nvme nvme0: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0x10"),
        ("SEV1 node none", "[Hardware Error]: Uncorrected hardware memory error in user-access at 7f00"),
        ("SEV1 node none", "pcieport 0000:16:01.0: DPC: containment event, status:0x1f01 source:0x0000"),
        ("SEV1 node gpu_driver", "rcu: INFO: rcu_sched self-detected stall on CPU"),
        ("SEV3 link link_flapping", "bond0: link status definitely down for interface eth0, disabling it"),
        ("SEV3 link link_flapping", "mlx5_core 0000:16:00.1 ens1f1: Link down"),
        ("INFO link none", "mlx5_core 0000:16:00.1 ens1f1: Link up"),
        (
            "SEV2 process exited_abnormally",
            (" oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,task=python,pid=1,uid=1"),
        ),
        (
            "SEV2 process exited_abnormally",
            ("traps: python[1234] general protection fault ip:7f00 sp:7ffe error:0 in libc.so.6[7f00+1000]"),
        ),
        (
            "SEV2 process exited_abnormally",
            ("python3[5]: segfault at 10 ip 00007f sp 00007f error 4 in libcuda.so.535[7f+1]"),
        ),
        ("SEV2 gpu other_software", "Unexpected result nan on rank 3 at iteration 100"),
        ("FATAL job other_software", "loss became nan at step 1200"),
    ],
}


@pytest.mark.parametrize(
    ("wanted", "text"),
    [pytest.param(*row, id=f"{family}-{index}") for family, rows in TEXTS.items() for index, row in enumerate(rows)],
)
def test_a_text_means(wanted: str, text: str) -> None:
    found = diagnose_text(text.replace("~", "\n"))
    assert f"{found.severity} {found.scope} {found.category}" == wanted, (found.rule, found.reason)


def test_a_text_of_nothing_is_nothing() -> None:
    found = diagnose_text("")
    assert (found.severity, found.root_rank, found.evidence) == ("INFO", None, ())
