"""A simulated worker: the real healing machine, carried out with blocking collectives instead of torch.

The counterpart of training/engine.py and session.py, action by action. Its native monitor is a part of its own: it
hears the agent's frames and shuts sockets even while the loop is blocked, and stands still only when the process is
stopped. worker_process.py is its process and its waits, worker_training.py an iteration, worker_healing.py a failure.
"""

from __future__ import annotations

from unicron.healing import actions as do
from unicron.healing import events as on
from unicron.healing.machine import Phase
from unicron.healing.record import Record
from unicron.messages import ArenaRequest, SaveAndHold, StateLost, WorkerReady, WorkerWelcome
from unicron.sim.memory import NUM_SEGMENTS, Memory
from unicron.sim.plants import record_of
from unicron.sim.worker_reshaping import WorkerReshaping
from unicron.types import EpochPlan, PlanKind, Stage

OVER_MS_MAX = 120_000.0  # as in training/engine.py


class SimWorker(WorkerReshaping):
    # ------------------------------------------------------------ monitor

    def on_frame(self, plan: EpochPlan) -> None:
        """The native thread: announce the epoch, then shut what must be rebuilt."""
        if self.newest is not None and plan.epoch <= self.newest.epoch:
            return
        self.newest = plan
        if self.move is not None and plan.epoch > self.move.former.epoch:
            self.move = None
        if self.change is not None and plan.epoch > self.change.former.epoch:
            self.change = None
        self.is_told_to_hold = False  # who still must is told again in the new epoch
        self.unread.append(plan)
        touched = set(plan.touched)
        keep_healthy = self.world.options.plant == "keep-healthy-cross-group"
        for group, is_cross in self.groups:
            if touched & set(group.members) or (is_cross and not keep_healthy):
                group.shut(self.rank)
        if self.is_waiting_role:
            self._loop(0.0, self._maybe_take_role)
        elif self.goes_over is not None:
            self._loop(0.0, self.decided)
        elif self.in_store:
            token = self.token
            self._loop(0.5, lambda: self.broke(token, "a newer epoch"))
        elif self.holds is not None:
            self._loop(0.0, self._go_on)
        elif isinstance(self.action, (do.AwaitPlan, do.ReportStateLost)):
            self._loop(0.0, self._plan_came)

    def on_hold(self, message: SaveAndHold) -> None:
        self.is_told_to_hold = True

    def on_finish(self) -> None:
        if self.is_waiting_role:
            self._later(1.0, lambda: self.die("exited", 0))

    # ------------------------------------------------------------ build, wait, adopt

    def on_welcome(self, welcome: WorkerWelcome) -> None:
        self.rank, self.layout = welcome.rank, welcome.layout

        def built() -> None:
            self._advance(Stage.WAITING)
            self.say(WorkerReady(self.name, self.rank, welcome.waiting))
            self.is_waiting_role = True
            if self.move is not None:
                self.prepare()
            self.maybe_join_layout()
            self._maybe_take_role()

        self._loop(self.rng.uniform(20.0, 60.0), built)

    def _maybe_take_role(self) -> None:
        plan = self.newest
        member = None if plan is None else next((m for m in plan.members if m.worker == self.name), None)
        if not self.is_waiting_role or member is None or plan is None:
            return
        if self.enter_layout(plan):
            return
        if (member.rank, plan.layout) != (self.rank, self.layout):  # built for another role: built again
            self.rank, self.layout = member.rank, plan.layout
            self._loop(self.rng.uniform(20.0, 60.0), self._maybe_take_role)
            return
        self.is_waiting_role = False
        self._advance(Stage.HEAL)
        if self.has_moved_in(plan):
            self.machine = self.new_machine()
            self.run(on.Joined(plan, self.memory.read(self.rank)))
            return
        adopt = plan.kind is PlanKind.REPLACE
        request = ArenaRequest(self.task, self.name, self.rank, 1, "digest", adopt)
        self._asked_for = plan
        self.host.ask_arena(self, request)

    def on_arena(self, memory: Memory, adopted: bool, request: ArenaRequest) -> None:
        if request.epoch:  # who asked in training/reshard waits there, and looks then whether that is called off
            self.arena_staged(memory, request)
            return
        self.memory = memory
        if self.is_joining:
            self.is_joining = False
            self.arena_came()
            return
        plan = self._asked_for
        if adopted:
            self._finish_open_step()
            record = record_of(self.world.options.plant, memory.read(self.rank))
        else:
            fresh = plan.kind is PlanKind.START
            record = Record(self.rank, 0, Stage.STARTING, has_state=fresh, num_segments=NUM_SEGMENTS)
        self.machine = self.new_machine()
        self.run(on.Joined(plan, record))

    def _finish_open_step(self) -> None:
        """A sharded step has an undo area: the heir of a process that died in it goes on where it stood."""
        memory = self.memory
        commit = memory.commit
        if self.layout.sharded and memory.is_torn and commit is not None and commit.iteration == memory.iteration:
            self.world.count("undone")
            memory.end_step(memory.iteration + 1, gathered=False)

    # ------------------------------------------------------------ the loop

    def run(self, event: on.AnyEvent) -> None:
        machine = self.machine
        assert machine is not None
        self.token, self.then, self.in_store = None, None, False
        try:
            for plan in self.unread:
                self._note_interruption(plan)
                machine.step(on.PlanArrived(plan))
            self.unread = []
            self.world.cover(("healing", machine.phase, type(event)))
            (self.action,) = machine.step(event)
        except Exception as error:
            self.world.violate(f"{self.name} (rank {self.rank}): healing machine: {error!r}")
            return
        self.memory.write(machine.record)
        if type(self.action).__name__ == self.kill_on:
            self.kill_on = ""
            self.faults.append("kill")
            self._later(self.rng.uniform(0.0, 3.0), lambda: self.die("signaled", 9))
        self._act(self.action)

    def _note_interruption(self, plan: EpochPlan) -> None:
        if plan.kind is not PlanKind.START and self.interrupted < 0:
            self.interrupted = self.memory.iteration

    def _act(self, action: do.AnyAction) -> None:
        match action:
            case do.Compute():
                self._compute(action)
            case do.Tie():
                self._advance(Stage.TIE)
                self._within(self.inside, ("tie", self.memory.iteration, self.memory.repeat), None, self._done)
            case do.Reduce():
                self._reduce(action, 0)
            case do.Commit():
                self._commit()
            case do.Confirm():
                self._advance(Stage.COMMIT, waiting=True)
                if action.report:
                    self._report(action.report, inside=False)
                tag = ("confirm", self.memory.iteration, self.memory.repeat)
                self._within(self.inside, tag, action.result, self._confirmed)
            case do.Step():
                self._step(action.commit)
            case do.Repeat():
                self._loop(self.rng.uniform(0.0, 0.5), self._done)
            case do.Gather(late=late):
                self.world.checkers.of(self.task).gathers(self, late)
                (self._begin_gather if late else self._gather_shards)()
            case do.FinishGather():
                self._advance(Stage.GATHER, waiting=True)
                self._await_gather(self._done)
            case do.Settle(ok=ok):
                self._advance(Stage.GATHER, waiting=True)
                if action.report:
                    self._report(action.report, inside=False)
                assert self.machine is not None
                # At a meeting a member whose state did not come says so from an older iteration.
                usual = self.machine.phase is Phase.SETTLE
                place = ("settle", self.memory.iteration if usual else "at the meeting")
                self._within(self.inside, place, ok, lambda results: self.run(on.Settled(all(results.values()))))
            case do.ExchangeInside() | do.RebuildInside():
                replica = self.layout.replica_of(self.rank)
                self._gather(action, self.layout.replica_ranks(replica), ("inside", replica))
            case do.ExchangeWorld() | do.RebuildCross():
                self._gather(action, action.plan.ranks, ("world", 0))
            case do.FetchState():
                self._fetch(action)
            case do.GoBack(iteration=iteration, branch=branch):
                self._advance(Stage.HEAL)
                self.go_back(iteration, branch, self._done)
            case do.LoadCheckpoint():
                self._advance(Stage.SAVE)
                self._loop(self.rng.uniform(20.0, 60.0), lambda: self._loaded(action.path))
            case _:
                self._act_alone(action)

    def _act_alone(self, action: do.AnyAction) -> None:
        match action:
            case do.AwaitPlan():
                self._advance(Stage.HEAL, waiting=True)
                if action.report:
                    self._report(action.report, inside=action.inside, late=action.late)
                self._loop(0.1, self._plan_came)
            case do.ReportStateLost():
                self._advance(Stage.HEAL, waiting=True)
                assert self.machine is not None
                epoch = self.machine._newest()
                self.say(StateLost(self.name, self.rank, epoch, action.iteration, action.positions))
            case do.AwaitOthers():
                if action.healed:
                    self._say_healed(self.memory.iteration - 1)
                self._gather(action, action.plan.ranks, ("over", 0))
                self._later(OVER_MS_MAX, lambda: self._waited(action))
            case do.Over(healed=healed):
                if healed:
                    self._say_healed(self.memory.iteration - 1)
                self._rest_of_script()
            case do.Ready():
                self._advance(Stage.IDLE)
                self._begin(action.iteration)
            case do.EndIteration():
                self._advance(Stage.IDLE)
                self._ended(action)
            case do.Leave():
                self._later(1.0, lambda: self.die("exited", 0))
            case _:
                raise AssertionError(f"no way to act {type(action).__name__}")
