"""Checkpoints: exact in every layout, written while training goes on, whole or not at all."""

from __future__ import annotations

import multiprocessing
import shutil
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from unicron.training import checkpoint, checkpoint_parts
from unicron.training.saving import CLOSE_S_MAX, Saving

pytestmark = pytest.mark.timeout(180)

LAYOUTS = ((1, 1, 2), (2, 1, 1), (1, 2, 1))


# ------------------------------------------------------------------ two real ranks


def test_save_and_load_are_exact_at_two_ranks(tmp_path):
    """tp, pp and dp, each with two processes over gloo: values, addresses, plain megatron's
    load.
    """
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    ranks = [context.Process(target=_rank, args=(rank, str(tmp_path), results), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(150)
    assert [process.exitcode for process in ranks] == [0, 0], results.get()
    for tp, pp, dp in LAYOUTS:
        folder = tmp_path / f"{tp}{pp}{dp}"
        assert sorted(path.name for path in folder.iterdir()) == [
            "iter_0000003",
            "iter_0000004",
            "latest_checkpointed_iteration.txt",
        ]


def _rank(rank: int, folder: str, results) -> None:
    try:
        torch.set_num_threads(1)
        from unicron.training import megatron_cpu

        megatron_cpu.install()
        store = dist.FileStore(f"{folder}/store", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        for layout in LAYOUTS:
            _one_layout(layout, folder)
        _one_layout((1, 1, 2), folder, sharded=True)
        dist.destroy_process_group()
    except BaseException:
        results.put(f"rank {rank}: {traceback.format_exc()}")
        raise


def _one_layout(sizes: tuple[int, int, int], folder: str, sharded: bool = False) -> None:
    from megatron.core import parallel_state

    from unicron.demo import model as demo
    from unicron.types import Layout

    tp, pp, dp = sizes
    parallel_state.initialize_model_parallel(tp, pp, create_gloo_process_groups=False)
    layout = Layout(tp=tp, pp=pp, dp=dp, micro_batch=2, num_micro_batches=2 * dp, sharded=sharded)
    folder += "/sharded" * sharded
    job = Job(layout, *demo.build(layout))
    job.train(2)
    saver = checkpoint.Saver(f"{folder}/{tp}{pp}{dp}", keep=2)
    for iteration in (2, 3, 4):
        saved = job.clone()
        saver.save(iteration, job.model, job.optimizer, job.scheduler, extra={"seed": 7})
        job.train(1)  # the save must not see this
    assert saver.wait(60)
    dist.barrier()
    failed = [result for result in saver.poll() if result.error]
    assert not failed, failed
    _compare_after_load(job, saved, saver.directory)
    saver.close()
    dist.barrier()
    parallel_state.destroy_model_parallel()


def _compare_after_load(job: Job, saved: dict[str, torch.Tensor], directory: Path) -> None:
    addresses = {name: value.data_ptr() for name, value in job.tensors().items()}
    for value in job.tensors().values():
        value.fill_(7.0)
    loaded = checkpoint.load(directory, job.model, job.optimizer, job.scheduler)
    assert loaded == {"iteration": 4, "extra": {"seed": 7}}
    now = job.tensors()
    assert {name: value.data_ptr() for name, value in now.items()} == addresses
    different = [name for name in saved if not torch.equal(saved[name], now[name])]
    assert not different and len(saved) == len(now), different
    # plain megatron-core, with its own checks of completeness and of shards
    from megatron.core import dist_checkpointing

    bare = checkpoint.modules(job.model)["model"]
    wanted = {"model": bare.sharded_state_dict(prefix="")}
    path = checkpoint.find_latest(directory)
    plain = dist_checkpointing.load(wanted, str(path))
    for name, value in bare.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(plain["model"][name], value), name


class Job:
    """The demo's model with a plain loop around it."""

    def __init__(self, layout, model, optimizer, scheduler) -> None:
        from megatron.core.distributed import finalize_model_grads

        from unicron.demo import model as demo
        from unicron.training.data import ByteCorpus, ByteDataset

        self.layout, self.model, self.optimizer, self.scheduler = (
            layout,
            model,
            optimizer,
            scheduler,
        )
        model.config.finalize_model_grads_func = finalize_model_grads
        corpus = ByteCorpus.from_stdlib(200_000)
        self.dataset = ByteDataset(corpus, demo.SEQ_LENGTH, 2, layout.num_micro_batches)
        self.iteration = 0

    def train(self, iterations: int) -> None:
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        from unicron.demo import model as demo

        first = 2 * parallel_state.get_data_parallel_rank()
        for _ in range(iterations):
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            get_forward_backward_func()(
                forward_step_func=demo.forward_step,
                data_iterator=iter([self.dataset(self.iteration, first + m) for m in range(2)]),
                model=[self.model],
                num_microbatches=2,
                seq_length=demo.SEQ_LENGTH,
                micro_batch_size=2,
                forward_only=False,
            )
            self.optimizer.step()
            self.scheduler.step(self.layout.micro_batch * self.layout.num_micro_batches)
            self.iteration += 1

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {name: param.data for name, param in self.model.named_parameters()}
        for number, state in enumerate(self.optimizer.optimizer.state.values()):
            found.update({f"{number}.{name}": value for name, value in state.items()})
        return found

    def clone(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.tensors().items()}


# ------------------------------------------------------------------ one process, plain tensors


class Plain(torch.nn.Module):
    """The least that can be saved: one tensor, sharded_state_dict."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4, 3), value))

    def sharded_state_dict(self, prefix: str = "") -> dict:
        from megatron.core.dist_checkpointing import ShardedTensor

        key = f"{prefix}weight"
        return {key: ShardedTensor.from_rank_offsets(key, self.weight.data)}


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def save_all(saver: checkpoint.Saver, iterations, value: float = 1.0) -> list:
    for iteration in iterations:
        saver.save(iteration, Plain(value + iteration), tag="t")
    assert saver.wait(30)
    return list(saver.poll())


def test_keeps_the_newest_and_marks_the_latest(alone, tmp_path):
    saver = checkpoint.Saver(tmp_path, keep=2)
    results = save_all(saver, range(1, 6))
    assert [(r.iteration, r.complete, r.error) for r in results] == [(i, True, "") for i in range(1, 6)]
    assert [path.name for path in checkpoint.complete(tmp_path)] == ["iter_0000004", "iter_0000005"]
    assert checkpoint.find_latest(tmp_path) == tmp_path / "iter_0000005"
    assert (tmp_path / checkpoint.LATEST).read_text().strip() == "5"
    model = Plain(0.0)
    assert checkpoint.load(tmp_path, model)["iteration"] == 5
    assert torch.equal(model.weight.data, torch.full((4, 3), 6.0))
    saver.close()


def test_the_same_iteration_again_replaces_it(alone, tmp_path):
    saver = checkpoint.Saver(tmp_path)
    save_all(saver, [3], value=1.0)
    saver.save(3, Plain(50.0), tag="later")
    assert saver.wait(30)
    model = Plain(0.0)
    checkpoint.load(tmp_path, model)
    assert float(model.weight.detach()[0, 0]) == 50.0
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000003"]
    saver.close()


def test_a_missing_part_is_a_failed_save_and_no_checkpoint(alone, tmp_path, monkeypatch):
    saver = checkpoint.Saver(tmp_path, timeout_s=0.3)
    monkeypatch.setattr(checkpoint, "_rank_and_size", lambda: (0, 2))  # rank 1 died
    (result,) = save_all(saver, [1])
    assert not result.complete and "parts of some ranks are missing" in result.error
    assert checkpoint.find_latest(tmp_path) is None
    monkeypatch.undo()
    (result,) = save_all(saver, [2])  # the next one goes through and sweeps the remains away
    assert result.complete and checkpoint.find_latest(tmp_path) == tmp_path / "iter_0000002"
    assert not list(tmp_path.glob("*.partial-*"))
    saver.close()


def test_the_end_of_a_task_does_not_wait_for_parts_that_a_recovery_took(alone, tmp_path, monkeypatch):
    """Of those who began a save some had learned of the failure and some not: two attempts, neither ever complete."""
    monkeypatch.setattr(checkpoint, "INTERRUPTED_S_MIN", 0.3)
    saving = Saving(str(tmp_path), 5, (Plain(1.0), None, None), dict)
    monkeypatch.setattr(checkpoint, "_rank_and_size", lambda: (0, 2))
    assert saving.save_if_due(4, epoch=1)
    begun = time.monotonic()
    assert saving.finish(epoch=2) is None
    assert time.monotonic() - begun < CLOSE_S_MAX / 2
    assert checkpoint.find_latest(tmp_path) is None


def test_behind_the_last_iteration_a_recovery_makes_all_save_again(alone, tmp_path):
    """Parts of the first attempt may be lost, the heir's are, and no later save makes up for it."""
    saving = Saving(str(tmp_path), 5, (Plain(1.0), None, None), dict)
    assert saving.save_if_due(4, epoch=1)
    assert not saving.save_again_if_due(4, epoch=1)
    assert saving.save_again_if_due(4, epoch=2) and not saving.save_again_if_due(4, epoch=2)
    assert saving.finish(2) is not None  # before the heir begins: here both are rank 0, and write the same files
    heir = Saving(str(tmp_path), 5, (Plain(1.0), None, None), dict)
    assert heir.save_again_if_due(4, epoch=2) and not heir.save_again_if_due(6, epoch=2)
    assert heir.finish(2) is not None
    assert checkpoint.find_latest(tmp_path) == tmp_path / "iter_0000005"


def test_of_saves_that_wait_for_parts_older_ones_end_with_a_newer_one(alone, tmp_path, monkeypatch):
    saver = checkpoint.Saver(tmp_path)
    monkeypatch.setattr(checkpoint, "_rank_and_size", lambda: (0, 2))
    saver.save(1, Plain(1.0), tag="t")
    monkeypatch.undo()

    def slow_rmtree(path, **options):
        time.sleep(0.2)
        rmtree(path, **options)

    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", slow_rmtree)  # a result is told when the folder is as it says
    older, newer = sorted(save_all(saver, [2]), key=lambda result: result.iteration)
    assert not older.complete and "iteration 2 is complete" in older.error and newer.complete
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000002"]
    saver.close()


def test_a_full_disk_is_a_result_not_an_exception(alone, tmp_path, monkeypatch):
    saver = checkpoint.Saver(tmp_path)

    def full(_self, _folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_parts.Snapshot, "write", full)
    (result,) = save_all(saver, [1])
    assert "No space left" in result.error and not result.complete
    monkeypatch.undo()
    (result,) = save_all(saver, [2])
    assert result.complete
    saver.close()


def test_latest_without_a_usable_marker(tmp_path):
    for iteration, is_complete in ((1, True), (2, True), (3, False)):
        folder = tmp_path / checkpoint.name_of(iteration)
        folder.mkdir()
        if is_complete:
            (folder / checkpoint.COMPLETE).write_text("{}")
    (tmp_path / "iter_0000009.partial-x").mkdir()
    for marker in (None, "nonsense", "3", "77"):
        if marker is not None:
            (tmp_path / checkpoint.LATEST).write_text(marker)
        assert checkpoint.find_latest(tmp_path) == tmp_path / "iter_0000002"
    (tmp_path / checkpoint.LATEST).write_text("1\n")
    assert checkpoint.find_latest(tmp_path) == tmp_path / "iter_0000001"


def test_no_checkpoint_is_refused_by_name(tmp_path):
    with pytest.raises(checkpoint.CheckpointRefused, match="no complete checkpoint"):
        checkpoint.load(tmp_path, Plain(0.0))
