"""Last words: exceptions of other processes and threads, C++ exceptions, fatal signals, torch's error file; bounded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from machines import Coordinator, pulse, running
from unicron import _core
from unicron.agent.events import MutexReleased
from unicron.coordinator.unready import message_of
from unicron.messages import TEXT_CHARS_MAX, ExceptionRaised, cut, decode
from unicron.runtime.agent_process import AgentProcess
from unicron.runtime.last_words import last_words
from unicron.training.exceptions import describe
from unicron.training.session import Session
from unicron.types import Cpu, Layout, Severity, Stage

# ---------------------------------------------------------------- bounded


def test_a_long_text_keeps_head_and_tail() -> None:
    assert cut("short") == "short"
    text = "HEAD" + "x" * 10 * TEXT_CHARS_MAX + "TAIL"
    kept = cut(text)
    assert len(kept) <= TEXT_CHARS_MAX
    assert kept.startswith("HEAD") and kept.endswith("TAIL") and "characters and more left out" in kept


# ---------------------------------------------------------------- exceptions


def _raised(call: Any) -> BaseException:
    with pytest.raises(BaseException) as caught:
        call()
    return caught.value


def test_an_exception_of_this_process() -> None:
    told = describe(_raised(lambda: [].pop()))
    assert told.type == "IndexError" and "pop from empty list" in told.text
    assert told.where.startswith(f"{__file__}:")


@pytest.mark.parametrize("steps_left_out", ["seed", "groups"])
def test_what_helps_is_said_with_megatrons_message(steps_left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own, from where it is raised; once, however often it is told."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    monkeypatch.setattr(parallel_state, "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO", None)

    def build() -> None:
        if steps_left_out == "seed":
            with CudaRNGStatesTracker().fork():
                pass
        else:
            parallel_state.get_data_parallel_group_gloo(with_context_parallel=True, partial_data_parallel=True)

    error = _raised(build)
    describe(error)
    told = message_of(describe(error).text)
    helps = {"seed": "model_parallel_cuda_manual_seed(SEED)", "groups": "use_gloo_process_groups=False"}
    assert told.count(helps[steps_left_out]) == 1 and type(error).__name__ in told


class Broken:
    """A data set whose third sample cannot be read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise KeyError("sample 3 is not on this disk")
        return index


@pytest.mark.timeout(120)
def test_a_data_loaders_worker_is_told_as_what_it_was_there() -> None:
    """Real torch, a real worker process: the type and the place are those of the data set."""
    from torch.utils.data import DataLoader

    told = describe(_raised(lambda: list(DataLoader(Broken(), num_workers=1, batch_size=2))))  # type: ignore[arg-type]
    assert told.type == "KeyError"
    file, _, line = told.where.rpartition(":")
    assert file == __file__ and "raise KeyError" in Path(__file__).read_text().splitlines()[int(line) - 1]
    assert "sample 3 is not on this disk" in told.text


def test_another_thread_is_told_of_and_shown_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    page = _core.PulsePage(_core.create_pulse_pages(1), 0)
    link = SimpleNamespace(pulse=page, plan=None, worker="w", send=lambda message: sent.append(message))
    session = Session.__new__(Session)
    session._link, session.rank, session._reported, session._pool = link, 2, False, None  # type: ignore[assignment]
    shown: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)
    with session.watched_threads():
        thread = threading.Thread(target=lambda: {}["gone"], name="prefetch")
        thread.start()
        thread.join(10)
    (raised,) = sent
    assert isinstance(raised, ExceptionRaised)
    assert (raised.type, raised.thread, raised.rank) == ("KeyError", "prefetch", 2)
    assert len(shown) == 1 and threading.excepthook == shown.append
    session.report_exception(ValueError("the loop's own is still told"))
    assert len(sent) == 2


# ---------------------------------------------------------------- C++

THROWS = """
#include <stdexcept>
#include <thread>
extern "C" void throw_in_a_thread() { std::thread([] { throw std::out_of_range("boom in C++"); }).join(); }
extern "C" void terminate_only() { std::terminate(); }
"""

WORKER = """
import ctypes, os, socket, sys
from unicron import _core
page = _core.PulsePage(int(sys.argv[1]), 0)
ours, theirs = socket.socketpair()
monitor = _core.WorkerMonitor(ours.detach(), page)
getattr(ctypes.CDLL(sys.argv[2]), sys.argv[3])()
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("throws")
    (folder / "throws.cc").write_text(THROWS)
    command = ["c++", "-std=c++17", "-shared", "-fPIC", "-pthread", "throws.cc", "-o", "throws.so"]
    subprocess.run(command, cwd=folder, check=True, timeout=100)
    return folder / "throws.so"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("function", "words"), [
    ("throw_in_a_thread", "terminate called after throwing an instance of 'std::out_of_range': boom in C++"),
    ("terminate_only", "std::terminate was called without an exception"),
])  # fmt: skip
def test_a_cpp_exception_leaves_its_text_in_the_page(library: Path, function: str, words: str) -> None:
    pages = _core.create_pulse_pages(1)
    os.set_inheritable(pages, True)
    page = _core.PulsePage(pages, 0)
    assert page.last_words == ""
    ended = subprocess.run(
        [sys.executable, "-c", WORKER, str(pages), str(library), function],
        pass_fds=(pages,), capture_output=True, check=False, timeout=60,
    )  # fmt: skip
    assert ended.returncode == -signal.SIGABRT
    assert page.last_words == words
    assert b"terminate called" in ended.stderr, "and what was shown before is still shown"
    assert b"throws.so" in ended.stderr, "the native stack that led there"
    page.reset()
    assert page.last_words == ""
    os.close(pages)


# ---------------------------------------------------------------- files


def test_a_fatal_signals_stacks_are_quoted(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    program = "import faulthandler, ctypes\nfaulthandler.enable()\nprint('x' * 99999, flush=True)\n"
    program += "def f(): ctypes.string_at(0)\nf()\n"
    with log.open("wb") as file:
        subprocess.run([sys.executable, "-c", program], stdout=file, stderr=file, check=False, timeout=60)
    words = last_words(str(log))
    assert words.text.startswith("Fatal Python error: Segmentation fault")
    assert len(words.text) <= TEXT_CHARS_MAX
    assert words.where.endswith(":" + words.where.rpartition(":")[2]) and words.where != ""


def test_a_traceback_is_quoted_and_its_innermost_place_told(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    with log.open("wb") as file:
        subprocess.run([sys.executable, "-c", "def f():\n  1 / 0\nf()\n"], stderr=file, check=False, timeout=60)
    words = last_words(str(log))
    assert words.text.endswith("ZeroDivisionError: division by zero") and words.where == "<string>:2"


@pytest.mark.parametrize(("content", "text", "where"), [
    (json.dumps({"message": {"message": "ValueError: bad", "extraInfo": {
        "py_callstack": 'Traceback (most recent call last):\n  File "train.py", line 7, in main\nValueError: bad',
    }}}), "ValueError: bad", "train.py:7"),
    (json.dumps({"message": "no stack"}), "no stack", ""),
    ("{", "", ""), (json.dumps([1]), "", ""), (json.dumps({"message": None}), "", ""),
])  # fmt: skip
def test_torchs_error_file(tmp_path: Path, content: str, text: str, where: str) -> None:
    (tmp_path / "error.json").write_text(content)
    words = last_words(str(tmp_path / "stderr.log"))
    assert text in words.text and words.where == where
    assert bool(words.text) == bool(text)


@pytest.mark.timeout(120)
def test_the_error_file_that_torch_really_writes(tmp_path: Path) -> None:
    program = (
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\ndef main():\n    raise ValueError('recorded')\nmain()\n"
    )
    environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=False, timeout=100)
    words = last_words(str(tmp_path / "stderr.log"))
    assert "ValueError: recorded" in words.text and words.where == "<string>:4"


def test_nothing_was_left(tmp_path: Path) -> None:
    assert last_words("").text == last_words(str(tmp_path / "stderr.log")).text == ""


def test_a_dying_workers_words_are_heard_before_its_death() -> None:
    """Both can be there in one turn; a death without its exception would be told without its cause."""
    taken: list[Any] = []
    agent = SimpleNamespace(
        _pulses=SimpleNamespace(take_deaths=lambda: [("w", 7, pulse())]),
        _server=SimpleNamespace(serve_last=lambda worker: [f"words of {worker}"]),
        _take=taken.append,
    )
    AgentProcess._read_deaths(agent)  # type: ignore[arg-type]
    assert taken == ["words of w", MutexReleased("w", 7, pulse())]


# ---------------------------------------------------------------- in the incident


def cluster() -> tuple[Coordinator, list[str]]:
    driver = running(Layout(dp=2, num_micro_batches=4), nodes=2, slots=1)
    assert driver.task.plan is not None
    return driver, [member.worker for member in driver.task.plan.members]


def test_an_incident_says_category_and_rule() -> None:
    driver, workers = cluster()
    driver.lost(workers[1], "signal 11")
    (incident,) = driver.machine.state.incidents.values()
    assert incident.category == "", "the decision waited for no words"
    driver.fire(f"classify/{incident.id}")
    (incident,) = driver.machine.state.incidents.values()
    assert (incident.category, incident.rule) == ("exited_abnormally", "process.segfault")
    assert incident.severity is Severity.SEV2 and incident.meaning


def test_words_that_blame_the_hardware_raise_it_to_the_nodes_fault() -> None:
    driver, workers = cluster()
    driver.raised(workers[1], "RuntimeError: CUDA error: uncorrectable ECC error encountered")
    (incident,) = driver.machine.state.incidents.values()
    driver.fire(f"classify/{incident.id}")
    (incident,) = driver.machine.state.incidents.values()
    assert (incident.severity, incident.category) == (Severity.SEV1, "ecc")
    assert driver.machine.state.node_faults == {incident.node: 1}


def thread_raised(driver: Coordinator, name: str) -> None:
    driver.says(
        ExceptionRaised(name, driver.rank_of(name), 1, 5, 1, Stage.COMPUTE, "OSError", "OSError: gone", "x.py:1", 1,
                        "prefetch")
    )  # fmt: skip


def test_a_threads_end_is_told_and_ends_nobody() -> None:
    driver, workers = cluster()
    for _ in range(2):
        thread_raised(driver, workers[1])
    (incident,) = driver.machine.state.incidents.values()
    assert (incident.fault, incident.severity) == ("thread", Severity.INFO)
    assert "OSError ended thread prefetch of rank 1; its process lives on" in incident.cause
    assert workers[1] in driver.task.workers and driver.task.workers[workers[1]].exception is None


def test_a_threads_end_is_the_second_signal_of_a_loop_that_stands_still() -> None:
    driver, workers = cluster()
    thread_raised(driver, workers[1])
    driver.stalled(workers[1], waiting=False, cpu=Cpu.BUSY)
    _, incident = driver.machine.state.incidents.values()
    assert incident.fault == "stalled" and "OSError ended its thread prefetch" in incident.cause
    assert incident.text == "OSError: gone"


def test_it_crosses_the_wire() -> None:
    raised = ExceptionRaised("w", 0, 1, 2, 3, Stage.IDLE, "X", "t", "w", 4, "thread")
    from unicron.messages import encode

    assert decode(encode(raised)) == raised
