"""Timers: names are `kind/subject`. One that fires after it was moved or cancelled is refused by name."""

from __future__ import annotations

from unicron.coordinator import (
    fitness,
    growth,
    leaving,
    moves,
    nodes,
    recovery,
    reshaping,
    starting,
    steering,
    symptoms,
)
from unicron.coordinator.accounts import close_healing
from unicron.coordinator.classifying import on_classify
from unicron.coordinator.diagnosis import OWN_WORK
from unicron.coordinator.lifecycle import finish_task
from unicron.coordinator.state import TaskState, WorkerState
from unicron.coordinator.step import Step
from unicron.coordinator.transitions import TERMINAL, NodePhase, TaskPhase, WorkerPhase
from unicron.coordinator.workers import end_worker, forget_worker
from unicron.messages import EndWorker

NODE_KINDS = ("verdict", "silence")
WORKER_KINDS = ("end", "stop", "exception", "stall")
EARLY_MS = 0.5  # hosts round timers


def on_timer(step: Step, name: str) -> None:
    at_ms = step.state.timers.get(name)
    if at_ms is None or step.now_ms < at_ms - EARLY_MS:
        step.refuse("stale_timer", f"{name} was cancelled or moved")
        return
    del step.state.timers[name]
    kind, _, subject = name.partition("/")
    if kind == "tables":
        steering.on_tables(step)
    elif kind == "classify":
        on_classify(step, subject)
    elif kind in NODE_KINDS:
        _on_node_timer(step, kind, subject)
    elif kind in fitness.KINDS:
        fitness.on_timer(step, kind, step.state.nodes[subject])
    elif kind in WORKER_KINDS:
        task = step.state.task_of_worker(subject)
        assert task is not None, f"timer {name} of no worker"
        _on_worker_timer(step, kind, task, task.workers[subject])
    else:
        _on_task_timer(step, kind, step.state.tasks[subject])


def _on_node_timer(step: Step, kind: str, name: str) -> None:
    node = step.state.nodes[name]
    if kind == "verdict":
        nodes.on_verdict(step, node)
    elif node.phase is NodePhase.UP:
        nodes.suspect_node(step, node, "silent", "its heartbeats stay away")


def _on_worker_timer(step: Step, kind: str, task: TaskState, worker: WorkerState) -> None:
    match kind:
        case "end":
            _repeat_end(step, task, worker)
        case "stop":
            symptoms.end_stopped(step, task, worker)
        case "exception":
            assert worker.exception is not None
            reason = f"raised {worker.exception.type} and did not leave by itself"
            end_worker(step, task, worker, reason)
        case "stall":
            symptoms.on_stall_timer(step, task, worker)
        case _:
            raise AssertionError(f"unknown timer {kind}")


def _repeat_end(step: Step, task: TaskState, worker: WorkerState) -> None:
    """A kill cannot fail while its agent works; after some tries go on without (epochs fence the old one)."""
    worker.end_tries += 1
    if worker.end_tries > step.config.end_tries_max:
        forget_worker(step, task, worker, "ended, and never reported lost")
        return
    step.send(worker.node, EndWorker(task.name, worker.name, worker.end_reason), "not dead yet")
    step.set_timer("end", worker.name, step.config.end_ms, "an ended worker must be reported lost")


def _on_task_timer(step: Step, kind: str, task: TaskState) -> None:
    match kind:
        case "diagnose":
            symptoms.on_diagnose(step, task)
        case "ready":
            recovery.on_ready_timeout(step, task)
        case "join":
            starting.on_join_timeout(step, task)
        case "joiner":
            growth.on_joiner_timeout(step, task)
        case "understudy":
            starting.replenish(step, task)
        case "heal":
            if recovery.on_heal_timeout(step, task):
                close_healing(step, task, "not every member gave its account in time")
                step.touch(task)
        case "layout":
            reshaping.on_layout_timeout(step, task)
        case "move":
            moves.on_move_timeout(step, task)
        case "leave":
            leaving.on_leave_timeout(step, task)
        case "finish":
            _on_finish(step, task)
        case _:
            raise AssertionError(f"unknown timer {kind}")


def _on_finish(step: Step, task: TaskState) -> None:
    if not task.is_over:
        members = map(task.holder, task.plan.ranks) if task.plan is not None else ()
        at_work = [worker.rank for worker in members if worker is not None and worker.stage in OWN_WORK]
        if at_work:  # whether too long already is another question: see stall_root
            why = f"the scripts of ranks {at_work} are still at work behind their loops"
            step.set_timer("finish", task.name, step.config.finish_ms_max, why)
            return
        finish_task(step, task, recovery.end_of(task))
        return
    assert task.phase not in TERMINAL
    left = list(task.workers.values())
    for worker in left:
        if worker.phase is WorkerPhase.ENDING:
            forget_worker(step, task, worker, "ended, and never reported lost")
        else:
            end_worker(step, task, worker, "it did not leave by itself after the end of its task")
    if task.workers:
        step.set_timer("finish", task.name, step.config.finish_ms_max, "until the last is gone")
    step.touch(task)


def timers_after_replay(step: Step) -> None:
    """Timers are not journaled: what is waited for gets a fresh bound."""
    config = step.config
    for node in step.state.nodes.values():
        node.since_ms = step.now_ms
        if node.phase is NodePhase.AWAITED:
            nodes.ask(step, node, "it must say hello to the new coordinator")
        fitness.timers_after_replay(step, node)
    bounds = {
        TaskPhase.STARTING: ("join", config.join_ms_max),
        TaskPhase.HEALING: ("heal", config.heal_ms_max),
        TaskPhase.FINISHING: ("finish", config.finish_ms_max),
        TaskPhase.STOPPING: ("finish", config.finish_ms_max),
        TaskPhase.RUNNING: ("understudy", config.understudy_delay_ms + config.return_ms_max),
    }
    for task in step.state.tasks.values():
        if task.phase in bounds:
            kind, delay_ms = bounds[task.phase]
            step.set_timer(kind, task.name, delay_ms, "a new coordinator waits afresh")
        if task.leaving:
            step.set_timer("leave", task.name, config.leave_ms_max, "a new coordinator waits afresh")
        task.heal_iteration = task.iteration
        step.touch(task)
    steering.renew_tables(step, "a coordinator began")
