"""Seeded random histories in exact mode: several faults each, also during recoveries, at widths down to one replica.

Every history must end in one and the same digest, the undisturbed run's: sums in integers depend neither on who made
them nor on how many there were (training/exact.py). Results are kept, one JSON line a history; what passed is not run
again.

With --overlap sums are in floating point and partly reduced under the backward. Roles are replaced then, and no node is
lost for good: who computes what stays the same, and so do the bits.

    python -m unicron.demo.histories --into results/histories.jsonl --layout 1,1,4 --count 20
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from unicron import _core
from unicron.demo import compare, results, runner
from unicron.demo.progress import Progress
from unicron.demo.scenarios import EXTRA_S, Act, Expect, Fault, Scenario
from unicron.demo.variant import Variant
from unicron.demo.watch import TIMEOUT_S, WatchProblem
from unicron.runtime.local_cluster import ClusterProblem
from unicron.types import Layout

ITERATIONS = 18
SHARDED_ITERATIONS = 110  # a change of the layout takes some dozens
FIRST, LAST = 2, 10  # faults fall between these iterations
BUDDY_ITERATIONS = 220  # ... and what came of itself is undone when the node is back
AGAIN = (34, 44)  # iterations in which another node is lost: armed when the task is narrower
NARROW_AT, WHILE_NARROW, WIDE_AT, AT_LAST = 12, (45, 60), 60, (85, 100)  # iterations of a sharded history
KINDS = ("kill", "kill", "segv", "exception", "exit", "reset")
POINTS = ("idle", "compute", "forward", "backward", "tie", "reduce", "copy", "commit", "step", "heal", "heal")
SHARDED_POINTS = ("gather", *POINTS)  # those of a recovery last
EAGER_POINTS = ("eager", "eager", "eager", "reduced", *POINTS)
BACK_AFTER = 3  # iterations, or more, until a lost node comes back
RETURN_S = 2.0  # ... where training waits for it


def history(layout: Layout, seed: int, *, may_move: bool = True) -> Scenario:
    """What happens in it. Plain optimizer: nodes are lost too, once in a while all but one; that one does not fail in
    its step: it would be the last copy and has nothing to undo it with (a checkpoint would be needed). may_move: the
    layout can change while it runs (not on GPUs)."""
    stream = random.Random(f"{seed} {layout}")
    if not layout.exact:
        return _overlapped_history(layout, seed, stream)
    if layout.sharded:
        return _sharded_history(layout, seed, stream, may_move)
    nodes_lost = stream.choice((0, 0, 1, 1, 2, layout.num_replicas - 1))
    lost = stream.sample(range(layout.num_replicas), min(nodes_lost, layout.num_replicas - 1))
    faults, acts = [], []
    for node in lost:
        rank = stream.choice(layout.replica_ranks(node))
        at = stream.randrange(FIRST, LAST)
        faults.append(Fault(rank, "node", at, stream.choice([p for p in POINTS if p != "heal"])))
        acts.append(Act("start_agent", at + BACK_AFTER + stream.randrange(4), node))
    others = [rank for rank in range(layout.world_size) if layout.replica_of(rank) not in lost]
    for rank in stream.sample(others, min(len(others), stream.randrange(1, 4))):
        fault = _fault(stream, rank, POINTS, FIRST, LAST)
        is_last_copy = fault.point == "step" and len(lost) == layout.num_replicas - 1
        faults.append(replace(fault, point="commit") if is_last_copy else fault)
    # It goes on, after what is compared, until the task is as wide as before: a joiner takes seconds to get ready.
    return replace(_scenario(layout, seed, faults, acts), extra_s=EXTRA_S if acts else 0.0)


def _sharded_history(layout: Layout, seed: int, stream: random.Random, may_move: bool) -> Scenario:
    """Narrower and wide again: by itself, when nodes are lost and buddies keep copies, else by order. There are faults
    before, while it is narrow, and after, and sometimes in a move itself."""
    faults: list[Fault] = []
    acts: list[Act] = []
    layouts: tuple[Layout, ...] = ()
    lost = stream.randrange(layout.num_replicas) if layout.buddy and layout.dp > 1 and stream.random() < 0.6 else -1
    if lost >= 0:
        faults, acts = _lose_nodes(layout, lost, stream, may_move)
    others = [rank for rank in range(layout.world_size) if layout.replica_of(rank) != lost]
    for rank in stream.sample(others, min(len(others), stream.randrange(1, 4))):
        faults.append(_fault(stream, rank, SHARDED_POINTS, FIRST, LAST))
    if may_move and not layout.buddy and layout.dp > layout.ep == 1 and stream.random() < 0.6:
        narrow = structs.replace(layout, dp=stream.randrange(1, layout.dp // 2 + 1))
        layouts = (layout, narrow)
        in_it = Fault(0, "kill", -1, "layout", 1) if stream.random() < 0.25 else None
        acts += [Act("reshape", NARROW_AT, dp=narrow.dp, fault=in_it), Act("reshape", WIDE_AT, dp=layout.dp)]
        if stream.random() < 0.7:
            faults.append(_fault(stream, stream.randrange(narrow.world_size), SHARDED_POINTS[:-2], *WHILE_NARROW))
    elif stream.random() < 0.7:
        faults.append(_fault(stream, stream.randrange(layout.world_size), SHARDED_POINTS[:-2], *AT_LAST))
    faults.sort(key=lambda fault: fault.iteration)
    return replace(_scenario(layout, seed, faults, acts), layouts=layouts)


def _lose_nodes(
    layout: Layout, lost: int, stream: random.Random, may_move: bool
) -> tuple[list[Fault], list[Act]]:  # fmt: skip
    """A node is lost, and is back at once, or when the task is narrower; or another one is lost meanwhile."""
    at = stream.randrange(FIRST + 3, LAST)
    faults = [Fault(stream.choice(layout.replica_ranks(lost)), "node", at, stream.choice(SHARDED_POINTS[:-2]))]
    if not may_move or stream.random() < 0.3:
        return faults, [Act("start_agent", at - 1, lost, delay_s=RETURN_S)]
    narrow = structs.replace(layout, dp=layout.dp - 1)
    if narrow.dp < 3 or stream.random() < 0.6:
        return faults, [Act("start_agent", at, lost, when_dp=narrow.dp)]
    rank, later = stream.randrange(narrow.world_size), stream.randrange(*AGAIN)
    faults.append(Fault(rank, "node", later, stream.choice(SHARDED_POINTS[:-2])))
    left = [node for node in range(layout.dp) if node != lost]  # a replica of the narrower layout is on each
    back = Act("start_agent", later, lost, when_dp=narrow.dp - 1)
    return faults, [back, Act("start_agent", later, left[narrow.replica_of(rank)], delay_s=RETURN_S)]


def _overlapped_history(layout: Layout, seed: int, stream: random.Random) -> Scenario:
    """Workers fail, before, inside and after a segment that is reduced under the backward among other places."""
    points = EAGER_POINTS + ("gather", "late", "late") * layout.sharded
    faults = []
    for rank in stream.sample(range(layout.world_size), stream.randrange(1, min(4, layout.world_size))):
        fault = _fault(stream, rank, points, FIRST, LAST)
        faults.append(replace(fault, micro_batch=stream.randrange(3)) if fault.point == "eager" else fault)
    faults.sort(key=lambda fault: fault.iteration)
    return replace(_scenario(layout, seed, faults, []), iterations=ITERATIONS)


def _fault(stream: random.Random, rank: int, points: Sequence[str], first: int, last: int) -> Fault:
    point = stream.choice(points)
    iteration = -1 if point == "heal" else stream.randrange(first, last)
    return Fault(rank, stream.choice(KINDS), iteration, point)


def iterations_of(layout: Layout) -> int:
    if layout.buddy:
        return BUDDY_ITERATIONS
    return SHARDED_ITERATIONS if layout.sharded and layout.exact else ITERATIONS


def _scenario(layout: Layout, seed: int, faults: list[Fault], acts: list[Act]) -> Scenario:
    says = [f"{f.fault} of rank {f.rank} at {f.point} {f.iteration}" for f in faults]
    says += [
        f"dp {act.dp} after {act.after}" + (f" with a {act.fault.fault} of rank 0 in it" if act.fault else "")
        for act in acts if act.dp
    ]  # fmt: skip
    return Scenario(
        f"history-{seed}", ", ".join(says), Expect("healed"), tuple(faults),
        tuple(sorted(acts, key=lambda act: act.after)), iterations=iterations_of(layout), window=(),
    )  # fmt: skip


def reference(suite: runner.Suite, layout: Layout) -> results.Run:
    undisturbed = Scenario("", "", Expect("unaffected"), iterations=iterations_of(layout), window=())
    return suite.reference(undisturbed)


def reference_digest(suite: runner.Suite, layout: Layout) -> str:
    """What every history must end in."""
    return compare.position_digest(reference(suite, layout), layout)


def judge(suite: runner.Suite, scenario: Scenario, layout: Layout, wanted: str) -> dict[str, Any]:
    usual_ms = compare.median_ms(reference(suite, layout))
    extra = runner.extra_iterations(scenario, usual_ms)
    run, seen, left, problem = suite.carry_out(scenario, extra, usual_ms=usual_ms)
    reasons = [problem] if problem else []
    digest = compare.position_digest(run, layout)
    if seen.view.get("phase") != "done":
        reasons.append(f"the task is {seen.view.get('phase')}: {seen.view.get('cause')}")
    elif digest != wanted:
        reasons.append("it ends in another digest")
    elif (
        len(seen.replicas) != layout.num_replicas
    ):  # every node that was lost came back, and every change of layout was undone
        reasons.append(
            f"{len(seen.replicas)} of {layout.num_replicas} replicas at the end: it did not become as wide as before"
        )
    reasons += [f"{count} {what} left behind" for what, count in left.items() if count]
    moves = [f"{move['from']} -> {move['to']}" for move in seen.view.get("layout_changes", ())]
    if not layout.buddy and len(moves) != sum(act.dp > 0 for act in scenario.acts):
        reasons.append(f"not narrower and wide again, but: {moves}")
    told = [[i["fault"], i["severity"], i["outcome"]] for i in seen.incidents.values()]
    return {
        "says": scenario.says, "passed": not reasons, "reasons": reasons, "digest": digest, "incidents": told,
        "moves": moves,
    }  # fmt: skip


def known(path: Path, layout: str, optimizer: str) -> dict[int, str]:
    """Seeds that passed, and the digest that each ended in."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    return {
        r["seed"]: r["digest"] for r in found if r["passed"] and (r["layout"], r["optimizer"]) == (layout, optimizer)
    }


def left_of(seeds: Iterable[int], done: dict[int, str], wanted: str) -> list[int]:
    """What passed on another machine, or with other libraries, may have another digest: it does not count here."""
    return [seed for seed in seeds if done.get(seed) != wanted]


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the cluster is taken down with it
    sizes = map(int, options.layout.split(","))
    layout = runner.layout_of(
        *sizes, sharded=options.distributed or options.buddy, buddy=options.buddy, exact=not options.overlap
    )
    optimizer = "distributed" if layout.sharded else "plain"
    optimizer += "-buddy" * options.buddy + "-overlap" * options.overlap
    may_move = _core.num_cuda_devices() == 0
    seeds = range(options.seed, options.seed + options.count)
    options.into.parent.mkdir(parents=True, exist_ok=True)
    folder, wrong, began = options.folder / f"{options.layout}-{optimizer}", 0, time.monotonic()
    setting = runner.Options(
        layout, folder=folder, measure_unmanaged=False, variant=Variant(overlap=options.overlap),
        timeout_s=options.timeout,
    )  # fmt: skip
    ran = 0
    try:
        with runner.Suite(setting, Progress()) as suite:
            wanted = reference_digest(suite, layout)
            for seed in left_of(seeds, known(options.into, options.layout, optimizer), wanted):
                if options.seconds and time.monotonic() - began > options.seconds:
                    print(f"no more after {options.seconds:g} s")
                    break
                ran += 1
                result = judge(suite, history(layout, seed, may_move=may_move), layout, wanted)
                wrong += not result["passed"]
                print(f"{seed}: {'passed' if result['passed'] else result['reasons']}: {result['says']}", flush=True)
                line = {"layout": options.layout, "optimizer": optimizer, "seed": seed, "reference": wanted, **result}
                with open(options.into, "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                if not result["passed"]:
                    suite.renew()  # the next one shall not suffer from this one
    except (WatchProblem, ClusterProblem) as problem:
        print(f"{options.layout}: {problem}", file=sys.stderr)
        return 1
    print(f"{ran} histories, {wrong} not passed, in {time.monotonic() - began:.0f} s; {options.into}")
    done = known(options.into, options.layout, optimizer)
    same = len(done) - len(left_of(list(done), done, wanted))
    print(f"{optimizer}, {options.layout}: {same} seeds in all end in {wanted}")
    return 1 if wrong else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=Path("results/histories.jsonl"), help="kept results")
    parser.add_argument("--layout", default="1,1,4", help="tp,pp,dp")
    parser.add_argument("--distributed", action="store_true", help="the distributed optimizer, narrower and wide again")
    parser.add_argument(
        "--buddy", action="store_true", help="... with copies of the shards elsewhere: nodes are lost, too"
    )
    parser.add_argument("--overlap", action="store_true", help="segments are reduced under the backward, in floats")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first one")
    parser.add_argument("--seconds", type=float, default=0, help="none begins after so long; 0: no bound")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds for one, beside its iterations")
    parser.add_argument("--folder", type=Path, default=Path("results/histories"), help="records and logs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
