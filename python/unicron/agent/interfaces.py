"""Which network interface a node uses for control and which for state: decided from what is there and what is wanted.
Pure; runtime/networks.py looks.

Control is the agent's line to the coordinator and the store it advertises; state is the workers' process groups, over
which a role's state travels to its heir. Without a word from anybody both take the interface that the route to the
coordinator takes: it is known to lead somewhere that all nodes reach.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unicron.types import Network

FASTER_BY = 2  # rated so many times faster: worth a word
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
IPV4_ONLY = "this version speaks IPv4"
STATE_ADDRESS = "UNICRON_STATE_ADDRESS"  # tells a worker which of the interface's addresses


class NoInterface(OSError):
    """What is wanted cannot be had; one text that says what there is and what to do."""


@dataclass(frozen=True, slots=True)
class Interface:
    name: str
    addresses: tuple[str, ...] = ()  # with their prefix lengths: 10.0.0.2/24
    is_up: bool = True
    is_loopback: bool = False
    rated_mbit: int = 0  # 0: the kernel does not know it

    @property
    def usable(self) -> tuple[str, ...]:
        """Addresses that others can be told: of IPv4, for sockets, beats and gloo's devices are made of it; and a
        link-local one means another interface on another machine."""
        known = (ipaddress.ip_interface(address).ip for address in self.addresses)
        return tuple(str(address) for address in known if address.version == 4 and not address.is_link_local)


@dataclass(frozen=True, slots=True)
class Wanted:
    text: str = ""  # a name, an address or a network; "": whatever the route takes
    why: str = ""  # the option or variable that says so


@dataclass(frozen=True, slots=True)
class Route:
    towards: str
    own: str = ""  # our address on the way there; "": no way is known
    peer: str = ""
    problem: str = ""


def choose(found: Sequence[Interface], wanted: Wanted, route: Route) -> Network:
    """Raises NoInterface."""
    if not wanted.text:
        return _by_route(found, route)
    named = next((each for each in found if each.name == wanted.text), None)
    if named is not None:
        return _of(named, found, wanted, next(iter(named.usable), ""))
    network = network_of(wanted.text)
    if network is None:
        is_network = "/" in wanted.text  # no interface may be called so
        text = f"{wanted.text!r} is no valid network" if is_network else f"no interface {wanted.text!r} here"
        raise NoInterface(absent(found, wanted, text))
    if network.version == 6:
        raise NoInterface(absent(found, wanted, f"{wanted.text} is of IPv6; {IPV4_ONLY}"))
    inside = [
        (not each.is_up, address != route.own, each.is_loopback, index, address)
        for index, each in enumerate(found)
        for address in each.usable
        if ipaddress.ip_address(address) in network
    ]
    if inside:
        *_, index, address = min(inside, key=lambda each: each[:-1])
        return _of(found[index], found, wanted, address)
    local = next((each for each in found if each.is_loopback and network.num_addresses == 1), None)
    if local is not None and network.is_loopback:  # all of 127.0.0.0/8 is this machine
        return _of(local, found, wanted, str(network.network_address))
    text = "no interface has this address" if network.num_addresses == 1 else "no interface has an address in it"
    raise NoInterface(absent(found, wanted, f"{wanted.text}: {text}"))


def choose_state(
    found: Sequence[Interface], wanted: Wanted, control: Network, route: Route, environment: Mapping[str, str]
) -> Network:
    """As wanted; else what gloo was told already; else control's. Raises NoInterface."""
    if wanted.text:
        return choose(found, wanted, route)
    told = environment.get(GLOO, "").split(",")[0]
    if told:
        try:
            return choose(found, Wanted(told, GLOO), route)
        except NoInterface:  # a job on GPUs does not use it: doubts() tells it
            pass
    return Network(control.interface, control.address, "the same as control", control.rated_mbit)


def doubts(
    found: Sequence[Interface], control: Network, state: Network, route: Route, environment: Mapping[str, str]
) -> list[str]:
    """What works and is probably not meant, a line each."""
    said = []
    for use, chosen, option in (("control", control, "--interface"), ("state", state, "--state-interface")):
        if use == "state" and state.address == control.address:
            continue
        if is_loopback(chosen.address) and route.peer and not is_loopback(route.peer):
            said.append(
                f"{use} goes over loopback ({chosen.address}, {chosen.why}), and {route.towards} is not there:"
                f" no other node reaches this one; give {option}"
            )
    told = environment.get(GLOO, "")
    if told and told.split(",")[0] != state.interface:
        said.append(f"{GLOO}={told} is set and stays: gloo uses it, not {state.interface} ({state.why})")
    if told := environment.get(NCCL, ""):
        taken = nccl_interfaces(told, [each.name for each in found if each.is_up and each.addresses])
        if state.interface not in taken[:1]:
            used = f"NCCL uses {taken[0]}" if taken else "NCCL finds no interface that fits it"
            said.append(f"{NCCL}={told} is set and stays: {used}, not {state.interface} ({state.why})")
    if not route.own:
        said.append(f"no way to {route.towards} now ({route.problem}): it is called again and again")
    faster = max((each for each in found if each.is_up and each.usable), key=lambda e: e.rated_mbit, default=None)
    if faster is not None and 0 < state.rated_mbit * FASTER_BY <= faster.rated_mbit:
        said.append(
            f"state goes over {state.interface} ({rated_words(state.rated_mbit)}), and {faster.name} is rated"
            f" {rated_words(faster.rated_mbit)}: --state-interface {faster.name}, if all nodes are on it"
        )
    return said


def socket_environment(state: Network | None, environment: Mapping[str, str]) -> dict[str, str]:
    """What a worker's process groups are told, where nobody else told them: by name, for that is what they take."""
    if state is None or not state.interface:
        return {}
    added = {}
    if not environment.get(GLOO):
        added = {GLOO: state.interface, STATE_ADDRESS: state.address}
    if not environment.get(NCCL):
        added[NCCL] = f"={state.interface}"  # NCCL takes it for a prefix otherwise
    return added


def nccl_interfaces(told: str, names: Sequence[str]) -> list[str]:
    """Those that NCCL takes, in its order, which is the kernel's, as names has to be. told: NCCL_SOCKET_IFNAME, a list
    of prefixes; with '=' before it of whole names, with '^' of what it must not be."""
    listed = told.removeprefix("^")
    is_whole = listed.startswith("=")
    items = [item.partition(":")[0] for item in listed.removeprefix("=").split(",")]  # a port may follow

    def fits(name: str) -> bool:
        return any(name == item if is_whole else name.startswith(item) for item in items if item)

    return [name for name in names if fits(name) != told.startswith("^")]


def words(found: Sequence[Interface]) -> str:
    return "; ".join(map(interface_words, found)) or "none at all"


def interface_words(interface: Interface) -> str:
    addresses = " ".join(interface.addresses) or "no address"
    state = "up" if interface.is_up else "down"
    return f"{interface.name} {addresses}, {state}, {rated_words(interface.rated_mbit)}"


def network_words(network: Network) -> str:
    return f"{network.interface or 'an unknown interface'} {network.address}, {rated_words(network.rated_mbit)}"


def rated_words(mbit: int) -> str:
    if not mbit:
        return "speed unknown"
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit} Mbit/s"


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _by_route(found: Sequence[Interface], route: Route) -> Network:
    if not route.own:
        raise NoInterface(
            f"no way to {route.towards} ({route.problem}), so no interface is known to lead there. There are:"
            f" {words(found)}. Mend the name or the route, or give --interface NAME, ADDRESS or CIDR"
        )
    own = ipaddress.ip_address(route.own)
    holder = next((each for each in found if own in {ipaddress.ip_interface(a).ip for a in each.addresses}), None)
    name, rated = (holder.name, holder.rated_mbit) if holder is not None else ("", 0)
    return Network(name, route.own, f"route to {route.towards}", rated)


def _of(interface: Interface, found: Sequence[Interface], wanted: Wanted, address: str) -> Network:
    if not interface.is_up:
        raise NoInterface(absent(found, wanted, f"{interface.name} is down"))
    if not address:
        raise NoInterface(absent(found, wanted, f"{interface.name} {_why_unusable(interface)}"))
    return Network(interface.name, address, wanted.why, interface.rated_mbit)


def _why_unusable(interface: Interface) -> str:
    known = [ipaddress.ip_interface(address).ip for address in interface.addresses]
    if not known:
        return "has no address"
    if all(address.is_link_local for address in known):
        return "has link-local addresses only"
    return f"has IPv6 addresses only; {IPV4_ONLY}"


def network_of(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def absent(found: Sequence[Interface], wanted: Wanted, what: str) -> str:
    return (
        f"{wanted.why}: {what}. There are: {words(found)}."
        f" Give the name, an address or a network (CIDR) of one that is up and has an address"
    )
