"""The worker-side healing machine: one rank's way through iterations and through whatever happens to them. Pure.

Theory. A worker is a sequential program: it has exactly one outstanding action, and each event that ends it yields the
next. Plans arrive at any time and are only *noted*; they take effect at these points and no others:

  * a member of a wounded replica: on entering an iteration, on entering the reduction, and when an action breaks;
  * a member of a whole replica: on entering the reduction, and when an action between replicas breaks.
    It is never interrupted while computing: a tp peer may be one collective further (MECHANICS 1.10);
  * a replica of a single rank may also meet on entering an iteration (nobody waits for it inside);
  * after a move everybody meets on entering the iteration: all of them hold there, and nobody computes;
  * after the script's loop everybody meets at once: nothing is left to compute, and all wait there for one another.

Order inside an iteration (MECHANICS 1.2): inside collectives (compute, tie), then those between replicas (reduce,
commit). `Confirm` makes a whole replica act as one on a commit that was interrupted for some of it only; `Settle` does
the same for what else is between replicas and is followed by computing: taking state at a meeting and, with a sharded
optimizer, gathering the parameters after each step. Without it a member goes on to compute and waits there for one who
waits for it at the next meeting.

The script's loop and the machine meet at two places: `IterationBegun` (train_step was called) and `EndIteration` /
`Ready` (control goes back). What a meeting decided for an iteration that the script has not begun yet is *parked*.
After a checkpoint was loaded, iterations before the script's own are done again inside the same train_step.

The machine never looks at a clock: bounds on waits belong to the runtime, which reports Broken when one is exceeded.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import ClassVar

import msgspec

from unicron.healing import actions as do
from unicron.healing import events as on
from unicron.healing.dealing import assigned
from unicron.healing.record import CommitResult, Record
from unicron.healing.resolve import (
    Fetch,
    ReplicaVerdict,
    WorldVerdict,
    gathers_late,
    position_of,
    reduces_eagerly,
    resolve_replica,
    resolve_world,
    rolls_forward,
)
from unicron.types import EpochPlan, Layout, PlanKind, Rank, Stage

NEVER = 1 << 62  # above any iteration


class Phase(enum.Enum):
    OUTSIDE = "outside"  # no role yet
    BETWEEN = "between"  # the script's own code
    COMPUTE = "compute"
    TIE = "tie"
    REDUCE = "reduce"
    COMMIT = "commit"
    CONFIRM = "confirm"
    STEP = "step"
    GATHER = "gather"  # the others' shards of the new parameters
    BEGIN_GATHER = "begin_gather"  # they are under way, and the next forward waits for them
    FINISH_GATHER = "finish_gather"  # or the end of the script's loop does
    SETTLE = "settle"
    AWAIT_PLAN = "await_plan"
    EXCHANGE_INSIDE = "exchange_inside"
    REBUILD_INSIDE = "rebuild_inside"
    ROLL_INSIDE = "roll_inside"  # stepping with a commit result learned inside the replica
    EXCHANGE_WORLD = "exchange_world"
    REBUILD_CROSS = "rebuild_cross"
    ROLL_WORLD = "roll_world"  # stepping with a commit result learned at the meeting
    FETCH = "fetch"
    GO_BACK = "go_back"  # to what is kept of an earlier iteration
    GATHER_WORLD = "gather_world"  # at the meeting
    SETTLE_WORLD = "settle_world"
    LOAD = "load"
    OVER = "over"  # the script's loop is: nobody leaves before the last commit is everybody's
    LEFT = "left"


#: Where an action that involves others is outstanding, and so can break.
BREAKABLE = frozenset(
    {
        Phase.COMPUTE, Phase.TIE, Phase.REDUCE, Phase.COMMIT, Phase.CONFIRM, Phase.EXCHANGE_INSIDE,
        Phase.REBUILD_INSIDE, Phase.EXCHANGE_WORLD, Phase.REBUILD_CROSS, Phase.FETCH, Phase.LOAD, Phase.GATHER,
        Phase.SETTLE, Phase.GATHER_WORLD, Phase.SETTLE_WORLD, Phase.GO_BACK, Phase.OVER, Phase.BEGIN_GATHER,
        Phase.FINISH_GATHER,
    }
)  # fmt: skip


#: What is between replicas and is followed by computing, and where the members of a replica say how it ended.
SETTLED_IN = {
    Phase.GATHER: Phase.SETTLE, Phase.FETCH: Phase.SETTLE_WORLD, Phase.GATHER_WORLD: Phase.SETTLE_WORLD,
    Phase.GO_BACK: Phase.SETTLE_WORLD,
}  # fmt: skip


class UnknownTransition(AssertionError):
    """An event that this phase does not know: a programmer's error, never ignored."""


def _new_or_ended(plan: EpochPlan) -> set[Rank]:
    """Who has no groups inside its replica. At the start nobody has any yet."""
    return set(plan.ranks if plan.kind is PlanKind.START else plan.ended)


class Work(msgspec.Struct, frozen=True):
    """What a meeting left this rank to do in its iteration."""

    micro_batches: tuple[int, ...]
    dealt: tuple[int, ...]
    extra: bool
    reduce_only: bool
    reason: str


class HealingMachine:
    """Args: rank; layout; num_segments: gradient segments of this rank (equal within a position)."""

    def __init__(self, rank: Rank, layout: Layout, num_segments: int) -> None:
        self.rank, self.layout, self.num_segments = rank, layout, num_segments
        self.replica = layout.replica_of(rank)
        self.phase = Phase.OUTSIDE
        self.record = Record(rank, 0, Stage.STARTING, num_segments=num_segments)
        self.plan: EpochPlan | None = None  # the newest plan met: its groups between replicas stand
        self.pending: list[EpochPlan] = []  # newer ones, in order of epoch
        self.loop_iteration: int | None = None  # the one the script is in, None between iterations
        self.healing = False  # a plan (other than the first) is being carried out
        self.shared: tuple[Rank, ...] = ()
        self.parked: Work | None = None
        self.is_ending = False  # the script's loop is over
        self._acting = 0  # newest epoch acted on
        self._inside_done = 0  # newest epoch whose inside groups stand
        self.is_extra = False  # the last Compute added to whole sums
        # The iteration that the newest meeting left everybody in. In later ones of its epoch nobody heals, so all of a
        # position may begin collectives under the backward, and all gather late. Not in that one: who adopted its sums
        # has no backward.
        self._undisturbed_after = NEVER
        self._is_eager_agreed = False
        self._is_late_agreed = False
        #: Is something done with whole parameters after this iteration, as everybody knows beforehand? (A checkpoint.)
        self.whole_after: Callable[[int], bool] = lambda iteration: False
        self._await_inside = False
        self._inside: ReplicaVerdict | None = None
        self._verdict: WorldVerdict | None = None

    @property
    def may_hold(self) -> bool:
        """Does control return to the script after this very iteration, here as everywhere? Not in a recovery, and not
        while iterations are done again since a checkpoint: some members do so inside one train_step, others do not."""
        return not self.healing and (self.loop_iteration is None or self.record.iteration >= self.loop_iteration)

    # ------------------------------------------------------------------ events

    def step(self, event: on.AnyEvent) -> tuple[do.AnyAction, ...]:
        """The next thing to do: one action, or none (PlanArrived is only noted)."""
        if isinstance(event, on.PlanArrived):
            self._note(event.plan)
            return ()
        action = self._answer(event)
        self.invariants()
        return (action,)

    def _answer(self, event: on.AnyEvent) -> do.AnyAction:
        phase = self.phase
        match event:
            case on.Joined(plan, record) if phase is Phase.OUTSIDE:
                self.record = record
                self._note(plan)
                return self._repair()
            case on.IterationBegun(iteration) if phase is Phase.BETWEEN:
                return self._begin(iteration)
            case on.LoopEnded() if phase is Phase.BETWEEN:
                self.is_ending, self.loop_iteration = True, self.record.iteration - 1
                return self._end() if self.record.gathered or self.pending else self._finish_gather()
            case on.RecordsGathered(records) if phase is Phase.EXCHANGE_INSIDE:
                return self._inside_gathered(records)
            case on.RecordsGathered(records) if phase is Phase.EXCHANGE_WORLD:
                return self._world_gathered(records)
            case on.OthersLeft() if phase in (Phase.EXCHANGE_INSIDE, Phase.EXCHANGE_WORLD):
                return self._others_left()
            case on.CommitDone(result) if phase is Phase.COMMIT:
                return self._committed(result)
            case on.Confirmed(result) if phase is Phase.CONFIRM:
                return self._confirmed(result)
            case on.Settled(ok) if phase in (Phase.SETTLE, Phase.SETTLE_WORLD):
                return self._settled(ok)
            case on.CheckpointLoaded(iteration) if phase is Phase.LOAD:
                return self._loaded(iteration)
            case on.Broken() if phase in BREAKABLE:
                return self._broken(event)
            case on.Done() if phase in self._on_done:
                return self._on_done[phase](self)
        raise UnknownTransition(f"{type(event).__name__} in phase {phase.value}")

    # ------------------------------------------------------------------ the undisturbed iteration

    def _begin(self, iteration: int) -> do.AnyAction:
        if iteration != self.record.iteration:
            raise AssertionError(f"script begins {iteration}, state is at {self.record.iteration}")
        self.loop_iteration, self.is_ending = iteration, False
        if self._touched():
            self.parked = None
            return self._repair()
        if self.parked is not None:
            return self._work(self.parked)
        if self.pending and (self.layout.replica_size == 1 or self._is_moved()):
            return self._repair()
        assert self.plan is not None
        return self._compute_own(self.plan.replicas, "iteration begins")

    def _compute_own(self, dealt: tuple[int, ...], why: str) -> do.AnyAction:
        if self.record.begun:
            dealt = self.record.dealt
        mine = assigned(self.replica, dealt, self.layout.num_sets)
        return self._work(Work(mine, dealt, extra=False, reduce_only=False, reason=why))

    def is_others(self, number: int) -> bool:
        """Is this set of micro-batches, which it computes, the share of a replica that was lost?"""
        dealt = self.record.dealt
        return self.replica in dealt and number not in assigned(self.replica, dealt, self.layout.num_sets)

    def _work(self, work: Work) -> do.AnyAction:
        """Go on with an iteration, or park the work until the script is there."""
        iteration = self.record.iteration
        if self.loop_iteration is None or iteration > self.loop_iteration:
            self.parked = work
            return self._return_to_script()
        self.parked = None
        if work.reduce_only:
            return self._enter_reduction(work.reason)
        done = set(work.micro_batches) | (set(self.record.done) if work.extra else set())
        self.is_extra = work.extra
        self._set(
            stage=Stage.COMPUTE, begun=True, dealt=work.dealt, summed=False, done=tuple(sorted(done)),
            segments_reduced=self.record.segments_reduced if work.extra else 0,
        )  # fmt: skip
        return self._to(
            Phase.COMPUTE,
            do.Compute(
                iteration=iteration, micro_batches=work.micro_batches, dealt=work.dealt, extra=work.extra,
                eager=self._is_eager_agreed and iteration > self._undisturbed_after and not self.pending,
                reason=work.reason,
            ),
        )  # fmt: skip

    def _return_to_script(self) -> do.AnyAction:
        if self.is_ending:
            return self._end()
        if self.loop_iteration is None:
            return self._to(Phase.BETWEEN, do.Ready(iteration=self.record.iteration, reason="state agreed"))
        commit = self.record.commit
        assert commit is not None and commit.iteration == self.loop_iteration, (commit, self.loop_iteration)
        self.loop_iteration = None
        healed, self.healing = self.healing, self.healing and self.parked is not None
        if healed and commit.hold > 0:
            # That everybody may hold was said in an epoch that is over: the heirs of this one go on.
            commit = msgspec.structs.replace(commit, hold=0.0)
        return self._to(
            Phase.BETWEEN,
            do.EndIteration(commit=commit, healed=healed and not self.healing, reason="stepped"),
        )

    def _end(self) -> do.AnyAction:
        """Who dies before all have the last commit is replaced, as in any iteration. A replica of several need not wait
        for its reduction to meet: no member waits for another one's computing any more."""
        self.parked = None
        if self.pending:
            return self._repair()
        assert self.plan is not None
        healed, self.healing = self.healing, False
        return self._to(
            Phase.OVER, do.AwaitOthers(plan=self.plan, healed=healed, reason="nothing is left to do in this task")
        )

    def _finish_gather(self) -> do.AnyAction:
        return self._to(Phase.FINISH_GATHER, do.FinishGather(reason="no forward follows"))

    def _gather_finished(self) -> do.AnyAction:
        self._set(gathered=True)
        return self._end()

    def _over(self) -> do.AnyAction:
        return self._to(Phase.BETWEEN, do.Over(reason="every member's loop is over"))

    def _others_left(self) -> do.AnyAction:
        """Of an epoch that nobody else meets: what is left of the script is its own."""
        plan = self.plan = self._acting_plan()
        self.pending = [p for p in self.pending if p.epoch > plan.epoch]
        self.parked, self.loop_iteration, self.is_ending = None, None, True
        healed, self.healing = self.healing, False
        why = "all the others had left their loops before this role was lost"
        return self._to(Phase.BETWEEN, do.Over(healed=healed, reason=why))

    def _tie(self) -> do.AnyAction:
        self._set(stage=Stage.TIE, gathered=True)  # what was late is here: the forward waited for it
        return self._to(Phase.TIE, do.Tie(extra=self.is_extra, reason="before any collective between replicas"))

    def _tied(self) -> do.AnyAction:
        self._set(summed=True)
        return self._enter_reduction("sums are whole")

    def _enter_reduction(self, why: str) -> do.AnyAction:
        self._set(stage=Stage.REDUCE)
        if self.pending and self._inside_done >= self.pending[0].epoch:
            return self._repair()  # mended for it, as every member of this replica: only the meeting is left
        if self.pending:
            return self._miss_commit("a newer epoch came before the reduction", inside=False)
        return self._to(Phase.REDUCE, do.Reduce(shared=self.shared, reason=why))

    def _reduced(self) -> do.AnyAction:
        self._set(segments_reduced=self.num_segments, stage=Stage.COMMIT)
        return self._to(Phase.COMMIT, do.Commit(reason="all segments reduced"))

    def _committed(self, result: CommitResult) -> do.AnyAction:
        self._set(commit=result)
        if self.layout.replica_size == 1:
            return self._step_with(result, Phase.STEP, "committed")
        return self._to(Phase.CONFIRM, do.Confirm(result=result, reason="the replica acts as one"))

    def _confirmed(self, result: CommitResult | None) -> do.AnyAction:
        if result is not None:
            return self._step_with(result, Phase.STEP, "committed, as the replica knows")
        return self._repair_or_wait("commit interrupted, nobody in the replica saw its result", inside=False)

    def _step_with(self, commit: CommitResult, phase: Phase, why: str) -> do.AnyAction:
        if commit.overflowed:
            self._set(commit=commit)
            return self._to(phase, do.Repeat(commit=commit, reason="sums did not fit their scale, everywhere"))
        self._set(stage=Stage.STEP, commit=commit)
        return self._to(phase, do.Step(commit=commit, reason=why))

    def _stepped(self) -> do.AnyAction:
        if not self._roll() or not self.layout.sharded:
            return self._next_iteration()
        if self._gathers_late():
            return self._to(Phase.BEGIN_GATHER, do.Gather(late=True, reason="the next forward waits for it"))
        return self._to(Phase.GATHER, do.Gather(reason="every replica stepped its shard"))

    def _gathers_late(self) -> bool:
        """The same for all who made this commit: they send their buckets in one order, and the members of a replica
        settle, or do not. So what only some know by now does not count, such as a pending plan."""
        commit = self.record.commit
        assert commit is not None
        is_undisturbed = self._is_late_agreed and commit.iteration > self._undisturbed_after
        return is_undisturbed and commit.hold <= 0 and not self.whole_after(commit.iteration)

    def _gathered(self) -> do.AnyAction:
        self._set(gathered=True)
        return self._next_iteration() if self.layout.replica_size == 1 else self._settle(Phase.SETTLE, ok=True)

    def _settle(self, phase: Phase, *, ok: bool, report: str = "") -> do.AnyAction:
        return self._to(
            phase, do.Settle(ok=ok, report=report, reason="the replica goes on as one" if ok else "broken: not as one")
        )

    def _settled(self, ok: bool) -> do.AnyAction:
        if not ok:
            return self._repair_or_wait("a member of the replica could not complete it", inside=False)
        return self._next_iteration() if self.phase is Phase.SETTLE else self._agreed()

    def _next_iteration(self) -> do.AnyAction:
        assert self.loop_iteration is not None and self.plan is not None
        if self.record.iteration <= self.loop_iteration:
            why = "at a smaller scale" if self.record.repeat else "done again since the checkpoint"
            return self._compute_own(self.plan.replicas, why)
        return self._return_to_script()

    def _roll(self) -> bool:
        """One more committed step is in the parameters; or, False, the iteration is to be computed again."""
        commit = self.record.commit
        assert commit is not None
        self.shared = ()
        if commit.overflowed:
            self._fresh(self.record.iteration, commit.repeat + 1)
            return False
        self._fresh(self.record.iteration + 1)
        self._set(gathered=not self.layout.sharded)
        return True

    # ------------------------------------------------------------------ when something breaks

    def _broken(self, event: on.Broken) -> do.AnyAction:
        if event.segments_reduced >= 0:
            self._set(segments_reduced=event.segments_reduced)
        if self.phase in (Phase.REDUCE, Phase.COMMIT):
            return self._miss_commit(f"commit interrupted: {event.text}", event.inside)
        if self.phase in SETTLED_IN and self.layout.replica_size > 1 and not self._touched():
            # A group of all lanes may have broken for this one only, and a member that waits in it for others of it,
            # who wait on, is freed by a plan alone.
            report = "" if self.layout.ep == 1 or self._helps(inside=False) else event.text
            return self._settle(SETTLED_IN[self.phase], ok=False, report=report)
        return self._repair_or_wait(event.text, event.inside, late=event.late)

    def _miss_commit(self, why: str, inside: bool) -> do.AnyAction:
        """This pass ends without the commit's result. A whole replica still confirms, exactly once a pass, whether
        it got as far as the commit, broke in the reduction or did not enter it: a member that did waits there.

        When no plan explains it yet it is told: members that wait in the commit, for us among others, are freed only
        by a plan, and until then we wait for them.
        """
        if self.layout.replica_size == 1 or self._touched():
            return self._repair_or_wait(why, inside)
        report = "" if self._helps(inside=False) else why
        return self._to(Phase.CONFIRM, do.Confirm(result=None, report=report, reason=why))

    def _repair_or_wait(self, text: str, inside: bool, *, late: bool = False) -> do.AnyAction:
        if self._helps(inside):
            return self._repair()
        self._await_inside = inside
        return self._to(
            Phase.AWAIT_PLAN,
            do.AwaitPlan(
                after_epoch=self._newest(), report=text, inside=inside, late=late, reason="no plan explains this yet"
            ),
        )  # fmt: skip

    def _plan_awaited(self) -> do.AnyAction:
        return self._repair() if self._helps(self._await_inside) else self._repair_or_wait("", self._await_inside)

    def _helps(self, inside: bool) -> bool:
        """A plan not acted on yet that mends what broke: inside a replica only one that touches it does."""
        new = [p for p in self.pending if p.epoch > self._acting]
        return bool(new) and (not inside or bool(self._touched()))

    def _repair(self) -> do.AnyAction:
        """Act on the pending plans: a wounded replica first mends itself, then everybody meets."""
        if not self.pending:
            raise AssertionError("nothing to repair")
        newest = self.pending[-1]
        if newest.member(self.rank) is None:
            return self._to(Phase.LEFT, do.Leave(reason=f"epoch {newest.epoch}: {newest.reason}"))
        self._acting = newest.epoch
        self._undisturbed_after = NEVER
        self.healing = self.healing or newest.kind is not PlanKind.START
        touched = self._touched()
        self._set(inside_touched=touched)
        if not touched:
            return self._meet("a whole replica meets the new epoch")
        if self.layout.replica_size == 1:
            return self._inside_gathered((self.record,))
        return self._to(
            Phase.EXCHANGE_INSIDE,
            do.ExchangeInside(plan=newest, reason=f"replica {self.replica} is wounded: {newest.reason}"),
        )

    def _meet(self, why: str) -> do.AnyAction:
        self._acting = self.pending[-1].epoch
        return self._to(Phase.EXCHANGE_WORLD, do.ExchangeWorld(plan=self.pending[-1], reason=why))

    # ------------------------------------------------------------------ inside the wounded replica

    def _inside_gathered(self, records: Sequence[Record]) -> do.AnyAction:
        verdict = self._inside = resolve_replica(sorted(records, key=lambda r: r.rank), sharded=self.layout.sharded)
        if self.layout.replica_size == 1:
            return self._inside_rebuilt()
        plan = self._acting_plan()
        return self._to(
            Phase.REBUILD_INSIDE,
            do.RebuildInside(
                plan=plan, touched=verdict.touched, is_first=verdict.is_first, reason=verdict.reason
            ),
        )  # fmt: skip

    def _inside_rebuilt(self) -> do.AnyAction:
        verdict = self._inside
        assert verdict is not None
        self._inside_done = self._acting
        self._set(inside_epoch=self._acting, inside_touched=())
        if verdict.commit is not None and rolls_forward(self.record, verdict.commit):
            return self._step_with(verdict.commit, Phase.ROLL_INSIDE, "a member knows the commit's result")
        return self._mended()

    def _rolled_inside(self) -> do.AnyAction:
        self._roll()
        return self._mended()

    def _mended(self) -> do.AnyAction:
        """The replica stands again: compute, or meet at once if there is nothing to compute (or to compute with)."""
        verdict = self._inside
        assert verdict is not None
        if self._touched():  # by a newer plan
            return self._repair()
        if verdict.compute and self.pending[-1].kind is not PlanKind.RESTORE and not self._is_moved():
            return self._compute_own(verdict.dealt, verdict.reason)
        return self._meet(verdict.reason)

    # ------------------------------------------------------------------ the meeting

    def _world_gathered(self, records: Sequence[Record]) -> do.AnyAction:
        plan = self._acting_plan()
        verdict = self._verdict = resolve_world(plan, sorted(records, key=lambda r: r.rank))
        self._is_eager_agreed = reduces_eagerly(self.layout, self.rank, records)
        self._is_late_agreed = gathers_late(records)
        return self._to(Phase.REBUILD_CROSS, do.RebuildCross(plan=plan, reason=verdict.reason))

    def _cross_rebuilt(self) -> do.AnyAction:
        verdict = self._verdict
        assert verdict is not None
        plan = self.plan = self._acting_plan()
        self.pending = [p for p in self.pending if p.epoch > plan.epoch]
        self._set(met_replicas=plan.replicas)
        if plan.restore:
            # What loading writes over is no state from here on, whatever breaks; and no commit is of what it brings.
            self.shared = ()
            self._set(has_state=False, commit=None)
            return self._to(Phase.LOAD, do.LoadCheckpoint(plan=plan, path=plan.restore, reason=plan.reason))
        if verdict.lost_positions:
            self._await_inside = False
            return self._to(
                Phase.AWAIT_PLAN,
                do.ReportStateLost(
                    positions=verdict.lost_positions, iteration=verdict.iteration, reason=verdict.reason
                ),
            )
        if verdict.goes_back:
            return self._go_back(verdict)
        if verdict.commit is not None and rolls_forward(self.record, verdict.commit):
            return self._step_with(verdict.commit, Phase.ROLL_WORLD, "somebody knows the commit's result")
        return self._fetch()

    def _go_back(self, verdict: WorldVerdict) -> do.AnyAction:
        """From here on the state is not that of the record's iteration, whatever breaks."""
        self.shared = ()
        self._set(has_state=False, commit=None)
        if any(self.rank in fetch.targets for fetch in verdict.fetches):
            return self._fetch()
        return self._to(
            Phase.GO_BACK,
            do.GoBack(iteration=verdict.iteration, branch=verdict.branch, reason=verdict.reason),
        )

    def _went_back(self) -> do.AnyAction:
        assert self._verdict is not None
        self._fresh(self._verdict.iteration)
        self._set(has_state=True, gathered=False, branch=self._verdict.branch)
        return self._fetch()

    def _rolled_world(self) -> do.AnyAction:
        self._roll()
        return self._fetch()

    def _fetch(self) -> do.AnyAction:
        verdict, plan = self._verdict, self.plan
        assert verdict is not None and plan is not None
        if self.record.has_state:
            self._take_deal(verdict)
        mine = next((f for f in verdict.fetches if self._takes_part(f)), None)
        if mine is None:
            return self._gather_world()
        return self._to(
            Phase.FETCH,
            do.FetchState(
                plan=plan, fetch=mine, iteration=verdict.iteration, commit=verdict.commit, branch=verdict.branch,
                reason=f"ranks {mine.targets} take their state from rank {mine.source}",
            ),
        )  # fmt: skip

    def _takes_part(self, fetch: Fetch) -> bool:
        if fetch.copy:
            return self.rank == fetch.source or self.rank in fetch.targets
        mine = position_of(self.layout, self.rank), self.layout.shard_of(self.rank)
        return (fetch.position, fetch.shard) == mine

    def _fetched(self) -> do.AnyAction:
        assert self._verdict is not None
        if not self.record.has_state:
            self._fresh(self._verdict.iteration, self._verdict.repeat)
            self._set(
                has_state=True, commit=self._verdict.commit, gathered=not self.layout.sharded,
                branch=self._verdict.branch,
            )  # fmt: skip
            self._take_deal(self._verdict)
        return self._gather_world()

    def _take_deal(self, verdict: WorldVerdict) -> None:
        """Known from here on, whatever breaks before all agree: a wounded replica computes its share of this very deal,
        which may be older than the plan."""
        self._set(begun=True, dealt=verdict.dealt)

    def _gather_world(self) -> do.AnyAction:
        """All or nobody, as the verdict is the same for all: who has the shards is given the same values again."""
        assert self._verdict is not None
        if not self._verdict.gather:
            return self._settle_world()
        return self._to(Phase.GATHER_WORLD, do.Gather(reason="somebody lacks other replicas' shards"))

    def _gathered_world(self) -> do.AnyAction:
        self._set(gathered=True)
        return self._settle_world()

    def _settle_world(self) -> do.AnyAction:
        assert self._verdict is not None
        if self.layout.replica_size == 1 or not (self._verdict.fetches or self._verdict.gather):
            return self._agreed()
        return self._settle(Phase.SETTLE_WORLD, ok=True)

    def _loaded(self, iteration: int) -> do.AnyAction:
        assert self.plan is not None
        self._fresh(iteration)
        self._set(has_state=True, gathered=True, branch=self.plan.epoch)
        self._undisturbed_after = iteration
        return self._compute_own(self.plan.replicas, "from the checkpoint")

    def _agreed(self) -> do.AnyAction:
        """Everybody is at the same iteration with whole parameters: on with what is left of it."""
        verdict = self._verdict
        assert verdict is not None
        if (self.record.iteration, self.record.repeat) != (verdict.iteration, verdict.repeat):
            raise AssertionError(f"at {self.record.iteration}, the meeting agreed on {verdict.iteration}")
        self._undisturbed_after = verdict.iteration
        self.shared = verdict.shared[position_of(self.layout, self.rank)]
        have, mine = verdict.have.get(self.replica, ()), verdict.compute[self.replica]
        if self.replica not in verdict.have and self.record.summed:
            self._set(summed=False)  # a member of the replica does not hold its part
        whole = self.replica in verdict.have or verdict.all_reduced
        return self._work(
            Work(mine, verdict.dealt, extra=bool(have), reduce_only=whole and not mine, reason=verdict.reason)
        )

    # ------------------------------------------------------------------ helpers

    def _note(self, plan: EpochPlan) -> None:
        if plan.epoch > self._newest():
            self.pending.append(plan)

    def _newest(self) -> int:
        if self.pending:
            return self.pending[-1].epoch
        return self.plan.epoch if self.plan is not None else 0

    def _acting_plan(self) -> EpochPlan:
        return next(p for p in self.pending if p.epoch == self._acting)

    def _is_moved(self) -> bool:
        """Roles went to other nodes and nothing else happened: such a plan comes only when all stand at a boundary."""
        return self.pending[-1].kind is PlanKind.MOVE

    def _touched(self) -> tuple[Rank, ...]:
        """Ranks of my replica touched by pending plans and not mended yet."""
        mine = set(self.layout.replica_ranks(self.replica))
        if (
            not self._inside_done
        ):  # nobody in it has groups yet: a member that did not see the START cannot be passed over
            return tuple(sorted(mine))
        new = [p for p in self.pending if p.epoch > self._inside_done]
        return tuple(sorted({t for p in new for t in _new_or_ended(p) if t in mine}))

    def _fresh(self, iteration: int, repeat: int = 0) -> None:
        self._set(
            iteration=iteration, repeat=repeat, stage=Stage.IDLE, begun=False, dealt=(), done=(), summed=False,
            segments_reduced=0,
        )  # fmt: skip

    def _set(self, **changes: object) -> None:
        self.record = msgspec.structs.replace(self.record, **changes)

    def _to(self, phase: Phase, action: do.AnyAction) -> do.AnyAction:
        self.phase = phase
        return action

    def invariants(self) -> None:
        record = self.record
        assert 0 <= record.segments_reduced <= self.num_segments, record
        epochs = [p.epoch for p in self.pending]
        assert epochs == sorted(set(epochs)), epochs
        if self.plan is not None:
            assert all(e > self.plan.epoch for e in epochs), (self.plan.epoch, epochs)
        assert record.begun or not record.summed, record
        assert self.parked is None or self.phase is not Phase.COMPUTE

    #: What `Done` means in each phase.
    _on_done: ClassVar[dict[Phase, Callable[[HealingMachine], do.AnyAction]]] = {
        Phase.COMPUTE: _tie,
        Phase.TIE: _tied,
        Phase.REDUCE: _reduced,
        Phase.STEP: _stepped,
        Phase.AWAIT_PLAN: _plan_awaited,
        Phase.REBUILD_INSIDE: _inside_rebuilt,
        Phase.ROLL_INSIDE: _rolled_inside,
        Phase.REBUILD_CROSS: _cross_rebuilt,
        Phase.ROLL_WORLD: _rolled_world,
        Phase.FETCH: _fetched,
        Phase.GO_BACK: _went_back,
        Phase.GATHER: _gathered,
        Phase.BEGIN_GATHER: _next_iteration,
        Phase.FINISH_GATHER: _gather_finished,
        Phase.GATHER_WORLD: _gathered_world,
        Phase.OVER: _over,
    }
