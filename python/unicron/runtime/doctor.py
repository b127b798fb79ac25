"""Is this machine fit for unicron, and how fast would a death be seen here: facts looked up and small
things measured.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from unicron.agent.interfaces import Interface, NoInterface, network_words, rated_words
from unicron.runtime import networks
from unicron.runtime.client import ADDRESS_VARIABLE
from unicron.runtime.endpoints import EndpointProblem, endpoints_of

LOCAL = "tcp://127.0.0.1:1"
FUTEX_WAITV = (5, 16)
FILES_MIN = 1024
SHARED_BYTES_MIN = 64 << 20
DEVICES = Path("/dev")


@dataclass(frozen=True)
class Finding:
    name: str
    state: str  # ok | note | bad
    value: str
    meaning: str = ""


def examine(coordinator: str = "", interface: str = "", state_interface: str = "") -> list[Finding]:
    """The arguments: as an agent would be given them on this machine."""
    found: list[Finding] = []
    for check in (_core, _kernel, _python, _files, _nice, _clock, _disk, _shared_memory, _gpus, _nccl, _trainers):
        try:
            found += check()
        except Exception as error:
            name = check.__name__.strip("_").replace("_", " ")
            found.append(Finding(name, "bad", f"{type(error).__name__}: {error}", "cannot be used"))
    found += networks_found(coordinator, interface, state_interface)
    if all(f.state != "bad" for f in found):
        found += _deaths()
    return found + _hardware()


def _hardware() -> list[Finding]:
    """What an agent asks before its node joins (runtime/checks). As if no worker ran here: it is looked at whole."""
    from unicron.runtime.checks import gpu_compute, nvml
    from unicron.runtime.checks.check import known_checks
    from unicron.runtime.checks.supervise import run_checks

    of_gpus = {check.name for check in (*nvml.CHECKS, *gpu_compute.CHECKS)} if not _has_gpus() else set()
    wanted = [name for name in known_checks() if name not in of_gpus]  # the line GPUs says all there is to say
    with tempfile.TemporaryDirectory(prefix="unicron-doctor-", dir=os.getcwd()) as directory:
        results = run_checks(Path(directory), is_idle=True, only=wanted)
    states = {"ok": "ok", "bad": "bad", "unknown": "note"}
    return [Finding(f"check {r.check}", states[r.answer.value], r.answer.value, r.reason) for r in results]


def _core() -> list[Finding]:
    from unicron import _core

    kernels = "GPU kernels" if _core.cuda else "no GPU kernels (built without nvcc)"
    return [Finding("native core", "ok", f"{_core.__version__}, {kernels}")]


def _kernel() -> list[Finding]:
    release = platform.release()
    version = tuple(int(p) for p in release.split("-")[0].split(".")[:2])
    if version >= FUTEX_WAITV:
        return [Finding("kernel", "ok", release, "one thread waits for all deaths (futex_waitv)")]
    return [Finding("kernel", "note", release, "before 5.16: one waiting thread per worker")]


def _python() -> list[Finding]:
    return [Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")]


def _files() -> list[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FILES_MIN:
        return [Finding("open files", "note", f"{soft}", f"raise it: ulimit -n {min(hard, 65536)}")]
    return [Finding("open files", "ok", str(soft))]


def _nice() -> list[Finding]:
    low, _ = resource.getrlimit(resource.RLIMIT_NICE)
    may = os.geteuid() == 0 or low >= 30
    text = "the agent runs before its workers" if may else "a busy machine delays the agent"
    return [Finding("priority", "ok" if may else "note", f"nice -10 {'' if may else 'not '}permitted", text)]


def _clock() -> list[Finding]:
    resolution = time.get_clock_info("monotonic").resolution
    return [Finding("clock", "ok" if resolution <= 1e-6 else "bad", f"{resolution * 1e9:.0f} ns")]


def _disk() -> list[Finding]:
    from unicron.runtime.journal_sqlite import SqliteJournal

    with tempfile.TemporaryDirectory(prefix="unicron-doctor-", dir=os.getcwd()) as directory:
        journal = SqliteJournal(Path(directory) / "journal.db")
        times = []
        for _ in range(10):
            start = time.perf_counter()
            journal.append([b"x" * 500])
            times.append((time.perf_counter() - start) * 1000)
        journal.close()
    median = sorted(times)[len(times) // 2]
    state = "ok" if median < 50 else "note"
    return [Finding("journal", state, f"{median:.1f} ms", "a decision on the disk, in this folder")]


def _shared_memory() -> list[Finding]:
    fd = os.memfd_create("unicron-doctor")
    os.ftruncate(fd, 1 << 20)
    os.close(fd)
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    note = free < SHARED_BYTES_MIN
    return [
        Finding("memfd", "ok", "yes", "training state can outlive its process"),
        Finding("/dev/shm", "note" if note else "ok", f"{free >> 20} MiB free", "data loaders use it"),
    ]


def networks_found(coordinator: str, interface: str, state_interface: str) -> list[Finding]:
    """What there is, and what an agent would choose. Without a coordinator's address, also in the environment: by the
    default route, or with no way out of this machine as for a cluster on it alone."""
    where = "--coordinator" if coordinator else ADDRESS_VARIABLE
    coordinator = coordinator or os.environ.get(ADDRESS_VARIABLE, "")
    try:
        found = [_interface(each) for each in networks.interfaces()]
    except OSError as problem:
        return [Finding("interfaces", "bad", "unknown", str(problem))]
    try:
        ways = endpoints_of(coordinator, where) if coordinator else (networks.ANYWHERE, LOCAL)
        chosen = networks.choose_networks(ways, interface, state_interface, os.environ)
    except (EndpointProblem, NoInterface) as problem:
        return [*found, Finding("network", "bad", "none", str(problem))]
    for use, network in (("control", chosen.control), ("state", chosen.state)):
        found.append(Finding(f"{use} network", "ok", network_words(network), network.why))
    return found + [Finding("network", "note", "look", doubt) for doubt in chosen.doubts]


def _interface(interface: Interface) -> Finding:
    value = f"{' '.join(interface.addresses) or 'no address'}, {'up' if interface.is_up else 'down'}"
    rated = rated_words(interface.rated_mbit) if interface.rated_mbit else ""
    return Finding(f"interface {interface.name}", "ok" if interface.is_up else "note", value, rated)


def _has_gpus() -> bool:
    """Also one that CUDA does not see: then what the driver says of it is wanted."""
    from unicron import _core

    return _core.num_cuda_devices() > 0 or any(DEVICES.glob("nvidia[0-9]*"))


def _gpus() -> list[Finding]:
    from unicron import _core

    count = _core.num_cuda_devices()
    if count == 0:
        return [Finding("GPUs", "note", "none", _without_driver(_core.why_no_cuda()) or "the driver sees no GPU")]
    version = _core.cuda_driver_version()
    found = [Finding("CUDA driver", "ok", f"CUDA {version // 1000}.{version % 1000 // 10}")]
    for device in range(count):
        major, minor, exports, nbytes = _core.cuda_device_facts(device)
        value = f"{_core.cuda_device_name(device)}, {nbytes >> 30} GiB, {major}.{minor}"
        text = "state can outlive its process" if exports else "its memory cannot be handed on: state dies with it"
        found.append(Finding(f"GPU {device}", "ok" if exports else "note", value, text))
    if not _core.cuda:
        found.append(Finding("GPU kernels", "note", "none", "no digests and exact sums on GPUs; build with nvcc"))
    return found


def _without_driver(why: str) -> str:
    """The loader's own words are three lines, and say this."""
    is_missing = "libcuda.so.1" in why and "No such file" in why
    return "no CUDA driver here (libcuda.so.1)" if is_missing else why


def _nccl() -> list[Finding]:
    """The library that torch would load; what a version lacks decides how groups are made and ended."""
    from unicron import _core

    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        _core.add_nccl_path(str(Path(folder) / "nccl" / "lib" / "libnccl.so.2"))
    why = _core.why_no_nccl()
    if why:
        return [Finding("NCCL", "note", "none", why.split(";")[0])]
    version, missing = _core.nccl_version(), _core.nccl_missing()
    text = "lacks " + ", ".join(name.removeprefix("ncclComm") for name in missing) if missing else "lacks nothing"
    number = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    return [Finding("NCCL", "ok", number, f"{text} of what unicron uses")]


def _trainers() -> list[Finding]:
    found = []
    for name in ("torch", "megatron.core"):
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            spec = None
        if spec is None:
            text = "scripts without it are supervised and restarted only"
            found.append(Finding(name, "note", "not installed", text))
        else:
            found.append(Finding(name, "ok", str(Path(spec.origin or "").parent)))
    return found


def _deaths() -> list[Finding]:
    """A child takes its robust mutex and is killed: how long until we know?"""
    from unicron import _core

    times = [_one_death(_core) for _ in range(5)]
    known = sorted(t for t in times if t is not None)
    if not known:
        return [Finding("death seen", "bad", "never", "the robust mutex does not work here")]
    median = known[len(known) // 2]
    return [Finding("death seen", "ok", f"{median:.2f} ms", "from SIGKILL to the agent, median of 5")]


def _one_death(_core) -> float | None:  # type: ignore[no-untyped-def]
    import select
    import socket
    import subprocess

    fd = _core.create_pulse_pages(1)
    supervisor = _core.Supervisor()
    ours, theirs = socket.socketpair()
    code = (
        "import sys, time\n"
        "from unicron import _core\n"
        "page = _core.PulsePage(int(sys.argv[1]), 0)\n"
        "monitor = _core.WorkerMonitor(int(sys.argv[2]), page)\n"
        "time.sleep(10)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(fd), str(theirs.fileno())], pass_fds=(fd, theirs.fileno())
    )
    try:
        page = _core.PulsePage(fd, 0)
        supervisor.watch(page, 0)
        deadline = time.monotonic() + 10
        while page.owner_pid == 0:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.005)
        start = time.monotonic_ns()
        os.kill(child.pid, signal.SIGKILL)
        if not select.select([supervisor.fileno()], [], [], 2.0)[0]:
            return None
        return (time.monotonic_ns() - start) / 1e6
    finally:
        child.kill()
        child.wait(5)
        supervisor.close()
        ours.close()
        theirs.close()
        os.close(fd)
