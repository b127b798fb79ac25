"""Megatron's .bin/.idx, written by megatron-core's own builder and read by address."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from unicron.training.data import CorpusRefused, CorpusTooSmall, IndexedDataset

pytestmark = pytest.mark.timeout(60)

SEQ, SAMPLES, MICRO_BATCHES = 8, 2, 4


def build(folder, lengths, dtype=np.uint16) -> tuple[str, np.ndarray]:
    """A data set of documents of these lengths; tokens count up, so a place in the stream is its
    value.
    """
    prefix = str(folder / "text")
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=dtype)
    stream = np.arange(sum(lengths), dtype=dtype)
    for document in np.split(stream, np.cumsum(lengths)[:-1]):
        builder.add_document(document, [len(document)])
    builder.finalize(prefix + ".idx")
    return prefix, stream


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_samples_are_the_stream(tmp_path, dtype):
    prefix, stream = build(tmp_path, [30, 1, 50, 20], dtype)
    dataset = IndexedDataset(prefix, SEQ, SAMPLES, MICRO_BATCHES)
    assert dataset.num_tokens == 101 and dataset.num_samples == 12
    for index in range(dataset.num_samples):
        assert np.array_equal(dataset.sample(index), stream[index * SEQ : index * SEQ + SEQ + 1])


def test_an_epoch_sees_every_sample_once(tmp_path):
    prefix, _ = build(tmp_path, [SEQ * 16 + 1])
    dataset = IndexedDataset(prefix, SEQ, SAMPLES, MICRO_BATCHES)
    firsts = [int(row[0]) // SEQ for i in range(2) for m in range(4) for row in dataset(i, m)["tokens"]]
    assert sorted(firsts) == list(range(16)) and firsts != list(range(16))
    again = [int(row[0]) // SEQ for i in (2, 3) for m in range(4) for row in dataset(i, m)["tokens"]]
    assert sorted(again) == list(range(16)) and again != firsts


def test_same_address_same_content(tmp_path):
    prefix, _ = build(tmp_path, [500])
    one = IndexedDataset(prefix + ".bin", SEQ, SAMPLES, MICRO_BATCHES, seed=5)
    other = IndexedDataset(prefix, SEQ, SAMPLES, MICRO_BATCHES, seed=5)
    one(9, 1)
    assert torch.equal(one(3, 2)["tokens"], other(3, 2)["tokens"])
    assert torch.equal(one(3, 2)["tokens"][:, 1:], one(3, 2)["labels"][:, :-1])


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"text\.idx is missing"):
        IndexedDataset(tmp_path / "text", SEQ, SAMPLES, MICRO_BATCHES)


def test_too_small(tmp_path):
    prefix, _ = build(tmp_path, [SEQ])
    with pytest.raises(CorpusTooSmall, match="8 tokens"):
        IndexedDataset(prefix, SEQ, SAMPLES, MICRO_BATCHES)


def test_not_an_index(tmp_path):
    prefix, _ = build(tmp_path, [100])
    (tmp_path / "text.idx").write_bytes(b"not an index at all" * 10)
    with pytest.raises(CorpusRefused, match="cannot be read"):
        IndexedDataset(prefix, SEQ, SAMPLES, MICRO_BATCHES)


def test_truncated_index(tmp_path):
    prefix, _ = build(tmp_path, [100, 100])
    whole = (tmp_path / "text.idx").read_bytes()
    (tmp_path / "text.idx").write_bytes(whole[:-20])
    with pytest.raises(CorpusRefused):
        IndexedDataset(prefix, SEQ, SAMPLES, MICRO_BATCHES)


def test_truncated_data(tmp_path):
    prefix, _ = build(tmp_path, [100, 100])
    whole = (tmp_path / "text.bin").read_bytes()
    (tmp_path / "text.bin").write_bytes(whole[:-20])
    with pytest.raises(CorpusRefused, match="shorter than its index"):
        IndexedDataset(prefix, SEQ, SAMPLES, MICRO_BATCHES)
