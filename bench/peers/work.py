"""The work that every system here does: a small GPT on real text, one global batch, one learning rate.

Only torch and numpy are needed, so that no peer pays for an import it does not use. M micro-batches are summed over
tokens and divided once by the tokens of the iteration, so a system that goes on with fewer ranks and deals all
micro-batches anew trains on the same batch; what micro-batch m of iteration i holds depends on (seed, i, m) alone.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from peers import job
from peers.job import (
    CLIP,
    HEADS,
    HIDDEN,
    LAYERS,
    LEARNING_RATE,
    MICRO_BATCH,
    NUM_MICRO_BATCHES,
    SEED,
    SEQ_LENGTH,
    VOCABULARY,
    WEIGHT_DECAY,
)

CORPUS_BYTES = 2_000_000


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, HIDDEN))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


def device(rank: int) -> torch.device:
    """Of a process; all are on one machine."""
    if not job.ON_GPUS:
        return torch.device("cpu")
    fix_order()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def fix_order() -> None:
    """A GPU's sums in one and the same order, run after run."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    for has_fixed_order in (torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.enable_mem_efficient_sdp):
        has_fixed_order(False)


class GPT(nn.Module):
    """tokens, labels [samples, SEQ_LENGTH] -> loss of every token, of that shape."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(SEQ_LENGTH, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


def build() -> GPT:
    """The same parameters in every process."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = GPT()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    return model


class Data:
    """(iteration, micro-batch) -> tokens and labels, out of the bytes of Python's own standard library."""

    def __init__(self) -> None:
        data = bytearray()
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            data += path.read_bytes()
        self._text = np.frombuffer(bytes(data[:CORPUS_BYTES]), dtype=np.uint8)
        self._window = np.arange(SEQ_LENGTH + 1)

    def __call__(self, iteration: int, micro_batch: int) -> dict[str, Any]:
        """address: what was asked for."""
        generator = np.random.Philox(key=[SEED, iteration], counter=[0, 0, 0, micro_batch])
        starts = np.asarray(generator.random_raw(MICRO_BATCH), np.uint64) % np.uint64(len(self._text) - SEQ_LENGTH)
        samples = torch.from_numpy(self._text[starts.astype(np.int64)[:, None] + self._window].astype(np.int64))
        tokens, labels = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
        return {"tokens": tokens, "labels": labels, "address": (iteration, micro_batch)}


def share(place: int, places: int) -> range:
    """The micro-batches of one of so many ranks; every one has an owner whatever the number of ranks."""
    return range(place * NUM_MICRO_BATCHES // places, (place + 1) * NUM_MICRO_BATCHES // places)


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """Biases and norms do not decay, as megatron-core has it."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE)


def weights(model: nn.Module) -> np.ndarray:
    return np.concatenate([p.detach().float().flatten().cpu().numpy() for p in model.parameters()])


class Trainer:
    """Model, optimizer and one flat buffer: all gradients, and behind them the sums of losses and of tokens.

    A system reduces `flat` in whatever way it has (sum or mean: both end in the same step)."""

    def __init__(self, rank: int) -> None:
        """rank: the process's own, which tells it its GPU."""
        self.device = device(rank)
        self.model = build().to(self.device)
        self.optimizer = optimizer_of(self.model)
        self.data = Data()
        sizes = [p.numel() for p in self.model.parameters()]
        self.flat = torch.zeros(sum(sizes) + 2, device=self.device)
        for parameter, part in zip(self.model.parameters(), self.flat[:-2].split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)

    def warm_up(self) -> None:
        """One micro-batch forward and back: what torch does the first time is done before ranks wait for each other."""
        self.compute(0, (0,), lambda *_: None)

    def compute(self, iteration: int, micro_batches: Iterable[int], begins: Any) -> None:
        """Sums of these micro-batches. begins(iteration, m) is called before each forward."""
        self.flat.zero_()
        for micro_batch in micro_batches:
            batch = self.data(iteration, micro_batch)
            begins(iteration, micro_batch)
            tokens, labels = batch["tokens"].to(self.device), batch["labels"].to(self.device)
            loss = self.model(tokens, labels).sum()
            loss.backward()
            self.flat[-2] += loss.detach()
            self.flat[-1] += labels.numel()

    def step(self) -> float:
        """After the reduction: one step; the iteration's mean loss."""
        loss = float(self.flat[-2] / self.flat[-1])
        self.flat[:-2].div_(self.flat[-1].item())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return loss

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def save(self, path: Path, iteration: int) -> None:
        """iteration: the next one."""
        torch.save({**self.state(), "iteration": iteration}, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)

    def restore(self, path: Path) -> int:
        """The iteration to go on with."""
        if not path.exists():
            return 0
        state = torch.load(path, weights_only=True, map_location=self.device)
        self.load(state)
        return int(state["iteration"])
