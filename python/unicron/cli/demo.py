"""unicron demo: train a real GPT on this machine, break it, compare with a run that nothing
broke.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from unicron.cli.common import Instances, Json, Problem, buddies_of, print_json, with_instances
from unicron.demo.scenarios import ITERATIONS

OPTIMIZERS = ("plain", "distributed")
RECOVERIES = ("in-order",)
Iterations = Annotated[int, typer.Option(help="Compared after so many; faults come at 12 to 19.", min=25)]
Experts = Annotated[int, typer.Option(help="In each layer of the model; 0: none.", min=0)]
ExpertParallel = Annotated[int, typer.Option("--ep", help="Data-parallel ranks that experts are spread over.", min=1)]


def main(
    scenario: Annotated[str, typer.Option(help="A scenario's name, several with commas, or all.")] = "all",
    iterations: Iterations = ITERATIONS,
    layout: Annotated[str, typer.Option(help="tp,pp,dp")] = "1,1,4",
    optimizer: Annotated[str, typer.Option(help=" | ".join(OPTIMIZERS))] = "plain",
    overlap: Annotated[bool, typer.Option("--overlap", help="The script asks for overlapped communication.")] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="Parameters in bf16, main parameters in fp32.")] = False,
    fp16: Annotated[bool, typer.Option("--fp16", help="The same in fp16, with a loss scale that adapts.")] = False,
    sequence_parallel: Annotated[bool, typer.Option("--sequence-parallel", help="Where tp > 1.")] = False,
    dropout: Annotated[float, typer.Option(help="Of the model.", min=0.0, max=0.9)] = 0.0,
    experts: Experts = 0,
    ep: ExpertParallel = 1,
    virtual_pp: Annotated[int, typer.Option(help="Model chunks a rank; above 1 pp is interleaved.", min=1)] = 1,
    recovery: Annotated[str, typer.Option(help=" | ".join(RECOVERIES))] = "in-order",
    exact: Annotated[bool, typer.Option("--exact", help="Sums in integers: the same bits at any width.")] = False,
    buddy: Annotated[bool, typer.Option("--buddy", help="Of a distributed optimizer: copies on another node.")] = False,
    buddy_every: Annotated[int, typer.Option(help="The same, every so many iterations, beside the training.")] = 0,
    optimizer_instances: Instances = 1,
    seed: Annotated[int, typer.Option(help="Of random-kills.")] = 0,
    report: Annotated[str, typer.Option(help="Folder of runs, logs and picture.")] = "unicron-demo",
    keep: Annotated[bool, typer.Option("--keep", help="Keep gradients and weights.")] = False,
    unmanaged: Annotated[bool, typer.Option(help="Also run the script without unicron, for its speed.")] = True,
    json: Json = False,
) -> int:
    """Train a real megatron-core GPT on a small local cluster, break it, and compare.

    Example: unicron demo --scenario kill-compute --layout 1,2,2
    """
    from unicron.demo import report as reporting
    from unicron.demo import scenarios
    from unicron.demo.progress import Progress
    from unicron.demo.runner import Options, Suite, layout_of
    from unicron.demo.variant import Variant
    from unicron.demo.watch import WatchProblem
    from unicron.runtime.local_cluster import ClusterProblem

    _refuse("optimizer", optimizer, OPTIMIZERS)
    _refuse("recovery", recovery, RECOVERIES)
    sharded = optimizer == "distributed"
    buddy = _buddies(buddy, buddy_every, sharded=sharded)
    names = _names(scenario, scenarios.names(), scenarios.in_all(sharded=sharded))
    kind: Any = {"sharded": sharded, "exact": exact, "buddy": buddy, "buddy_every": buddy_every}
    options = Options(
        with_instances(layout_of(*_sizes(layout, experts, ep), ep=ep, **kind), optimizer_instances),
        iterations,
        seed,
        Path(report),
        measure_unmanaged=unmanaged,
        keep=keep,
        variant=Variant(overlap, bf16, fp16, sequence_parallel, dropout, virtual_pp, experts=experts),
    )
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupted)
    progress, started = Progress(), time.monotonic()
    outcomes = []
    try:
        with Suite(options, progress) as suite:
            for outcome in suite.run(names):
                outcomes.append(outcome)
                if json:
                    print_json(outcome.result)
    except (WatchProblem, ClusterProblem) as problem:
        raise Problem(str(problem)) from None
    if json:
        reporting.picture(outcomes, options.folder)
    else:
        reporting.show(outcomes, options.folder, progress.console)
    progress.console.print(f"{time.monotonic() - started:.0f} s in all", markup=False)
    return 0 if all(outcome.result["passed"] for outcome in outcomes) else 1


def _interrupted(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _buddies(buddy: bool, every: int, *, sharded: bool) -> bool:
    wanted = buddies_of(buddy, every)
    if wanted and not sharded:
        raise Problem("--buddy copies shards of the distributed optimizer: add --optimizer distributed", 2)
    return wanted


def _refuse(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise Problem(f"--{option} {value!r}: this version has {', '.join(known)}", 2)


def _sizes(layout: str, experts: int, ep: int) -> tuple[int, int, int]:
    words = layout.split(",")
    if len(words) != 3 or not all(word.strip().isdecimal() for word in words):
        raise Problem(f"--layout {layout!r}: give tp,pp,dp, as 1,2,2", 2)
    tp, pp, dp = (int(word) for word in words)
    why = _why_not(tp, pp, dp) or _why_no_experts(experts, ep, tp, dp)
    if why:
        raise Problem(f"--layout {layout}: {why}", 2)
    return tp, pp, dp


def _why_not(tp: int, pp: int, dp: int) -> str:
    """The demo's model has 4 layers and 4 heads. A single replica is healed, too (its understudies take over its
    arenas), but scenarios lose whole nodes."""
    if tp not in (1, 2, 4):
        return f"tp {tp} does not divide the model's 4 heads"
    if pp not in (1, 2, 4):
        return f"pp {pp} does not divide the model's 4 layers"
    if dp < 2:
        return "dp must be at least 2: scenarios lose whole nodes, and another replica goes on (unicron run takes dp 1)"
    return ""


def _why_no_experts(experts: int, ep: int, tp: int, dp: int) -> str:
    if ep > 1 and experts % ep:
        return f"--experts {experts} do not divide by --ep {ep}"
    if ep > 1 and not experts:
        return "--ep spreads experts: add --experts"
    if experts == 1:
        return "--experts 1: a token takes two"
    if dp % ep or dp < 2 * ep:
        return f"with --ep {ep} dp must be a multiple of it, at least {2 * ep}: a lost node is a whole replica"
    return ""


def _names(asked: str, known: tuple[str, ...], every: tuple[str, ...]) -> tuple[str, ...]:
    import difflib

    if asked == "all":
        return every
    names: list[Any] = [name.strip() for name in asked.split(",") if name.strip()]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"did you mean {close[0]}?" if close else f"known: all, {', '.join(known)}"
            raise Problem(f"no scenario {name!r}: {hint}", 2)
    return tuple(names)
