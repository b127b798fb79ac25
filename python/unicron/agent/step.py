"""One step of the agent's machine: the state, the time, the actions so far."""

from __future__ import annotations

from collections.abc import Callable

from unicron.agent.actions import Action, CancelTimer, Refused, SendCoordinator, SetTimer
from unicron.agent.config import AgentConfig
from unicron.agent.state import Report, State, Worker
from unicron.agent.transitions import POLICY
from unicron.messages import WorkerContinued, WorkerStalled, WorkerStopped, WorkerUp


def _takes_back(again: WorkerContinued, report: Report) -> bool:
    return isinstance(report, WorkerStalled | WorkerStopped) and report.worker == again.worker


class Step:
    def __init__(self, state: State, config: AgentConfig, now_ms: float) -> None:
        self.state = state
        self.config = config
        self.now_ms = now_ms
        self.actions: list[Action] = []

    def report(self, message: Report, reason: str) -> None:
        """Sent now if it can be, and kept: a coordinator that comes back is told again (it knows duplicates)."""
        if isinstance(message, WorkerContinued):  # what it takes back must not be told again, out of its time
            self._forget(lambda report: _takes_back(message, report))
        self.state.reports.append(message)
        while len(self.state.reports) > self.config.reports_kept_max:
            self.state.reports.popleft()
        if self.state.is_connected:
            self.actions.append(SendCoordinator(message, reason))

    def forget_stall(self, worker: str) -> None:
        """Its clock begins anew, so what was said of it is over, whether it advances or not."""
        self._forget(lambda report: isinstance(report, WorkerStalled) and report.worker == worker)

    def _forget(self, is_over: Callable[[Report], bool]) -> None:
        kept = [report for report in self.state.reports if not is_over(report)]
        self.state.reports.clear()
        self.state.reports.extend(kept)

    def report_up(self, worker: Worker, reason: str) -> None:
        """Not kept: the hello's inventory says the same."""
        if self.state.is_connected:
            up = WorkerUp(self.config.node, worker.status())
            self.actions.append(SendCoordinator(up, reason))

    def set_timer(self, kind: str, subject: str, delay_ms: float, reason: str) -> None:
        name = f"{kind}/{subject}"
        at_ms = self.now_ms + delay_ms
        self.state.timers[name] = at_ms
        self.actions.append(SetTimer(name, at_ms, reason))

    def cancel_timer(self, kind: str, subject: str, reason: str) -> None:
        name = f"{kind}/{subject}"
        if self.state.timers.pop(name, None) is not None:
            self.actions.append(CancelTimer(name, reason))

    def refuse(self, name: str, reason: str) -> None:
        self.actions.append(Refused(name, reason))

    def find(self, name: str, fact: str) -> Worker | None:
        """The worker, if a fact of this kind counts in its phase; refuses by name otherwise."""
        worker = self.state.workers.get(name)
        if worker is None:
            self.refuse("unknown_worker", f"{fact}: {name} is not on {self.config.node}")
            return None
        refusal = POLICY[worker.phase][fact]
        if refusal:
            self.refuse(refusal, f"{fact}: {name} is {worker.phase.value}")
            return None
        return worker
