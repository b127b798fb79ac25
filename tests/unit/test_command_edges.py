"""What people can give to a command, and what a machine can be like: one line that says what to do, no traceback."""

from __future__ import annotations

import ast
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from several import Cluster
from unicron.cli import main
from unicron.messages import Reply, Request
from unicron.runtime import key_rotation, keys
from unicron.runtime.agent_daemon import run_with_template
from unicron.runtime.agent_process import AgentSettings
from unicron.runtime.client import CoordinatorClient, RequestUnfit
from unicron.runtime.coordinator_daemon import new_client
from unicron.runtime.coordinator_settings import EtcdSettings
from unicron.runtime.dashboard import DashboardProblem, _read_token
from unicron.runtime.dashboard_settings import DashboardSettings
from unicron.runtime.files import FileProblem, convert
from unicron.runtime.framing import SOCKET_PATH_BYTES_MAX, listen
from unicron.runtime.job_file import JobFile
from unicron.runtime.requests import answer

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "unicron"
HUGE = "9" * 30
OTHERS = ("runtime/networks.py",)  # numbers that the kernel writes


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*words: str, code: int = 1) -> str:
        assert main([*words]) == code
        text = capsys.readouterr().err
        assert len(text.splitlines()) == 1 and text.startswith(f"unicron {words[0]}: "), text
        return text

    return run


# ------------------------------------------------------------ files of people


@pytest.mark.parametrize("verb", ["submit", "plan", "coordinator", "simulate"])
def test_nesting_without_end(tmp_path: Path, said: Any, verb: str) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text("[" * 700)  # more are refused as well, later
    assert f"{path} is nested too deep" in said(verb, str(path))


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"priority": 10**30}, "priority"),
        ({"layouts": [{"tp": -(10**400)}]}, r"layouts\[0\].tp"),
        ({"throughput": {10**30: 1.0}}, "throughput .a name."),
        ({"restart": {"fatal_exit_codes": [1, 2**63]}}, r"restart.fatal_exit_codes\[1\]"),
    ],
)
def test_numbers_that_no_message_holds(change: dict[str, Any], where: str) -> None:
    with pytest.raises(FileProblem, match=f"^{where} is a number of more than 64 bits"):
        convert({"name": "a", "command": ["x"], **change}, JobFile)


def test_text_is_read_and_written_as_utf_8_whatever_the_locale_says() -> None:
    """Every file of the package: what people wrote on one machine is read on another."""
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        if str(path.relative_to(PACKAGE)) in OTHERS:
            continue
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text if re.search(r"_text\(|open\(", text) else "")):
            if isinstance(node, ast.Call) and _opens_text(node) and "encoding" not in {k.arg for k in node.keywords}:
                wrong.append(f"{path}:{node.lineno}")
    assert not wrong, 'say encoding="utf-8": ' + " ".join(wrong)


def _opens_text(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name in ("read_text", "write_text"):
        return True
    if name not in ("open", "fdopen") or ast.unparse(call.func) == "os.open":
        return False
    is_method = isinstance(call.func, ast.Attribute) and name == "open"
    if is_method and not call.args and not call.keywords:
        return False  # something else that is opened
    mode = call.args[0 if is_method else 1 :][:1]
    return not (mode and isinstance(mode[0], ast.Constant) and "b" in str(mode[0].value))


def in_plain_locale(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "unicron.cli", *words]
    return subprocess.run(command, env={**os.environ, **plain}, stderr=subprocess.PIPE, encoding="utf-8", **more)


def test_a_locale_without_the_letters_shows_them_escaped(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("KeyError: 'é'\n", encoding="utf-8")
    done = in_plain_locale("classify", str(log), stdout=subprocess.PIPE)
    assert done.returncode == 0 and r"\xe9" in done.stdout and not done.stderr
    job = tmp_path / "job.yaml"
    job.write_text('name: "é"\ncommand: [x]\n', encoding="utf-8")
    done = in_plain_locale("submit", str(job))
    assert r"name '\xe9'" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["classify", "--json"]])
def test_a_full_disk_under_stdout_is_said_once(words: list[str], tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("fine\n")
    with open("/dev/full", "wb") as full:
        done = in_plain_locale(*words, *([str(log)] if words[1:] else []), stdout=full)
    assert done.returncode == 1 and "No space left" in done.stderr and len(done.stderr.splitlines()) == 1


def test_help_into_a_pipe_that_nobody_reads() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = in_plain_locale("--help", stdout=writing)
    os.close(writing)
    assert done.returncode == 1 and not done.stderr


# ------------------------------------------------------------ words and numbers of a command


@pytest.mark.parametrize(
    "words",
    [
        ["reshape", "a", f"{HUGE},1,1"],
        ["reshape", "a", "²,1,1"],
        ["inject", "kill", "--task", "x", "--rank", HUGE],
        ["inject", "kill", "--task", "x", "--rank", "-1"],
        ["inject", "kill", "--task", "x", "--iteration", HUGE],
        ["inject", "kill", "--task", "x", "--micro-batch", HUGE],
        ["agent", "--coordinator", "127.0.0.1:9", "--slots", "1", "--incarnation", HUGE],
        ["agent", "--coordinator", "127.0.0.1:9", "--slots", HUGE],
        ["agent", "--coordinator", "127.0.0.1:9", "--slots", "1", "--understudies", HUGE],
        ["logs", "--rank", HUGE],
    ],
)
def test_numbers_of_options_have_bounds(said: Any, words: list[str]) -> None:
    assert "2147483647" in said(*words, code=2) or words[-1] == "-1"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [({"node": "\udcff"}, "no text in UTF-8"), ({"job": {"priority": 10**30}}, "more than 64 bits"),
     ({"job": {"name": "x" * (1 << 23)}}, "limit")],
)  # fmt: skip
def test_what_no_message_holds_is_refused_before_it_is_sent(arguments: dict[str, Any], why: str) -> None:
    with CoordinatorClient("127.0.0.1:9", keys.generate().public, keys.generate()) as client:
        with pytest.raises(RequestUnfit, match=why):
            client.ask("drain", **arguments)


def test_names_that_are_not_there_are_quoted() -> None:
    cluster = Cluster(nodes=1, slots=2)
    for task in ("", "a"):
        for verb in ("describe", "cancel", "suspend", "resume"):
            reply = answer(Request(verb, {"task": task}), "r1", cluster.machine.state, {}, 0.0)
            assert isinstance(reply, Reply) and "there are no tasks" in reply.error
    cluster.run("b", 2)
    reply = answer(Request("describe", {"task": "a"}), "r1", cluster.machine.state, {}, 0.0)
    assert isinstance(reply, Reply) and reply.error == "no task 'a'; known: b"


# ------------------------------------------------------------ folders and sockets


def settings_of(folder: Path) -> AgentSettings:
    return AgentSettings("n1", "127.0.0.1:9", "keys", 1, 0, str(folder))


def test_folders_that_cannot_be_are_named_with_their_option(tmp_path: Path, said: Any) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "below", Path("/proc/x")):
        with pytest.raises(FileProblem, match=f"^{folder} cannot be the --run-dir .*: give a folder"):
            run_with_template(settings_of(folder), "")
        assert f"{folder} cannot be the directory of the keys" in said("keys", str(folder))


def test_a_run_dir_that_is_too_long_for_a_socket(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 200)
    with pytest.raises(FileProblem, match=r"^--run-dir is too long \(\d+ bytes with /template.sock, 107 at most\)"):
        run_with_template(settings_of(long), "")
    with pytest.raises(OSError, match=r"cannot listen on .* too long"):
        listen(long / "s.sock")
    assert not long.exists()
    fits = tmp_path / ("x" * (SOCKET_PATH_BYTES_MAX - len(str(tmp_path)) - 1))
    listen(fits).close()


# ------------------------------------------------------------ keys


def test_key_files_that_are_none(tmp_path: Path, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "keys"
    keys.make_directory(folder)
    public = folder / "coordinator.pub"
    for content in (b"\xff" * 40, b"#" * 40, b'"' * 40, b"short", "é".encode() * 40):
        public.write_bytes(content)
        assert f"{public} holds no public key" in said("nodes", "--keys", str(folder))
    public.unlink()
    (folder / "coordinator.key").chmod(0o644)
    assert f"no {public}: copy it from" in said("nodes", "--keys", str(folder))
    (folder / "client.key").unlink()
    (folder / "client.key").mkdir(mode=0o700)
    assert f"cannot read the key file {folder / 'client.key'}: Is a directory: give" in said(
        "ps", "--keys", str(folder)
    )
    (folder / "revoked").write_bytes(b"\xff")
    with pytest.raises(keys.KeyProblem, match=r"cannot read .*revoked .*: restore it"):
        key_rotation.revoked(folder)
    (tmp_path / "file").touch()
    with pytest.raises(keys.KeyProblem, match="Not a directory: give the directory"):
        keys.load(tmp_path / "file" / "agent.key")


def test_a_token_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"\xff" * 40)
    path.chmod(0o600)
    with pytest.raises(DashboardProblem, match="letters and digits"):
        _read_token(DashboardSettings("0.0.0.0:0", str(path)), "0.0.0.0")


# ------------------------------------------------------------ the rest


@pytest.mark.parametrize("content", [random.Random(1).randbytes(5000), bytes(5000), "naïf\n".encode("utf-16")])
def test_what_is_no_text_is_not_judged(tmp_path: Path, said: Any, content: bytes) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    assert f"{path} is not text" in said("classify", "--kind", "text", str(path))


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_wait_for_etcd_that_is_none(seconds: float) -> None:
    with pytest.raises(FileProblem, match=f"etcd.request_s is {seconds}: give seconds above 0"):
        new_client(EtcdSettings(("127.0.0.1:1",), request_s=seconds))
