"""Why a process stands still although nothing is wrong with it: somebody holds it on purpose.

A debugger (TracerPid), or a frozen control group (v2: cgroup.events, v1: freezer.state). Such a process is left alone,
and this is said.
"""

from __future__ import annotations

from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def why_held(pid: int, proc: Path = Path("/proc"), cgroups: Path = CGROUPS) -> str:
    """In words; '' when nobody holds it, or it cannot be known."""
    tracer = _tracer(proc / str(pid) / "status")
    if tracer:
        return f"a debugger (pid {tracer}) is attached"
    frozen = _frozen(proc / str(pid) / "cgroup", cgroups)
    return f"its control group {frozen} is frozen" if frozen else ""


def _tracer(path: Path) -> int:
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("TracerPid:"):
                return int(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return 0


def _frozen(path: Path, cgroups: Path) -> str:
    """Its frozen control group. A frozen ancestor freezes it too, and both kernels' files say so in its own folder."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    for line in lines:
        number, controllers, place = line.split(":", 2)
        relative = place.lstrip("/")
        if "freezer" in controllers.split(","):
            if _read(cgroups / "freezer" / relative / "freezer.state").strip() in ("FROZEN", "FREEZING"):
                return place
        elif number == "0" and not controllers:
            for root in (cgroups, cgroups / "unified"):
                if "frozen 1" in _read(root / relative / "cgroup.events").splitlines():
                    return place
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
