"""From a fork of the template to a script that runs as ``__main__``, as if python had been started
with it.

Also used without a template: ``python -m unicron.runtime.child SCRIPT ARGS`` runs a script the same
way. An understudy that learned another role than the one it had guessed raises
``unicron.training.RoleChanged`` through the script: the script is then run again from its top, in
the same process, with everything imported already.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import runpy
import signal
import sys
import types
from collections.abc import Sequence
from pathlib import Path

from unicron import _core
from unicron.messages import Fork

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
TITLE = "unicron worker"  # of a worker and of what it forks, in ps (processes.TITLE_MARK)
RERUNS_MAX = 64  # a role that changes more often than this is a loop
PYTHON_FLAGS = ("-u", "-B", "-E", "-O", "-I", "-s")  # what a command may say before its script

_libc = ctypes.CDLL(None, use_errno=True)


class CommandProblem(ValueError):
    """A command that cannot be run; the text says why."""


class Command:
    """What to run: a script, a module (-m), or any other program."""

    def __init__(self, argv: Sequence[str]) -> None:
        words = list(argv)
        if words and Path(words[0]).name.startswith("python"):
            words.pop(0)
            while words and words[0] in PYTHON_FLAGS:
                words.pop(0)
            if words and words[0].startswith("-") and words[0] != "-m":
                text = f"python {words[0]} is not supported: give a script or -m module"
                raise CommandProblem(text)
            self.program = False
        else:
            self.program = bool(words) and words[0] != "-m" and not words[0].endswith(".py")
        if not words or words == ["-m"]:
            raise CommandProblem("the command names no script")
        self.module = words[1] if words[0] == "-m" else ""
        self.words = words[1:] if self.module else words

    @property
    def title(self) -> str:
        return " ".join(self.words)


def become_worker(request: Fork, template_pid: int) -> None:
    """Turn a fresh fork into a process of its own: session, signals, environment, logs, title."""
    die_with_parent(template_pid)
    os.setsid()
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    # As Python itself starts: a write to a shut gloo socket must be an error, not the end of a survivor.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.environ.clear()
    os.environ.update(request.env)
    _redirect(request.stdout, request.stderr)
    os.chdir(request.cwd or "/")
    faulthandler.enable()
    _core.announce_fatal_signals()  # before faulthandler writes its stacks
    set_title(f"{TITLE} {request.worker}: {' '.join(request.argv)}")


def die_with_parent(parent_pid: int) -> None:
    """The kernel kills this process when its parent (thread) ends."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)  # it ended before the line above


def adopt_orphans() -> None:
    """What descendants of this process leave behind becomes its child, and not init's."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _redirect(stdout: str, stderr: str) -> None:
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for target, path in ((1, stdout), (2, stderr)):
        if not path:
            continue
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.dup2(log, target)
        os.close(log)
    for stream in (sys.stdout, sys.stderr):  # a log that is read while it grows is read by lines
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)


def set_title(title: str) -> None:
    """What ps shows: the arguments' own memory is written over. Best effort."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        _libc.prctl(PR_SET_NAME, b"unicron-worker", 0, 0, 0)
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end
        room = end - start
        if 0 < room < 1 << 20:
            text = title.encode()[: room - 1]
            ctypes.memmove(start, text + b"\0" * (room - len(text)), room)


def run(argv: Sequence[str]) -> None:
    """Run the command as ``__main__``. Raises what the script raises."""
    if os.environ.pop("UNICRON_EXEC", ""):  # a script that shall find nothing imported
        _exec(argv)
    command = Command(argv)
    if command.program:
        _exec(command.words)
    directory = os.getcwd()
    for _ in range(RERUNS_MAX):
        os.chdir(directory)
        try:
            _run_once(command)
            return
        except BaseException as error:
            if not _is_role_change(error):
                raise
        gc.collect()  # what the first run built for another role
    raise RuntimeError(f"the role of this understudy changed {RERUNS_MAX} times")


def _exec(argv: Sequence[str]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvp(argv[0], list(argv))
    except OSError as error:
        raise CommandProblem(f"{argv[0]}: {error.strerror}") from None


def _is_role_change(error: BaseException) -> bool:
    training = sys.modules.get("unicron.training")
    kind = getattr(training, "RoleChanged", None)
    return isinstance(kind, type) and isinstance(error, kind)


def _run_once(command: Command) -> None:
    if command.module:
        sys.argv = list(command.words)
        sys.path[0] = os.getcwd()
        runpy.run_module(command.module, run_name="__main__", alter_sys=True)
        return
    path = os.path.abspath(command.words[0])
    sys.argv = list(command.words)
    sys.path[0] = os.path.dirname(path)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    # Not runpy.run_path: it takes its module away again when the script ends, before threads and
    # exit handlers of the script. multiprocessing's spawn finds __main__ again by __file__ (and
    # __spec__ None).
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def run_and_report(argv: Sequence[str]) -> None:
    """``run``, with an uncaught exception shown as python shows it: without the frames of this
    package.
    """
    try:
        run(argv)
    except (SystemExit, KeyboardInterrupt):
        raise
    except (FileNotFoundError, CommandProblem) as error:
        if error.__traceback__ is not None and _innermost_file(error) == __file__:
            sys.stderr.write(f"unicron: cannot run {' '.join(argv)}: {error}\n")
            sys.exit(2)
        _show(error)
    except BaseException as error:
        _show(error)


def _innermost_file(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else trace.tb_frame.f_code.co_filename


def _show(error: BaseException) -> None:
    own = {__file__, runpy.__file__, "<frozen runpy>"}
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    sys.stdout.flush()
    sys.exit(1)


if __name__ == "__main__":
    run_and_report(sys.argv[1:])
