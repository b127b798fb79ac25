"""What an heir pays for its predecessor's state on a GPU: a mapping per slab, whatever the content's size.

What its slabs showed until then it lets go of while the predecessor ends.

Owner and heir are processes of their own; the descriptors are held by this one, which has no CUDA context. `ready` is
an understudy's arena built without memory, `memory of its own` what it costs to fill it instead, `digest` reads all of
it once. Needs a GPU and neither torch nor cupy.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
import common
from gpu_roles import Line
from unicron import _core

GIB = 1 << 30


def timed_ms(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return (time.perf_counter() - begun) * 1000


def owner(line: Line, nbytes: int) -> None:
    arena = _core.GpuArena(0, 0, True)
    begun = time.perf_counter()
    addresses = [arena.allocate(min(GIB, nbytes)) for _ in range(max(1, nbytes // GIB))]
    build_ms = (time.perf_counter() - begun) * 1000
    copier = _core.GpuCopier(0)
    for address in addresses[1:]:  # something else than what the memory held
        copier.copy(address, addresses[0], GIB, "plain", 60_000)
    digests = [_core.gpu_digest(0, [(address, min(GIB, nbytes), 0)], 60_000) for address in addresses]
    sizes = [size for _, _, size in arena.slabs()]
    line.send({"sizes": sizes, "build_ms": build_ms, "digests": digests}, arena.export_all())
    line.receive()


def heir(line: Line, nbytes: int) -> None:
    context_ms = timed_ms(lambda: _core.load_kernels(0))
    arena = _core.GpuArena(0, 0, False)
    begun = time.perf_counter()
    addresses = [arena.allocate(min(GIB, nbytes)) for _ in range(max(1, nbytes // GIB))]
    ready_ms = (time.perf_counter() - begun) * 1000
    line.send({})
    message, fds = line.receive(120)
    let_go_ms = timed_ms(arena.let_go)
    adopt_ms = timed_ms(lambda: arena.adopt(fds, message["sizes"]))
    digests: list[int] = []
    digest_ms = timed_ms(
        lambda: digests.extend(_core.gpu_digest(0, [(address, min(GIB, nbytes), 0)], 60_000) for address in addresses)
    )
    line.send(
        {"context_ms": context_ms, "ready_ms": ready_ms, "let_go_ms": let_go_ms, "adopt_ms": adopt_ms,
         "digest_ms": digest_ms, "digests": digests}
    )  # fmt: skip


def start(role: str, nbytes: int) -> tuple[subprocess.Popen[bytes], Line]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    command = [sys.executable, __file__, "--role", role, "--fd", str(theirs.fileno()), "--bytes", str(nbytes)]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    return process, Line(ours)


def one_run(nbytes: int) -> dict[str, float]:
    first, to_owner = start("owner", nbytes)
    second, to_heir = start("heir", nbytes)
    told, fds = to_owner.receive(120)
    to_heir.receive(120)
    first.kill()
    first.wait(60)
    to_heir.send({"sizes": told["sizes"]}, fds)
    found, _ = to_heir.receive(120)
    second.wait(60)
    for fd in fds:
        os.close(fd)
    if found.pop("digests") != told["digests"]:
        raise AssertionError("the heir found other content")
    found["build_ms"] = told["build_ms"]
    return found


def main() -> None:
    parser = common.parser(__doc__.splitlines()[0], runs=3)
    parser.add_argument("--gib", type=float, nargs="*", default=[1, 4, 16, 48], help="sizes of the state")
    for hidden in ("--role", "--fd", "--bytes"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        line = Line(socket.socket(fileno=int(options.fd)))
        {"owner": owner, "heir": heir}[options.role](line, int(options.bytes))
        return
    bench = common.Bench("state of a dead process on a GPU", unit="ms", configuration={"device": 0})
    for gib in options.gib:
        runs = [one_run(int(gib * GIB)) for _ in range(options.runs)]
        for name, meaning in (
            ("adopt_ms", "map the predecessor's"), ("let_go_ms", "let go of what is shared"),
            ("ready_ms", "understudy's, without memory"),
            ("build_ms", "with memory of its own"), ("digest_ms", "digest of all of it"), ("context_ms", "context"),
        ):  # fmt: skip
            bench.add(f"{gib:g} GiB, {meaning}", [run[name] for run in runs])
    bench.finish(options)


if __name__ == "__main__":
    main()
