"""The work under torchft: one replica group a rank, gradients through Manager.allreduce.

torchft's stock DistributedDataParallel ends every survivor on a gloo error (assert in its hook); Manager.allreduce,
which its own LocalSGD uses, does not. PEERS_DEAL=1 deals all micro-batches over those who take part in the step
(Manager.participating_rank, num_participants), so that a step with fewer replicas loses no samples; else each replica
has its fixed share, as in torchft's example. An iteration that is voted away is tried again with the same data.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL

from peers import job, work
from peers.record import Recorder

UP_S_MAX = 120.0


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


def main() -> None:
    rank, timeout = int(os.environ["RANK"]), float(os.environ["PEERS_TIMEOUT"])
    recorder = Recorder(rank)
    trainer = work.Trainer(rank)
    trainer.warm_up()
    wait_for_all(recorder)

    def state() -> dict[str, Any]:
        recorder.serving()
        return trainer.state()

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = ProcessGroupNCCL if job.ON_GPUS else ProcessGroupGloo
    manager = Manager(
        pg=made(timeout=seconds(timeout)), min_replica_size=1, load_state_dict=trainer.load,
        state_dict=state, replica_id=f"replica_{rank}", store_addr="127.0.0.1", store_port=store.port, rank=0,
        world_size=1, lighthouse_addr=os.environ["PEERS_LIGHTHOUSE"], hostname="127.0.0.1", timeout=seconds(timeout),
        quorum_timeout=seconds(60), connect_timeout=seconds(60),
    )  # fmt: skip
    deals = os.environ.get("PEERS_DEAL") == "1"
    recorder.say("ready")
    while manager.current_step() < recorder.told_end():
        iteration = manager.current_step()
        manager.start_quorum()
        place, places = rank, job.WORLD_SIZE
        if deals:
            places = manager.num_participants()
            place = manager.participating_rank() if manager.participating_rank() is not None else -1
        trainer.compute(iteration, work.share(place, places) if place >= 0 else (), recorder.begins)
        manager.allreduce(trainer.flat).wait()
        if not manager.should_commit():
            recorder.say("voted_away", iteration)
            continue
        iteration = manager.current_step() - 1  # a replica that was healed is where the others are
        tokens = float(trainer.flat[-1]) * manager.num_participants()  # torchft gives the mean
        loss = trainer.step()
        recorder.committed(iteration, manager.num_participants(), loss, tokens)
        recorder.compared(iteration, lambda: work.weights(trainer.model))
    recorder.say("end", manager.current_step())
    time.sleep(1.0)  # the others may still need this one's vote
    os._exit(0)


def wait_for_all(recorder: Recorder) -> None:
    """At the first start only: imports take unequally long, and the first quorum shall have everybody."""
    (recorder.folder / f"up_{recorder.rank}").touch()
    deadline = time.monotonic() + UP_S_MAX
    while len(list(recorder.folder.glob("up_*"))) < job.WORLD_SIZE and time.monotonic() < deadline:
        time.sleep(0.01)


if __name__ == "__main__":
    main()
