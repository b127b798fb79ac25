"""A whole iteration of the real script by a worker that has no role and no peers yet: what is lazy happens here.

A standby or joiner runs the script twice. The first time manage() does not wait for a role and train_step() comes
here: forward, backward and step of all micro-batches of its guessed role, over the stand-in groups, whose collectives
end at once. Then the process runs the script again from its top (as for any change of role), and waits as ever.

So nothing that is computed here can survive: model, optimizer, arena and groups are dropped with the first run, and
made anew. What survives is what a process does once: imports inside functions, thread pools, kernels and their caches,
the allocator's memory, the data's pages, first uses of the pipeline's code.

Answers: a collective's output is its input, and what would be received is zeros (torch.empty gives those meanwhile), so
numbers stay finite. Rejected: outputs recorded in a real iteration. They are needed where a path depends on values: so
does routing to experts that are spread, whose exchange of tokens may fail here; then the part is counted as missed.
Rejected: to go on with the model of the first run. Then every
value in it would have to be shown to be replaced.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from unicron.healing.dealing import assigned
from unicron.healing.record import CommitResult
from unicron.training import compute, data, step
from unicron.training.chunks import Chunks
from unicron.training.exact import ExactGradients
from unicron.training.gradients import Gradients
from unicron.training.memory import StateMemory
from unicron.training.randomness import Randomness
from unicron.types import Layout, Rank


class Sandbox:
    """Of one run of the script. missed: parts that this model cannot do here, with the error."""

    def __init__(self, rank: Rank, layout: Layout, built: tuple[Chunks, Any, Any], memory: StateMemory) -> None:
        """built: model, optimizer, scheduler, over stand-in groups and in scratch memory."""
        self.rank, self.layout, self.memory = rank, layout, memory
        self.model, self.optimizer, self.scheduler = built
        self.missed: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.is_finite = True
        self.num_micro_batches = 0

    def run(self, forward_step: Any, dataset: Any, pulse: Callable[[], None]) -> None:
        """One iteration. What fails is counted and said, and the rest is tried all the same."""
        made = ExactGradients(self.model, self.memory, self.layout) if self.layout.exact else None
        gradients = made or Gradients(self.model, self.memory)
        stepper = step.Stepper(self.optimizer, self.scheduler, self.layout, gradients)
        addressed = data.addressed(dataset, self.layout.micro_batch, self.layout.num_micro_batches)
        replicas = tuple(range(self.layout.num_replicas))
        mine = assigned(self.layout.replica_of(self.rank), replicas, self.layout.num_sets)

        def begin(_micro_batch: int) -> None:
            self.num_micro_batches += 1
            pulse()

        with zeros_for_empty():
            gradients.zero()
            stepper.zero_grad()
            computation = compute.Computation(self.model, self.layout, self.memory.scalars)
            computation.randomness = Randomness(self.rank, self.layout)
            lane = self.layout.lane_of(self.rank)
            numbers = [number * self.layout.ep + lane for number in mine]
            self._part("compute", lambda: computation.run(0, numbers, forward_step, addressed, begin))
            self._part("tie", lambda: self._tie(gradients, computation))
            self._part("step", lambda: self._step(gradients, stepper))
        os.close(self.memory.fd)  # its mapping goes with the model
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items())
        print(
            f"unicron: warmed up as rank {self.rank} with {self.num_micro_batches} micro-batches: {parts}; "
            f"{len(self.missed)} parts missed",
            file=sys.stderr,
        )

    def _tie(self, gradients: Gradients, computation: compute.Computation) -> None:
        gradients.computed()
        gradients.tie(self.model, computation.config)

    def _step(self, gradients: Gradients, stepper: step.Stepper) -> None:
        gradients.finish()
        squares = gradients.sum_of_squares()
        self.is_finite = math.isfinite(squares)
        tokens = float(self.memory.scalars[0])
        found = 0.0 if self.is_finite else 1.0
        stepper.step(CommitResult(0, tokens, squares, found, float(self.memory.scalars[1])), lambda *_: None)

    def _part(self, name: str, what: Callable[[], None]) -> None:
        begun = time.monotonic()
        try:
            what()
        except Exception as error:
            self.missed[name] = repr(error)
            print(f"unicron: not warmed up: {name}: {error!r}", file=sys.stderr)
        self.seconds[name] = time.monotonic() - begun


@contextlib.contextmanager
def zeros_for_empty() -> Iterator[None]:
    """Buffers that nobody fills hold zeros."""
    empty = torch.empty

    def zeros(*sizes: Any, **how: Any) -> torch.Tensor:
        with torch.no_grad():
            return empty(*sizes, **how).zero_()

    torch.empty = zeros
    try:
        yield
    finally:
        torch.empty = empty
