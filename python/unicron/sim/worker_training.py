"""The undisturbed iteration of a simulated worker: compute, tie, reduce, commit, step, and saving before it leaves."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from unicron.healing import actions as do
from unicron.healing import events as on
from unicron.healing.machine import HealingMachine
from unicron.healing.record import OVERFLOW, CommitResult, hold_vote
from unicron.messages import ChangeLayout, Finished, Healed, MoveRoles, Saved
from unicron.sim.memory import NUM_SEGMENTS, Sum, add
from unicron.sim.plants import machine_for
from unicron.sim.worker_copies import WorkerCopies
from unicron.sim.worker_process import Late
from unicron.types import Rank, Stage

REST_SHARE, REST_MS_MAX = 0.2, 12_000.0  # of scripts that do something behind their loop


class WorkerTraining(WorkerCopies):
    def new_machine(self) -> HealingMachine:
        machine = machine_for(self.world.options.plant, self.rank, self.layout)
        machine.whole_after = self._saves_after
        return machine

    def _saves_after(self, iteration: int) -> bool:
        every = self.world.options.of(self.task).checkpoint_every
        return bool(every) and (iteration + 1) % every == 0

    def _begin(self, iteration: int) -> None:
        if iteration >= self.world.options.of(self.task).iterations:
            self._loop(self.rng.uniform(0.0, 1.0), lambda: self.run(on.LoopEnded()))
            return
        self._loop(self.rng.uniform(0.1, 1.0), lambda: self.run(on.IterationBegun(iteration)))

    def _rest_of_script(self) -> None:
        """A last evaluation, an export: mostly nothing, at times longer than any healing may take."""
        assert self.machine is not None
        record = self.machine.record
        is_whole = record.has_state and record.iteration >= self.world.options.of(self.task).iterations
        self._advance(Stage.EVALUATE)
        self._loop(self._rest_ms(is_whole), lambda: self._finish(is_whole))

    def _rest_ms(self, is_whole: bool) -> float:
        is_long = is_whole and self.rng.random() < REST_SHARE
        return self.rng.uniform(0.0, REST_MS_MAX if is_long else 1.0)

    def _finish(self, is_whole: bool) -> None:
        """The script leaves its block; what follows that is its own, too, until the interpreter ends."""
        self._advance(Stage.EVALUATE)
        self.say(Finished(self.name, self.rank, tail=True))
        self._loop(self._rest_ms(is_whole), self._exit)

    def _exit(self) -> None:
        self._advance(Stage.DONE)
        self._later(self.rng.uniform(1.0, 10.0), lambda: self.die("exited", 0))

    def _compute(self, action: do.Compute) -> None:
        if not self.memory.gathered and self.late is None:
            self.world.violate(f"{self.name} computes iteration {action.iteration} without the others' shards")
        if self.layout.pp > 1 and not self.memory.is_tied:
            self.world.violate(f"{self.name} computes with weights that the first stage did not give to the last")
        self.world.checkers.of(self.task).computes(self)
        self.world.checkers.of(self.task).reduces_eagerly(self, action)
        self._reduced_before = self.memory.reduced
        if not action.extra and self.world.options.plant != "keep-sums":
            self.memory.segments = [()] * NUM_SEGMENTS
            self.memory.reduced = 0
        self._fresh = ()
        self._await_gather(lambda: self._compute_next(action, 0))

    def _compute_next(self, action: do.Compute, index: int) -> None:
        if index == len(action.micro_batches):
            self._computed(action)
            return
        micro_batch = action.micro_batches[index]
        assert self.machine is not None
        if micro_batch in self.memory.begun or (self.machine.healing and action.extra):
            self.recomputed.add((action.iteration, micro_batch))
        self.memory.begun.add(micro_batch)
        self._advance(Stage.COMPUTE, micro_batch)

        def added(_: Any) -> None:
            self._fresh = add(self._fresh, (micro_batch,))
            self._compute_next(action, index + 1)

        tag = ("forward", action.iteration, self.memory.repeat, micro_batch)
        self._loop(self.rng.uniform(10.0, 20.0), lambda: self._within(self.inside, tag, None, added))

    def _computed(self, action: do.Compute) -> None:
        first = self._reduced_before if action.extra else 0
        for number in range(first, NUM_SEGMENTS):
            self.memory.segments[number] = add(self.memory.segments[number], self._fresh)
        assert self.machine is not None
        self.memory.begun = set(self.machine.record.done)
        self._done()

    def _reduce(self, action: do.Reduce, number: int) -> None:
        if number == NUM_SEGMENTS:
            self._done()
            return
        if number == 0:
            self._own = self.memory.reduced
        own = self._own
        self._advance(Stage.REDUCE, number, waiting=True)

        def reduced(results: dict[Rank, Sum]) -> None:
            if number < len(action.shared):
                value = results[action.shared[number]]
            else:
                value = add(*results.values())
            if number >= own or number >= len(action.shared):
                self.memory.segments[number] = value
                self.memory.reduced = number + 1
            self._reduce(action, number + 1)

        tag = ("reduce", self.memory.iteration, self.memory.repeat, number, number < len(action.shared))
        self._within(self.data, tag, self.memory.segments[number], reduced)

    def _commit(self) -> None:
        self._advance(Stage.COMMIT, waiting=True)
        iteration, repeat = self.memory.iteration, self.memory.repeat
        assert self.machine is not None and self.machine.plan is not None
        epoch = self.machine.plan.epoch

        def committed(results: dict[Rank, tuple[int, int, int, float]]) -> None:
            if {result[:3] for result in results.values()} != {(epoch, iteration, repeat)}:
                self.world.violate(f"{self.name}: commit of {results}")
            hold = sum(vote for *_, vote in results.values())
            found = OVERFLOW * len(results) if self._overflows(iteration, repeat) else 0.0
            self.run(on.CommitDone(CommitResult(iteration, 1.0, 1.0, found, 1.0, hold, repeat)))

        switches = self.move is not None and self.move.switch
        told = self.is_told_to_hold or switches or self.change is not None
        vote = hold_vote(told=told, may_hold=self.machine.may_hold)
        mine = (epoch, iteration, repeat, vote)
        self._within(self.everybody, ("commit", iteration, repeat), mine, committed)

    def _overflows(self, iteration: int, repeat: int) -> bool:
        """A fact of the data and the scale, the same in every history of this seed."""
        share = self.world.options.of(self.task).overflows
        return share > 0 and random.Random(f"{self.world.options.seed}/{iteration}/{repeat}").random() < share

    def _confirmed(self, results: dict[Rank, CommitResult | None]) -> None:
        self.run(on.Confirmed(next((r for r in results.values() if r is not None), None)))

    def _step(self, commit: CommitResult) -> None:
        self._advance(Stage.STEP)
        self.world.checkers.of(self.task).computes(self)
        self.memory.is_torn = self.memory.is_wreck = True

        def stepped() -> None:
            self.world.checkers.of(self.task).stepped(self, commit)
            self.memory.end_step(commit.iteration + 1, gathered=not self.layout.sharded)
            self._done()

        self._loop(self.rng.uniform(1.0, 4.0), stepped)

    def _begin_gather(self) -> None:
        """Nobody waits for it here. There is one group in which each shard has one holder: see WorkerHealing."""
        self._advance(Stage.GATHER)
        self.world.count("late gather")
        token, group = object(), self._shard_group()
        self.late = Late(token, self.memory.iteration)
        payload = (self.layout.shard_of(self.rank), self.memory.iteration)
        if group is None:
            self.late.results = {self.rank: payload}
        else:
            group.enter(self.rank, ("gather", self.memory.iteration), payload, token)
        self._loop(0.1, self._done)

    def _await_gather(self, then: Callable[[], None]) -> None:
        """What was begun; at once where nothing was."""
        late = self.late
        if late is None:
            then()
            return

        def gathered(results: dict[Rank, tuple[int, int]]) -> None:
            self.late = None
            self._require_shards(results, late.iteration, range(self.layout.num_shards))
            then()

        self.token, self.then, self._waits_since_ms = late.token, gathered, self.world.scheduler.now_ms
        if late.broke:
            self.broke(late.token, late.broke)
        elif late.results is not None:
            self.completed(late.token, late.results)

    def _shard_group(self) -> Any:
        return self.data if self.layout.instances == 1 else self.mates

    def _gather_shards(self) -> None:
        """First of what is outside of experts, which every lane has a shard of, then of the experts."""
        self._advance(Stage.GATHER, waiting=True)
        if self.layout.ep == 1:
            self._gather_of_replicas()
            return
        place = self.layout.coords(self.rank)[1]
        self._gather_of(self.lanes, place, range(self.layout.dp), "lanes", self._gather_of_replicas)

    def _gather_of_replicas(self) -> None:
        def gathered() -> None:
            self.memory.gathered = True
            if self.layout.buddy:  # training/buddies.py: a part of the gather
                self.renew_copies(self._done)
            else:
                self._done()

        shards = range(self.layout.num_shards)
        self._gather_of(self._shard_group(), self.layout.shard_of(self.rank), shards, "gather", gathered)

    def _gather_of(self, group: Any, place: int, places: range, tag: str, then: Callable[[], None]) -> None:
        """Every shard must be of the same version, and there must be one of each place."""
        iteration = self.memory.iteration

        def gathered(results: dict[Rank, tuple[int, int]]) -> None:
            self._require_shards(results, iteration, places)
            then()

        self._within(group, (tag, iteration), (place, iteration), gathered)

    def _require_shards(self, results: dict[Rank, tuple[int, int]], iteration: int, places: range) -> None:
        if set(results.values()) != {(each, iteration) for each in places}:
            self.world.violate(f"{self.name} at {iteration} gathers shards {sorted(results.values())}")

    def _ended(self, action: do.EndIteration) -> None:
        iteration = action.commit.iteration
        if action.healed:
            self._say_healed(iteration)
        assert self.machine is not None and self.machine.plan is not None
        if action.commit.hold > 0 and not action.healed and self._is_current():
            self._hold(iteration + 1)
            return
        if self._saves_after(iteration) and not self.memory.gathered:
            self.world.violate(f"{self.name} saves at {iteration} without the others' shards")
        if self._saves_after(iteration) and self.rank == min(self.machine.plan.ranks):
            saved = Saved(self.name, self.rank, iteration + 1, f"ckpt/{iteration + 1}")
            self._later(self.rng.uniform(10.0, 60.0), lambda: self.say(saved))
        self._begin(iteration + 1)

    def _hold(self, iteration: int) -> None:
        """Save, and wait for the end or a newer epoch. Parts meet on the disk; the lowest rank says when all did."""
        self.holds = iteration
        if not self.memory.gathered:
            self.world.violate(f"{self.name} holds at {iteration} without the others' shards")
        assert self.machine is not None and self.machine.plan is not None
        if self.change is not None and not self.is_told_to_hold:
            self.change_layout(self.change, iteration)
            return
        if self.move is not None and not self.is_told_to_hold:  # the others may have heard the switch before
            self._advance(Stage.SAVE)
            self.hand_over(self.move, iteration)
            return
        plan = self.machine.plan
        self._advance(Stage.SAVE)

        def written() -> None:
            self.world.parts.setdefault((self.task, plan.epoch, iteration), set()).add(self.rank)
            if self.rank == min(plan.ranks):
                look()

        def look() -> None:
            if self.holds != iteration or not self._is_current():
                return
            saved = self.world.parts[self.task, plan.epoch, iteration]
            if saved >= set(plan.ranks) or self.world.options.plant == "save-without-parts":
                self.world.checkers.of(self.task).saved_last(self, saved, plan)
                path = f"ckpt/{iteration}"
                self.say(Saved(self.name, self.rank, iteration, path, plan.epoch, final=True))
            else:
                self._later(10.0, look)

        self._later(self.rng.uniform(10.0, 60.0), written)

    def hand_over(self, move: MoveRoles, iteration: int) -> None:
        raise NotImplementedError

    def change_layout(self, order: ChangeLayout, iteration: int) -> None:
        raise NotImplementedError

    def _is_current(self) -> bool:
        """No newer epoch than the one its groups are of."""
        assert self.machine is not None and self.machine.plan is not None
        return self.newest is None or self.newest.epoch == self.machine.plan.epoch

    def _go_on(self) -> None:
        if self.holds is not None:
            iteration, self.holds = self.holds, None
            assert self.newest is not None
            if all(m.worker != self.name for m in self.newest.members):  # its role moved
                self._later(1.0, lambda: self.die("exited", 0))
                return
            self._begin(iteration)

    def _say_healed(self, iteration: int) -> None:
        assert self.machine is not None and self.machine.plan is not None
        self.say(
            Healed(
                self.name, self.rank, self.machine.plan.epoch, iteration, max(self.interrupted, 0),
                50.0, 40.0, self.host.now_ns, tuple(sorted(self.recomputed)),
                0.0, 0, 1, "none_needed", 0, {},
            )
        )  # fmt: skip
        self.recomputed, self.interrupted = set(), -1
