"""Where a worker's process groups listen: at the address that its agent chose, or where gloo was told."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from unicron.runtime import networks
from unicron.training.gloo_device import interface_name, make_device

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
