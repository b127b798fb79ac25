"""What the demo's training script writes down, so that two runs can be compared afterwards.

One folder a run, files by rank. Lines are appended with one write each, so a process that is killed
leaves whole lines, and its heir goes on in the same file. Nothing here is needed for training:

  rank_R.jsonl         one line an iteration: loss, when it began and was committed; one a process
  forwards_R.jsonl     one line a forward begun: counts what was computed again, independently of
                       what unicron says about itself
  gradient_I_R.npy     the reduced, unscaled gradient of iteration I, for the iterations asked for
  magnitude_I_R.npy    reference run: sum over micro-batches of |g_m| (this rank's share)
  digests_R.jsonl      if asked for: one line an iteration, sha256 of reduced gradient and of parameters and optimizer
  state_R.json         digest of parameters and optimizer state after the last compared iteration
  weights_R.npy        the parameters then"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unicron.training.chunks import Chunks
from unicron.training.optimizer_state import inner_optimizers
from unicron.training.session import Metrics

LINE_BYTES_MAX = 4096


class Recorder:
    """Writes one rank's files.

    Args:
        folder: of the run.
        rank: the role's number.
        gradients: iterations whose reduced gradient is kept.
        magnitudes: also the sum of |g_m| of those (the reference run).
        digests: of every iteration.
        place: (tp, pp) of the role, which another layout gives to another number."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        gradients: Collection[int] = (),
        magnitudes: bool = False,
        digests: bool = False,
        place: tuple[int, int] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.rank, self._place = folder, rank, place
        self._gradients = frozenset(gradients)
        self._magnitudes = magnitudes
        self._sums: list[torch.Tensor] = []
        self._summing = False
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._log = os.open(folder / f"rank_{rank}.jsonl", flags, 0o644)
        self._forwards = os.open(folder / f"forwards_{rank}.jsonl", flags, 0o644)
        self._digests = os.open(folder / f"digests_{rank}.jsonl", flags, 0o644) if digests else -1
        self._gradient = ("", -1)  # digest of the newest reduced one, its iteration
        self._lines: list[bytes] = []

    # ---------------------------------------------------------------- as training goes

    def process_began(self, **facts: Any) -> None:
        self._append(self._log, {"event": "process", "pid": os.getpid(), **facts})

    def forward_begins(self, iteration: int, micro_batch: int) -> None:
        line = {"iteration": iteration, "micro_batch": micro_batch, "pid": os.getpid(), "place": self._place}
        self._append(self._forwards, line)

    def committed(self, iteration: int, metrics: Metrics, start_ns: int) -> None:
        line = {
            "event": "iteration",
            "iteration": iteration,
            "loss": metrics.loss,
            "grad_norm": metrics.grad_norm,
            "tokens": metrics.tokens,
            "start_ns": start_ns,
            "commit_ns": time.monotonic_ns(),
            "pid": os.getpid(),
        }
        self._append(self._log, line)

    def _append(self, descriptor: int, line: dict[str, Any]) -> None:
        data = json.dumps(line).encode() + b"\n"
        assert len(data) <= LINE_BYTES_MAX, len(data)
        os.write(descriptor, data)

    # ---------------------------------------------------------------- gradients

    def iteration_begins(self, iteration: int) -> None:
        self._summing = self._magnitudes and iteration in self._gradients
        for total in self._sums:
            total.zero_()

    def watch(self, model: Any) -> None:
        """Reference run: add |g_m| of every micro-batch to a flat buffer laid out as DDP's own."""
        if not self._magnitudes:
            return
        for number, buffer in enumerate(_all_buffers(Chunks(model))):
            self._sums.append(torch.zeros_like(buffer.grad_data))
            for param in buffer.params:
                start, end = span(buffer, param)
                self._watch_one(param, number, start, end)

    def _watch_one(self, param: Any, number: int, start: int, end: int) -> None:
        def add(gradient: torch.Tensor) -> None:
            if self._summing:
                self._sums[number][start:end].add_(gradient.detach().abs().view(-1))

        param.register_hook(add)  # once a micro-batch, with the whole gradient of it

    def reduced(self, iteration: int, buffers: list[torch.Tensor]) -> None:
        """What session.on_reduced calls: the sums of the whole task, before scaling."""
        if self._digests >= 0:
            self._gradient = (hashlib.sha256(_flat(buffers).tobytes()).hexdigest()[:16], iteration)
        if iteration not in self._gradients:
            return
        self._save(f"gradient_{iteration}_{self.rank}.npy", _flat(buffers))
        if self._magnitudes:
            self._save(f"magnitude_{iteration}_{self.rank}.npy", _flat(self._sums))

    def digests(self, iteration: int, model: Any = None, optimizer: Any = None) -> None:
        """After the step. The gradient is not known to a process that rolled forward with another's commit, the state
        not without model and optimizer."""
        if self._digests >= 0:
            gradient = self._gradient[0] if self._gradient[1] == iteration else ""
            state = "" if model is None else digest(model, optimizer)[:16]
            line = {"iteration": iteration, "gradient": gradient, "state": state}
            self._append(self._digests, line)

    def _save(self, name: str, values: np.ndarray) -> None:
        """Whole or not at all: the process may be killed in the middle."""
        staging = self.folder / f".{name}.{os.getpid()}"
        with open(staging, "wb") as file:
            np.save(file, values, allow_pickle=False)
        os.replace(staging, self.folder / name)

    # ---------------------------------------------------------------- at the end

    def state(self, iteration: int, model: Any, optimizer: Any) -> None:
        """Digest and weights after `iteration`."""
        model = Chunks(model)
        weights = [param.detach().reshape(-1).float() for param in model.parameters()]
        self._save(f"weights_{self.rank}.npy", torch.cat(weights).cpu().numpy())
        facts = {
            "rank": self.rank,
            "place": self._place,
            "iteration": iteration,
            "sha256": digest(model.chunks, optimizer),
            "parameters": own_parameters(model),
            "tied": [list(span) for span in tied_spans(model)],
            "dense": sum(buffer.grad_data.numel() for buffer in model.buffers),
        }
        staging = self.folder / f".state_{self.rank}.{os.getpid()}"
        staging.write_text(json.dumps(facts), encoding="utf-8")
        os.replace(staging, self.folder / f"state_{self.rank}.json")


class Counted:
    """A data set that says which micro-batch it hands out, for the count inside the forward."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.seq_length = dataset.seq_length

    def __call__(self, iteration: int, micro_batch: int) -> dict[str, Any]:
        batch = self._dataset(iteration, micro_batch)
        return {**batch, "address": (iteration, micro_batch)}


def span(buffer: Any, param: Any) -> tuple[int, int]:
    """Where a parameter's gradient lies in its flat buffer."""
    data = buffer.grad_data
    start = (param.main_grad.data_ptr() - data.data_ptr()) // data.element_size()
    return start, start + param.main_grad.numel()


def tied_spans(model: Chunks) -> Iterator[tuple[int, int]]:
    """Places in the flat gradient whose value is a sum over the first and the last stage."""
    offset = 0
    for buffer in model.buffers:
        for param in buffer.params:
            if getattr(param, "shared_embedding", False):
                start, end = span(buffer, param)
                yield offset + start, offset + end
        offset += buffer.grad_data.numel()


def _all_buffers(model: Chunks) -> list[Any]:
    """In the order of what on_reduced gets."""
    return model.buffers + model.expert_parallel_buffers


def own_parameters(model: Chunks) -> int:
    """Parameters that this rank counts for the whole model: no copy is counted twice."""
    from megatron.core import parallel_state

    is_first_tp = parallel_state.get_tensor_model_parallel_rank() == 0
    is_first_lane = parallel_state.get_expert_model_parallel_rank() == 0
    counted = 0
    for param in model.parameters():
        if getattr(param, "shared", False):  # the last stage's copy of the embedding
            continue
        if getattr(param, "allreduce", True) and not is_first_lane:
            continue
        if is_first_tp or getattr(param, "tensor_model_parallel", False):
            counted += param.numel()
    return counted


def digest(model: Any, optimizer: Any) -> str:
    """sha256 of every bit of parameters and optimizer state, in an order of structure only."""
    sha = hashlib.sha256()
    for name, param in Chunks(model).named_parameters():
        _add(sha, name, param)
    number = 0
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            for param in group["params"]:
                state = inner.state[param]
                for name in sorted(state):
                    if isinstance(state[name], torch.Tensor):
                        _add(sha, f"{number}.{name}", state[name])
                number += 1
    return sha.hexdigest()


def _add(sha: Any, name: str, tensor: torch.Tensor) -> None:
    sha.update(name.encode())
    sha.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def _flat(buffers: list[torch.Tensor]) -> np.ndarray:
    return torch.cat([data.detach().reshape(-1).float() for data in buffers]).cpu().numpy()
