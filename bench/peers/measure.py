"""From what a run left to what it cost. Pure: events in, one row out.

Times are seconds since the fault struck. An iteration is committed when a rank says so after its optimizer's step.
  next commit    first commit, by whoever lives, of the interrupted iteration or a later one
  full world     first commit since when every iteration was committed by all ranks
  lost           wall time from the last commit before the fault to the next commit, less the median iteration
  redone         iterations that were committed before the fault and computed again
  samples again  forwards that began more than once, in samples
  samples lost   samples of the global batch that no update has, from the interrupted iteration on
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

from peers import job
from peers.job import COMPARED, FAULT_ITERATION

Event = dict[str, Any]


def row(events: list[Event], said: list[tuple[float, str]], detected_s: float | None) -> dict[str, Any]:
    """events: ordered by time. {} when nothing struck."""
    struck = [event for event in events if event["event"] == "fault"]
    if not struck:
        return {}
    at = struck[0]["t"]
    commits = [event for event in events if event["event"] == "commit"]
    before = [event for event in commits if event["t"] <= at]
    first = max((event["i"] for event in before), default=FAULT_ITERATION - 1) + 1
    after = [event for event in commits if event["t"] > at and event["i"] >= first]
    usual = iteration_s(before)
    result: dict[str, Any] = {"iteration_ms": round(1000 * usual, 1), "interrupted": first}
    told = [t - at for t, _ in said if t > at]
    told += [event["t"] - at for event in events if event["event"] == "voted_away" and event["t"] > at]
    result["detected_s"] = _rounded(detected_s if detected_s is not None else min(told, default=None))
    result["next_commit_s"] = _rounded(after[0]["t"] - at if after else None)
    result["full_world_s"] = _rounded(full_world(after, at))
    last = max((event["t"] for event in before), default=at)
    result["lost_s"] = _rounded(max(0.0, after[0]["t"] - last - usual) if after else None)
    again = [event["i"] for event in commits if event["t"] > at and event["i"] < first]
    result["redone"] = len(set(again))
    result["samples_again"] = begun_again(events)
    result["samples_lost"] = samples_lost(after)
    result["world_after"] = len({event["rank"] for event in after if event["i"] == max(e["i"] for e in after) - 1})
    return result


def iteration_s(commits: list[Event]) -> float:
    """Median gap between iterations' first commits, the first two iterations apart (they warm up)."""
    times = first_commits(commits)
    gaps = [times[i] - times[i - 1] for i in times if i - 1 in times and i > 2]
    return statistics.median(gaps) if gaps else 0.0


def first_commits(commits: list[Event]) -> dict[int, float]:
    times: dict[int, float] = {}
    for event in commits:
        times.setdefault(event["i"], event["t"])
    return times


def full_world(after: list[Event], at: float) -> float | None:
    """None when the last whole look at the run saw fewer than all ranks."""
    ranks: dict[int, set[int]] = defaultdict(set)
    worlds: dict[int, set[int]] = defaultdict(set)
    times: dict[int, float] = {}
    for event in after:
        ranks[event["i"]].add(event["rank"])
        worlds[event["i"]].add(event["world"])
        times[event["i"]] = event["t"]
    whole = {i for i in ranks if len(ranks[i]) == job.WORLD_SIZE and worlds[i] == {job.WORLD_SIZE}}
    # The newest iteration may be half said when a run is ended.
    counted = sorted(ranks)[:-1] if ranks and max(ranks) not in whole else sorted(ranks)
    if not counted or counted[-1] not in whole:
        return None
    first = counted[-1]
    while first - 1 in whole:
        first -= 1
    return times[first] - at


def begun_again(events: list[Event]) -> int:
    begun: dict[tuple[int, int], int] = defaultdict(int)
    for event in events:
        if event["event"] == "forward":
            begun[event["i"], event["m"]] += 1
    return job.MICRO_BATCH * sum(count - 1 for count in begun.values())


def samples_lost(after: list[Event]) -> int:
    """By the tokens that each iteration's update was divided by."""
    tokens: dict[int, float] = {}
    for event in after:
        tokens[event["i"]] = max(tokens.get(event["i"], 0.0), event["tokens"])
    missing = sum(job.SAMPLES - round(count / job.SEQ_LENGTH) for count in tokens.values())
    return max(0, missing)


def losses(events: list[Event]) -> list[float]:
    """Of the iterations that are compared, as they were committed last."""
    found = {event["i"]: event["loss"] for event in events if event["event"] == "commit"}
    return [found[i] for i in sorted(found) if i < COMPARED]


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 4)
