"""Checkpoints in megatron-core's own format (dist_checkpointing, torch_dist), written while
training goes on.

At an iteration boundary `Saver.save` takes a snapshot: a clone of the tensors this rank is the main
replica of. A background thread writes it. **Saving makes no collective**, neither in the training
groups nor in groups of its own: ranks meet in the file system (checkpoint_parts.py), so that a save
can neither hang the training nor be hung by a failure. A rank that dies while saving costs that
checkpoint, which never appears, and nothing else.

A checkpoint is written in `iter_0000123.partial-TAG` and renamed to `iter_0000123` when it is
complete; `latest_checkpointed_iteration.txt`, the marker plain Megatron-LM looks for, is written
last. The newest `keep` checkpoints stay. The folder must be the same for all ranks.

Rejected: `dist_checkpointing.save` (2.7-4.2 s here: it spawns processes that import the script
again, forks from a threaded process, and gathers in the default group); its `async_sharded_save`
(planning and finalizing are still collectives in the training groups, an epoch change between the
two is undefined, and its writers fork). What this one costs is in docs/TRAINING.md."""

from __future__ import annotations

import logging
import queue
import re
import secrets
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from unicron.training import checkpoint_parts as parts
from unicron.training import loss_scale
from unicron.training.optimizer_state import inner_optimizers, optimizer_parts
from unicron.training.scheduler import restore_scheduler
from unicron.training.undoable_step import is_sharded

LATEST = "latest_checkpointed_iteration.txt"
CHECKPOINT_VERSION = 3.0  # of Megatron-LM's state dict: what its own loader asks for
COMPLETE = "metadata.json"  # written last inside a checkpoint
POLL_S = 0.02
PARTS_TIMEOUT_S = 600.0
#: After a recovery, for each further part of a save that was begun before: as long as the own part took so many times,
#: at least these seconds. Somebody may have died before writing its own, or belongs to the save's second attempt.
INTERRUPTED_S_MIN = 5.0
INTERRUPTED_TIMES = 3.0
QUEUED_MAX = 2
#: Of a distributed optimizer: each rank writes its own shard and no collective is made; it loads at any dp.
SHARDED_METADATA = {"distrib_optim_sharding_type": "dp_reshardable"}
_NAME = re.compile(r"iter_(\d{7,})")

logger = logging.getLogger(__name__)


class CheckpointRefused(ValueError):
    """The folder holds no checkpoint that this model can take."""


@dataclass(frozen=True)
class SaveResult:
    """What became of a save, on this rank: written, or (rank 0 of the save) complete, or failed."""

    iteration: int
    path: Path
    complete: bool
    error: str = ""
    seconds: float = 0.0


@dataclass
class _Save:
    iteration: int
    folder: Path
    num_ranks: int
    snapshot: parts.Snapshot
    started: float
    written: float = 0.0  # when the own part was, in the background
    writing_s: float = 0.0
    num_parts: int = 0  # that are there, and since when
    came: float = 0.0
    deadline: float = 0.0
    common: dict[str, Any] = field(default_factory=dict)


class Saver:
    """Writes checkpoints of one rank in the background; one thread, nothing shared with training.

    Args:
        directory: where the checkpoints go; the same for all ranks, on a file system all of them
        see. keep: how many complete checkpoints stay. timeout_s: how long rank 0 of a save waits
        for the others' parts before it gives it up."""

    def __init__(self, directory: str | Path, keep: int = 2, timeout_s: float = PARTS_TIMEOUT_S) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.keep = max(1, keep)
        self.timeout_s = timeout_s
        self._queue: queue.Queue[_Save | None] = queue.Queue(maxsize=QUEUED_MAX)
        self._waiting: list[_Save] = []  # written here, parts of others outstanding; rank 0 only
        self._results: queue.SimpleQueue[SaveResult] = queue.SimpleQueue()
        self._pending = 0  # saves asked for and not yet reported; guarded by _lock
        self._interrupted_at = 0.0  # by a recovery: saves begun before may lack parts for ever
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._tag = ""

    def save(
        self,
        iteration: int,
        model: Any,
        optimizer: Any = None,
        scheduler: Any = None,
        extra: dict[str, Any] | None = None,
        tag: str = "",
    ) -> Path:
        """Snapshot now, write later; every rank calls it at the same iteration boundary.

        `tag` names this attempt: the same on every rank, and never used before for this folder
        (unicron gives the epoch). Without one rank 0 draws it: one broadcast, at the first save.
        Blocks only while QUEUED_MAX earlier saves of this rank are still being written."""
        state = state_dict(model, optimizer, scheduler)
        state.update(iteration=iteration, checkpoint_version=CHECKPOINT_VERSION)
        if extra:
            state["unicron"] = extra
        rank, num_ranks = _rank_and_size()
        folder = self._partial(iteration, tag or self._own_tag())
        snapshot = parts.Snapshot(state, rank)
        self._start()
        with self._lock:
            self._pending += 1
        save = _Save(iteration, folder, num_ranks, snapshot, time.monotonic())
        self._queue.put(save, timeout=self.timeout_s)
        return self.directory / name_of(iteration)

    def interrupt(self) -> None:
        """There was a recovery: parts of saves asked for so far may never come, and are waited for no longer than
        their writing takes (INTERRUPTED_TIMES)."""
        self._interrupted_at = time.monotonic()

    def poll(self) -> tuple[SaveResult, ...]:
        """What has become known since the last call. Never blocks."""
        results = []
        while not self._results.empty():
            results.append(self._results.get_nowait())
        return tuple(results)

    def wait(self, timeout_s: float) -> bool:
        """Until every save asked for is reported; False after timeout_s."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            with self._lock:
                if not self._pending:
                    return True
            time.sleep(POLL_S / 4)
        return False

    def close(self, timeout_s: float = 60.0) -> None:
        """Finish what can be finished within timeout_s; what is left stays partial."""
        self.wait(timeout_s)
        if self._thread is not None:
            self._queue.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)
            self._thread = None

    # ---------------------------------------------------------------- background

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                save = self._queue.get(timeout=POLL_S if self._waiting else None)
            except queue.Empty:
                save = None
            else:
                if save is None:
                    return
            if save is not None:
                self._guarded(save, self._write)
            for waiting in list(self._waiting):
                self._guarded(waiting, self._maybe_finish)

    def _guarded(self, save: _Save, step: Any) -> None:
        """A failed save (a full disk) is a result, never the end of training or of this thread."""
        try:
            step(save)
        except Exception as error:
            logger.warning("checkpoint of iteration %d failed: %s", save.iteration, error)
            self._report(save, False, f"{type(error).__name__}: {error}")

    def _write(self, save: _Save) -> None:
        begun = time.monotonic()
        save.snapshot.write(save.folder)
        save.written = time.monotonic()
        save.writing_s = save.written - begun
        if save.snapshot.rank != 0:
            self._report(save, False)
            return
        save.common = save.snapshot.common
        save.deadline = save.written + self.timeout_s
        self._waiting.append(save)

    def _maybe_finish(self, save: _Save) -> None:
        if parts.has_all_parts(save.folder, save.num_ranks):
            parts.finish(save.folder, save.num_ranks, save.common)
            self._publish(save)
            self._report(save, True)
            self._forget_older(save)
        elif time.monotonic() > save.deadline:
            raise TimeoutError(f"parts of some ranks are missing after {self.timeout_s:.0f} s")
        elif save.started < self._interrupted_at and self._stands(save):
            raise TimeoutError("parts of some ranks are missing since a recovery")

    def _stands(self, save: _Save) -> bool:
        """No part has come for longer than writing one takes."""
        now, there = time.monotonic(), parts.num_parts(save.folder, save.num_ranks)
        if there != save.num_parts:
            save.num_parts, save.came = there, now
        since = max(save.written, save.came, self._interrupted_at)
        return now > since + max(INTERRUPTED_S_MIN, INTERRUPTED_TIMES * save.writing_s)

    def _forget_older(self, save: _Save) -> None:
        """Of a save that is complete: nobody needs an older one that still waits for parts."""
        for older in [other for other in self._waiting if other.started < save.started]:
            shutil.rmtree(older.folder, ignore_errors=True)  # before it is told: whoever waited looks at the folder
            self._report(older, False, f"parts of some ranks are missing, and iteration {save.iteration} is complete")

    def _publish(self, save: _Save) -> None:
        """Rename, then the marker, then forget what is older."""
        final = self.directory / name_of(save.iteration)
        if final.exists():  # trained again from an older checkpoint: the new one replaces it
            old = final.with_name(f"{final.name}.partial-old-{secrets.token_hex(4)}")
            final.rename(old)
            shutil.rmtree(old, ignore_errors=True)
        save.folder.rename(final)
        parts.sync_path(self.directory)
        parts.write_text_durably(self.directory / LATEST, f"{save.iteration}\n")
        for path in complete(self.directory)[: -self.keep]:
            shutil.rmtree(path, ignore_errors=True)
        in_work = {other.folder for other in self._waiting if other is not save}
        for path in self.directory.glob("iter_*.partial-*"):
            match = _NAME.match(path.name)
            if path not in in_work and match and int(match[1]) < save.iteration:
                shutil.rmtree(path, ignore_errors=True)

    def _report(self, save: _Save, is_complete: bool, error: str = "") -> None:
        if save in self._waiting:
            self._waiting.remove(save)
        path = self.directory / name_of(save.iteration) if is_complete else save.folder
        seconds = time.monotonic() - save.started
        self._results.put(SaveResult(save.iteration, path, is_complete, error, seconds))
        with self._lock:
            self._pending -= 1

    def _partial(self, iteration: int, tag: str) -> Path:
        return self.directory / f"{name_of(iteration)}.partial-{tag}"

    def _own_tag(self) -> str:
        if not self._tag:
            number = torch.tensor([secrets.randbits(62)])
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.broadcast(number, 0)
            self._tag = f"{int(number):x}"
        return self._tag


def _rank_and_size() -> tuple[int, int]:
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


# -------------------------------------------------------------------- state


def state_dict(model: Any, optimizer: Any = None, scheduler: Any = None, is_loading: bool = False) -> dict[str, Any]:
    """Megatron-LM's own arrangement: model, optimizer, opt_param_scheduler; sharded."""
    state: dict[str, Any] = {name: module.sharded_state_dict(prefix="") for name, module in modules(model).items()}
    of_model = state.get("model", state)
    if optimizer is not None:
        options = {"metadata": SHARDED_METADATA} if is_sharded(optimizer) else {}
        state["optimizer"] = optimizer.sharded_state_dict(dict(of_model), is_loading=is_loading, **options)
    if scheduler is not None and not is_loading:
        state["opt_param_scheduler"] = scheduler.state_dict()
    return state


def modules(model: Any) -> dict[str, Any]:
    """The GPTModels inside wrappers (DDP, Float16Module), by their names in Megatron-LM's checkpoints: model, or
    model0, model1, … of an interleaved pipeline.
    """
    chunks = list(model) if isinstance(model, list | tuple) else [model]
    names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
    return {name: _bare(chunk) for name, chunk in zip(names, chunks, strict=True)}


def _bare(model: Any) -> Any:
    while hasattr(model, "module"):
        model = model.module
    return model


def load(path: str | Path, model: Any, optimizer: Any = None, scheduler: Any = None) -> dict[str, Any]:
    """Read a checkpoint into the living tensors, in place (they may lie in an arena).

    Makes no collective. Returns {"iteration": int, "extra": dict}."""
    path = resolve(path)
    before = {} if optimizer is None else _states(optimizer)
    wanted = state_dict(model, optimizer, is_loading=True)
    loaded = dist_checkpointing.load(
        wanted,
        str(path),
        sharded_strategy=parts.LoneReader(),
        validate_access_integrity=False,
    )
    for name, module in modules(model).items():
        module.load_state_dict(loaded[name], strict=False)
    if optimizer is not None:
        _complete(optimizer, loaded["optimizer"])
        optimizer.load_state_dict(loaded["optimizer"])
        _move_back(optimizer, before)
    if scheduler is not None and "opt_param_scheduler" in loaded:
        restore_scheduler(scheduler, loaded["opt_param_scheduler"])
    return {"iteration": int(loaded["iteration"]), "extra": loaded.get("unicron", {})}


def _complete(optimizer: Any, loaded: dict[str, Any]) -> None:
    """What Megatron's own loading does not do: read a step count of 0, which its saving leaves out (in fp16 every step
    so far may have overflowed), and set a loss scale on a CPU."""
    chained = optimizer_parts(optimizer)
    states = [loaded] if len(chained) == 1 else [state for _, state in sorted(loaded.items())]
    for part, state in zip(chained, states, strict=True):
        if "grad_scaler" in state:
            loss_scale.restore(part.grad_scaler, state.pop("grad_scaler"))
        of_params = state.get("optimizer", state).get("state", {})
        counts = [each for each in of_params.values() if isinstance(each, dict) and "exp_avg" in each]
        if counts and "common_step" not in of_params and not any("step" in each for each in counts):
            of_params["common_step"] = torch.tensor(0.0)


def _states(optimizer: Any) -> dict[torch.Tensor, tuple[Any, dict[str, Any]]]:
    """parameter -> (its optimizer, its state's tensors by name)."""
    inners = inner_optimizers(optimizer)
    return {param: (inner, dict(state)) for inner in inners for param, state in inner.state.items()}


@torch.no_grad()
def _move_back(optimizer: Any, before: dict[torch.Tensor, tuple[Any, dict[str, Any]]]) -> None:
    """torch's load_state_dict puts new tensors in the place of the old: move the values back.

    The old tensors may lie in an arena, and views of them elsewhere must go on seeing them."""
    for param, (inner, old) in before.items():
        new = inner.state[param]
        for name, tensor in old.items():
            if isinstance(tensor, torch.Tensor) and name in new and new[name] is not tensor:
                value = new[name]
                tensor.copy_(value if isinstance(value, torch.Tensor) else torch.tensor(value))
        inner.state[param] = {**new, **old} if set(new) - set(old) else old


# -------------------------------------------------------------------- folders


def name_of(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def iteration_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def complete(directory: str | Path) -> list[Path]:
    """The complete checkpoints of a folder, oldest first."""
    folder = Path(directory)
    found = [path for path in folder.glob("iter_*") if iteration_of(path) >= 0]
    return sorted((path for path in found if (path / COMPLETE).is_file()), key=iteration_of)


def find_latest(directory: str | Path) -> Path | None:
    """The checkpoint the marker names; without a usable marker the newest complete one; or None."""
    folder = Path(directory)
    try:
        marked = folder / name_of(int((folder / LATEST).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        marked = None
    if marked is not None and (marked / COMPLETE).is_file():
        return marked
    found = complete(folder)
    return found[-1] if found else None


def resolve(path: str | Path) -> Path:
    """A checkpoint, or a folder of checkpoints: its latest."""
    path = Path(path)
    if (path / COMPLETE).is_file():
        return path
    latest = find_latest(path)
    if latest is None:
        raise CheckpointRefused(f"{path} holds no complete checkpoint (iter_*/{COMPLETE})")
    return latest
