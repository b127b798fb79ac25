"""unicron agent: a node's supervisor."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from unicron.cli.common import INT_MAX, Interface, Keys, Problem, StateInterface


def main(
    coordinator: Annotated[str, typer.Option(help="host:port of the coordinator; of several: with commas between.")],
    slots: Annotated[int, typer.Option(min=1, max=INT_MAX, help="Workers this node can hold.")],
    understudies: Annotated[int, typer.Option(min=0, max=INT_MAX, help="Warm processes beside them.")] = 1,
    node: Annotated[str, typer.Option(help="Name of the node; default Slurm's, else the host's.")] = "",
    host: Annotated[
        str, typer.Option(help="Another word for --interface, of an address or a host's name; auto: the route's.")
    ] = "auto",
    interface: Interface = "",
    state_interface: StateInterface = "",
    keys: Keys = "",
    run_dir: Annotated[Path, typer.Option(help="For its sockets; default by uid.")] = Path(""),
    incarnation: Annotated[
        int,
        typer.Option(min=0, max=INT_MAX, help="Number of this life; 0: one more than the last on its run directory."),
    ] = 0,
    metrics: Annotated[
        str, typer.Option(help="host:port of /metrics, /healthz and /readyz; empty for none.")
    ] = "127.0.0.1:7072",
    imports: Annotated[
        str, typer.Option("--import", help="What the template imports beforehand.")
    ] = "torch,megatron.core",
    checks: Annotated[
        bool, typer.Option(help="Look at the hardware before the node is used, and after each incident on it.")
    ] = True,
    verbose: Annotated[bool, typer.Option("--verbose", "-v")] = False,
) -> int:
    """A node's supervisor: starts workers, sees them die, keeps their state. Ends with them.

    Example: unicron agent --coordinator 10.0.0.1:7070 --slots 8 --interface eth0 --keys keys
    """
    if "SLURM_STEP_ID" in os.environ:  # Slurm sends a job's notice to all its steps, unless that says B:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # and no worker shall die of it
    from unicron.planner.cluster import NAME
    from unicron.runtime import logs
    from unicron.runtime.agent_daemon import run_with_template
    from unicron.runtime.agent_process import AgentSettings
    from unicron.runtime.slurm import node_name

    logs.set_up(verbose=verbose)
    name = node or node_name(os.environ)
    if not NAME.fullmatch(name):
        raise Problem(f"node {name!r}: a name has letters, digits, '_', '.' and '-' only: give --node", 2)
    directory = run_dir if str(run_dir) != "." else Path(f"/tmp/unicron-{os.getuid()}") / name
    settings = AgentSettings(
        node=name,
        coordinator=coordinator,
        keys=keys or os.environ.get("UNICRON_KEYS", "keys"),
        slots=slots,
        understudies=understudies,
        run_dir=str(directory),
        interface=interface,
        host="" if host == "auto" else host,
        state_interface=state_interface,
        metrics=metrics,
        checks=checks,
        incarnation=incarnation,
    )
    return run_with_template(settings, imports)
