"""An ordinary torchrun script that has never heard of unicron.

    torchrun --nproc-per-node 2 examples/plain_torchrun.py          # as it was written for
    unicron run --nproc-per-node 2 examples/plain_torchrun.py       # supervised and restarted

unicron keeps torchrun's environment contract, so it runs unchanged. When a worker dies all of them
start again, and the script goes on from its own checkpoint: that is all anyone can do for a script
that does not join, and `unicron run` says so.
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS, EVERY = 200, 20


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    path = Path(os.environ.get("CHECKPOINT", Path(tempfile.gettempdir()) / f"plain-{run}.pt"))
    step = load(path, model, optimizer)
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if rank == 0:
        print(f"start {restarts} at step {step}", flush=True)
    while step < STEPS:
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
        batch = torch.randn(64, 32, generator=generator)
        loss = ((model(batch) - batch.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0 and step % EVERY == 0:
            save(path, model, optimizer, step)
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    dist.barrier()
    if rank == 0:
        path.unlink(missing_ok=True)
    dist.destroy_process_group()


def load(path, model, optimizer):
    if not path.exists():
        return 0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def save(path, model, optimizer, step):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    staging = path.with_suffix(".tmp")
    torch.save(state, staging)
    os.replace(staging, path)


if __name__ == "__main__":
    main()
