"""Training data by address: the content of micro-batch m of iteration i depends on (seed, i, m) and
nothing else.

That is what lets any worker compute any micro-batch at any width, now or again: an heir computes
its predecessor's, survivors those of a lost replica. So a data set here is a function
``dataset(iteration, micro_batch) -> batch``. Nothing is drawn from a stream whose position would
have to be saved.

Randomness is counter-based (Philox keyed by the address), and epoch-wise permutations are computed
index by index (a Feistel network), so that there is neither state nor a table as long as the data.
Rejected: a sampler that shuffles a list per epoch; at 10^9 samples it is 8 GB per worker and a
minute for every heir."""

from __future__ import annotations

import inspect
import math
import struct
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

Batch = Any

STDLIB_BYTES_MAX = 4_000_000
STDLIB_BYTES_MIN = 100_000
ADDRESS_MAX = 1 << 62  # samples over a task's life: sample numbers are int64
FEISTEL_ROUNDS = 6
_INDEX_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype, sequences, documents


class AddressedDataset(Protocol):
    """What train_step takes."""

    def __call__(self, iteration: int, micro_batch: int) -> Batch: ...


class SequentialIteratorRefused(TypeError):
    """The data comes in an order of its own; what micro-batch m of iteration i holds cannot be
    asked again."""


class CorpusTooSmall(ValueError):
    """Not enough text for one sample."""


class CorpusRefused(ValueError):
    """The files are not what their format says."""


def addressed(dataset: Any, micro_batch: int, num_micro_batches: int, seed: int = 1234) -> AddressedDataset:
    """What a script handed to train_step as a function of (iteration, micro-batch), or a refusal by
    name."""
    if isinstance(dataset, torch.utils.data.DataLoader):
        raise SequentialIteratorRefused(
            "a DataLoader draws its samples in an order of its own: pass its .dataset (map-style)"
        )
    if callable(dataset):
        return dataset
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return MapDataset(dataset, micro_batch, num_micro_batches, seed=seed)
    if isinstance(dataset, Iterator | Iterable) or inspect.isgenerator(dataset):
        raise SequentialIteratorRefused(
            f"{type(dataset).__name__} is a sequential iterator: after a failure micro-batches are "
            "computed again, by whoever is alive. Pass dataset(iteration, micro_batch) -> batch, "
            "or a map-style data set"
        )
    raise TypeError(
        f"{type(dataset).__name__} is no data set: pass dataset(iteration, micro_batch) -> batch, "
        "or an object with __getitem__ and __len__"
    )


# ------------------------------------------------------------------ bytes of real text


class ByteCorpus:
    """Text as bytes: a vocabulary of 256 and nothing to download."""

    def __init__(self, data: bytes | bytearray) -> None:
        self.data = np.frombuffer(bytes(data), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self.data)

    @classmethod
    def from_paths(cls, paths: Iterable[str | Path], bytes_max: int = STDLIB_BYTES_MAX) -> ByteCorpus:
        """Files one after the other, in the order given, up to bytes_max in all."""
        parts: list[bytes] = []
        left = bytes_max
        for path in paths:
            if left <= 0:
                break
            with open(path, "rb") as file:
                parts.append(file.read(left))
            left -= len(parts[-1])
        return cls(b"".join(parts))

    @classmethod
    def from_stdlib(cls, bytes_max: int = STDLIB_BYTES_MAX) -> ByteCorpus:
        """The source of the running Python's own standard library, in order of name: real text on
        any machine."""
        folder = Path(sysconfig.get_paths()["stdlib"])
        corpus = cls.from_paths(sorted(folder.glob("*.py")), bytes_max)
        if len(corpus) < min(STDLIB_BYTES_MIN, bytes_max):
            raise CorpusTooSmall(
                f"{folder} holds {len(corpus)} bytes of Python source (is it zipped?): name text files instead"
            )
        return corpus


class ByteDataset:
    """Language-model batches cut out of a ByteCorpus at random places.

    A batch is {tokens, labels, position_ids, attention_mask, loss_mask}, as megatron-core's
    GPTModel wants them. The attention mask is one shared tensor: do not write into it."""

    def __init__(
        self,
        corpus: ByteCorpus,
        seq_length: int,
        micro_batch: int,
        num_micro_batches: int,
        seed: int = 1234,
    ) -> None:
        if len(corpus) < seq_length + 2:
            raise CorpusTooSmall(
                f"corpus of {len(corpus)} bytes: one sample needs {seq_length + 1} and a choice of places"
            )
        self.corpus = corpus
        self.seq_length = seq_length
        self.micro_batch = micro_batch
        self.num_micro_batches = num_micro_batches
        self.seed = seed
        self._window = np.arange(seq_length + 1)
        self._frame = _Frame(seq_length, micro_batch)

    def __call__(self, iteration: int, micro_batch: int) -> dict[str, torch.Tensor]:
        check_address(iteration, micro_batch, self.num_micro_batches)
        starts = draw(self.seed, iteration, micro_batch, self.micro_batch)
        starts %= np.uint64(len(self.corpus) - self.seq_length)
        samples = self.corpus.data[starts.astype(np.int64)[:, None] + self._window]
        return self._frame.batch(samples.astype(np.int64))


class _Frame:
    """The parts of a language-model batch that do not depend on the text."""

    def __init__(self, seq_length: int, micro_batch: int) -> None:
        square = torch.ones(1, 1, seq_length, seq_length, dtype=torch.bool)
        self.attention_mask = torch.triu(square, 1)  # True: may not be seen
        self.position_ids = torch.arange(seq_length).repeat(micro_batch, 1)
        self.loss_mask = torch.ones(micro_batch, seq_length)

    def batch(self, samples: np.ndarray) -> dict[str, torch.Tensor]:
        text = torch.from_numpy(samples)
        return {
            "tokens": text[:, :-1].contiguous(),
            "labels": text[:, 1:].contiguous(),
            "position_ids": self.position_ids.clone(),
            "attention_mask": self.attention_mask,
            "loss_mask": self.loss_mask.clone(),
        }


# ------------------------------------------------------------------ addresses


def check_address(iteration: int, micro_batch: int, num_micro_batches: int) -> None:
    if not 0 <= micro_batch < num_micro_batches:
        raise IndexError(f"micro-batch {micro_batch} of {num_micro_batches}")
    if iteration < 0:
        raise IndexError(f"iteration {iteration}")


def draw(seed: int, iteration: int, micro_batch: int, count: int) -> np.ndarray:
    """count random uint64 that depend on the address alone. Raw generator output: stable over numpy
    versions."""
    word = (1 << 64) - 1
    generator = np.random.Philox(key=[seed & word, iteration & word], counter=[0, 0, 0, micro_batch & word])
    return np.asarray(generator.random_raw(count), dtype=np.uint64)


def sample_numbers(iteration: int, micro_batch: int, micro_batch_samples: int, num_micro_batches: int) -> np.ndarray:
    """The task-wide numbers of a micro-batch's samples: consecutive over micro-batches and
    iterations."""
    check_address(iteration, micro_batch, num_micro_batches)
    first = (iteration * num_micro_batches + micro_batch) * micro_batch_samples
    if first + micro_batch_samples > ADDRESS_MAX:
        raise IndexError(f"iteration {iteration} is beyond {ADDRESS_MAX} samples")
    return np.arange(first, first + micro_batch_samples, dtype=np.int64)


class Permutation:
    """A random order of 0..n-1 for every epoch, computed index by index.

    A balanced Feistel network over the smallest even number of bits that holds n; what falls
    outside goes round again (cycle walking: fewer than four rounds on average). A bijection
    whatever the round function is."""

    def __init__(self, n: int, seed: int) -> None:
        if n < 1:
            raise ValueError(f"a permutation of {n} things")
        self.n = n
        self.seed = seed
        self._half = np.uint64(max(1, math.ceil((n - 1).bit_length() / 2)))
        self._mask = (np.uint64(1) << self._half) - np.uint64(1)
        self._keys: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.uint64))

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        """Sample numbers (over all epochs) -> indices into the data."""
        epochs, within = np.divmod(np.asarray(numbers, dtype=np.int64), self.n)
        out = np.empty_like(within)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            out[chosen] = self._epoch(int(epoch), within[chosen])
        return out

    def _epoch(self, epoch: int, within: np.ndarray) -> np.ndarray:
        if self._keys[0] != epoch:
            self._keys = (epoch, draw(self.seed, epoch, 0, FEISTEL_ROUNDS))
        value = self._encrypt(within.astype(np.uint64))
        outside = value >= self.n
        while outside.any():  # ends: a bijection's walk comes back to its start, which is inside
            value[outside] = self._encrypt(value[outside])
            outside = value >= self.n
        return value.astype(np.int64)

    def _encrypt(self, value: np.ndarray) -> np.ndarray:
        left, right = value >> self._half, value & self._mask
        for key in self._keys[1]:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._half) | right


def _mix(value: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


# ------------------------------------------------------------------ map-style and indexed data sets


class MapDataset:
    """A map-style data set (``__getitem__``, ``__len__``) under unicron's sampler: every sample
    once an epoch."""

    def __init__(
        self,
        dataset: Any,
        micro_batch: int,
        num_micro_batches: int,
        seed: int = 1234,
        collate: Callable[[list[Any]], Batch] = torch.utils.data.default_collate,
        shuffle: bool = True,
    ) -> None:
        if len(dataset) < 1:
            raise CorpusTooSmall(f"{type(dataset).__name__} is empty")
        self.dataset = dataset
        self.micro_batch = micro_batch
        self.num_micro_batches = num_micro_batches
        self.collate = collate
        self.permutation = Permutation(len(dataset), seed) if shuffle else None

    def __call__(self, iteration: int, micro_batch: int) -> Batch:
        numbers = sample_numbers(iteration, micro_batch, self.micro_batch, self.num_micro_batches)
        if self.permutation is None:
            indices = numbers % len(self.dataset)
        else:
            indices = self.permutation(numbers)
        return self.collate([self.dataset[int(index)] for index in indices])


class IndexedDataset:
    """Samples of a Megatron indexed data set (PREFIX.bin, PREFIX.idx), read by megatron-core's own
    reader (mmap).

    The documents are taken as one stream of tokens in the order of the file (megatron's GPTDataset
    packs them so too, after shuffling documents); sample k is the seq_length + 1 tokens from k *
    seq_length. Every sample once an epoch, in a random order."""

    def __init__(
        self,
        prefix: str | Path,
        seq_length: int,
        micro_batch: int,
        num_micro_batches: int,
        seed: int = 1234,
    ) -> None:
        self._reader = _open_indexed(str(prefix))
        index = self._reader.index
        self.num_tokens = int(index.sequence_lengths.sum(dtype=np.int64))
        self.num_samples = (self.num_tokens - 1) // seq_length
        if self.num_samples < 1:
            raise CorpusTooSmall(f"{prefix} holds {self.num_tokens} tokens, one sample needs {seq_length + 1}")
        self._first = _contiguous_start(str(prefix), index)
        self._dtype = index.dtype
        self._item = index.dtype_size
        self.seq_length = seq_length
        self.micro_batch = micro_batch
        self.num_micro_batches = num_micro_batches
        self.permutation = Permutation(self.num_samples, seed)
        self._frame = _Frame(seq_length, micro_batch)

    def __call__(self, iteration: int, micro_batch: int) -> dict[str, torch.Tensor]:
        numbers = sample_numbers(iteration, micro_batch, self.micro_batch, self.num_micro_batches)
        samples = [self.sample(int(index)) for index in self.permutation(numbers)]
        return self._frame.batch(np.stack(samples).astype(np.int64))

    def sample(self, index: int) -> np.ndarray:
        offset = self._first + index * self.seq_length * self._item
        return self._reader.bin_reader.read(self._dtype, self.seq_length + 1, offset)


def _open_indexed(prefix: str) -> Any:
    from megatron.core.datasets.indexed_dataset import IndexedDataset as Reader

    prefix = prefix.removesuffix(".bin").removesuffix(".idx")
    missing = [p for p in (f"{prefix}.idx", f"{prefix}.bin") if not Path(p).is_file()]
    if missing:
        raise FileNotFoundError(f"no Megatron indexed data set at {prefix}: {missing[0]} is missing")
    _check_index(Path(f"{prefix}.idx"))
    return Reader(prefix, mmap=True)


def _check_index(path: Path) -> None:
    """The header's own claims against the file's size: megatron's reader asserts, or reads
    beyond.
    """
    head = _first_bytes(path, _INDEX_HEADER.size)
    if len(head) < _INDEX_HEADER.size:
        raise CorpusRefused(f"{path} cannot be read: {len(head)} bytes")
    magic, version, _, sequences, documents = _INDEX_HEADER.unpack(head)
    if magic != b"MMIDIDX\x00\x00" or version != 1:
        raise CorpusRefused(f"{path} cannot be read: no Megatron index of version 1")
    needed = _INDEX_HEADER.size + sequences * (4 + 8) + documents * 8
    if path.stat().st_size < needed or not sequences:
        raise CorpusRefused(f"{path} is truncated: {path.stat().st_size} of {needed} bytes")


def _first_bytes(path: Path, count: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(count)


def _contiguous_start(prefix: str, index: Any) -> int:
    """Byte offset of the first token; refuses files whose sequences do not follow each other."""
    lengths = index.sequence_lengths.astype(np.int64) * index.dtype_size
    pointers = index.sequence_pointers
    if not np.array_equal(pointers[:-1] + lengths[:-1], pointers[1:]):
        raise CorpusRefused(f"{prefix}.bin: the sequences do not follow each other")
    end = int(pointers[-1] + lengths[-1])
    if Path(f"{prefix.removesuffix('.bin').removesuffix('.idx')}.bin").stat().st_size < end:
        raise CorpusRefused(f"{prefix}.bin is shorter than its index says: {end} bytes")
    return int(pointers[0])
