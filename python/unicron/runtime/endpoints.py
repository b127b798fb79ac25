"""host:port, as people and daemons write it: the one place that reads it, because libzmq takes whatever port it is
given modulo 2^16, and an IPv6 address that was let in fails far from whoever gave it.
"""

from __future__ import annotations

import ipaddress
import re
import socket

from unicron.agent.interfaces import IPV4_ONLY

HOST = re.compile(r"[\w.-]+", re.ASCII)
PORT = re.compile(r"-?[0-9]{1,9}")
PORT_MAX = (1 << 16) - 1


class EndpointProblem(OSError):
    """It cannot be one; the text names it and who gave it."""


def parse_endpoint(
    endpoint: str, where: str = "", *, listens: bool = False, may_be_ipv6: bool = False
) -> tuple[str, int]:
    """'tcp://a:1' and 'a:1' -> ('a', 1). where: who gave it, for the text. listens: port 0 is any that is free. Raises
    EndpointProblem."""
    said = f"{where}: {endpoint!r}" if where else repr(endpoint)
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    is_ipv6 = _is_ipv6(host)
    if is_ipv6 and not may_be_ipv6:
        raise EndpointProblem(f"{said} is an IPv6 address; {IPV4_ONLY}")
    if not (is_ipv6 or HOST.fullmatch(host)):
        raise EndpointProblem(f"{said} is not host:port")
    if not PORT.fullmatch(port):
        raise EndpointProblem(f"{said} is not host:port: the port must be a number, 1 to {PORT_MAX}")
    if problem := port_problem(int(port), listens=listens):
        raise EndpointProblem(f"{said}: {problem}")
    return host.strip("[]"), int(port)


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).version == 6
    except ValueError:
        return False


def port_problem(port: int, *, listens: bool = False) -> str:
    """'' where it is one."""
    if (0 if listens else 1) <= port <= PORT_MAX:
        return ""
    return f"the port must be 1 to {PORT_MAX}{', or 0 for any that is free' if listens else ''}"


def endpoints_of(addresses: str, where: str = "--coordinator") -> tuple[str, ...]:
    """'a:1,b:2' -> ('tcp://a:1', 'tcp://b:2'). Raises EndpointProblem."""
    parts = [part.strip() for part in addresses.split(",") if part.strip()]
    if not parts:
        raise EndpointProblem(f"{where}: {addresses!r} names no coordinator: give host:port, or several with commas")
    return tuple(f"tcp://{host}:{port}" for host, port in (parse_endpoint(part, where) for part in parts))


def numeric(host: str) -> str:
    """The IPv4 address of a name, asked of the resolver, which may take seconds; raises OSError."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_DGRAM)[0][4][0])
    except socket.gaierror as error:
        if _has_ipv6(host):
            raise OSError(error.errno, f"{host} has IPv6 addresses only; {IPV4_ONLY}") from None
        raise OSError(error.errno, error.strerror) from None
    except UnicodeError:  # a part of it is empty or too long
        raise OSError(socket.EAI_NONAME, "no host can have this name") from None


def _has_ipv6(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None, socket.AF_INET6, socket.SOCK_DGRAM))
    except OSError:
        return False


def require_names(endpoints: tuple[str, ...], where: str) -> None:
    """EndpointProblem where not one of their names means an address now: for whoever would wait for them in vain. A
    daemon calls again and again instead: names come back."""
    problems = []
    for endpoint in endpoints:
        host, port = parse_endpoint(endpoint)
        try:
            numeric(host)
            return
        except OSError as error:
            problems.append(f"{host}:{port}: {error.strerror}")
    raise EndpointProblem(f"{where}: no address is known of {', '.join(problems)}")
