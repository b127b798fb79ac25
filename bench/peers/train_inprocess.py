"""The work under NVRx's in-process restart: the wrapped function begins anew inside the processes that are left.

PEERS_SETTING: defaults, tuned or spare (a fifth rank in reserve). gloo cannot be aborted by NVRx, so the timeout of
the collectives (PEERS_TIMEOUT) bounds how soon survivors of a rank that stands still come back.
"""

# Without `from __future__ import annotations`: NVRx reads the annotation of call_wrapper as a type.
import logging
import os
from datetime import timedelta
from typing import Any

import nvidia_resiliency_ext.inprocess as inprocess
import torch.distributed as dist

from peers import job, work
from peers.record import Recorder


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


PORT = int(os.environ["MASTER_PORT"])
FIRST_RANK = int(os.environ["RANK"])
TIMEOUT_S = float(os.environ.get("PEERS_TIMEOUT", "1800"))
SETTING = os.environ["PEERS_SETTING"]


def knobs() -> dict[str, Any]:
    if SETTING == "defaults":
        return {}
    chosen: dict[str, Any] = {
        "monitor_thread_interval": seconds(0.1), "monitor_process_interval": seconds(0.1),
        "heartbeat_interval": seconds(0.1), "progress_watchdog_interval": seconds(0.1),
        "soft_timeout": seconds(2), "hard_timeout": seconds(3), "heartbeat_timeout": seconds(4),
        "barrier_timeout": seconds(20), "completion_timeout": seconds(20), "last_call_wait": seconds(0.1),
        "termination_grace_time": seconds(0.5),
    }  # fmt: skip
    if SETTING == "spare":
        from nvidia_resiliency_ext.inprocess.rank_assignment import Layer, LayerFlag, Tree

        layer = Layer(min_ranks=1, max_ranks=job.WORLD_SIZE, flag=LayerFlag.RESERVE)
        chosen["rank_assignment"] = Tree([layer])
    return chosen


RECORDER = Recorder(FIRST_RANK)
TRAINER = work.Trainer(FIRST_RANK)
TRAINER.warm_up()  # of the process: what can be built before the first fault is


@inprocess.Wrapper(store_kwargs={"port": PORT + 1}, **knobs())
def train(call_wrapper: inprocess.CallWrapper | None = None) -> None:
    assert call_wrapper is not None
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    RECORDER.rank = rank
    generation = call_wrapper.iteration
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.TCPStore(
        "127.0.0.1", PORT + 2 + generation, world_size=world, is_master=rank == 0, multi_tenant=True,
        wait_for_workers=True,
    )  # fmt: skip
    dist.init_process_group(job.BACKEND, store=store, rank=rank, world_size=world, timeout=seconds(TIMEOUT_S))
    checkpoint = RECORDER.folder / "checkpoint.pt"
    if rank == 0 and not checkpoint.exists():
        TRAINER.save(checkpoint, 0)  # whoever begins anew before the first one must not go on from what it trained
    iteration = TRAINER.restore(checkpoint)
    RECORDER.say("ready", iteration, generation=generation)
    while iteration < RECORDER.told_end():
        TRAINER.compute(iteration, work.share(rank, world), RECORDER.begins)
        dist.all_reduce(TRAINER.flat)
        tokens = float(TRAINER.flat[-1])
        # a step torn by a restart is harmless: every restart reads the checkpoint
        loss = TRAINER.step()
        call_wrapper.ping()
        if rank == 0 and (iteration + 1) % job.CHECKPOINT_EVERY == 0:
            with call_wrapper.atomic():
                TRAINER.save(checkpoint, iteration + 1)
        RECORDER.committed(iteration, world, loss, tokens)
        RECORDER.compared(iteration, lambda: work.weights(TRAINER.model))
        iteration += 1
    RECORDER.say("end", iteration)
    dist.barrier()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
    train()
