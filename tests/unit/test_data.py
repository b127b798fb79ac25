"""Data by address: what a micro-batch holds depends on (seed, iteration, micro-batch) alone."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from unicron.training.data import (
    ByteCorpus,
    ByteDataset,
    CorpusTooSmall,
    MapDataset,
    Permutation,
    SequentialIteratorRefused,
    addressed,
    draw,
    sample_numbers,
)

pytestmark = pytest.mark.timeout(60)

SEQ, SAMPLES, MICRO_BATCHES = 64, 4, 16


@pytest.fixture(scope="module")
def corpus() -> ByteCorpus:
    return ByteCorpus.from_stdlib(bytes_max=300_000)


@pytest.fixture
def dataset(corpus: ByteCorpus) -> ByteDataset:
    return ByteDataset(corpus, SEQ, SAMPLES, MICRO_BATCHES, seed=7)


def same(one: dict, other: dict) -> bool:
    return all(torch.equal(one[key], other[key]) for key in one)


def test_same_address_same_content_whatever_was_asked_before(corpus, dataset):
    other = ByteDataset(corpus, SEQ, SAMPLES, MICRO_BATCHES, seed=7)
    for iteration in reversed(range(5)):
        for micro_batch in (3, 0, 15):
            other(iteration, micro_batch)
    assert same(dataset(2, 3), other(2, 3))
    assert same(dataset(2, 3), dataset(2, 3))


@pytest.mark.parametrize("address", [(2, 4), (3, 3), (0, 0), (3, 2)])
def test_other_address_other_content(dataset, address):
    assert not torch.equal(dataset(2, 3)["tokens"], dataset(*address)["tokens"])


def test_other_seed_other_content(corpus, dataset):
    other = ByteDataset(corpus, SEQ, SAMPLES, MICRO_BATCHES, seed=8)
    assert not torch.equal(dataset(0, 0)["tokens"], other(0, 0)["tokens"])


def test_shapes_and_shift(dataset):
    batch = dataset(1, 1)
    assert batch["tokens"].shape == batch["labels"].shape == (SAMPLES, SEQ)
    assert batch["tokens"].dtype == torch.int64 and batch["loss_mask"].dtype == torch.float32
    assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    assert batch["attention_mask"].shape == (1, 1, SEQ, SEQ)
    assert batch["attention_mask"][0, 0, 0, 1] and not batch["attention_mask"][0, 0, 1, 0]


def test_what_a_script_writes_into_a_batch_stays_there(dataset):
    batch = dataset(1, 1)
    batch["loss_mask"].zero_()
    batch["tokens"].zero_()
    again = dataset(1, 1)
    assert again["loss_mask"].sum() == SAMPLES * SEQ and again["tokens"].sum() > 0


def test_the_same_words_on_every_machine():
    """Raw Philox output: a change here changes what every task trains on."""
    assert draw(1, 2, 3, 2).tolist() == np.random.Philox(key=[1, 2], counter=[0, 0, 0, 3]).random_raw(2).tolist()
    assert draw(1, 2, 3, 2).tolist() != draw(1, 3, 2, 2).tolist()


def test_a_micro_batch_costs_little(dataset):
    dataset(0, 0)
    best = min(_seconds(lambda: [dataset(1, m) for m in range(MICRO_BATCHES)]) for _ in range(20))
    assert best / MICRO_BATCHES < 0.3e-3


def _seconds(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def test_wrong_addresses(dataset):
    for address in ((0, -1), (0, MICRO_BATCHES), (-1, 0)):
        with pytest.raises(IndexError):
            dataset(*address)


def test_corpus_too_small():
    with pytest.raises(CorpusTooSmall, match="20 bytes"):
        ByteDataset(ByteCorpus(b"x" * 20), SEQ, SAMPLES, MICRO_BATCHES)


def test_empty_stdlib_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(CorpusTooSmall, match="name text files instead"):
        ByteCorpus.from_stdlib()


def test_corpus_is_bounded(tmp_path):
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode() * 100)
    corpus = ByteCorpus.from_paths([tmp_path / "a", tmp_path / "b"], bytes_max=150)
    assert bytes(corpus.data) == b"a" * 100 + b"b" * 50


# ------------------------------------------------------------------ permutations


@pytest.mark.parametrize("n", [1, 2, 3, 5, 64, 65, 1000, 4097])
def test_every_sample_once_an_epoch(n):
    permutation = Permutation(n, seed=3)
    for epoch in range(3):
        assert sorted(permutation(np.arange(n) + epoch * n)) == list(range(n))


def test_epochs_and_seeds_differ():
    numbers = np.arange(1000)
    one, other = Permutation(1000, 3), Permutation(1000, 4)
    assert not np.array_equal(one(numbers), one(numbers + 1000))
    assert not np.array_equal(one(numbers), other(numbers))


def test_a_permutation_looks_random():
    """Far from the identity, and neighbours do not stay neighbours."""
    order = Permutation(10_000, 5)(np.arange(10_000))
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05
    assert np.mean(np.abs(np.diff(order)) < 10) < 0.01


def test_numbers_across_an_epoch_boundary():
    permutation = Permutation(10, seed=1)
    across = permutation(np.arange(8, 13))
    assert np.array_equal(across[:2], permutation(np.arange(8, 10)))
    assert np.array_equal(across[2:], permutation(np.arange(10, 13)))


def test_huge_data_sets_cost_no_table():
    permutation = Permutation(10**12, seed=1)
    values = permutation(np.arange(1000))
    assert len(set(values.tolist())) == 1000 and values.max() < 10**12


def test_sample_numbers_are_consecutive():
    numbers = [sample_numbers(i, m, 2, 3) for i in range(2) for m in range(3)]
    assert np.concatenate(numbers).tolist() == list(range(12))


# ------------------------------------------------------------------ what train_step accepts


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {"x": torch.tensor(index * index)}


def test_map_style_data_set():
    dataset = addressed(Squares(), micro_batch=2, num_micro_batches=5)
    assert isinstance(dataset, MapDataset)
    seen = torch.cat([dataset(4, m)["x"] for m in range(5)])
    assert sorted(seen.tolist()) == [i * i for i in range(10)]
    assert torch.equal(dataset(4, 1)["x"], dataset(4, 1)["x"])


def test_map_style_in_order():
    dataset = MapDataset(Squares(), 2, 5, shuffle=False)
    assert dataset(0, 1)["x"].tolist() == [4, 9] and dataset(1, 0)["x"].tolist() == [0, 1]


def test_lists_are_map_style():
    assert addressed([1, 2, 3, 4], 2, 2)(0, 0).shape == (2,)


def test_functions_pass_through(dataset):
    assert addressed(dataset, SAMPLES, MICRO_BATCHES) is dataset


@pytest.mark.parametrize(
    "sequential",
    [iter([1, 2]), (i for i in range(3)), torch.utils.data.DataLoader(Squares())],
    ids=["iterator", "generator", "DataLoader"],
)
def test_sequential_iterators_are_refused_by_name(sequential):
    with pytest.raises(SequentialIteratorRefused, match=r"[pP]ass"):
        addressed(sequential, 2, 5)


def test_what_is_no_data_set():
    with pytest.raises(TypeError, match="no data set"):
        addressed(3, 2, 5)
