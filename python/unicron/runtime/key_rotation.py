"""New keys in the place of old ones, and keys that are not admitted any more, while everything runs.

A rotation has three steps, and between any two of them every key that is in use anywhere is admitted everywhere, once
the directory was copied to all machines:

    prepare   <role>.next.key, <role>.next.pub      everybody admits, and knows, the next keys besides the present ones
    use       <role>.next.* becomes <role>.*, the old public half <role>.former.pub      whoever connects uses the new
    finish    <role>.former.pub goes                the old keys are refused

    nodes/<node>.key     an agent's key that is good for this node alone: it becomes that node's agent.key
    revoked              public keys that are refused, whatever else admits them: one a line, with a name
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from unicron.runtime.files import write_atomically
from unicron.runtime.keys import ROLES, Z85_CHARS, KeyPair, KeyProblem, generate, load_public, save

NODES = "nodes"
REVOKED = "revoked"
NODE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def prepare(directory: Path, roles: Sequence[str] = ROLES) -> dict[str, KeyPair]:
    _require_directory(directory)
    under_way = [role for role in ROLES for kind in ("next", "former") if (directory / f"{role}.{kind}.pub").exists()]
    if under_way:
        raise KeyProblem(f"a rotation of {under_way[0]} is under way in {directory}: go on with --use, then --finish")
    pairs = {role: generate() for role in roles}
    for role, pair in pairs.items():
        save(pair, directory / f"{role}.next.key")
    return pairs


def use(directory: Path) -> list[str]:
    """The roles whose next keys are the present ones now."""
    _require_directory(directory)
    roles = [role for role in ROLES if (directory / f"{role}.next.key").exists()]
    if not roles:
        raise KeyProblem(f"no next keys in {directory}: prepare them with `unicron keys rotate {directory}`")
    for role in roles:  # whoever reads in between finds the old public half, the new one, or both
        write_atomically(directory / f"{role}.former.pub", load_public(str(directory / f"{role}.pub")) + "\n")
        os.replace(directory / f"{role}.next.key", directory / f"{role}.key")
        os.replace(directory / f"{role}.next.pub", directory / f"{role}.pub")
    return roles


def finish(directory: Path) -> list[str]:
    """The roles whose former keys are refused now."""
    _require_directory(directory)
    roles = [role for role in ROLES if (directory / f"{role}.former.pub").exists()]
    if not roles:
        raise KeyProblem(f"no former keys in {directory}: nothing to finish")
    for role in roles:
        (directory / f"{role}.former.pub").unlink()
    return roles


def make_node(directory: Path, node: str) -> KeyPair:
    """A pair for this node's agent."""
    _require_directory(directory)
    if not NODE_NAME.fullmatch(node):
        raise KeyProblem(f"{node!r} is no name of a node")
    (directory / NODES).mkdir(mode=0o700, exist_ok=True)
    pair = generate()
    save(pair, directory / NODES / f"{node}.key")
    return pair


def revoke(directory: Path, who: str) -> str:
    """A node with a key of its own, or a public key; the key. It is refused from now on."""
    _require_directory(directory)
    path = directory / NODES / f"{who}.pub"
    if path.exists():
        public = load_public(str(path))
    elif len(who) == Z85_CHARS:
        public = who
    else:
        raise KeyProblem(
            f"{who!r} has no key of its own in {directory / NODES}, and is no public key: a key that all share is"
            " replaced, not revoked (`unicron keys rotate`)"
        )
    shared = [role for role in ROLES if (directory / f"{role}.pub").exists() and public == present(directory, role)]
    if shared:
        raise KeyProblem(f"that is the key of every {shared[0]}: replace it (`unicron keys rotate`)")
    known = revoked(directory)
    if public not in known:
        text = "".join(f"{key} {name}\n" for key, name in {**known, public: who}.items())
        write_atomically(directory / REVOKED, text)
    path.with_suffix(".key").unlink(missing_ok=True)
    return public


def revoked(directory: Path) -> dict[str, str]:
    """{public key: whose}."""
    try:
        lines = (directory / REVOKED).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:  # whom it refuses must not come in because it cannot be read
        raise KeyProblem(f"cannot read {directory / REVOKED} ({error}): restore it, or move it away") from None
    return {key: name for key, _, name in (line.partition(" ") for line in lines) if len(key) == Z85_CHARS}


def present(directory: Path, role: str) -> str:
    """Where only the pair lies, its public half."""
    path = directory / f"{role}.pub"
    pair = directory / f"{role}.key"
    if path.exists() or not pair.exists():
        return load_public(str(path))
    try:
        return load_public(str(pair))
    except KeyProblem:  # few need the pair, all need the public half: that one is missed
        raise KeyProblem(f"no {path}: copy it from where the keys were made") from None


def publics(directory: Path, role: str) -> list[str]:
    """Every public key of this role that counts now, the present one first."""
    others = (directory / f"{role}.{kind}.pub" for kind in ("next", "former"))
    found = [present(directory, role), *(load_public(str(path)) for path in others if path.exists())]
    refused = revoked(directory)
    return [key for key in found if key not in refused]


def node_publics(directory: Path) -> dict[str, str]:
    """{public key: node} of the nodes that have one of their own, and still may."""
    refused = revoked(directory)
    found = {load_public(str(path)): path.stem for path in sorted((directory / NODES).glob("*.pub"))}
    return {key: node for key, node in found.items() if key not in refused}


def _require_directory(directory: Path) -> None:
    if not (directory / "coordinator.pub").exists():
        raise KeyProblem(f"no keys in {directory}: make them with `unicron keys {directory}`")
