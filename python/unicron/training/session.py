"""join() and Session: a task's worker as its script sees it.

Managed (an agent started this process): join() builds torch.distributed and megatron's parallel_state over stand-in
groups for this worker's role, or for an understudy's guess; manage() moves the state into the arena and waits for the
role; train_step() drives the healing machine. Unmanaged (plain torchrun or python): see unmanaged.py; the same script
runs.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import msgspec
import torch.distributed as dist

from unicron import _core
from unicron.faults.kinds import FaultPoint
from unicron.healing import actions as do
from unicron.healing import events as on
from unicron.healing.record import Record
from unicron.messages import (
    ChangeLayout,
    ExceptionRaised,
    Finished,
    LayoutReady,
    MoveRoles,
    Saved,
    WorkerReady,
    announced_name,
)
from unicron.runtime import log_role
from unicron.training import data as data_module
from unicron.training import exceptions, gpu, gradients, megatron_cpu
from unicron.training.arena_pool import ArenaPool
from unicron.training.boundary import (
    hand_over,
    is_given_up,
    order_to_hold,
    save_and_hold,
    take_fresh_arena,
    take_over_role,
)
from unicron.training.buddies import buddy_bytes
from unicron.training.chunks import Chunks
from unicron.training.engine import Engine, Left, is_collective_error
from unicron.training.exact import exact_counts
from unicron.training.exceptions import describe
from unicron.training.expected import Expected
from unicron.training.groups import Groups
from unicron.training.link import WorkerLink
from unicron.training.memory import StateMemory
from unicron.training.moving import Preparation, is_left_out
from unicron.training.optimizer_state import force_optimizer_state
from unicron.training.overlap import plan_own
from unicron.training.rehearsal import rehearse
from unicron.training.reshard.atlas import atlas_of
from unicron.training.reshard.change import Change, NewHome
from unicron.training.reshard.former import Former
from unicron.training.roles import RoleChanged, overruled
from unicron.training.sandbox import Sandbox
from unicron.training.stand_ins import drop_stand_ins, make_stand_ins
from unicron.training.undoable_step import is_sharded, undo_bytes
from unicron.types import EpochPlan, Layout, PlanKind, Rank, Stage


class Metrics(msgspec.Struct, frozen=True):
    """One committed iteration. loss is the token mean over the whole task; lr is the one the step used."""

    iteration: int
    loss: float
    grad_norm: float
    tokens: int
    skipped: bool  # a non-finite gradient: parameters unchanged
    repeats: int = 0  # exact mode: so often it was computed before, at scales that were too large for a gradient


class NotManaged(RuntimeError):
    """manage() was not called, or called twice."""


class _Process:
    """What survives a change of role inside one process: the line to the agent, and the role to build for."""

    link: WorkerLink | None = None
    rank: Rank = 0
    layout: Layout | None = None  # to build for; None: as the agent said when this process began
    is_warm: bool = False  # its shadow iteration is over
    former: Former | None = None  # of a change of layout under way: what this process serves
    back: Former | None = None  # of one that was called off: what this process goes back to


@contextlib.contextmanager
def join(
    *, tp: int = 1, pp: int = 1, ep: int = 1, micro_batch: int = 1, num_micro_batches: int = 0, sharded: bool = False,
    instances: int = 1,
) -> Iterator[Any]:  # fmt: skip
    """A role in a task, or an understudy's or joiner's wait for one.

    The arguments are used only when nothing manages the script (plain torchrun): under unicron the task says them.
    """
    megatron_cpu.install()
    if gpu.has_gpu():
        gpu.prepare()
    if "UNICRON_AGENT" not in os.environ:
        from unicron.training.unmanaged import UnmanagedSession

        with UnmanagedSession(
            tp, pp, micro_batch, num_micro_batches, ep=ep, sharded=sharded, instances=instances
        ) as unmanaged:
            yield unmanaged
        return
    if _Process.link is None:
        _Process.link = WorkerLink()
        _Process.rank = _Process.link.welcome.rank
    session = Session(_Process.link, _Process.rank, _Process.layout)
    said = {"tp": tp, "pp": pp, "ep": ep, "micro_batch": micro_batch, "num_micro_batches": num_micro_batches}
    if session.speaks and (line := overruled(said, session.layout)):
        print(f"unicron: {line}", file=sys.stderr)
    try:
        with session.watched_threads():
            yield session
            session.see_off()
    except (SystemExit, KeyboardInterrupt, RoleChanged):
        raise
    except Left as left:
        print(f"unicron: this worker leaves: {left}", file=sys.stderr)
        _leave(0)
    except BaseException as error:
        session.report_exception(error)
        traceback.print_exc()
        _leave(1)
    session.finish()


def _leave(code: int) -> NoReturn:
    """End at once: an heir waits for this process to be gone, and interpreter teardown takes a tenth of a second."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Session:
    """See docs/TRAINING.md: layout, manage, iterations, train_step, expect, save_if_due."""

    def __init__(self, link: WorkerLink, rank: Rank, layout: Layout | None = None) -> None:
        self._link, self.rank = link, rank
        self.layout: Layout = layout or link.welcome.layout
        self._engine: Engine | None = None
        self._model: Any = None
        self._next: int | None = None
        self._holds = False  # the task gives up its slots after the iteration just committed
        self._move: Preparation | None = None  # of roles that are to go to other workers
        self._sandbox: Sandbox | None = None
        self._callbacks: list[Callable[..., None]] = []
        self._reported = False
        self._is_seen_off = False
        self._checkpoints: Any = None
        link.pulse.advance(int(Stage.STARTING), 0, -1)
        self._pool: ArenaPool | None = None
        self._birth: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if gpu.has_gpu():
            self._open_gpu(gpu.take_device(link, rank))
        make_stand_ins(rank, self.layout)

    @property
    def managed(self) -> bool:
        return True

    @property
    def speaks(self) -> bool:
        """Is this the one rank of the task that prints and logs: the lowest of the present plan? A rank is a role's for
        the task's life, so rank 0 is nobody's when its replica has left; and who waits for a role says nothing."""
        plan = self._engine.machine.plan if self._engine is not None else None  # the one that its loop is in
        if plan is None:
            if self.rehearses or self._is_waiting:
                return False
            plan = self._link.plan
        return self.rank == (min(plan.ranks) if plan is not None else 0)

    @property
    def rehearses(self) -> bool:
        """Is this run of the script only to warm its process up? Then nothing it would record is of any iteration."""
        is_asked = self._link.welcome.warm_up and not is_left_out("warm-up")
        return bool(is_asked and self._is_waiting and not _Process.is_warm and not gpu.has_gpu())

    def _open_gpu(self, device: int) -> None:
        """What the script builds until manage() is born in this GPU's arena; an understudy's has no memory."""
        self._link.refuses_layouts = gpu.NO_LAYOUTS
        self._pool = ArenaPool(device, own_memory=not self._is_waiting)
        self._birth = self._pool.born_here()
        self._birth.__enter__()

    @property
    def _is_waiting(self) -> bool:
        # Built again for the role it was given, a worker is no understudy any more, and must not say that it is.
        return bool(self._link.welcome.waiting and self._link.member() is None)

    # ------------------------------------------------------------------ build, wait, adopt

    def manage(self, model: Any, optimizer: Any, scheduler: Any = None) -> None:
        """Index the state, move it into an arena, take (or wait for) the role, agree with the others where to go on.

        Raises PerTokenLossRequired, or ValueError for what cannot be managed.
        """
        if self._engine is not None:
            raise NotManaged("manage() was called twice")
        model = Chunks(model)
        overlap = plan_own(model, optimizer, self.layout)
        eager = overlap.eager
        exact = exact_counts(model, self.layout)
        staging = gradients.staging_bytes(
            model, gradients.CHUNK_BYTES if eager is None else eager.segment_bytes, 8 if exact else 0,
            gradients.num_slots(self._pool), 0 if eager is None else eager.nbytes,
        )  # fmt: skip
        undo = self._undo_bytes(optimizer)
        self._birth.__exit__(None, None, None)
        memory = StateMemory(model, optimizer, staging, undo, self._pool, exact, self._buddy_bytes(model))
        device = None if self._pool is None else self._pool.device
        groups = Groups(self.rank, self.layout, self._link.monitor, self._link.pulse, device)
        if device is not None and self._is_waiting:
            groups.warm_up()
            if not is_left_out("warm-up"):
                gpu.warm_up(device, next(iter(model.parameters())).dtype)
                rehearse(model, optimizer, self.layout, device)
        if self.rehearses:
            self._sandbox = Sandbox(self.rank, self.layout, (model, optimizer, scheduler), memory)
            return
        groups.adopt_handles({"model": model.chunks, "optimizer": optimizer, "scheduler": scheduler})
        former, _Process.former = _Process.former, None
        order = former.order if former else None
        plan = order.plan if order else self._take_role()
        if order is None and self._link.change is not None and plan is self._link.change.plan:
            order = self._link.change  # a joiner is called before the epoch that it joins
        if order is not None:
            describe = functools.partial(atlas_of, model, optimizer, memory.place_of)
            plan = self._take_over(order, former, NewHome(self.rank, memory, describe))
        groups.open()
        engine = Engine(
            self._link, self.rank, self.layout, model, optimizer, scheduler, memory, groups, eager,
            gathers_late=overlap.gathers_late,
        )  # fmt: skip
        engine.on_reduced = self._callbacks
        self._engine, self._model = engine, model
        move = self._link.move
        if move is not None and plan is move.plan:
            plan, record = self._join_move(engine, move)
            self._make_checkpoints(engine, model.chunks, optimizer, scheduler)
            self._first = on.Joined(plan, record)
            return
        record = self._account_of(engine) if order else self._take_arena(engine, plan)
        self._make_checkpoints(engine, model.chunks, optimizer, scheduler)
        self._first = on.Joined(plan, record)

    def _undo_bytes(self, optimizer: Any) -> int:
        """0 where another replica has the same state. ValueError when the task was submitted for the other kind."""
        if is_sharded(optimizer) != self.layout.sharded:
            built, said = ("distributed", "plain") if not self.layout.sharded else ("plain", "distributed")
            raise ValueError(
                f"the script builds a {built} optimizer, but the task was submitted with a {said} one: "
                f"say --optimizer {built} to unicron run, or change use_distributed_optimizer"
            )
        if not self.layout.steps_undoably:
            return 0
        force_optimizer_state(optimizer)
        return undo_bytes(optimizer)

    def _buddy_bytes(self, model: Any) -> int:
        return buddy_bytes(model, self.layout) if self.layout.buddy else 0

    def _take_role(self) -> EpochPlan:
        link = self._link
        link.pulse.advance(int(Stage.WAITING), 0, -1)
        link.send(WorkerReady(link.worker, self.rank, self._is_waiting))
        with gpu.small_stacks(self._pool.device if self._pool is not None and self._is_waiting else None):
            role = link.wait_for_role()
        if role is None:
            link.pulse.advance(int(Stage.DONE), 0, -1)
            _leave(0)
        rank, plan = role  # type: ignore[misc]
        if (rank, plan.layout) != (self.rank, self.layout):
            self._build_again(rank, plan.layout)
        return plan

    def _build_again(self, rank: Rank, layout: Layout) -> NoReturn:
        """The script runs again from its top, for another role."""
        _Process.rank, _Process.layout = rank, layout
        log_role.say(rank)
        if dist.is_initialized():
            drop_stand_ins()
        raise RoleChanged(f"built for rank {self.rank} of {self.layout}, now rank {rank} of {layout}")

    # ------------------------------------------------------------------ another layout

    def _leave_layout(self, order: ChangeLayout) -> NoReturn:
        """At an iteration boundary: serve the present arena, from the role in the new layout, or from none."""
        engine = self._require_engine()
        former = Former(engine, order)
        link, plan = self._link, order.plan
        link.send(LayoutReady(link.worker, self.rank, plan.epoch, -1, digest=announced_name(plan)))
        self._tell_saved(self._checkpoints.finish(self._epoch()))
        engine.leave()
        self._engine = self._model = self._checkpoints = None
        seat = self._link.member(order.plan)
        if seat is not None:
            _Process.former = former
            self._build_again(seat.rank, order.plan.layout)
        plan = self._take_over(order, former, None)
        raise Left(f"epoch {plan.epoch}: {plan.reason}")

    def _take_over(self, order: ChangeLayout, former: Former | None, home: NewHome | None) -> EpochPlan:
        """Fetch the new layout's slices and serve the old one's, until it is decided. Called off, the script runs
        again for the role that was left."""
        plan = Change(self._link, order, former, home).carry_out()
        if plan.layout == order.plan.layout and (home is None or self._link.member(plan) is not None):
            if former is not None:
                former.close()
            return plan
        print(f"unicron: the change of layout is called off: {plan.reason}", file=sys.stderr)
        if former is None:
            self._build_again(self.rank, self.layout)
        _Process.back = former
        return self._build_again(former.rank, former.layout)

    def _account_of(self, engine: Engine) -> Record:
        """Of state that came from the former layout."""
        engine.stepper.load_extra(engine.ledger.header.extra())
        engine.account.state_source = "replica"
        return engine.ledger.read(self.rank, len(engine.gradients.segments))

    def _go_back(self, engine: Engine) -> Record | None:
        """To the arena that this process left for a layout that was called off."""
        former, _Process.back = _Process.back, None
        if former is None:
            return None
        fd = former.take_fd()
        former.close()
        refused = _core.ArenaHeader(fd).check(engine.memory.digest, engine.memory.content_bytes)
        if refused:
            print(f"unicron: the arena that was left cannot be used: {refused}", file=sys.stderr)
            os.close(fd)
            return None
        return self._adopt(engine, (fd, (), ()), len(engine.gradients.segments))

    def _take_arena(self, engine: Engine, plan: EpochPlan) -> Record:
        """Own arena of the role's last holder if there can be a usable one; else a fresh one.

        A replica that comes back (GROW) must not find what it held when it left, iterations ago.
        """
        memory, rank = engine.memory, self.rank
        num_segments = len(engine.gradients.segments)
        left = self._go_back(engine)
        if left is not None:
            return left
        if plan.kind in (PlanKind.REPLACE, PlanKind.RECONNECT, PlanKind.SHRINK):
            memory.let_go()  # the agent answers when the former owner is gone: until then nobody waits for this
            fd, grant, gpu_fds = self._link.request_arena(rank, memory.content_bytes, memory.digest, adopt=True)
            if grant.adopted:
                refused = _core.ArenaHeader(fd).check(memory.digest, memory.content_bytes)
                if not refused:
                    return self._adopt(engine, (fd, gpu_fds, grant.sizes), num_segments)
                print(f"unicron: the role's last arena cannot be used: {refused}", file=sys.stderr)
            for useless in (fd, *gpu_fds):
                if useless >= 0:
                    os.close(useless)
        take_fresh_arena(self._link, engine, rank)
        fresh = plan.kind is PlanKind.START
        engine.account.is_far_heir = plan.kind is PlanKind.REPLACE and rank in plan.heirs
        return Record(rank, 0, Stage.STARTING, has_state=fresh, num_segments=num_segments)

    def _adopt(self, engine: Engine, arena: tuple[int, tuple[int, ...], tuple[int, ...]], num_segments: int) -> Record:
        """arena: its descriptor, and descriptors and sizes of its GPU slabs."""
        engine.memory.adopt(*arena)
        for mapped in arena[1]:
            os.close(mapped)
        engine.ledger = type(engine.ledger)(engine.memory.fd)
        engine.gradients.finish_open_copy(engine.ledger)
        engine.finish_open_step()
        record = engine.ledger.read(self.rank, num_segments)
        if record.has_state:
            engine.stepper.load_extra(engine.ledger.header.extra())
            engine.account.state_source = "own_arena"
        return record

    # ------------------------------------------------------------------ the loop

    def iterations(self, count: int) -> Iterator[int]:
        """Iteration numbers from where the task stands up to count - 1."""
        if self._sandbox is not None:
            _Process.is_warm = True
            yield 0
            self._build_again(self.rank, self.layout)
        engine = self._require_engine()
        ready = engine.run(self._first)
        self._next = ready.iteration if isinstance(ready, do.Ready) else engine.machine.record.iteration
        engine.last_iteration = count - 1
        if isinstance(ready, do.Over):
            self._end_alone(engine, count)
            return
        while self._next < count:
            yield self._next
            if self._link.finished:
                break
            if self._holds:
                self._hold()
        self.see_off()

    def see_off(self) -> None:
        """After the loop: wait for the others, and mend with them whoever fails in the last iteration. What the script
        does next is its own matter. Once; nothing where there was no loop."""
        engine = self._engine
        if self._is_seen_off or engine is None or self._next is None or self._link.finished:
            return
        self._is_seen_off = True
        self._run(engine, on.LoopEnded())
        if engine.meeting.left_in is not None:
            self._end_alone(engine, self._next)
        elif engine.machine.record.iteration > 0:
            self._checkpoints.save_again_if_due(engine.machine.record.iteration - 1, self._epoch())
        engine.points.maybe(FaultPoint.REST)

    def _end_alone(self, engine: Engine, count: int) -> None:
        """All the others left their loops after `count` iterations. With the last one's state the rest of the script is
        run, and its part of the last checkpoint written in their attempt; without there is nothing to run it with."""
        self._is_seen_off = True
        record, left_in = engine.machine.record, engine.meeting.left_in
        assert left_in is not None
        if record.has_state and record.iteration >= count:
            self._checkpoints.save_missing(count - 1, left_in)
            return
        print(
            f"unicron: rank {self.rank}: the others' loops were over before this role was lost, and its state was lost "
            "with it: the rest of its script is left out", file=sys.stderr,
        )  # fmt: skip
        self._link.send(Finished(self._link.worker, self.rank))
        _leave(0)

    def _run(self, engine: Engine, event: on.AnyEvent) -> do.AnyAction:
        try:
            return engine.run(event)
        except Exception as error:
            self.report_exception(error)
            raise

    def train_step(self, iteration: int, forward_step: Any, dataset: Any) -> Metrics:
        """One optimizer step. forward_step: Megatron's; dataset: (iteration, micro_batch) -> batch, or map-style."""
        if self._sandbox is not None:
            pulse = self._link.pulse
            self._sandbox.run(forward_step, dataset, lambda: pulse.advance(int(Stage.STARTING), 0, -1))
            self._build_again(self.rank, self.layout)
        engine = self._require_engine()
        if iteration != self._next:
            raise ValueError(f"train_step({iteration}): session.iterations() is at {self._next}")
        if engine.forward_step is None:
            exceptions.warm_up()
        engine.forward_step = forward_step
        engine.dataset = data_module.addressed(dataset, self.layout.micro_batch, self.layout.num_micro_batches)
        end = self._run(engine, on.IterationBegun(iteration))
        if isinstance(end, do.Over):  # this very iteration is committed, and nobody is left who knows its state
            self._end_alone(engine, iteration + 1)
        assert isinstance(end, do.EndIteration)
        commit = end.commit
        # A commit of a recovery holds nobody: not everybody may have it from the same all-reduce.
        self._holds = commit.hold > 0 and not end.healed
        if end.healed:
            engine.account.healed(iteration)
            engine.groups.release_retired()
        self._next = iteration + 1
        self._look_at_move(engine)
        tokens = max(commit.tokens, 1.0)
        engine.points.maybe(FaultPoint.LOG)
        return Metrics(
            iteration, commit.loss_sum / tokens, engine.stepper.grad_norm, int(commit.tokens),
            bool(commit.found_inf), commit.repeat,
        )  # fmt: skip

    def on_reduced(self, callback: Callable[..., None]) -> None:
        """callback(iteration, flat gradient buffers), after the reduction and before scaling."""
        self._callbacks.append(callback)

    def wait_for_parameters(self) -> bool:
        """For a script that reads parameters between iterations: with overlap_param_gather they come under the next
        forward. False: they do not, because another rank failed; the next train_step heals."""
        return not self._require_engine().gathering.why_not_whole()

    @contextlib.contextmanager
    def expect(self, what: str, seconds: float) -> Iterator[Expected]:
        """The script is about to do something long: evaluation, export. Progress is judged by this bound meanwhile.

        A collective of the script's own that breaks there, because another rank failed, is no error of the script: the
        block is left, Expected.finished stays False, and the next train_step heals. (Without it every rank that shares
        a group with the failed one would end, too, and be taken for broken.) Raises ValueError unless seconds is above
        0.
        """
        if not seconds > 0:
            raise ValueError(f"expect({what!r}, seconds={seconds}): say how long it may take, above 0")
        pulse = self._link.pulse
        pulse.advance(int(Stage.EVALUATE), self._next or 0, -1, math.ceil(seconds * 1000))
        engine, expected = self._engine, Expected(what)
        try:
            if engine is not None:
                engine.points.maybe(FaultPoint.EVALUATE)
                # Nobody would answer, or training would.
                why = engine.why_alone((self._next or 0) - 1) or engine.gathering.why_not_whole()
                expected.left_out = engine.refusal = f"{what} is left out: {why}" if why else ""
            yield expected
            if engine is not None:
                engine.require_good(inside=False)  # on a GPU a collective that was ended returns like any other
            expected.finished = True
        except Exception as error:
            if engine is None or self._reported or not is_collective_error(error):
                raise
            engine.groups.settle_broken()
            print(f"unicron: {what} ends early in rank {self.rank}, somebody failed: {error}", file=sys.stderr)
        finally:
            if engine is not None:
                engine.refusal = ""
            pulse.advance(int(Stage.IDLE), self._next or 0, -1)

    # ------------------------------------------------------------------ checkpoints

    def _make_checkpoints(self, engine: Engine, model: Any, optimizer: Any, scheduler: Any) -> None:
        from unicron.training.saving import Saving

        welcome = self._link.welcome
        state = (model, optimizer, scheduler)
        self._checkpoints = Saving(
            welcome.checkpoint_dir, welcome.checkpoint_every, state, engine.stepper.own_state
        )  # fmt: skip
        engine.load_checkpoint = self._checkpoints.load
        engine.machine.whole_after = self._checkpoints.is_due

    def _epoch(self) -> int:
        """Of the plan that this iteration runs under."""
        plan = self._require_engine().machine.plan
        return plan.epoch if plan is not None else 0

    def save_if_due(self, iteration: int) -> bool:
        """Start a checkpoint if the task asks for one here; it is written while training goes on."""
        engine = self._require_engine()
        finished = self._checkpoints.poll()
        if finished is not None and self.speaks:
            self._link.send(Saved(self._link.worker, self.rank, finished[0], finished[1]))
        if not self._checkpoints.is_due(iteration) or engine.gathering.why_not_whole():
            return False
        epoch = self._epoch()
        self._link.pulse.advance(int(Stage.SAVE), iteration, -1)
        try:
            begun = bool(self._checkpoints.save_if_due(iteration, epoch))
            if begun:
                engine.points.maybe(FaultPoint.SAVE)
            return begun
        finally:
            self._link.pulse.advance(int(Stage.IDLE), iteration, -1)

    def _hold(self) -> None:
        """Why, then save and wait, hand a role over, or leave for another layout (boundary.py).

        Everybody holds after the same iteration, because the commit said so (healing/record.py). Raises HeldTooLong.
        """
        self._holds = False
        engine, link = self._require_engine(), self._link
        plan = engine.machine.plan
        assert plan is not None and self._next is not None
        order = order_to_hold(link, plan, self._next)
        if isinstance(order, MoveRoles):
            assert self._move is not None
            hand_over(link, self._move, engine, self._next)
            assert link.plan is not None
            if link.member() is None:
                self._tell_saved(self._checkpoints.finish(self._epoch()))
                raise Left(f"epoch {link.plan.epoch}: {link.plan.reason}")
        elif order is not None:
            self._leave_layout(order)
        elif link.monitor.newest_epoch() <= plan.epoch:
            save_and_hold(link, self._checkpoints, plan, self.rank, self._next)

    # ------------------------------------------------------------------ roles that move

    def _look_at_move(self, engine: Engine) -> None:
        """Between iterations: begin what was announced, drop what is over."""
        order, known = self._link.move, self._move
        if known is not None and is_given_up(known.order, order, self._link.plan, engine.machine.plan):
            known.close()
            engine.groups.drop_prepared()
            self._move = known = None
        if order is not None and known is None:
            self._move = Preparation(self._link, order, self.rank, engine.groups)
            self._move.start()

    def _join_move(self, engine: Engine, order: MoveRoles) -> tuple[EpochPlan, Record]:
        """A joiner's way in. Called off, the script runs again and waits."""
        taken, plan = take_over_role(self._link, engine, self.rank, order), self._link.plan
        if plan is None or plan.epoch <= order.former.epoch:  # the task is done
            _leave(0)
        is_mine = self._link.member(plan) is not None and (plan == order.plan or self.rank not in plan.heirs)
        if taken is None or not is_mine:
            print(f"unicron: the move is called off: {plan.reason}", file=sys.stderr)
            engine.leave()
            self._engine = self._model = None
            self._build_again(self.rank, self.layout)
        engine.account.state_source = "node_arena"
        record = engine.ledger.read(self.rank, len(engine.gradients.segments))
        return plan, msgspec.structs.replace(record, commit=taken.commit)

    # ------------------------------------------------------------------ ends

    def report_exception(self, error: BaseException) -> None:
        """Tell the agent before the process unwinds. Once."""
        if not self._reported:
            self._reported = True
            if self._pool is not None:
                self._pool.explain(error)
            self._tell(error, "")

    def _tell(self, error: BaseException, thread: str) -> None:
        """thread: where it was raised, when that is not the loop's."""
        raised_ns = _core.monotonic_ns()
        told, pulse, link = describe(error), self._link.pulse, self._link
        epoch = link.plan.epoch if link.plan else 0
        with contextlib.suppress(_core.UnicronError):
            link.send(
                ExceptionRaised(
                    link.worker, self.rank, epoch, pulse.iteration, pulse.micro_batch, Stage(pulse.stage),
                    told.type, told.text, told.where, raised_ns, thread,
                )
            )  # fmt: skip

    @contextlib.contextmanager
    def watched_threads(self) -> Iterator[None]:
        """An exception that ends another thread is told, too, and shown as ever: the loop may soon wait for it."""
        before = threading.excepthook

        def hook(arguments: Any) -> None:
            if arguments.exc_value is not None and arguments.exc_type is not SystemExit:
                self._tell(arguments.exc_value, arguments.thread.name if arguments.thread else "a thread")
            before(arguments)

        threading.excepthook = hook
        try:
            yield
        finally:
            threading.excepthook = before

    def finish(self) -> None:
        if self._engine is None:
            return
        if self._checkpoints is not None:
            # Of a plan that came behind the loop nobody heard here; it took parts all the same.
            self._tell_saved(self._checkpoints.finish(max(self._epoch(), self._link.monitor.newest_epoch())))
        self._watch_tail()
        self._link.send(Finished(self._link.worker, self.rank, tail=True))
        if self._move is not None:
            self._move.close()
        self._engine.close()
        sys.stdout.flush()

    def _watch_tail(self) -> None:
        """What the script does behind its `with` block is its own work, until the interpreter ends; an exception of
        it is told like any other. (Not what a child of it does that it forked.)"""
        pulse, before, owner = self._link.pulse, sys.excepthook, os.getpid()
        pulse.advance(int(Stage.EVALUATE), self._next or 0, -1)

        def ends() -> None:
            if os.getpid() == owner:
                pulse.advance(int(Stage.DONE), self._next or 0, -1)

        def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            if os.getpid() == owner:
                self._tell(error, "")
            before(kind, error, trace)

        atexit.register(ends)
        sys.excepthook = hook

    def _tell_saved(self, finished: tuple[int, str] | None) -> None:
        if finished is not None:
            self._link.send(Saved(self._link.worker, self.rank, finished[0], finished[1]))

    def _require_engine(self) -> Engine:
        if self._engine is None:
            raise NotManaged("call session.manage(model, optimizer, scheduler) first")
        return self._engine
