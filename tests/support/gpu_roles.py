"""Processes of the GPU tests and benches: an owner whose state must outlive it, and the heir that takes it over.

    python gpu_roles.py ROLE SOCKET-DESCRIPTOR JSON-OPTIONS

Messages are JSON lines on a Unix socket; descriptors travel with them. Who starts the roles holds the descriptors and
has no CUDA context, like an agent.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DESCRIPTORS_MAX = 250


class Line:
    """JSON lines with descriptors over a Unix socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._data = b""
        self._fds: list[int] = []

    def send(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        data = json.dumps(message).encode() + b"\n"
        if fds:
            socket.send_fds(self._socket, [data], fds)
        else:
            self._socket.sendall(data)

    def receive(self, timeout_s: float = 60) -> tuple[dict[str, Any], list[int]]:
        self._socket.settimeout(timeout_s)
        while b"\n" not in self._data:
            data, fds, _, _ = socket.recv_fds(self._socket, 65536, DESCRIPTORS_MAX)
            if not data:
                raise ConnectionError("the other process ended")
            self._data += data
            self._fds += fds
        text, self._data = self._data.split(b"\n", 1)
        fds, self._fds = self._fds, []
        return json.loads(text), fds


class Role:
    """One started role."""

    def __init__(self, name: str, **options: Any) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        command = [sys.executable, str(Path(__file__)), name, str(theirs.fileno()), json.dumps(options)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        self.pidfd = os.pidfd_open(self.process.pid)
        theirs.close()
        self.socket = ours
        self.line = Line(ours)

    def wait_gone(self, timeout_s: float) -> bool:
        """Until nothing of the process is left (its GPU context included): its pidfd is readable."""
        return bool(select.select([self.pidfd], [], [], timeout_s)[0])

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(30)
        os.close(self.pidfd)
        self.socket.close()


@contextlib.contextmanager
def role(name: str, **options: Any) -> Iterator[Role]:
    started = Role(name, **options)
    try:
        yield started
    finally:
        started.close()


# ---------------------------------------------------------------- the state: the same script in owner and heir


class State:
    """Parameters and AdamW state of a few layers, born in an arena; big: further bytes in one tensor."""

    def __init__(self, device: int, own_memory: bool, big_bytes: int, fill: bool) -> None:
        import torch

        from unicron.training.arena_pool import ArenaPool

        torch.cuda.set_device(device)
        torch.zeros(1, device="cuda")
        self.pool = ArenaPool(device, own_memory=own_memory)
        with self.pool.born_here():
            layers = [torch.nn.Linear(1024, 1024, device="cuda") for _ in range(4)]
            self.parameters = [p for layer in layers for p in layer.parameters()]
            self.big = torch.empty(max(big_bytes // 8, 1), dtype=torch.int64, device="cuda")
            optimizer = torch.optim.AdamW(self.parameters, fused=True)
            for parameter in self.parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        self.tensors = [p.data for p in self.parameters] + [
            value for p in self.parameters for key, value in sorted(optimizer.state[p].items()) if value.numel() > 1
        ]
        if fill:
            self.fill()
        torch.cuda.synchronize()

    def fill(self) -> None:
        import torch

        for number, tensor in enumerate(self.tensors):
            tensor.copy_(torch.arange(tensor.numel(), device="cuda").view(tensor.shape) % 1009 + number)
        torch.arange(self.big.numel(), out=self.big)
        self.big.mul_(0x9E3779B97F4A7C1)

    def rewrite(self) -> None:
        """Every word by itself: whenever this is cut off, what is there is what fill() wrote."""
        for tensor in self.tensors:
            tensor.mul_(1)
        self.big.add_(0)

    def num_wrong(self) -> int:
        """Words that are not what fill() writes."""
        import torch

        wrong = 0
        for number, tensor in enumerate(self.tensors):
            expected = torch.arange(tensor.numel(), device="cuda").view(tensor.shape) % 1009 + number
            wrong += int((tensor != expected).sum())
        step = 1 << 26
        for start in range(0, self.big.numel(), step):
            part = self.big[start : start + step]
            expected = torch.arange(start, start + part.numel(), device="cuda").mul_(0x9E3779B97F4A7C1)
            wrong += int((part != expected).sum())
        return wrong

    def digest(self) -> int:
        from unicron import _core

        address, nbytes = self.big.data_ptr(), self.big.numel() * 8
        return int(_core.gpu_digest(self.pool.device, [(address, nbytes, 0)], 20_000))


def owner(line: Line, device: int, big_bytes: int, end: str) -> None:
    import torch

    state = State(device, True, big_bytes, True)
    arena = state.pool.arena
    fds = arena.export_all()
    facts = {
        "sizes": [nbytes for _, _, nbytes in arena.slabs()], "layout": state.pool.layout_digest(),
        "digest": state.digest(), "inside": all(state.pool.place_of(t) is not None for t in state.tensors),
        "memory_bytes": arena.memory_bytes, "tensor_bytes": sum(t.nbytes for t in [*state.tensors, state.big]),
    }  # fmt: skip
    line.send(facts, fds)
    for fd in fds:
        os.close(fd)
    line.receive()
    if end == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if end == "illegal":
        from unicron import _core

        stream = torch.cuda.current_stream().cuda_stream
        _core.gpu_exact_to_float(device, 16, 16, 4, 0, stream)  # no memory is there
        with contextlib.suppress(Exception):
            torch.cuda.synchronize()
        os.abort()
    if end == "exit":
        os._exit(0)
    while True:  # busy with writing what is there already, until killed
        state.rewrite()
        torch.cuda.synchronize()


def heir(line: Line, device: int, big_bytes: int) -> None:
    import torch

    before = _free_bytes(device)
    begun = time.monotonic()
    state = State(device, False, big_bytes, False)
    ready_s = time.monotonic() - begun
    line.send(
        {"layout": state.pool.layout_digest(), "memory_bytes": state.pool.arena.memory_bytes, "ready_s": ready_s,
         "used_bytes": before - _free_bytes(device)}
    )  # fmt: skip
    message, fds = line.receive(120)
    begun = time.monotonic()
    state.pool.arena.adopt(fds, message["sizes"])
    adopted_ms = (time.monotonic() - begun) * 1000
    for fd in fds:
        os.close(fd)
    wrong, digest = state.num_wrong(), state.digest()
    state.fill()
    torch.cuda.synchronize()
    line.send({"adopt_ms": adopted_ms, "wrong": wrong, "digest": digest, "writable": state.num_wrong() == 0})
    line.receive()


def _free_bytes(device: int) -> int:
    """What this GPU has free, told by nvidia-smi: asking CUDA would make the context whose size is wanted."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={device}"]
    used = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    return -(int(used.split()[0]) << 20)


def main() -> None:
    from gpu_nccl_roles import NCCL_ROLES

    name, descriptor, options = sys.argv[1:4]
    line = Line(socket.socket(fileno=int(descriptor)))
    roles: dict[str, Callable[..., None]] = {"owner": owner, "heir": heir, **NCCL_ROLES}
    roles[name](line, **json.loads(options))


if __name__ == "__main__":
    main()
