"""unicron keys: the CURVE key pairs of a cluster: make, rotate, revoke."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from unicron.cli.common import Json, Problem, print_json

DIRECTORY = Path("keys")


def main(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="[DIRECTORY] | rotate [DIRECTORY] | node NODE [DIRECTORY] | revoke NODE|KEY [DIRECTORY]"),
    ] = None,
    replace: Annotated[
        bool, typer.Option(help="Make new ones over existing ones: everybody needs them again.")
    ] = False,
    use: Annotated[bool, typer.Option(help="Of rotate: the prepared keys become the present ones.")] = False,
    finish: Annotated[bool, typer.Option(help="Of rotate: the former keys are refused from now on.")] = False,
    json: Json = False,
) -> None:
    """Make the key pairs of a cluster: coordinator, agent, client, worker. DIRECTORY is keys where none is given.

    rotate: new keys in three steps, while everything runs: prepare, then --use, then --finish; copy the directory to
    all machines after each. node: a key for one node's agent alone. revoke: a key is refused from now on.

    Example: unicron keys /etc/unicron/keys
    """
    match words or []:
        case ["rotate", *rest]:
            _rotate(_directory(rest), use, finish, json)
        case ["node", node, *rest]:
            _node(_directory(rest), node, json)
        case ["revoke", who, *rest]:
            _revoke(_directory(rest), who, json)
        case ["node" | "revoke"]:
            raise Problem("name the node: unicron keys node n3, unicron keys revoke n3", 2)
        case rest:
            _make(_directory(rest), replace, json)


def _directory(rest: list[str]) -> Path:
    if len(rest) > 1:
        raise Problem(f"one directory, not {' '.join(rest)}; unicron keys --help shows how", 2)
    return Path(rest[0]) if rest else DIRECTORY


def _say(json: bool, lines: list[str], **facts: Any) -> None:
    if json:
        print_json(facts)
    else:
        print("\n".join(lines))


def _make(directory: Path, replace: bool, json: bool) -> None:
    from unicron.runtime.keys import make_directory

    pairs = make_directory(directory, replace=replace)
    lines = [f"{directory / role}.key  {pair.public}" for role, pair in pairs.items()]
    lines += ["Agents need agent.key, worker.key and coordinator.pub;"]
    lines += ["command lines need client.key and coordinator.pub."]
    _say(json, lines, directory=str(directory), **{role: pair.public for role, pair in pairs.items()})


def _rotate(directory: Path, use: bool, finish: bool, json: bool) -> None:
    from unicron.runtime import key_rotation

    if use and finish:
        raise Problem("--use and --finish are two steps: copy the keys to all machines between them", 2)
    if finish:
        roles = key_rotation.finish(directory)
        step, then = "finished", "The former keys are refused here; copy the directory to all machines once more."
    elif use:
        roles = key_rotation.use(directory)
        step, then = "used", "Copy the directory to all machines; when all have it: unicron keys rotate --finish."
    else:
        roles = [*key_rotation.prepare(directory)]
        step, then = "prepared", "Copy the directory to all machines; when all have it: unicron keys rotate --use."
    _say(json, [f"{step}: {', '.join(roles)}", then], step=step, roles=roles)


def _node(directory: Path, node: str, json: bool) -> None:
    from unicron.runtime.key_rotation import make_node

    pair = make_node(directory, node)
    path = directory / "nodes" / f"{node}.key"
    _say(json, [f"{path}  {pair.public}", f"It becomes agent.key on {node}."], node=node, public=pair.public)


def _revoke(directory: Path, who: str, json: bool) -> None:
    from unicron.runtime.key_rotation import revoke

    public = revoke(directory, who)
    lines = [f"{who} is refused: {public}", "Its machine still knows worker.key: rotate the keys, too."]
    _say(json, lines, revoked=public)
