"""The template with real processes: forks, exit codes, stops, scripts as __main__, nothing left
behind.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unicron.messages import ChildStatus, Fork, Forked, decode, encode
from unicron.runtime import framing

pytestmark = pytest.mark.timeout(60)


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def gone(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return text.rpartition(")")[2].split()[0] == "Z"


class Client:
    def __init__(self, path: Path, work: Path) -> None:
        self.socket = framing.connect(path, 20_000)
        self.work = work

    def fork(self, script: str, *arguments: str, worker: str = "w", env: dict[str, str] | None = None) -> int:
        path = self.work / f"{worker}.py"
        path.write_text(script)
        logs = self.work / "log" / worker
        environment = {"PATH": os.environ["PATH"], **(env or {})}
        request = Fork(
            worker,
            (str(path), *arguments),
            environment,
            str(self.work),
            f"{logs}/out",
            f"{logs}/err",
        )
        framing.send_blocking(self.socket, encode(request))
        answer = self.next()
        assert isinstance(answer, Forked)
        return answer.pid

    def next(self) -> Forked | ChildStatus:
        return decode(framing.receive_blocking(self.socket, 20_000)[0])

    def end(self) -> tuple[str, int]:
        status = self.next()
        assert isinstance(status, ChildStatus)
        return status.kind, status.status

    def log(self, name: str = "out", worker: str = "w") -> str:
        path = self.work / "log" / worker / name
        return path.read_text() if path.exists() else ""


@pytest.fixture(scope="module")
def template(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    path = tmp_path_factory.mktemp("t") / "template.sock"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "unicron.runtime.template",
            "--socket",
            path,
            "--import",
            "json,no_such",
        ]
    )
    yield process, path
    process.terminate()
    assert process.wait(10) == 0
    assert not path.exists()


@pytest.fixture
def client(template: tuple[subprocess.Popen[bytes], Path], tmp_path: Path) -> Iterator[Client]:
    client = Client(template[1], tmp_path)
    yield client
    client.socket.close()


def test_a_script_runs_as_main(client: Client) -> None:
    client.fork(
        "import os, sys, __main__\n"
        "print(__name__, __main__.__file__ == __file__, sys.argv[1:], end=' ')\n"
        "print(os.environ['A'], 'B' in os.environ)\n"
        "print(os.getcwd(), sys.path[0], os.getsid(0) == os.getpid(), sys.stdin.read())\n"
        "print(sorted(os.listdir('/proc/self/fd')))\n",
        "x",
        "y",
        env={"A": "1"},
    )
    assert client.end() == ("exited", 0)
    first, second, third = client.log().splitlines()
    assert first == "__main__ True ['x', 'y'] 1 False"
    assert second.split() == [str(client.work), str(client.work), "True"]
    assert third == "['0', '1', '2', '3']"  # 3: the listing itself


@pytest.mark.parametrize("way", ["fork", "exec"])
def test_nothing_outlives_its_worker(client: Client, way: str) -> None:
    """A grandchild in a session of its own, whose parent is gone already: no process group leads to it."""
    started = {
        "fork": "os.fork() or (os.setsid(), os.fork() and os._exit(0), say(), time.sleep(60))",
        "exec": "subprocess.Popen(['sh', '-c', 'setsid sleep 60 & echo $!'], stdout=open('pid', 'w'))",
    }[way]
    client.fork(
        "import os, subprocess, sys, time\n"
        "def say(): open('pid', 'w').write(str(os.getpid()))\n"
        f"{started}\n"
        "while not os.path.exists('pid') or not open('pid').read().strip(): time.sleep(0.01)\n"
        "time.sleep(0.1); os.kill(os.getpid(), 9)\n",
        env={"UNICRON_WORKER": "w"},
    )
    assert client.end() == ("signaled", 9)
    orphan = int((client.work / "pid").read_text())
    assert eventually(lambda: gone(orphan)), f"process {orphan} lives on"


@pytest.mark.parametrize(
    ("script", "end", "err"),
    [
        ("raise SystemExit(7)", ("exited", 7), ""),
        ("import sys; sys.exit('no luck')", ("exited", 1), "no luck"),
        ("1 / 0", ("exited", 1), "ZeroDivisionError"),
        ("import os; os._exit(9)", ("exited", 9), ""),
        ("import os; os.abort()", ("signaled", 6), "Fatal Python error: Aborted"),
        ("import ctypes; ctypes.string_at(0)", ("signaled", 11), "Segmentation fault"),
        ("def f(:", ("exited", 1), "SyntaxError"),
    ],
)
def test_ends_pass_through(client: Client, script: str, end: tuple[str, int], err: str) -> None:
    client.fork(script)
    assert client.end() == end
    assert err in client.log("err")
    assert "template.py" not in client.log("err") or "Fatal Python" in client.log("err")


def test_a_missing_script_says_so(client: Client) -> None:
    request = Fork("m", ("nowhere.py",), {}, str(client.work), "", f"{client.work}/err")
    framing.send_blocking(client.socket, encode(request))
    assert isinstance(client.next(), Forked)
    assert client.end() == ("exited", 2)
    assert "cannot run nowhere.py" in (client.work / "err").read_text()


def test_modules_and_programs(client: Client) -> None:
    for argv, code in (
        (("python", "-m", "json.tool", "--help"), 0),
        (("/bin/sh", "-c", "echo hello; exit 4"), 4),
        (("python3", "-X", "dev"), 2),
    ):
        request = Fork("m", argv, {"PATH": "/bin"}, "/", f"{client.work}/out", f"{client.work}/err")
        framing.send_blocking(client.socket, encode(request))
        assert isinstance(client.next(), Forked)
        assert client.end() == ("exited", code)
    out = (client.work / "out").read_text()
    assert "usage:" in out and "hello" in out


def test_stop_continue_kill_are_reported(client: Client) -> None:
    pid = client.fork("import time; time.sleep(60)")
    os.kill(pid, signal.SIGSTOP)
    assert client.end() == ("stopped", signal.SIGSTOP)
    os.kill(pid, signal.SIGCONT)
    assert client.end() == ("continued", signal.SIGCONT)
    os.kill(pid, signal.SIGKILL)
    assert client.end() == ("signaled", signal.SIGKILL)


def test_what_a_worker_started_ends_with_it(client: Client) -> None:
    pid = client.fork(
        "import subprocess, time\nprint(subprocess.Popen(['sleep', '60']).pid, flush=True)\ntime.sleep(60)\n"
    )
    assert eventually(lambda: client.log().strip() != "")
    grandchild = int(client.log())
    os.kill(pid, signal.SIGKILL)
    assert client.end() == ("signaled", signal.SIGKILL)
    assert eventually(lambda: gone(grandchild))


def test_spawn_finds_main_again(client: Client) -> None:
    client.fork(
        "import multiprocessing\n"
        "def double(x): return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(double, [21]))\n"
    )
    assert client.end() == ("exited", 0), client.log("err")
    assert client.log() == "[42]\n"


def test_another_role_runs_the_script_again(client: Client) -> None:
    client.fork(
        "import os, sys, types\n"
        "name = 'unicron.training'\n"
        "training = sys.modules.setdefault(name, types.ModuleType(name))\n"
        "if not hasattr(training, 'RoleChanged'):\n"
        "    training.RoleChanged = type('RoleChanged', (BaseException,), {})\n"
        "training.count = getattr(training, 'count', 0) + 1\n"
        "print(training.count, os.getpid())\n"
        "if training.count < 3: raise training.RoleChanged()\n"
        "sys.exit(5)\n"
    )
    assert client.end() == ("exited", 5), client.log("err")
    lines = [line.split() for line in client.log().splitlines()]
    assert [count for count, _ in lines] == ["1", "2", "3"]
    assert len({pid for _, pid in lines}) == 1


def test_an_agents_end_is_its_workers_end(
    template: tuple[subprocess.Popen[bytes], Path], client: Client, tmp_path: Path
) -> None:
    other = Client(template[1], tmp_path)
    running = other.fork("import time; time.sleep(60)", worker="a")
    stopped = other.fork("import time; time.sleep(60)", worker="b")
    mine = client.fork("import time; time.sleep(60)", worker="c")
    os.kill(stopped, signal.SIGSTOP)
    other.socket.close()
    assert eventually(lambda: gone(running) and gone(stopped))
    assert not gone(mine)
    os.kill(mine, signal.SIGKILL)


def test_garbage_ends_only_its_own_connection(template: tuple[subprocess.Popen[bytes], Path], client: Client) -> None:
    for garbage in (
        b"\xff\xff\xff\xff",
        framing.pack(b"\x09"),
        framing.pack(encode(Forked("w", 1))),
    ):
        with framing.connect(template[1], 1000) as bad:
            bad.sendall(garbage)
            bad.settimeout(5)
            assert bad.recv(1) == b""
    client.fork("pass")
    assert client.end() == ("exited", 0)


def test_workers_die_with_a_killed_template(tmp_path: Path) -> None:
    path = tmp_path / "s"
    process = subprocess.Popen([sys.executable, "-m", "unicron.runtime.template", "--socket", path])
    client = Client(path, tmp_path)
    pid = client.fork("import time; time.sleep(60)")
    process.kill()
    process.wait(10)
    assert eventually(lambda: gone(pid))
    with pytest.raises((framing.PeerClosed, socket.error)), client.socket:
        client.next()
