"""State that outlives its process on a GPU: born in the arena, handed on by descriptors, found word for word."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time

import pytest

from gpu_roles import Role, role

GIB = 1 << 30
UNDERSTUDY_BYTES_MAX = 3 * GIB // 2
ODD_BYTES = 37 * (1 << 20) + 8  # no slab is of a round size in a real model


def used_mib() -> int:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    return int(text.split()[0])


def end(owner: Role, how: str) -> None:
    if how == "kill":
        owner.process.send_signal(signal.SIGKILL)
    else:
        owner.line.send({"end": how})
    assert owner.wait_gone(30)


@pytest.mark.parametrize("how", ["kill", "segv", "illegal", "exit"])
def test_state_outlives_its_process(how: str) -> None:
    """The heir, built beforehand without memory on the busy GPU, finds every word and can write."""
    big_bytes = 2 * GIB + ODD_BYTES
    with contextlib.ExitStack() as roles:
        owner = roles.enter_context(role("owner", device=0, big_bytes=big_bytes, end=how))
        if how == "kill":  # one after the other: what the understudy takes of the GPU is looked at
            told, fds = owner.line.receive(90)
        heir = roles.enter_context(role("heir", device=0, big_bytes=big_bytes))
        if how != "kill":
            told, fds = owner.line.receive(90)
        assert told["inside"], "a tensor of the state lies outside of the arena"
        assert told["memory_bytes"] <= told["tensor_bytes"] + 512 * (1 << 20)
        ready, _ = heir.line.receive(90)
        assert ready["layout"] == told["layout"]
        assert ready["memory_bytes"] == 64 << 20
        if how == "kill":
            assert ready["used_bytes"] <= UNDERSTUDY_BYTES_MAX
            owner.line.send({"end": how})  # busy from now on
            time.sleep(0.3)
        end(owner, how)
        heir.line.send({"sizes": told["sizes"]}, fds)
        found, _ = heir.line.receive(90)
        print(f"{how}: {found}, understudy {ready}")
        assert found["wrong"] == 0 and found["digest"] == told["digest"] and found["writable"]
        for fd in fds:
            os.close(fd)


def test_memory_is_given_back_with_the_last_descriptor() -> None:
    before = used_mib()
    with role("owner", device=0, big_bytes=4 * GIB, end="exit") as owner:
        _, fds = owner.line.receive(90)
        end(owner, "exit")
        assert used_mib() - before >= 4096
        for fd in fds:
            os.close(fd)
    deadline = time.monotonic() + 5
    while used_mib() - before > 512 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert used_mib() - before <= 512


def test_another_layout_is_refused() -> None:
    with role("owner", device=0, big_bytes=GIB, end="exit") as owner:
        told, fds = owner.line.receive(90)
        end(owner, "exit")
        with role("heir", device=0, big_bytes=2 * GIB) as heir:
            ready, _ = heir.line.receive(90)
            assert ready["layout"] != told["layout"]
            heir.line.send({"sizes": told["sizes"]}, fds)
            assert heir.process.wait(30) != 0
        for fd in fds:
            os.close(fd)


def test_the_memory_of_one_gpu_is_read_from_the_other(two_gpus: None) -> None:
    big_bytes = GIB
    with role("owner", device=0, big_bytes=big_bytes, end="exit") as owner:
        told, fds = owner.line.receive(90)
        with role("reader", device=1, sizes=told["sizes"], big_bytes=big_bytes) as reader:
            reader.line.receive(90)
            reader.line.send({}, fds)
            seen, _ = reader.line.receive(90)
            print(seen)
            assert told["digest"] in seen["digests"].values()
            assert len(set(seen["digests"].values())) == 1
        for fd in fds:
            os.close(fd)
