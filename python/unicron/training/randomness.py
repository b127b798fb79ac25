"""Random numbers of the forward pass belong to the micro-batch, not to history.

Dropout of micro-batch m of iteration i draws from generators seeded by (the script's seed, i, m, role), so whoever
computes m, and however often, gets the same masks: a healed iteration has the bits of an undisturbed one. What the
script draws outside of train_step goes on as if nothing had been drawn inside.

Megatron's trackers hold generator states by name; those of data-parallel regions are the same on all tensor-parallel
ranks, the others differ (tensor_parallel/random.py, model_parallel_cuda_manual_seed).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random

from unicron.types import Layout, Rank


class Randomness:
    def __init__(self, rank: Rank, layout: Layout) -> None:
        self._tp, _, self._pp = layout.coords(rank)
        self._base = torch.initial_seed()  # the script's, before anything is drawn in the loop
        # Seeding by torch.manual_seed costs two milliseconds, because it asks every backend.
        self._live = [torch.default_generator]
        if torch.cuda.is_available():
            self._live.append(torch.cuda.default_generators[torch.cuda.current_device()])
        self._spare = torch.Generator(self._live[-1].device)
        self._same_in_tp = {megatron_random.get_data_parallel_rng_tracker_name()}

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """What is drawn inside leaves the script's generators as they were."""
        tracker = megatron_random.get_cuda_rng_tracker()
        before, states = [generator.get_state() for generator in self._live], _states(tracker)
        try:
            yield
        finally:
            for generator, state in zip(self._live, before, strict=True):
                generator.set_state(state)
            if states is not None:
                tracker.set_states(states)

    def begin(self, iteration: int, micro_batch: int) -> None:
        """Seed every generator for the forward of this micro-batch."""
        tracker = megatron_random.get_cuda_rng_tracker()
        if tracker.is_initialized():
            tracker.set_states({name: self._state(tracker, name, iteration, micro_batch) for name in tracker.states_})
        for generator in self._live:
            generator.manual_seed(self._seed("", iteration, micro_batch, in_tp=False))

    def _state(self, tracker: Any, name: str, iteration: int, micro_batch: int) -> Any:
        seed = self._seed(name, iteration, micro_batch, in_tp=name not in self._same_in_tp)
        state = tracker.states_[name]
        if isinstance(state, torch.Generator):  # of trackers that work inside CUDA graphs: the generator itself
            return state.manual_seed(seed)
        return self._spare.manual_seed(seed).get_state()

    def _seed(self, name: str, iteration: int, micro_batch: int, *, in_tp: bool) -> int:
        place = f"{self._base} {iteration} {micro_batch} {name} {self._pp} {self._tp if in_tp else ''}"
        return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest()) >> 1


def _states(tracker: Any) -> dict[str, Any] | None:
    """A copy that later draws do not reach; None where there is none, or where states are live generators."""
    states = dict(tracker.get_states()) if tracker.is_initialized() else {}
    if not states or any(isinstance(state, torch.Generator) for state in states.values()):
        return None
    return states
