"""This machine's network interfaces, and the way to the coordinator: what agent/interfaces.py decides from.

Interfaces and addresses are asked of the kernel over netlink, which knows all of an interface's addresses and stays
right in a network namespace, where /sys may show another one's; the rated speed is in /sys alone.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unicron.agent.interfaces import (
    Interface,
    NoInterface,
    Route,
    Wanted,
    choose,
    choose_state,
    doubts,
    network_words,
)
from unicron.runtime.probe import parse_endpoint
from unicron.types import Network

SYS = Path("/sys/class/net")
INTERFACE, STATE_INTERFACE = "UNICRON_INTERFACE", "UNICRON_STATE_INTERFACE"
ANYWHERE = "tcp://203.0.113.1:9"  # documentation's own network: whoever is asked the way there names the default route
ANSWER_S_MAX = 5.0
ANSWER_BYTES = 1 << 16
DEPTH_MAX = 4  # a VLAN on a bond on cards

# linux/netlink.h, linux/rtnetlink.h, linux/if.h
NLM_F_REQUEST_DUMP = 0x301
NLMSG_ERROR, NLMSG_DONE = 2, 3
RTM_NEWLINK, RTM_GETLINK, RTM_NEWADDR, RTM_GETADDR = 16, 18, 20, 22
IFLA_IFNAME, IFA_ADDRESS, IFA_LOCAL = 3, 1, 2
IFF_UP, IFF_LOOPBACK, IFF_RUNNING = 0x1, 0x8, 0x40
HEADER = struct.Struct("=IHHII")  # nlmsghdr
LINK = struct.Struct("=BxHiII")  # ifinfomsg
ADDRESS = struct.Struct("=BBBBi")  # ifaddrmsg
ATTRIBUTE = struct.Struct("=HH")


@dataclass(frozen=True)
class Networks:
    control: Network
    state: Network
    doubts: tuple[str, ...]
    is_named: bool = False  # control's: somebody wanted that one


def choose_networks(
    endpoints: Sequence[str], interface: str, state_interface: str, environment: Mapping[str, str]
) -> Networks:
    """endpoints: of the coordinators. interface, state_interface: of the options, '' where they are not given. Raises
    NoInterface."""
    found, route = interfaces(), route_to_any(endpoints)
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
    try:
        host, port = parse_endpoint(endpoint)
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as way:
            way.connect(address)
            return Route(towards, str(way.getsockname()[0]), str(way.getpeername()[0]))
    except ValueError as error:
        raise NoInterface(str(error)) from None
    except OSError as error:
        return Route(towards, problem=error.strerror or str(error))


def numeric(host: str) -> str:
    """An address of a name, as `--host` may be one; what is an address, a name of an interface or unknown stays."""
    try:
        if host in {name for _, name in socket.if_nameindex()}:
            return host
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0][4][0])
    except OSError:
        return host


def interfaces(sys: Path = SYS) -> tuple[Interface, ...]:
    """In the kernel's order."""
    names: dict[int, tuple[str, int]] = {}
    for body in _dump(RTM_GETLINK, RTM_NEWLINK, LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0)):
        _, _, index, flags, _ = LINK.unpack_from(body)
        name = dict(_attributes(body[LINK.size :])).get(IFLA_IFNAME, b"").rstrip(b"\0").decode(errors="replace")
        names[index] = name, flags
    addresses: dict[int, list[str]] = {}
    for body in _dump(RTM_GETADDR, RTM_NEWADDR, ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)):
        family, prefix, _, _, index = ADDRESS.unpack_from(body)
        told = dict(_attributes(body[ADDRESS.size :]))
        raw = told.get(IFA_LOCAL, told.get(IFA_ADDRESS, b""))  # of a point-to-point link the other is the peer's
        if family in (socket.AF_INET, socket.AF_INET6) and raw:
            addresses.setdefault(index, []).append(f"{socket.inet_ntop(family, raw)}/{prefix}")
    return tuple(
        Interface(
            name,
            tuple(addresses.get(index, ())),
            bool(flags & IFF_UP and flags & (IFF_RUNNING | IFF_LOOPBACK)),
            bool(flags & IFF_LOOPBACK),
            rated_mbit(sys / name),
        )
        for index, (name, flags) in names.items()
    )


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


def _dump(request: int, kind: int, body: bytes) -> Iterator[bytes]:
    """The bodies of all messages of one kind with which the kernel answers."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as line:
        line.settimeout(ANSWER_S_MAX)
        line.bind((0, 0))
        line.send(HEADER.pack(HEADER.size + len(body), request, NLM_F_REQUEST_DUMP, 1, 0) + body)
        while True:
            data = line.recv(ANSWER_BYTES)
            while len(data) >= HEADER.size:
                length, found, _, _, _ = HEADER.unpack_from(data)
                if found == NLMSG_DONE or length < HEADER.size:
                    return
                if found == NLMSG_ERROR:
                    code = -struct.unpack_from("=i", data, HEADER.size)[0]
                    raise OSError(code, f"the kernel does not tell its interfaces: {os.strerror(code)}")
                if found == kind:
                    yield data[HEADER.size : length]
                data = data[_aligned(length) :]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= ATTRIBUTE.size:
        length, kind = ATTRIBUTE.unpack_from(data)
        if length < ATTRIBUTE.size:
            return
        yield kind, data[ATTRIBUTE.size : length]
        data = data[_aligned(length) :]


def _aligned(length: int) -> int:
    return (length + 3) & ~3
