"""Carries out what the healing machine says: the one place where a worker's actions meet torch, groups and arena.

`run(event)` feeds one event and acts until control goes back to the script (Ready, EndIteration). Each handler does one
action and returns the event that ends it; what breaks in a collective becomes `Broken`, everything else is the
script's own error and propagates.
"""

from __future__ import annotations

import math
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from unicron.faults.kinds import BEFORE, INSIDE, FaultKind, FaultPoint
from unicron.faults.perform import perform
from unicron.healing import actions as do
from unicron.healing import events as on
from unicron.healing.buddies import common_version
from unicron.healing.machine import HealingMachine
from unicron.healing.record import CommitResult, hold_vote
from unicron.healing.resolve import position_of
from unicron.messages import CollectiveFailed, StateLost, cut
from unicron.runtime.store_client import StoreError
from unicron.training import account, compute, gpu, step
from unicron.training.buddies import Buddies, CopyDiffers
from unicron.training.eager import EagerReduction
from unicron.training.eager_plan import EagerPlan
from unicron.training.exact import REPEAT_BITS, REPEATS_MAX, ExactGradients
from unicron.training.fault_points import FaultPoints
from unicron.training.gathering import Gathering
from unicron.training.gradients import CHUNK_BYTES, Gradients, ReduceHooks
from unicron.training.groups import GroupInterrupted, Groups
from unicron.training.ledger import Ledger
from unicron.training.link import WorkerLink, now_ms
from unicron.training.meeting import Meeting
from unicron.training.memory import StateMemory
from unicron.training.optimizer_state import even_optimizer_steps
from unicron.training.randomness import Randomness
from unicron.training.transfer import StateTransfer
from unicron.training.undoable_step import params_of
from unicron.training.watched_group import LostOperation
from unicron.types import EpochPlan, Layout, Rank, Stage, WaitKind

AWAIT_PLAN_MS_MAX = 120_000
OVER_MS_MAX = 120_000  # who is through with the last iteration waits for the others, and for an heir to get ready
COLLECTIVE_ERROR = re.compile(r"gloo|NCCL|Connection (closed|reset)|[Tt]imed out waiting|Broken pipe")


class NoPlanCame(RuntimeError):
    """A collective broke and nobody said what to do within the bound."""


class NothingToCompute(RuntimeError):
    """An heir of the last iteration, from which everybody is taken back: the script of its own heir begins there."""


class Left(BaseException):
    """The newest plan has no place for this worker."""


def is_collective_error(error: BaseException) -> bool:
    if isinstance(error, (GroupInterrupted, LostOperation, StoreError, CopyDiffers)):
        return True
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and COLLECTIVE_ERROR.search(str(error)) is not None


def gradients_of(
    model: Any, memory: StateMemory, layout: Layout, rank: Rank, eager: EagerPlan | None = None
) -> Gradients:
    counts_dense = layout.lane_of(rank) == 0
    if layout.exact:
        return ExactGradients(model, memory, layout, counts_dense=counts_dense)
    chunk_bytes = CHUNK_BYTES if eager is None else eager.segment_bytes
    return Gradients(model, memory, chunk_bytes, eager, counts_dense=counts_dense)


class Engine:
    """One member's machine with everything it acts on."""

    def __init__(
        self, link: WorkerLink, rank: Rank, layout: Layout, model: Any, optimizer: Any, scheduler: Any,
        memory: StateMemory, groups: Groups, eager: EagerPlan | None = None, *, gathers_late: bool = False,
    ) -> None:  # fmt: skip
        """eager: which segments are reduced under the backward; None: the script did not ask for that. gathers_late:
        it asked for the parameters to be gathered under the forward."""
        self.link, self.rank, self.layout = link, rank, layout
        self.model, self.memory, self.groups = model, memory, groups
        self.gradients = gradients_of(model, memory, layout, rank, eager)
        self.ledger = Ledger(memory.fd)
        self.points = FaultPoints(link.pulse, lambda: self.machine.record.iteration, self._fault)
        self.computation = compute.Computation(model, layout, memory.scalars)
        self.computation.randomness = Randomness(rank, layout)
        self.computation.forward_done = lambda m: self.points.maybe(FaultPoint.FORWARD, m)
        self.computation.backward_begins = self._backward_begins
        self.eager: EagerReduction | None = None
        if eager is not None:
            self.eager = EagerReduction(eager, self.gradients, is_collective_error, self.points.early)
            self.eager.watch(model)
            self.computation.last_backward = self.eager.last_backward
        self.gathers_late = gathers_late
        self.gathering = Gathering(rank, layout, model, groups, self.points, is_collective_error)
        if gathers_late:
            self.gathering.watch()
        self.stepper = step.Stepper(optimizer, scheduler, layout, self.gradients)
        self.stepper.loss_scale.require_use(self.computation.config)
        self.machine = HealingMachine(rank, layout, len(self.gradients.segments))
        self.transfer = StateTransfer(rank, memory, groups, of_shards=layout.sharded)
        self.buddies = Buddies(rank, layout, memory, groups) if layout.buddy else None
        if self.buddies is not None:
            self.buddies.moves = lambda: self._pulse(Stage.GATHER)
        self.account = account.Account(link, self.machine, groups)
        self.forward_step: compute.ForwardStep | None = None
        self.dataset: compute.Dataset | None = None
        self.on_reduced: list[Callable[[int, list[torch.Tensor]], None]] = []
        self.last_iteration: float = math.inf  # after it nobody meets again
        self.meeting = Meeting(link, self.machine)
        self._micro_batch = -1
        self._epoch_before = 0  # the one that stood when this iteration began
        self.refusal = ""  # why no operation with others may begin now
        groups.at_operation = self._enter_operation
        self._handlers: dict[type[do.Action], Callable[[Any], on.AnyEvent]] = {
            do.Compute: self._compute, do.Tie: self._tie, do.Reduce: self._reduce, do.Commit: self._commit,
            do.Confirm: self._confirm, do.Step: self._step, do.Repeat: self._repeat, do.Gather: self._gather,
            do.FinishGather: self._finish_gather,
            do.Settle: self._settle, do.ExchangeInside: self._exchange_inside,
            do.RebuildInside: self._rebuild_inside, do.ExchangeWorld: self._exchange_world,
            do.RebuildCross: self._rebuild_cross, do.FetchState: self._fetch_state, do.GoBack: self._go_back,
            do.LoadCheckpoint: self._load_checkpoint, do.AwaitPlan: self._await_plan,
            do.ReportStateLost: self._report_state_lost, do.AwaitOthers: self._await_others,
        }  # fmt: skip
        self.load_checkpoint: Callable[[str], tuple[int, dict[str, Any]]] | None = None

    # ------------------------------------------------------------------ the loop

    def run(self, event: on.AnyEvent) -> do.Ready | do.EndIteration | do.Over:
        if isinstance(event, on.IterationBegun):
            self._epoch_before = self.machine.plan.epoch if self.machine.plan is not None else 0  # an heir met nobody
            self.points.maybe(FaultPoint.IDLE)
        while True:
            for plan in self.link.new_plans():
                self.account.plan_arrived(plan)
                self.machine.step(on.PlanArrived(plan))
            (action,) = self.machine.step(event)
            self.ledger.write(self.machine.record)
            self.gradients.repeat = self.machine.record.repeat
            if isinstance(action, do.Over):
                self._over(action)
                return action
            if isinstance(action, (do.Ready, do.EndIteration)):
                self._pulse(Stage.IDLE)
                return action
            if isinstance(action, do.Leave):
                raise Left(action.reason)
            event = self._act(action)

    def _over(self, action: do.Over) -> None:
        """What the script does behind its loop (a last evaluation, an export) may take as long as an evaluation."""
        if action.healed:
            print(f"unicron: rank {self.rank} ends its script alone: {action.reason}", file=sys.stderr)
            self._tell_healed_at_end()
        self._pulse(Stage.EVALUATE)

    def _act(self, action: do.AnyAction) -> on.AnyEvent:
        with self.account.measure(type(action).__name__):
            try:
                return self._handlers[type(action)](action)
            except Exception as error:
                if not is_collective_error(error):
                    raise
                self.groups.settle_broken()
                inside = isinstance(action, (do.Compute, do.Tie, do.Confirm, do.Settle, do.RebuildInside))
                inside = inside or (isinstance(action, do.Gather) and self.layout.num_replicas == 1)
                if isinstance(error, (GroupInterrupted, StoreError)):
                    inside = inside and self.link.monitor.newest_epoch() <= self.machine._newest()
                late = self.gathering.is_broken and isinstance(action, (do.Compute, do.FinishGather))
                if late:  # it broke between replicas; but the members of this one may wait for it
                    inside = isinstance(action, do.Compute) and self.layout.replica_size > 1
                reduced = self.ledger.segments_reduced if isinstance(action, do.Reduce) else -1
                text = cut(f"{type(action).__name__}: {error}")
                return on.Broken(inside, text, reduced, late)
            finally:
                self.link.pulse.set_waiting(False)

    def require_good(self, *, inside: bool) -> None:
        """What was begun has ended, and its results are good; raises when a group that was used was ended meanwhile."""
        self.memory.synchronize()
        self.groups.require_whole(inside=inside)

    def _require_computed(self) -> None:
        """The same of what is inside the replica. Segments that are being reduced are not waited for: a peer of theirs
        may be dead, or slow."""
        if self.eager is not None and self.eager.is_under_way:
            self.memory.synchronize_stream()
            self.groups.require_whole(inside=True)
        else:
            self.require_good(inside=True)

    def _require_result(self) -> None:
        """The same of what this thread's stream waits for; more may be under way."""
        self.memory.synchronize_stream()
        self.groups.require_whole(inside=False)

    def _pulse(self, stage: Stage, micro_batch: int = -1, *, waiting: bool = False) -> None:
        self._micro_batch = micro_batch
        self.link.pulse.advance(int(stage), self.machine.record.iteration, micro_batch)
        if waiting:
            self.link.pulse.set_waiting(True)

    def _fault(self, kind: int, point: FaultPoint, micro_batch: int = -1) -> None:
        iteration = self.machine.record.iteration
        if kind == FaultKind.RESET:
            every = [rank for members in self.groups.inside_lists for rank in members]
            self.link.monitor.shut_groups(sorted(set(every)))
            return
        if kind == FaultKind.CORRUPT:
            self.transfer.spoil_next = True
            if self.buddies is not None:
                self.buddies.spoil_next = True
            return
        if kind == FaultKind.SCRIBBLE:
            params_of(self.memory.optimizer)[0][1].data.view(-1)[0].add_(1.0)
            return
        if kind == FaultKind.MEMORY:
            gpu.access_illegally(self.memory.device)
            return
        if kind == FaultKind.NODE:
            os.kill(self.link.agent_pid, signal.SIGKILL)
            kind = FaultKind.KILL
        perform(kind, f"{point.name.lower()} of iteration {iteration}, micro-batch {micro_batch}")

    def _enter_operation(self, kind: int, name: str) -> Callable[[], None] | None:
        """What the schedule, the model's layers, the tie and the script itself do with others."""
        if self.refusal:
            raise GroupInterrupted(self.refusal)
        stage = self.machine.record.stage
        if stage is Stage.TIE:
            return self.points.enter(FaultPoint.TIE, INSIDE)
        if stage is not Stage.COMPUTE:
            return None
        if name == "recv":
            return self.points.enter_passage(FaultPoint.RECEIVE)
        if name == "send":
            return self.points.enter_passage(FaultPoint.SEND)
        if kind == WaitKind.TP:
            return self.points.enter_passage(FaultPoint.TENSOR)
        return self.points.enter_passage(FaultPoint.EXPERT) if kind == WaitKind.WORLD else None

    # ------------------------------------------------------------------ the undisturbed iteration

    def _compute(self, action: do.Compute) -> on.AnyEvent:
        if self.forward_step is None or self.dataset is None:
            raise NothingToCompute(
                f"iteration {action.iteration} is done again, and this script's loop was over before it"
            )
        aside = self.gradients.put_aside() if action.extra else None
        begun = self.ledger.begun()
        reduced = self.ledger.segments_reduced
        if self.eager is not None:
            self.eager.drop()
            self.eager.arm(self.groups.data_group() if action.eager else None)
        self.gradients.zero()
        self.stepper.zero_grad()

        def begin(micro_batch: int) -> None:
            self._pulse(Stage.COMPUTE, micro_batch)
            self.points.maybe(FaultPoint.COMPUTE, micro_batch)
            if self.machine.healing or self.machine.record.repeat:
                self.points.maybe(FaultPoint.COMPUTE_AGAIN, micro_batch)
            number = micro_batch // self.layout.ep  # the ledger, like every plan, counts sets
            self.account.forward_begins(action.iteration, micro_batch, number in begun)
            begun.add(number)
            self.ledger.set_begun(begun)

        self._pulse(Stage.COMPUTE)  # a pipeline stage may fetch no micro-batch
        self.gathering.wait_for_first()
        mine = [number * self.layout.ep + self.layout.lane_of(self.rank) for number in action.micro_batches]
        self.computation.run(action.iteration, mine, self.forward_step, self.dataset, begin)
        self.gradients.computed()
        if self.eager is not None:
            self.eager.computed()
        self.gathering.finish()
        if aside is not None:
            self.gradients.tie(self.model, self.computation.config)
            self.gradients.put_back(aside, reduced)
        self._require_computed()
        self.ledger.set_begun(self.machine.record.done)
        return on.Done()

    def _tie(self, action: do.Tie) -> on.AnyEvent:
        self._pulse(Stage.TIE)
        self.points.maybe(FaultPoint.TIE, BEFORE)
        if not action.extra:  # extra sums were tied before they were added to the whole ones
            self.gradients.tie(self.model, self.computation.config)
            self._require_computed()
        return on.Done()

    def _backward_begins(self, chunk: int, micro_batch: int) -> None:
        self.gradients.backward_begins(chunk)
        self.points.maybe(FaultPoint.BACKWARD, micro_batch)

    def _reduce(self, action: do.Reduce) -> on.AnyEvent:
        def before(segment: int) -> None:
            self.link.pulse.set_waiting(False)  # as the segment before left it
            self._pulse(Stage.REDUCE, segment)
            self.points.maybe(FaultPoint.REDUCE, segment)
            if self.machine.healing or self.machine.record.repeat:
                self.points.maybe(FaultPoint.REDUCE_AGAIN, segment)
            self.link.pulse.set_waiting(True)  # not before: who never begins it waits for nobody

        shared = tuple(map(self.groups.data_index, action.shared))
        group = self.groups.data_group()
        if self.eager is not None and not self.eager.is_in(group):
            self.eager.drop()
        hooks = ReduceHooks(
            before, settle=self._require_result,
            half_copied=lambda segment: self.points.maybe(FaultPoint.COPY, segment),
            enter=lambda segment: self.points.enter(FaultPoint.REDUCING, segment),
            complete=lambda segment: self.points.maybe(FaultPoint.REDUCED, segment),
            eager=lambda segment: None if self.eager is None else self.eager.take(segment),
        )  # fmt: skip
        self.gradients.reduce(self.ledger, group, shared, hooks)
        if self.eager is not None:
            self.eager.over()
        return on.Done()

    def _commit(self, action: do.Commit) -> on.AnyEvent:
        self._pulse(Stage.COMMIT)
        self.points.maybe(FaultPoint.COMMIT, BEFORE)
        self.link.pulse.set_waiting(True)
        self.link.take_orders()
        plan = self.machine.plan
        assert plan is not None
        self.gradients.finish()
        for callback in self.on_reduced:
            callback(self.machine.record.iteration, self.gradients.buffers)
        speaks = self.layout.replica_of(self.rank) == plan.replicas[0]  # for its position
        counts = (
            speaks and self.layout.coords(self.rank)[0] == 0
        )  # every tensor-parallel rank has the same tokens and loss
        squares = self.gradients.sum_of_squares()
        found = self.gradients.found(squares)
        by_position = [0.0] * self.layout.replica_size
        if speaks and not found:
            by_position[position_of(self.layout, self.rank)] = squares
        scalars = self.memory.scalars
        vector = torch.tensor(  # on the GPU, where the group is NCCL's
            [1.0, float(plan.epoch), float(scalars[0]) if counts else 0.0,
             found, float(scalars[1]) if counts else 0.0,
             hold_vote(told=self._is_told_to_hold(), may_hold=self.machine.may_hold),
             *by_position],
            dtype=torch.float64, device=self.memory.device,
        )  # fmt: skip
        if len(plan.ranks) > 1:
            world = self.groups.world
            self.points.joint(
                FaultPoint.COMMIT, lambda is_async: dist.all_reduce(vector, group=world, async_op=is_async)
            )
            self.require_good(inside=False)
        count, epochs, tokens, found_inf, loss, hold, *by_position = vector.tolist()
        if count != len(plan.ranks) or epochs != count * plan.epoch:
            raise AssertionError(f"commit of epoch {plan.epoch}: {count} ranks, epochs sum to {epochs}")
        sumsq = math.fsum(by_position)  # the same whatever the order of the all-reduce was
        return on.CommitDone(self._result(tokens, sumsq, found_inf, loss, hold))

    def _result(self, tokens: float, sumsq: float, found_inf: float, loss: float, hold: float) -> CommitResult:
        """Of the try that this rank, and whoever made the commit with it, is at."""
        at = self.machine.record
        return CommitResult(at.iteration, tokens, sumsq, found_inf, loss, hold, at.repeat)

    def _is_told_to_hold(self) -> bool:
        link, move = self.link, self.link.move
        switches = move is not None and move.switch and self.machine.record.iteration < self.last_iteration
        return link.told_to_hold or link.change is not None or switches

    def _confirm(self, action: do.Confirm) -> on.AnyEvent:
        self._pulse(Stage.COMMIT, waiting=True)
        if action.report:
            self._report(action.report, inside=False)
        group = self.groups.replica_group()
        mine = torch.zeros(7, dtype=torch.float64, device=self.memory.device)
        if action.result is not None:
            r = action.result
            mine = torch.tensor(
                [1.0, r.iteration, r.tokens, r.sumsq, r.found_inf, r.loss_sum, r.hold], dtype=torch.float64,
                device=self.memory.device,
            )  # fmt: skip
        all_of_them = [torch.zeros_like(mine) for _ in range(dist.get_world_size(group))]
        self.points.joint(
            FaultPoint.CONFIRM, lambda is_async: dist.all_gather(all_of_them, mine, group=group, async_op=is_async)
        )
        self.require_good(inside=True)
        seen = next((x.tolist() for x in all_of_them if x[0] > 0), None)
        return on.Confirmed(None if seen is None else self._result(*seen[2:]))

    def _step(self, action: do.Step) -> on.AnyEvent:
        self._pulse(Stage.STEP)
        self.ledger.begin_step(undoable=self.layout.steps_undoably)
        kind = self.link.pulse.take_fault(int(FaultPoint.STEP), action.commit.iteration, -1)
        half_way = (lambda: self._fault_half_way(kind)) if kind else None
        self.stepper.step(action.commit, self._mark_chunk, half_way=half_way)
        self._end_step(action.commit)
        tokens = max(action.commit.tokens, 1.0)
        self.link.pulse.committed(action.commit.iteration, action.commit.loss_sum / tokens)
        self.account.committed(action.commit.iteration)
        return on.Done()

    def _repeat(self, action: do.Repeat) -> on.AnyEvent:
        """What was summed is given up when the ledger is written next."""
        if action.commit.repeat >= REPEATS_MAX:
            raise AssertionError(f"iteration {action.commit.iteration}: sums fit no scale: {action.commit}")
        plan = self.machine.plan
        if plan is not None and plan.ranks[0] == self.rank:
            print(
                f"unicron: iteration {action.commit.iteration}: a gradient did not fit the scale of the last committed "
                f"norm: everybody computes it again, at one 2^{REPEAT_BITS} times smaller", file=sys.stderr,
            )  # fmt: skip
        return on.Done()

    def _fault_half_way(self, kind: int) -> None:
        self.memory.synchronize()  # a part of the parameters is written
        self._fault(kind, FaultPoint.STEP)

    def _mark_chunk(self, mark: int, wait: bool) -> None:
        """What was begun before the mark is in memory when the mark is. (Of this stream: copies for buddies go on.)"""
        if wait or self.memory.device.type != "cuda":
            self.memory.synchronize_stream()
            self.ledger.mark_chunk(mark)
        else:
            stream = torch.cuda.current_stream(self.memory.device).cuda_stream
            self.ledger.mark_chunk_on_stream(mark, self.memory.device.index, stream)

    def _end_step(self, commit: CommitResult) -> None:
        self.memory.synchronize()  # the next line says that it is done
        self.ledger.end_step(commit.iteration + 1, self.stepper.extra_state(), gathered=not self.layout.sharded)

    def finish_open_step(self) -> None:
        """An heir's: the predecessor died in its step, of which nobody else has the state (the commit is proven)."""
        found = self.ledger.open_step()
        if found is None:
            return
        commit, marked = found
        self.stepper.load_extra(self.ledger.header.extra())
        self.stepper.step(commit, self._mark_chunk, marked)
        self._end_step(commit)

    def _gather(self, action: do.Gather) -> on.AnyEvent:
        self._pulse(Stage.GATHER, waiting=not action.late)
        self.points.maybe(FaultPoint.GATHER, 0)
        if action.late:
            self.gathering.begin()
            return on.Done()
        self.gathering.run()
        self.require_good(inside=False)  # before a copy begins to travel: nothing is to wait for that one here
        if self.buddies is not None:
            assert self.machine.plan is not None
            self.points.maybe(FaultPoint.BUDDY)
            self.buddies.after_step(self.machine.plan, self.machine.record.iteration, self.stepper.extra_tensor())
        return on.Done()

    def _finish_gather(self, action: do.FinishGather) -> on.AnyEvent:
        self._pulse(Stage.GATHER, waiting=True)
        self.gathering.finish()
        return on.Done()

    def _settle(self, action: do.Settle) -> on.AnyEvent:
        self._pulse(Stage.GATHER, waiting=True)
        if action.report:
            self._report(action.report, inside=False)
        ok = torch.tensor([1 if action.ok else 0], dtype=torch.int64, device=self.memory.device)
        group = self.groups.replica_group()
        self.points.joint(
            FaultPoint.SETTLE,
            lambda is_async: dist.all_reduce(ok, op=dist.ReduceOp.MIN, group=group, async_op=is_async),
        )
        self.require_good(inside=True)
        return on.Settled(bool(ok.item()))

    # ------------------------------------------------------------------ healing

    def _exchange(self, plan: EpochPlan, where: str, ranks: tuple[Rank, ...]) -> on.AnyEvent:
        self._pulse(Stage.HEAL, waiting=True)
        self.points.maybe(FaultPoint.HEAL, max(0, plan.epoch - self._epoch_before - 1))
        loop = -1 if self.machine.loop_iteration is None else self.machine.loop_iteration
        loop += self.machine.is_ending  # its script is in none any more
        record = msgspec.structs.replace(
            self.machine.record, loop=loop, side_by_side=True, waits_at_end=True, late=self.gathers_late,
            eager="" if self.eager is None else self.eager.plan.signature,
        )  # fmt: skip
        if (ours := self.buddies) is not None:
            ours.abandon()
            record = msgspec.structs.replace(record, copies=ours.copies(), kept=ours.kept())
        return self.meeting.exchange(plan, where, ranks, record)

    def why_alone(self, iteration: int) -> str:
        """Why the script, after this iteration, may do nothing with others before the next; nothing if it may.

        After a recovery scripts are not all at the same place. Who learned of a commit from others has its script
        look back at that iteration, in the new groups, while an heir's begins with the next one; in both the machine
        has work of the recovery left. And after a return to a checkpoint an heir's script is given iterations that
        the others do again inside of one train_step.
        """
        if self.meeting.left_in is not None:
            return "the others have left, and this rank ends alone"
        if self.machine.healing:
            return "a recovery is not over"
        others_in = self.meeting.others_in
        return f"other scripts are in iteration {others_in} already" if iteration < others_in else ""

    def _exchange_inside(self, action: do.ExchangeInside) -> on.AnyEvent:
        replica = self.layout.replica_of(self.rank)
        return self._exchange(action.plan, f"inside{replica}", self.layout.replica_ranks(replica))

    def _exchange_world(self, action: do.ExchangeWorld) -> on.AnyEvent:
        gathered = self._exchange(action.plan, "world", action.plan.ranks)
        if self.buddies is not None and isinstance(gathered, on.RecordsGathered):
            found = common_version(gathered.records)
            self.buddies.agreed(-1 if found is None else found[0])
        return gathered

    def _rebuild_inside(self, action: do.RebuildInside) -> on.AnyEvent:
        self._pulse(Stage.HEAL, waiting=True)
        self.groups.at_making = lambda number: self.points.maybe(FaultPoint.REBUILD_INSIDE, number)
        made = self.groups.rebuild_inside(action.plan, action.touched, self.meeting.store(action.plan))
        if action.is_first:  # also with the plan for a death in the first meeting
            compute.share_tied_weight(self.model)
            self.stepper.optimizer.reload_model_params()  # main parameters were cloned before the copy had its values
            self.require_good(inside=True)
        self.account.groups_made(made)
        return on.Done()

    def _rebuild_cross(self, action: do.RebuildCross) -> on.AnyEvent:
        self._pulse(Stage.HEAL, waiting=True)
        if self.eager is not None:
            self.eager.drop()
        self.gathering.drop()
        self.groups.at_making = lambda number: self.points.maybe(FaultPoint.REBUILD_CROSS, number)
        made = self.groups.rebuild_cross(action.plan, self.meeting.store(action.plan))
        self.account.groups_made(made)
        return on.Done()

    def _fetch_state(self, action: do.FetchState) -> on.AnyEvent:
        """What this rank's holders have in common, from one of them to those without: parameters and optimizer state,
        or a shard of the latter, after which the parameters are gathered."""
        self._pulse(Stage.HEAL, waiting=True)
        self.points.maybe(FaultPoint.FETCH)
        if action.fetch.copy:
            return self._fetch_copy(action)
        holders = self.layout.holders(self.rank)
        nodes = {m.rank: m.node for m in action.plan.members if m.rank in holders}
        extra = self.transfer.run(action.fetch, nodes, self.stepper.extra_tensor(), self.ledger.begin_step)
        self.require_good(inside=False)
        for target, nbytes, ms in self.transfer.sent:
            self.account.transferred(action.plan, action.plan, self.rank, target, (nbytes, ms))
        if extra is not None:
            self.stepper.load_extra(extra)
            if self.layout.sharded:
                self.stepper.show_main_params()
                self.memory.synchronize()  # the next line says that it is there
            self.ledger.set_branch(action.branch)
            self.ledger.end_step(action.iteration, self.stepper.extra_state(), gathered=not self.layout.sharded)
            self.account.state_source = "replica"
        return on.Done()

    def _fetch_copy(self, action: do.FetchState) -> on.AnyEvent:
        """The lost shard from its buddy, and its step if the copy is one behind; the parameters are gathered next."""
        assert self.buddies is not None
        fetch = action.fetch
        if self.rank == fetch.source:
            self.buddies.serve(fetch, self.gradients.segments)
            return on.Done()
        self.ledger.begin_step()
        extra = self.buddies.take(fetch, self.gradients.segments)
        self.account.transferred(action.plan, action.plan, fetch.source, self.rank, self.buddies.taken)
        self.ledger.set_branch(action.branch)
        self.buddies.forget(after=action.iteration)
        self.stepper.load_extra(extra)
        if fetch.steps:
            assert action.commit is not None
            self.stepper.zero_grad()
            self.stepper.step(action.commit, lambda *_: None)
        else:
            self.stepper.show_main_params()
        self.memory.synchronize()  # the next line says that it is there
        self.ledger.end_step(action.iteration, self.stepper.extra_state(), gathered=False)
        self.account.state_source = "buddy"
        return on.Done()

    def _go_back(self, action: do.GoBack) -> on.AnyEvent:
        assert self.buddies is not None
        self._pulse(Stage.HEAL)
        self.points.maybe(FaultPoint.FETCH)
        before = self.machine.record.iteration
        self.ledger.begin_step()
        self.stepper.load_extra(self.buddies.go_back(action.iteration))
        self.stepper.show_main_params()
        self.ledger.set_branch(action.branch)
        self.buddies.forget(after=action.iteration)
        self.memory.synchronize()  # the next line says that it is there
        self.ledger.end_step(action.iteration, self.stepper.extra_state(), gathered=False)
        self.account.went_back(before, action.iteration)
        return on.Done()

    def _load_checkpoint(self, action: do.LoadCheckpoint) -> on.AnyEvent:
        assert self.load_checkpoint is not None
        self._pulse(Stage.SAVE, waiting=True)
        before = self.machine.record.iteration
        self.ledger.begin_step()
        even_optimizer_steps(self.stepper.optimizer)
        iteration, own = self.load_checkpoint(action.path)
        self.stepper.load_own(own)
        self.ledger.set_branch(action.plan.epoch)
        if self.buddies is not None:
            self.buddies.forget()
        self.ledger.end_step(iteration, self.stepper.extra_state())
        self.account.restored(before, iteration)
        return on.CheckpointLoaded(iteration)

    def _await_plan(self, action: do.AwaitPlan) -> on.AnyEvent:
        self._pulse(Stage.HEAL, waiting=True)
        if action.report:
            self._report(action.report, inside=action.inside, late=action.late)
        self._wait_for_epoch_after(action.after_epoch, action.report)
        return on.Done()

    def _report(self, text: str, *, inside: bool, late: bool = False) -> None:
        record = self.machine.record
        print(f"unicron: rank {self.rank}, iteration {record.iteration}: {text}", file=sys.stderr)
        self.link.send(
            CollectiveFailed(
                self.link.worker, self.rank, self.machine._newest(), record.iteration, record.stage, inside, text, late
            )
        )

    def _report_state_lost(self, action: do.ReportStateLost) -> on.AnyEvent:
        epoch = self.machine._newest()
        self.link.send(StateLost(self.link.worker, self.rank, epoch, action.iteration, action.positions))
        self._wait_for_epoch_after(epoch, action.reason)
        return on.Done()

    def _wait_for_epoch_after(self, epoch: int, why: str) -> None:
        deadline = now_ms() + AWAIT_PLAN_MS_MAX
        while self.link.plan is None or self.link.plan.epoch <= epoch:
            plan = self.link.receive(1_000)
            if plan is not None:
                self.account.plan_arrived(plan)
                self.machine.step(on.PlanArrived(plan))
            if now_ms() > deadline:
                raise NoPlanCame(f"no epoch after {epoch} within {AWAIT_PLAN_MS_MAX} ms: {why}")

    def _await_others(self, action: do.AwaitOthers) -> on.AnyEvent:
        """In the store, so that a newer plan frees whoever waits. That all wait is no evidence against one whose script
        is still at work after its last iteration, so nothing is told before the wait is over."""
        plan = action.plan
        self.link.pulse.advance(int(Stage.HEAL), self.machine.record.iteration, -1, 2 * OVER_MS_MAX)
        self.link.pulse.set_waiting(True)
        self.points.maybe(FaultPoint.OVER, BEFORE)
        if action.healed:
            self._tell_healed_at_end()
        if not self.meeting.all_wait_at_end or self.meeting.all_leave(plan, OVER_MS_MAX):
            return on.Done()
        return on.Broken(inside=False, text="the end: a newer plan stands")

    def _tell_healed_at_end(self) -> None:
        self.account.ended()
        self.account.healed(self.machine.record.iteration - 1)
        self.groups.release_retired()

    def leave(self) -> None:
        """The role is left, and this process lives on: nothing of the model's groups stays. Its arena stays."""
        if self.buddies is not None:
            self.buddies.abandon()
        if self.eager is not None:
            self.eager.leave()
        self.gathering.leave()
        self.groups.dissolve()
        os.close(self.memory.fd)
        self.meeting.close()

    def close(self) -> None:
        if self.buddies is not None:
            self.buddies.abandon()
        self.groups.close()
        self.meeting.close()
