"""CURVE key pairs: who may speak to whom.

One directory holds the pairs of a cluster, one file a role, each 0600 in a directory 0700:

    coordinator.key   the coordinator's own pair; everybody else needs only its public half
    agent.key         what agents show to the coordinator (one for all agents of a cluster)
    client.key        what the command line shows to the coordinator
    worker.key        what workers show to the rendezvous stores

A file is JSON ``{"public": Z85, "secret": Z85}``; ``<role>.pub`` holds the public half alone.
Rejected: certificates of ``zmq.auth``, because they keep both halves in a ZPL text whose secret
file is written with the process's umask.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from unicron.runtime.files import make_folder

ROLES = ("coordinator", "agent", "client", "worker")
Z85_CHARS = 40  # 32 bytes
KEY_FILE_BYTES_MAX = 4096


class KeyProblem(ValueError):
    """A key file that cannot be used; the text says why and what to do."""


class KeyPair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    public: str
    secret: str

    # a secret must not get into a log through a traceback or an f-string
    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r}, secret=...)"


def generate() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def save(pair: KeyPair, path: Path, *, replace: bool = False) -> None:
    """Write a pair, readable by its owner alone from the first byte on. Never overwrites unless
    told to.
    """
    text = json.dumps({"public": pair.public, "secret": pair.secret}) + "\n"
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise KeyProblem(f"cannot write {path}: {error.strerror}: give a directory that you may write") from None
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.replace(staging, path)
        else:
            os.link(staging, path)
    except FileExistsError:
        raise KeyProblem(f"{path} exists already: remove it or pass --replace") from None
    finally:
        staging.unlink(missing_ok=True)
    public = path.with_suffix(".pub")
    public.write_text(pair.public + "\n", encoding="utf-8")


def load(path: Path) -> KeyPair:
    """Read a pair; refuses files that others may read, and halves that do not belong together."""
    try:
        info = path.stat()
    except FileNotFoundError:
        text = (
            f"no key file {path}: copy it from the directory that the coordinator's keys are in, or, for a new cluster,"
            f" make all of them with `unicron keys DIRECTORY`"
        )
        raise KeyProblem(text) from None
    except OSError as error:
        raise _unreadable(path, error) from None
    if stat.S_IMODE(info.st_mode) & 0o077:
        raise KeyProblem(f"{path} can be read by others: chmod 600 {path}")
    if info.st_size > KEY_FILE_BYTES_MAX:
        raise KeyProblem(f"{path} is not a key file: {info.st_size} bytes")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None
    try:
        pair = msgspec.json.decode(data, type=KeyPair)
        matches = zmq.curve_public(pair.secret.encode()) == pair.public.encode()
    except (msgspec.DecodeError, zmq.ZMQError, ValueError) as error:
        raise KeyProblem(f"{path} is not a key file: {error}") from None
    if not matches:
        raise KeyProblem(f"{path}: the public half does not belong to the secret one")
    return pair


def _unreadable(path: Path, error: OSError) -> KeyProblem:
    where = "give the directory that `unicron keys` made (--keys, UNICRON_KEYS)"
    return KeyProblem(f"cannot read the key file {path}: {error.strerror}: {where}")


def is_public(text: str) -> bool:
    if len(text) != Z85_CHARS:
        return False
    try:
        z85.decode(text.encode())
    except (KeyError, ValueError, struct.error):  # not its letters, or a number beyond its 32 bits
        return False
    return True


def load_public(text_or_path: str) -> str:
    """A public key given as Z85, as a .pub file or as a .key file."""
    path = Path(text_or_path)
    if is_public(text_or_path) and not path.exists():  # Z85 knows the slash, too
        return text_or_path
    if path.suffix == ".key":
        return load(path).public
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise KeyProblem(f"no public key in {path}: {error.strerror}") from None
    if not is_public(text):
        raise KeyProblem(
            f"{path} holds no public key (40 characters of Z85): copy it again from where the keys were made"
        )
    return text


def make_directory(directory: Path, *, replace: bool = False) -> dict[str, KeyPair]:
    """The four pairs of a cluster."""
    make_folder(directory, "directory of the keys")
    existing = [role for role in ROLES if (directory / f"{role}.key").exists()]
    if existing and not replace:
        path = directory / f"{existing[0]}.key"
        raise KeyProblem(f"{path} exists already: pass --replace to make new ones")
    pairs = {role: generate() for role in ROLES}
    for role, pair in pairs.items():
        save(pair, directory / f"{role}.key", replace=replace)
    return pairs


def load_directory(directory: Path) -> dict[str, KeyPair]:
    """The four pairs, as they were made."""
    return {role: load(directory / f"{role}.key") for role in ROLES}
