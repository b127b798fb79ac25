"""Every system through every fault, one run at a time, each run one line of JSON under bench/results/peers/.

Runs that are kept are not made again (--again makes them), so the comparison can be ended and gone on with. A pause
file (--pause PATH) holds it before the next run while that file exists. Example:

    bench/peers/run.sh --systems unicron torchrun --faults kill stop --settings tuned --runs 3
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import common
from peers import measure, tables
from peers.drive import Driver, Observed, carry_out
from peers.job import COMPARED, ON_GPUS
from peers.systems import ENVIRONMENTS, FAULTS, ROOT, SYSTEMS

RESULTS = ROOT / "bench" / "results" / ("peers_gpu" if ON_GPUS else "peers")
REFERENCES = ENVIRONMENTS / "references"  # weights of undisturbed runs: large, and made again in a minute
LOGS = ENVIRONMENTS / "logs"
REFERENCE_SETTING = "tuned"
SETTINGS = ("tuned", "spare", "plain", "defaults")  # in the order in which they are measured
IMPORTANT = ("none", "kill", "stop", "deadlock", "exception", "agent")


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a run that is ended takes its processes with it
    arguments = parse()
    arguments.into.mkdir(parents=True, exist_ok=True)
    problems = 0
    for number in range(arguments.runs):
        for system, setting, fault in cells(arguments):
            kept = [r for r in kept_rows(arguments.into, system) if (r["setting"], r["fault"]) == (setting, fault)]
            has_reference = fault != "none" or setting != REFERENCE_SETTING or is_reference(reference_of(system))
            if len(kept) > number and not arguments.again and has_reference:
                continue
            while arguments.pause and arguments.pause.exists():
                time.sleep(2.0)
            try:
                row = one(system, setting, fault)
            except Exception as problem:  # of one run: the others are made all the same, and this one next time
                print(f"{system} {setting} {fault}: not measured: {problem!r}; see {LOGS}", file=sys.stderr, flush=True)
                problems += 1
                continue
            with open(arguments.into / f"{system}.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")
            problems += row["status"].startswith("did not")
            print(sentence(row), flush=True)
    sys.exit(1 if problems else 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--systems", nargs="+", choices=tuple(SYSTEMS), default=tuple(SYSTEMS))
    parser.add_argument("--faults", nargs="+", choices=tuple(FAULTS), default=tuple(FAULTS))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS)
    parser.add_argument("--runs", type=common.positive, default=1, help="of each cell, as many as are not kept")
    parser.add_argument("--again", action="store_true", help="also what is kept")
    parser.add_argument("--quick", action="store_true", help="torchrun and unicron, kill and stop, tuned, one run each")
    parser.add_argument("--into", type=Path, default=RESULTS)
    parser.add_argument("--pause", type=Path, help="start no run while this file exists")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.systems, arguments.faults = ("unicron", "torchrun"), ("none", "kill", "stop")
        arguments.settings = ("tuned",)
    return arguments


def cells(arguments: argparse.Namespace) -> list[tuple[str, str, str]]:
    """(system, setting, fault): by setting, then the important faults first, then by system."""
    faults = sorted(arguments.faults, key=lambda fault: (fault not in IMPORTANT, list(FAULTS).index(fault)))
    return [
        (name, setting, fault)
        for setting in arguments.settings
        for fault in faults
        for name in arguments.systems
        if setting in SYSTEMS[name].settings
        and not (ON_GPUS and setting == "spare")  # it would share a GPU
        and SYSTEMS[name].has(fault)
        and (fault == "none" or setting != "plain")
    ]


def kept_rows(folder: Path, system: str) -> list[dict[str, Any]]:
    path = folder / f"{system}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def driver_of(system: str, setting: str, fault: str) -> Driver:
    if system == "unicron":
        from peers.ours import UnicronDriver

        return UnicronDriver(setting, fault)
    return Driver(SYSTEMS[system], setting, fault)


def one(system: str, setting: str, fault: str) -> dict[str, Any]:
    """Make the run; its row."""
    driver = driver_of(system, setting, fault)
    try:
        observed = carry_out(driver)
        if not commits(observed):  # nothing of this system was seen yet: it was not started as it must be
            raise RuntimeError(f"it {observed.status} before its first iteration: {last_words(driver)}")
        row = {
            "system": system, "setting": setting, "fault": fault, "status": observed.status, "nodes": observed.nodes,
            "load": [round(load, 2) for load in observed.load],
            "work": tables.work(), "at": time.strftime("%Y-%m-%d %H:%M", time.gmtime()), "machine": where(),
            **measure.row(observed.events, observed.said, observed.detected_s),
        }  # fmt: skip
        if observed.cpu_s is not None:
            row["cpu_ms_per_iteration"] = round(1000 * observed.cpu_s / observed.cpu_iterations, 1)
            row["iteration_ms"] = round(1000 * measure.iteration_s(commits(observed)), 1)
        return {**row, **against_reference(system, setting, fault, driver.folder, observed)}
    finally:
        keep_log(driver)
        driver.forget()


def last_words(driver: Driver) -> str:
    lines = (driver.folder / "log").read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it said nothing"


def commits(observed: Observed) -> list[dict[str, Any]]:
    return [event for event in observed.events if event["event"] == "commit"]


def where() -> dict[str, Any]:
    machine = common.machine()
    return {key: machine[key] for key in ("cpu", "cores", "memory_gib", "kernel", "python")}


def reference_of(system: str) -> Path:
    return REFERENCES / f"{system}.npz"


def is_reference(path: Path) -> bool:
    """Of as many iterations as are compared now."""
    return path.exists() and len(np.load(path)["losses"]) == COMPARED


def against_reference(system: str, setting: str, fault: str, folder: Path, observed: Observed) -> dict[str, Any]:
    """Final weights and losses against the system's own undisturbed run; that run keeps its own."""
    found = sorted(folder.glob("weights_*.npy"))
    losses = measure.losses(observed.events)
    if not found or len(losses) < COMPARED:
        return {}
    weights = np.load(found[0])
    path = reference_of(system)
    if fault == "none":
        if setting == REFERENCE_SETTING:
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(path, weights=weights, losses=losses)
        return {"losses": [round(loss, 6) for loss in losses], "parameters": len(weights)}
    if not is_reference(path):
        return {}
    reference = np.load(path)
    return {
        "weights_equal": bool(np.array_equal(weights, reference["weights"])),
        "weights_max_abs_diff": float(np.abs(weights - reference["weights"]).max()),
        "loss_max_abs_diff": float(np.abs(np.asarray(losses) - reference["losses"]).max()),
    }


def keep_log(driver: Driver) -> None:
    target = LOGS / driver.name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name in ("log", "events", "logs"):
        source = driver.folder / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("*.sock"))
        elif source.exists():
            shutil.copy(source, target / name)


def sentence(row: dict[str, Any]) -> str:
    told = ", ".join(
        f"{key} {row[key]}"
        for key in (
            "detected_s", "next_commit_s", "full_world_s", "lost_s", "samples_lost", "weights_max_abs_diff",
            "cpu_ms_per_iteration",
        )
        if row.get(key) is not None
    )  # fmt: skip
    return f"{row['system']} {row['setting']} {row['fault']}: {row['status']}; {told}; load {row['load'][0]}"


if __name__ == "__main__":
    main()
