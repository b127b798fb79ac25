"""This machine's network interfaces, and the way to the coordinator: what agent/interfaces.py decides from.

Interfaces and addresses are asked of the kernel (psutil), which stays right in a network namespace, where /sys may show
another one's; what is behind an interface, and so whether its rated speed means something, is in /sys alone.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from unicron.agent.interfaces import (
    Interface,
    NoInterface,
    Route,
    Wanted,
    absent,
    choose,
    choose_state,
    doubts,
    network_of,
    network_words,
)
from unicron.runtime.endpoints import numeric, parse_endpoint
from unicron.types import Network

SYS = Path("/sys/class/net")
INTERFACE, STATE_INTERFACE = "UNICRON_INTERFACE", "UNICRON_STATE_INTERFACE"
HOST = "--host"
ANYWHERE = "tcp://203.0.113.1:9"  # documentation's own network: whoever is asked the way there names the default route
DEPTH_MAX = 4  # a VLAN on a bond on cards


@dataclass(frozen=True)
class Networks:
    control: Network
    state: Network
    doubts: tuple[str, ...]
    is_named: bool = False  # control's: somebody wanted that one


def choose_networks(
    endpoints: Sequence[str], interface: str, state_interface: str, environment: Mapping[str, str], *, host: str = ""
) -> Networks:
    """endpoints: of the coordinators. interface, state_interface, host: of the options, '' where they are not given.
    Raises NoInterface."""
    found, route = interfaces(), route_to_any(endpoints)
    if host and not interface:
        named = Wanted(_of_host(host, found), HOST)
    else:
        named = wanted(interface, "--interface", environment, INTERFACE)
    control = choose(found, named, route)
    asked = wanted(state_interface, "--state-interface", environment, STATE_INTERFACE)
    state = choose_state(found, asked, control, route, environment)
    said = doubts(found, control, state, route, environment)
    return Networks(control, state, tuple(said), bool(named.text))


def tell_networks(log: logging.Logger, chosen: Networks) -> None:
    for use, network in (("control", chosen.control), ("state", chosen.state)):
        log.info("%s over %s (%s)", use, network_words(network), network.why)
    for doubt in chosen.doubts:
        log.warning("%s", doubt)


def wanted(value: str, option: str, environment: Mapping[str, str], variable: str) -> Wanted:
    if value:
        return Wanted(value, option)
    told = environment.get(variable, "")
    return Wanted(told, variable) if told else Wanted()


def route_to_any(endpoints: Sequence[str]) -> Route:
    """To the first of them to which there is one."""
    routes = []
    for endpoint in endpoints:
        routes.append(route_to(endpoint))
        if routes[-1].own:
            return routes[-1]
    return routes[0]


def route_to(endpoint: str) -> Route:
    """Asked of the kernel by a connected UDP socket: nothing is sent."""
    towards = "anywhere (the default route)" if endpoint == ANYWHERE else endpoint.removeprefix("tcp://")
    host, port = parse_endpoint(endpoint)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as way:
            way.connect((numeric(host), port))
            return Route(towards, str(way.getsockname()[0]), str(way.getpeername()[0]))
    except OSError as error:
        return Route(towards, problem=error.strerror or str(error))


def _of_host(host: str, found: Sequence[Interface]) -> str:
    """An address of a name, which `--host` may be; what --interface takes, too, stays."""
    if any(host == each.name for each in found) or network_of(host) is not None:
        return host
    try:
        return numeric(host)
    except OSError as error:
        text = f"{host!r} is no interface here, and as a host's name: {error.strerror}"
        raise NoInterface(absent(found, Wanted(host, HOST), text)) from None


def interfaces(sys: Path = SYS) -> tuple[Interface, ...]:
    """In the kernel's order."""
    addresses, stats = psutil.net_if_addrs(), psutil.net_if_stats()
    found = []
    for _, name in socket.if_nameindex():
        flags = set(stats[name].flags.split(",")) if name in stats else set()
        known = tuple(_with_prefix(each.address, each.netmask) for each in addresses.get(name, ()) if each.netmask)
        is_loopback = "loopback" in flags
        is_up = "up" in flags and ("running" in flags or is_loopback)
        found.append(Interface(name, known, is_up, is_loopback, rated_mbit(sys / name)))
    return tuple(found)


def _with_prefix(address: str, netmask: str) -> str:
    """'10.0.0.2/24'; a link-local address without the name of its interface."""
    return f"{address.partition('%')[0]}/{int(ipaddress.ip_address(netmask)).bit_count()}"


def rated_mbit(card: Path) -> int:
    """What the kernel says, 0 where it says nothing, or of a device that is only software: a veth's 10 Gbit/s are
    nobody's."""
    if not _is_hardware(card):
        return 0
    try:
        return max(int((card / "speed").read_text()), 0)
    except (OSError, ValueError):
        return 0


def _is_hardware(card: Path, depth: int = DEPTH_MAX) -> bool:
    """It has a device behind it, or lies on something that has: a bond, a VLAN, a bridge."""
    if (card / "device").exists():
        return True
    return depth > 0 and any(_is_hardware(lower, depth - 1) for lower in card.glob("lower_*"))
