"""The command line: a register of verbs, each in a module of its own, imported when it is called.

A module has a function ``main`` whose annotations are typer's; adding a verb is adding a line to
VERBS. Exit codes: 0 success, 2 wrong use, another on failure, with one line on stderr that says
what to do.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import os
import sys

# verb -> (module, what it does)
VERBS: dict[str, tuple[str, str]] = {
    "run": ("unicron.cli.run", "one task on this machine, in the place of torchrun"),
    "demo": ("unicron.cli.demo", "train a real GPT, break it, compare with an undisturbed run"),
    "coordinator": ("unicron.cli.coordinator", "a cluster's decider"),
    "agent": ("unicron.cli.agent", "a node's supervisor"),
    "submit": ("unicron.cli.submit", "give a job to the cluster"),
    "ps": ("unicron.cli.ps", "tasks and how they are"),
    "describe": ("unicron.cli.describe", "one task: its workers, roles, plan"),
    "suspend": ("unicron.cli.suspend", "a task saves, leaves its slots, and keeps its place"),
    "resume": ("unicron.cli.resume", "a suspended task wants slots again"),
    "reshape": ("unicron.cli.reshape", "a running task goes over to another layout, in memory"),
    "cancel": ("unicron.cli.cancel", "stop a task"),
    "logs": ("unicron.cli.logs", "what the workers of a task wrote"),
    "nodes": ("unicron.cli.nodes", "machines and how they are"),
    "drain": ("unicron.cli.drain", "empty a node: its tasks move, nothing new comes"),
    "undrain": ("unicron.cli.undrain", "use a drained node again"),
    "top": ("unicron.cli.top", "live view of tasks, nodes and what the cluster earns"),
    "incidents": ("unicron.cli.incidents", "what failed, why, what was decided, what it cost"),
    "inject": ("unicron.cli.inject", "a fault, exactly there"),
    "plan": ("unicron.cli.plan", "what the planner would do and why, with a cluster or without"),
    "simulate": ("unicron.cli.simulate", "a cluster's history under several policies; the papers' tables"),
    "classify": ("unicron.cli.classify", "severity, scope and root of logs and flight recorder dumps"),
    "bench": ("unicron.cli.bench", "measurements; without a name they are listed"),
    "doctor": ("unicron.cli.doctor", "is this machine fit, and how fast would a death be seen here"),
    "keys": ("unicron.cli.keys", "make a cluster's CURVE key pairs"),
}

USAGE = 2


def usage() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {text}" for verb, (_, text) in VERBS.items()]
    return "\n".join(
        [
            "usage: unicron COMMAND [OPTIONS]",
            "",
            "Keeps LLM training jobs earning: sees failures, finishes the interrupted iteration.",
            "",
            *lines,
            "",
            "unicron COMMAND --help shows options and an example.",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a locale without é, a name that is no text: shown, not died of
            stream.reconfigure(errors="backslashreplace")
    code = 0
    try:
        code = _main(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        if not code and not isinstance(error, BrokenPipeError):  # who stopped reading (`| head`) knows that himself
            sys.stderr.write(f"unicron: cannot write to stdout: {error.strerror or error}\n")
        with contextlib.suppress(OSError, ValueError):  # the buffer would fail once more when the interpreter ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code or 1
    return code


def _main(arguments: list[str] | None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else USAGE
    if words[0] in ("-V", "--version"):
        from importlib.metadata import version

        print(f"unicron {version('unicron')}")
        return 0
    if words[0] not in VERBS:
        close = difflib.get_close_matches(words[0], VERBS, n=1)
        hint = f"did you mean {close[0]}?" if close else "unicron --help lists the commands"
        sys.stderr.write(f"unicron: no command {words[0]!r}: {hint}\n")
        return USAGE
    try:
        module = importlib.import_module(VERBS[words[0]][0])
    except ModuleNotFoundError as error:
        if error.name != VERBS[words[0]][0]:
            raise
        sys.stderr.write(f"unicron: {words[0]} is not part of this installation\n")
        return 1
    from unicron.cli.common import call

    return call(words[0], module.main, words[1:])
