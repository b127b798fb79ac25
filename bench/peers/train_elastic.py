"""The work under a launcher that restarts all ranks from a checkpoint: torchrun, NVRx in-job, dlrover-run.

PEERS_TIMEOUT: of the collectives, in seconds (torch's default is 1800). PEERS_CHECKPOINT=0: none is written (the
plain run that shows what a checkpoint after every iteration costs). PEERS_HEARTBEAT=1: NVRx in-job's, every iteration.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from peers import job, work
from peers.record import Recorder

START_S = 60.0  # ranks do not import equally fast: the short timeout is for the gradients' group alone


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    recorder = Recorder(rank)
    timeout = float(os.environ.get("PEERS_TIMEOUT", "1800"))
    trainer = work.Trainer(rank)  # first: it chooses the GPU that the groups are made on
    dist.init_process_group(job.BACKEND, timeout=timedelta(seconds=max(START_S, timeout)))
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    beat, end = heartbeat()
    checkpoint = recorder.folder / "checkpoint.pt"
    iteration = trainer.restore(checkpoint)
    trainer.warm_up()
    dist.barrier()
    recorder.say("ready", iteration)
    writes = rank == 0 and os.environ.get("PEERS_CHECKPOINT", "1") == "1"
    while iteration < recorder.told_end():
        trainer.compute(iteration, work.share(rank, world), recorder.begins)
        dist.all_reduce(trainer.flat, group=group)
        tokens = float(trainer.flat[-1])
        loss = trainer.step()
        if writes and (iteration + 1) % job.CHECKPOINT_EVERY == 0:
            trainer.save(checkpoint, iteration + 1)
        recorder.committed(iteration, world, loss, tokens)
        recorder.compared(iteration, lambda: work.weights(trainer.model))
        beat()
        iteration += 1
    recorder.say("end", iteration)
    end()
    dist.destroy_process_group()


def heartbeat() -> tuple[Callable[[], None], Callable[[], None]]:
    """(every iteration, at the end)"""
    if os.environ.get("PEERS_HEARTBEAT") != "1":
        return lambda: None, lambda: None
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

    client = RankMonitorClient()
    client.init_workload_monitoring()
    return client.send_heartbeat, client.shutdown_workload_monitoring


if __name__ == "__main__":
    main()
