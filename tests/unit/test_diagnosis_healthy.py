"""What a healthy run says is no failure, however much it talks of errors, timeouts and watchdogs."""

from __future__ import annotations

import pytest

from unicron.diagnosis import diagnose_text
from unicron.types import Severity

pytestmark = pytest.mark.timeout(30)

LINES = r"""
n1:1:2 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth0
n1:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>
n1:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC/read
n1:1:2 [0] NCCL INFO Connected all rings
n1:1:2 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>
n1:1:2 [0] NCCL INFO NET/Plugin: No plugin found (libnccl-net.so)
n1:1:2 [0] NCCL INFO comm 0x55d rank 0 nranks 8 cudaDev 0 busId 1000 - Init COMPLETE
n1:1:2 [0] NCCL INFO comm 0x55d rank 0 nranks 8 cudaDev 0 busId 1000 - Abort COMPLETE
n1:1:2 [0] NCCL INFO comm 0x55d rank 0 nranks 8 cudaDev 0 busId 1000 - Destroy COMPLETE
n1:1:2 [0] NCCL INFO NVLS multicast support is available on dev 0
n1:1:2 [0] NCCL INFO MNNVL busId 0x1b000 fabric UUID 0.0 cliqueId 0x0 state 3 healthMask 0x0
n1:1:2 [0] NCCL INFO NCCL_IB_TIMEOUT set by environment to 22.
n1:1:2 [0] NCCL INFO NCCL_IB_RETRY_CNT set by environment to 7.
n1:1:2 [0] NCCL INFO Setting affinity for GPU 0 to ff
n1:1:2 [0] NCCL INFO threadThresholds 8/8/64 | 64/8/64 | 512 | 512
n1:1:2 [0] NCCL INFO NCCL_ASYNC_ERROR_HANDLING is 1
n1:1:2 [0] NCCL INFO Failed to open libibverbs.so[.1]
n1:1:2 [0] NCCL INFO RAS client listening socket at 127.0.0.1<28028>
[W socket.cpp:426] [c10d] The server socket cannot be initialized on [::]:29500 (errno: 97 - Address family not
  exit_signal_handler ............................. False
  check_for_nan_in_loss_and_grad .................. True
  distributed_timeout_minutes ..................... 10
  error_injection_rate ............................ 0
  exit_duration_in_mins ........................... None
  use_checkpoint_args ............................. False
  no_load_optim ................................... None
  inference_max_requests .......................... 8
  nccl_communicator_config_path ................... None
  kv_channels ..................................... 128
  rerun_mode ...................................... disabled
  async_save ...................................... None
  log_throughput .................................. True
  timing_log_level ................................ 0
> initializing torch distributed ...
> initialized tensor model parallel with size 4
> setting random seeds to 1234 ...
> compiling dataset index builder ...
> building train, validation, and test datasets for GPT ...
 > loading doc-idx mapping from /data/x_doc_idx.npy
 loading release checkpoint from /ckpt
  successfully loaded checkpoint from /ckpt [ t 1/4, p 1/1 ] at iteration 100
  successfully saved checkpoint from iteration 500 to /ckpt [ t 1/4, p 1/1 ]
saving checkpoint at iteration 500 to /ckpt in torch_dist format
 validation loss at iteration 500 | lm loss value: 2.1E+00 | lm loss PPL: 8.9E+00 |
 iteration 10/ 100 | consumed samples: 10 | elapsed time per iteration (ms): 500.0 | learning rate: 1.0E-04 | lm
UserWarning: torch.utils._pytree._register_pytree_node is deprecated
FutureWarning: `torch.cuda.amp.autocast(args...)` is deprecated. Please use `torch.amp.autocast('cuda', args...)`
  warnings.warn(
[rank0]:[W ProcessGroupNCCL.cpp:1168] Warning: WARNING: process group has NOT been destroyed before we destruct
WARNING:torch.distributed.run:Setting OMP_NUM_THREADS environment variable for each process to be 1 in default
INFO:torch.distributed.elastic.agent.server.api:[default] worker group successfully finished. Waiting 300 seconds for
INFO:torch.distributed.elastic.agent.server.api:Local worker group finished (SUCCEEDED). Waiting 300 seconds for
Tokenization: 100%|##########| 1000/1000 [00:01<00:00, 999.00it/s]
wandb: Run history: loss
Setting pad_token_id to eos_token_id for open-end generation.
mlx5_core 0000:1a:00.0: firmware version: 28.39.1002
mlx5_core 0000:1a:00.0 ens1: Link up
nvidia 0000:1b:00.0: enabling device (0140 -> 0142)
NVRM: loading NVIDIA UNIX x86_64 Kernel Module  535.104.05
NVRM: Open nvidia.ko is already loaded, exiting
nvidia-nvlink: Nvlink Core is being initialized, major device number 238
systemd[1]: Started Session 5 of user root.
EXT4-fs (nvme0n1p2): mounted filesystem with ordered data mode. Quota mode: none.
nvme nvme0: 64/0/0 default/read/poll queues
pcieport 0000:00:01.0: AER: enabled with IRQ 24
mce: CPU supports 20 MCE banks
EDAC MC: Ver: 3.0.0
NMI watchdog: Enabled. Permanently consumes one hw-PMU counter.
watchdog: Delayed init of the lockup detector failed: -19
Node 0, zone DMA32: page allocation
torch version: 2.5.1, cuda: 12.4, nccl: 2.21.5
0 errors, 3 warnings
retrying request in 1 seconds
error rate: 0.0
test_error ... ok
rank 0 waiting for barrier
Watchdog timeout is set to 600 s
heartbeat timeout: 480
TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=480
TORCH_NCCL_ASYNC_ERROR_HANDLING=1
exit code 0
Exited with exit code 0
"""


@pytest.mark.parametrize("line", LINES.strip("\n").split("\n"))
def test_a_healthy_line_is_no_failure(line: str) -> None:
    found = diagnose_text(line)
    assert (found.severity, found.root_rank) == (Severity.INFO, None), found.rule


def test_a_healthy_run_is_no_failure() -> None:
    assert diagnose_text(LINES).severity is Severity.INFO
