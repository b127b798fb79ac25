"""`unicron run` as people call it: exit codes pass through, nothing is left behind, however it
ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusters import PLAIN, eventually
from unicron.runtime import processes
from unicron.runtime.client import LOCAL_PREFIX
from unicron.runtime.kept_journal import find_journal, read_state
from unicron.runtime.run_logs import make_room

pytestmark = pytest.mark.timeout(60)
UNICRON = [sys.executable, "-m", "unicron.cli"]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder to run in, with temporary files of its own: what is left behind is left there."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    yield tmp_path
    eventually(lambda: list(temporary.iterdir()) == [], 10)


def environment(place: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(place / "tmp")}


def run(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*UNICRON, *words],
        cwd=place,
        env=environment(place),
        capture_output=True,
        text=True,
        timeout=50,
    )


def script(place: Path, text: str) -> str:
    (place / "script.py").write_text(text)
    return "script.py"


def test_an_unchanged_torchrun_script(place: Path) -> None:
    path = script(
        place,
        "import os, sys\n"
        "names = 'RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR'.split()\n"
        "print(*(os.environ[n] for n in names), sys.argv[1:], 'zmq' in sys.modules)\n",
    )
    ended = run(place, "run", "--standalone", "--nnodes=2", "--nproc_per_node", "1", path, "--lr", "3")
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [
        "[0] 0 0 2 1 0 127.0.0.1 ['--lr', '3'] False",
        "[1] 1 0 2 1 1 127.0.0.1 ['--lr', '3'] False",
    ]
    assert "does not join unicron" in ended.stderr


@pytest.mark.parametrize(
    ("text", "code"),
    [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137), ("1 / 0", 1)],
)
def test_the_exit_code_is_the_scripts(place: Path, text: str, code: int) -> None:
    ended = run(place, "run", "--max-restarts", "0", "--json", script(place, text))
    result = json.loads(ended.stdout)
    assert ended.returncode == result["exit_code"] == code, ended.stderr
    assert result["outcome"] == "stopped" and len(result["incidents"]) == 1
    assert Path(result["incidents"][0]["log"]).is_file()


def test_a_script_that_fails_once_starts_again_as_a_whole(place: Path) -> None:
    path = script(
        place,
        "import os, sys, time\n"
        "again = os.environ['TORCHELASTIC_RESTART_COUNT'] != '0'\n"
        "time.sleep(0 if again else 0.3)\n"
        "sys.exit(0 if again or os.environ['RANK'] == '0' else 3)\n",
    )
    ended = run(place, "run", "--nproc-per-node", "2", "--json", path)
    result = json.loads(ended.stdout)
    assert (ended.returncode, result["outcome"]) == (0, "done"), ended.stderr
    assert [i["outcome"] for i in result["incidents"]] == ["healed"]


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("wrong.py", "a = 1\nfor b in range(3)\n    pass\n", "wrong.py:2: SyntaxError: expected ':'"),
        ("job.yaml", "name: a\n", "job.yaml is no script but a job file: unicron submit job.yaml"),
    ],
)
def test_what_cannot_run_is_not_started(place: Path, name: str, text: str, told: str) -> None:
    (place / name).write_text(text)
    ended = run(place, "run", "--agents", "2", name)
    assert ended.returncode == 2 and told in ended.stderr
    assert len(ended.stderr.splitlines()) <= 2 and not (place / "unicron-logs").exists()


def test_the_logs_of_a_run_are_its_own(place: Path) -> None:
    """Those of an earlier one of the same name stood before and between them."""
    for number, text in enumerate(("first", "second", "third")):
        ended = run(place, "run", script(place, f"print({text!r})"))
        assert ended.stdout == f"[0] {text}\n" and ended.returncode == 0, ended.stderr
        assert ("logs of the run before" in ended.stderr) == bool(number)
    logs = place / "unicron-logs"
    for name, text in (("script-1", "first"), ("script-2", "second"), ("script", "third")):
        assert [path.read_text() for path in (logs / name).rglob("stdout.log")] == [f"{text}\n"]
    told = run(place, "logs", "--log-dir", "unicron-logs", "script")
    assert "third" in told.stdout and "second" not in told.stdout


def test_a_log_folder_that_cannot_be(place: Path) -> None:
    (place / "file").write_text("")
    ended = run(place, "run", "--log-dir", "file/logs", script(place, "1"))
    assert ended.returncode == 1 and "--log-dir" in ended.stderr and "Not a directory" in ended.stderr


def test_a_run_beside_another_one_leaves_its_logs_alone(tmp_path: Path) -> None:
    (tmp_path / "a" / "0" / "0").mkdir(parents=True)
    (tmp_path / "a" / "0" / "0" / "stdout.log").write_text("x")
    first, earlier = make_room(tmp_path, "a")
    assert earlier == tmp_path / "a-1" and not (tmp_path / "a").exists()
    (tmp_path / "a" / "0" / "0").mkdir(parents=True)
    (tmp_path / "a" / "0" / "0" / "stdout.log").write_text("y")
    second, earlier = make_room(tmp_path, "a")
    assert earlier is None and (tmp_path / "a").is_dir()
    os.close(second)
    os.close(first)
    third, earlier = make_room(tmp_path, "a")
    assert earlier == tmp_path / "a-2"
    os.close(third)


def test_a_module(place: Path) -> None:
    ended = run(place, "run", "-m", "json.tool", "--help")
    assert ended.returncode == 0 and "usage:" in ended.stdout


def test_a_managed_script_and_a_look_from_outside(place: Path) -> None:
    command = ["run", "--agents", "2", "--import", "unicron._core", "--stopped-grace", "0"]
    runner = subprocess.Popen(
        [*UNICRON, *command, "--json", str(PLAIN), "1500", "10"],
        cwd=place,
        env=environment(place),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def looks_well() -> bool:
        seen = run(place, "ps", "--json")
        tasks = json.loads(seen.stdout)["tasks"] if seen.returncode == 0 else []
        return bool(tasks) and tasks[0]["phase"] == "running" and tasks[0]["iteration"] > 5

    try:
        eventually(looks_well, 20)
        assert run(place, "inject", "kill", "--task", "plain_worker", "--rank", "1").returncode == 0
        assert "plain_worker" in run(place, "describe").stdout
        assert "n1" in run(place, "nodes").stdout
        assert "[0/0 stdout] arena fresh" in run(place, "logs", "--rank", "0").stdout
        out, _ = runner.communicate(timeout=40)
    finally:
        runner.kill()
        runner.communicate(timeout=5)
    result = json.loads(out)
    assert (runner.returncode, result["outcome"]) == (0, "done")
    (incident,) = [each for each in result["incidents"] if each["severity"] != "INFO"]  # a busy machine makes some slow
    assert incident["outcome"] == "healed" and incident["root"]["rank"] == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_behind_when_it_is_ended(place: Path, number: signal.Signals) -> None:
    command = ["run", "--nproc-per-node", "2", "--import", "unicron._core"]
    with (place / "said").open("wb") as said:
        runner = subprocess.Popen(
            [*UNICRON, *command, str(PLAIN), "100000", "10"], cwd=place, env=environment(place),
            stdout=subprocess.DEVNULL, stderr=said,
        )  # fmt: skip
    logs = place / "unicron-logs" / "plain_worker"
    try:
        eventually(lambda: len(list(logs.rglob("stdout.log"))) == 3, 20)
    except AssertionError:
        runner.kill()
        runner.wait(5)
        raise
    (directory,) = (place / "tmp").glob(f"{LOCAL_PREFIX}*")
    assert len(processes.find(directory)) >= 6  # 3 daemons, 3 workers
    start = time.monotonic()
    runner.send_signal(number)
    code = runner.wait(20)
    assert code == (-9 if number == signal.SIGKILL else 128 + number)
    eventually(lambda: processes.find(directory) == [], 10)
    assert time.monotonic() - start < 15
    if number != signal.SIGKILL:  # a person's end is no failure of a node
        assert f"{number.name}: plain_worker ends where it is" in (place / "said").read_text()
        assert read_state(find_journal(place / "unicron-logs"))[0].incidents == {}


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["run", "nowhere.py"], 2, "no script nowhere.py"),
        (["run", "--tp", "3", "--nproc-per-node", "4", "script.py"], 1, "multiple of 3"),
        (["run", "--nproc-per-node", "many", "script.py"], 2, "at least 1"),
        (["run"], 2, "--help"),
        (["rn"], 2, "did you mean run"),
        (["ps", "--no-such-option"], 2, "no-such-option"),
        (["ps"], 1, "unicron keys"),
        (["inject", "kil", "--task", "t"], 2, "known: kill"),
        (["inject", "kill"], 2, "--task"),
        (["submit", "job.yaml"], 1, "unknown field wieght; did you mean weight?"),
        (["submit", "none.yaml"], 1, "cannot read none.yaml"),
        (["coordinator", "cluster.yaml"], 1, "unknown field lisen; did you mean listen?"),
    ],
)
def test_wrong_use_is_one_line_that_says_what_to_do(place: Path, words: list[str], code: int, text: str) -> None:
    script(place, "pass")
    (place / "job.yaml").write_text("name: a\ncommand: [python, x.py]\nwieght: 2\n")
    (place / "cluster.yaml").write_text("lisen: 127.0.0.1:1\n")
    ended = run(place, *words)
    assert ended.returncode == code, ended.stderr
    assert text in ended.stderr and len(ended.stderr.splitlines()) == 1


def test_every_command_has_help_with_an_example(place: Path) -> None:
    from unicron.cli import VERBS

    for verb, (module, _) in VERBS.items():
        if not module.startswith("unicron.cli."):
            continue
        ended = run(place, verb, "--help")
        assert ended.returncode == 0, ended.stderr
        assert f"Example: unicron {verb}" in ended.stdout.replace("\n", " "), verb
