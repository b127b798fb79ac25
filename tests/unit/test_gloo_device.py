"""Where a worker's process groups listen: at the address that its agent chose, or where gloo was told."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from unicron.coordinator import diagnosis
from unicron.diagnosis import Scope, diagnose_text
from unicron.messages import ExceptionRaised, WorkerLost
from unicron.runtime import networks
from unicron.training.exceptions import describe
from unicron.training.gloo_device import StateAddressGone, interface_name, make_device
from unicron.types import Method, Severity, Stage

LISTEN = "0A"


def listening() -> dict[str, str]:
    """inode -> IPv4 address, of what listens here."""
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return {row[9]: socket.inet_ntoa(bytes.fromhex(row[1].partition(":")[0])[::-1]) for row in rows if row[3] == LISTEN}


def addresses_of_a_device() -> set[str]:
    before = listening()
    device = make_device()
    found = {address for inode, address in listening().items() if inode not in before}
    assert device is not None
    return found


def test_the_address_that_was_chosen_or_the_interface_that_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNICRON_STATE_ADDRESS", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert addresses_of_a_device() == {"127.0.0.1"}
    monkeypatch.setenv("UNICRON_STATE_ADDRESS", "127.0.0.5")
    assert addresses_of_a_device() == {"127.0.0.5"}
    monkeypatch.delenv("UNICRON_STATE_ADDRESS")
    outside = [
        e for e in networks.interfaces() if e.is_up and not e.is_loopback and e.usable and ":" not in e.usable[0]
    ]
    if outside:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", f"{outside[0].name},lo")
        assert addresses_of_a_device() == {outside[0].usable[0]}


def test_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0,eth1")
    assert interface_name(on_gpu=False) == "eth0"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert interface_name(on_gpu=False) == ""


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("=ib0", "ib0"),
        ("ib", "ib0"),
        ("ib,veth", "ib0"),
        ("ib,eth1", ""),  # it takes both
        ("eth", ""),
        ("^docker0", ""),
        ("docker", ""),
        ("", ""),
    ],
)
def test_its_name_as_nccl_reads_it(told: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(("lo", "eth0", "eth1", "ib0"))))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", told)
    assert interface_name(on_gpu=True) == name


def test_an_address_that_is_gone_is_the_nodes_fault_and_no_proof_against_the_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second time at the same place in another incarnation would end the task else."""
    monkeypatch.setenv("UNICRON_STATE_ADDRESS", "192.0.2.77")
    with pytest.raises(StateAddressGone) as problem:
        make_device()
    told = describe(problem.value)
    found = diagnose_text(f"{told.text}\n{told.type}")
    assert (found.severity, found.scope, found.rule) == (Severity.SEV1, Scope.NODE, "store.state-address-gone")
    stage = next(iter(Stage))
    lost = WorkerLost(
        "n0", "t", "n0.w0", 2, 0, Method.EXCEPTION.value, told.type, told.text, stage, 0, -1, 0, 0, "", told.where
    )
    raised = ExceptionRaised("n0.w0", 0, 1, 0, -1, stage, told.type, told.text, told.where, 0)
    assert diagnosis.signature_of(lost, None) == diagnosis.signature_of(lost, raised) == ""
