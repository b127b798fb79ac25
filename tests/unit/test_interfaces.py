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
HERE = (LO, ETH0, ETH1, IB0, DOWN, BARE, LINK_LOCAL)
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
        ("10.0.0.0/8", "eth0", "10.0.0.2"),  # the first, as the kernel has them
        ("fd00::/64", "eth0", "fd00::2"),
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


def test_an_address_is_of_the_family_that_the_coordinator_is_called_by() -> None:
    assert choose(HERE, Wanted("eth0", "--interface"), Route("h:1", "fd00::2", "fd00::1")).address == "fd00::2"


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
    assert socket_environment(CONTROL, {"GLOO_SOCKET_IFNAME": "ib0"}) == {"NCCL_SOCKET_IFNAME": "=eth0"}
    assert socket_environment(Network("", "172.16.0.1", "route"), {}) == socket_environment(None, {}) == {}


def test_an_agent_of_before_says_none() -> None:
    hello = AgentHello("n0", 1, 1, 0, "tcp://10.0.0.2:7", "k", control_network=CONTROL, state_network=OVER_IB0)
    assert decode(encode(hello)) == hello
    assert AgentHello("n0", 1, 1, 0, "tcp://10.0.0.2:7", "k").state_network is None
