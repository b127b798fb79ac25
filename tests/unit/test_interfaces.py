"""Which interface for control and which for state: the decision, from tables of what is there and what is wanted."""

from __future__ import annotations

import pytest

from unicron.agent.interfaces import (
    Interface,
    NoInterface,
    Route,
    Wanted,
    choose,
    choose_state,
    doubts,
    nccl_interfaces,
    socket_environment,
)
from unicron.messages import AgentHello, decode, encode
from unicron.types import Network

LO = Interface("lo", ("127.0.0.1/8", "::1/128"), is_loopback=True)
ETH0 = Interface("eth0", ("10.0.0.2/24", "fd00::2/64", "fe80::2/64"), rated_mbit=25_000)
ETH1 = Interface("eth1", ("10.0.1.2/24", "10.0.2.2/24"))
IB0 = Interface("ib0", ("10.9.0.2/16",), rated_mbit=200_000)
DOWN = Interface("eth2", ("10.3.0.2/24",), is_up=False)
BARE = Interface("eth3")
LINK_LOCAL = Interface("eth4", ("fe80::4/64",))
ONLY_IPV6 = Interface("eth6", ("fe80::6/64", "fd06::2/64"))
HERE = (LO, ETH0, ETH1, IB0, DOWN, BARE, LINK_LOCAL, ONLY_IPV6)
ROUTE = Route("head:7070", "10.0.0.2", "10.0.0.1")
LOCAL = Route("127.0.0.1:7070", "127.0.0.1", "127.0.0.1")
CONTROL = Network("eth0", "10.0.0.2", "route to head:7070", 25_000)


@pytest.mark.parametrize(
    ("text", "interface", "address"),
    [
        ("eth0", "eth0", "10.0.0.2"),
        ("eth1", "eth1", "10.0.1.2"),
        ("10.0.2.2", "eth1", "10.0.2.2"),
        ("10.0.2.0/24", "eth1", "10.0.2.2"),
        ("10.9.7.1/16", "ib0", "10.9.0.2"),  # an address with its prefix: the network that it is in
        ("10.0.0.0/8", "eth0", "10.0.0.2"),
        ("10.0.0.0/14", "eth0", "10.0.0.2"),  # not eth2, which is down
        ("0.0.0.0/0", "eth0", "10.0.0.2"),  # not lo, which the kernel has first
        ("lo", "lo", "127.0.0.1"),
        ("127.0.0.7", "lo", "127.0.0.7"),
    ],
)
def test_what_is_wanted(text: str, interface: str, address: str) -> None:
    chosen = choose(HERE, Wanted(text, "--interface"), ROUTE)
    assert (chosen.interface, chosen.address, chosen.why) == (interface, address, "--interface")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("eth7", "no interface 'eth7' here"),
        ("eth2", "eth2 is down"),
        ("10.3.0.2", "eth2 is down"),
        ("eth3", "eth3 has no address"),
        ("eth4", "eth4 has link-local addresses only"),
        ("10.7.0.1", "no interface has this address"),
        ("10.7.0.0/16", "no interface has an address in it"),
        ("eth0,eth1", "no interface 'eth0,eth1' here"),
        ("10.0.0.0/99", "'10.0.0.0/99' is no valid network"),
        ("10.0.0/8", "'10.0.0/8' is no valid network"),
        ("eth6", "eth6 has IPv6 addresses only; this version speaks IPv4"),
        ("fd00::2", "fd00::2 is of IPv6; this version speaks IPv4"),
        ("fd00::/64", "fd00::/64 is of IPv6; this version speaks IPv4"),
        ("::1", "::1 is of IPv6; this version speaks IPv4"),
    ],
)
def test_what_cannot_be_had_is_said_with_what_there_is(text: str, why: str) -> None:
    with pytest.raises(NoInterface) as problem:
        choose(HERE, Wanted(text, "UNICRON_INTERFACE"), ROUTE)
    said = str(problem.value)
    assert said.startswith("UNICRON_INTERFACE: ") and why in said
    for part in ("eth0 10.0.0.2/24", "25 Gbit/s", "eth2 10.3.0.2/24, down", "eth3 no address", "Give the name"):
        assert part in said


def test_nobody_says_anything() -> None:
    assert choose(HERE, Wanted(), ROUTE) == CONTROL
    assert choose(HERE, Wanted(), LOCAL) == Network("lo", "127.0.0.1", "route to 127.0.0.1:7070")
    elsewhere = choose(HERE, Wanted(), Route("head:7070", "172.16.0.1", "172.16.0.9"))
    assert (elsewhere.interface, elsewhere.address) == ("", "172.16.0.1")  # on none that is known: as the kernel says
    with pytest.raises(NoInterface, match=r"no way to head:7070 \(Network is unreachable\).*--interface NAME"):
        choose(HERE, Wanted(), Route("head:7070", problem="Network is unreachable"))


@pytest.mark.parametrize(
    ("text", "route", "address"),
    [
        ("10.0.0.0/8", Route("head:7070", "10.0.2.2", "10.0.2.1"), "10.0.2.2"),  # the one that leads there
        ("10.0.0.0/8", Route("head:7070", "192.0.2.9", "192.0.2.1"), "10.0.0.2"),  # none leads there: the first
        ("0.0.0.0/0", LOCAL, "127.0.0.1"),
        ("0.0.0.0/0", Route("head:7070", problem="Network is unreachable"), "10.0.0.2"),
        ("10.3.0.0/16", Route("head:7070", "10.3.0.9", "10.3.0.1"), "10.3.0.9"),
    ],
)
def test_of_a_network_with_several_addresses_the_one_that_leads_to_the_coordinator(
    text: str, route: Route, address: str
) -> None:
    found = (*HERE, Interface("eth5", ("10.3.0.9/24",)))
    assert choose(found, Wanted(text, "--interface"), route).address == address


@pytest.mark.parametrize(
    ("wanted", "environment", "interface", "why"),
    [
        (Wanted(), {}, "eth0", "the same as control"),
        (Wanted("ib0", "--state-interface"), {}, "ib0", "--state-interface"),
        (Wanted("ib0", "--state-interface"), {"GLOO_SOCKET_IFNAME": "eth1"}, "ib0", "--state-interface"),
        (Wanted(), {"GLOO_SOCKET_IFNAME": "eth1,ib0"}, "eth1", "GLOO_SOCKET_IFNAME"),
        (Wanted(), {"GLOO_SOCKET_IFNAME": "eth7"}, "eth0", "the same as control"),
    ],
)
def test_state(wanted: Wanted, environment: dict[str, str], interface: str, why: str) -> None:
    chosen = choose_state(HERE, wanted, CONTROL, ROUTE, environment)
    assert (chosen.interface, chosen.why) == (interface, why)


OVER_LO = Network("lo", "127.0.0.1", "--interface")
OVER_ETH1 = Network("eth1", "10.0.1.2", "--state-interface")
OVER_IB0 = Network("ib0", "10.9.0.2", "--state-interface", 200_000)


@pytest.mark.parametrize(
    ("control", "state", "route", "environment", "said"),
    [
        (CONTROL, OVER_IB0, ROUTE, {}, []),
        (CONTROL, OVER_ETH1, ROUTE, {}, []),  # its speed is not known: nothing is faster
        (CONTROL, CONTROL, ROUTE, {}, ["--state-interface ib0, if all nodes"]),
        (OVER_LO, OVER_LO, LOCAL, {}, []),
        (OVER_LO, OVER_LO, ROUTE, {}, ["control goes over loopback"]),
        (OVER_LO, OVER_IB0, ROUTE, {}, ["control goes over loopback"]),
        (CONTROL, OVER_LO, ROUTE, {}, ["state goes over loopback"]),
        (CONTROL, OVER_IB0, ROUTE, {"GLOO_SOCKET_IFNAME": "ib0"}, []),
        (CONTROL, OVER_IB0, ROUTE, {"GLOO_SOCKET_IFNAME": "eth1"}, ["GLOO_SOCKET_IFNAME=eth1 is set and stays"]),
        (CONTROL, OVER_IB0, ROUTE, {"NCCL_SOCKET_IFNAME": ""}, []),
        (CONTROL, OVER_IB0, ROUTE, {"NCCL_SOCKET_IFNAME": "ib"}, []),
        (CONTROL, OVER_IB0, ROUTE, {"NCCL_SOCKET_IFNAME": "=ib0:5000"}, []),
        (CONTROL, OVER_IB0, ROUTE, {"NCCL_SOCKET_IFNAME": "^lo,eth"}, []),
        (CONTROL, OVER_IB0, ROUTE, {"NCCL_SOCKET_IFNAME": "lo"}, ["NCCL uses lo, not ib0 (--state-interface)"]),
        (CONTROL, OVER_IB0, ROUTE, {"NCCL_SOCKET_IFNAME": "^docker0"}, ["NCCL uses lo, not ib0"]),
        (CONTROL, OVER_IB0, ROUTE, {"NCCL_SOCKET_IFNAME": "ib,eth"}, ["NCCL uses eth0, not ib0"]),
        (CONTROL, OVER_IB0, ROUTE, {"NCCL_SOCKET_IFNAME": "=ib"}, ["NCCL finds no interface that fits it"]),
        (CONTROL, OVER_IB0, ROUTE, {"NCCL_SOCKET_IFNAME": "docker0"}, ["NCCL finds no interface that fits it"]),
        (CONTROL, OVER_IB0, Route("head:7070", problem="unknown"), {}, ["no way to head:7070 now (unknown)"]),
    ],
)
def test_what_is_probably_not_meant(
    control: Network, state: Network, route: Route, environment: dict[str, str], said: list[str]
) -> None:
    found = doubts(HERE, control, state, route, environment)
    assert len(found) == len(said), found
    assert all(part in text for part, text in zip(said, found, strict=True)), found


def test_what_workers_are_told_unless_a_person_told_them() -> None:
    ours = {"GLOO_SOCKET_IFNAME": "eth0", "UNICRON_STATE_ADDRESS": "10.0.0.2"}
    assert socket_environment(CONTROL, {}) == {**ours, "NCCL_SOCKET_IFNAME": "=eth0"}
    assert socket_environment(CONTROL, {"NCCL_SOCKET_IFNAME": "ib"}) == ours
    empty = {"NCCL_SOCKET_IFNAME": "", "GLOO_SOCKET_IFNAME": ""}  # whoever empties one told nothing
    assert socket_environment(CONTROL, empty) == socket_environment(CONTROL, {})
    assert socket_environment(CONTROL, {"GLOO_SOCKET_IFNAME": "ib0"}) == {"NCCL_SOCKET_IFNAME": "=eth0"}
    assert socket_environment(Network("", "172.16.0.1", "route"), {}) == socket_environment(None, {}) == {}


@pytest.mark.parametrize(
    ("told", "taken"),
    [
        ("eth", ["eth0", "eth1"]),
        ("eth1,lo", ["lo", "eth1"]),  # in the kernel's order
        ("=eth", []),
        ("=eth1,lo", ["lo", "eth1"]),
        ("^eth", ["lo", "ib0"]),
        ("^=eth0,lo", ["eth1", "ib0"]),
        ("^docker", ["lo", "eth0", "eth1", "ib0"]),
        ("ib0:18000", ["ib0"]),
        (",", []),
    ],
)
def test_what_nccl_takes(told: str, taken: list[str]) -> None:
    assert nccl_interfaces(told, ["lo", "eth0", "eth1", "ib0"]) == taken


def test_an_agent_of_before_says_none() -> None:
    hello = AgentHello("n0", 1, 1, 0, "tcp://10.0.0.2:7", "k", control_network=CONTROL, state_network=OVER_IB0)
    assert decode(encode(hello)) == hello
    assert AgentHello("n0", 1, 1, 0, "tcp://10.0.0.2:7", "k").state_network is None
