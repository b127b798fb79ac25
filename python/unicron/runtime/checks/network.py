"""Network cards: what their drivers counted since the last look. Ethernet by /sys/class/net, InfiniBand by its own."""

from __future__ import annotations

from pathlib import Path

from unicron.agent.interfaces import is_loopback
from unicron.runtime import networks
from unicron.runtime.checks.check import Check, Look, Reading, bad, ok, unknown, worst

ERRORS = ("rx_crc_errors", "rx_frame_errors", "tx_carrier_errors", "rx_missed_errors")
ERRORS_MAX = 100  # new ones between two looks
FLAPS_MAX = 4  # changes of the carrier: down and up is two
PORT_ERRORS = ("symbol_error", "link_error_recovery", "port_rcv_errors", "local_link_integrity_errors")


def _count(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _word(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _interface(look: Look, card: Path) -> Reading:
    counters = {name: _count(card / "statistics" / name) for name in ERRORS}
    counters["carrier_changes"] = _count(card / "carrier_changes")
    grown = look.growth(f"nic {card.name}", {name: value for name, value in counters.items() if value is not None})
    flaps = grown.pop("carrier_changes", 0)
    many = {name: by for name, by in grown.items() if by > ERRORS_MAX}
    if many:
        return bad(f"{card.name}: {', '.join(f'{by} new {name}' for name, by in many.items())}")
    if flaps > FLAPS_MAX:
        return bad(f"{card.name}: its link changed {flaps} times since the last look")
    return ok(f"{card.name} is up")


def interfaces(look: Look) -> Reading:
    """Cards with a device behind them that are up. One that is down may be unused: that is no error."""
    cards = [c for c in sorted((look.sys / "class/net").glob("*")) if (c / "device").exists()]
    up = [c for c in cards if _word(c / "operstate") in ("up", "unknown")]
    return worst((_interface(look, card) for card in up), "no network card that is up is seen here")


def _port(look: Look, port: Path) -> Reading:
    name = f"{port.parent.parent.name} port {port.name}"
    state = _word(port / "state").partition(":")[2].strip()
    if state in ("DOWN", ""):
        return unknown(f"{name} is {state.lower() or 'of unknown state'}")
    counters = {c: _count(port / "counters" / c) for c in (*PORT_ERRORS, "link_downed")}
    grown = look.growth(f"ib {name}", {c: v for c, v in counters.items() if v is not None})
    downed = grown.pop("link_downed", 0)
    if downed:
        return bad(f"{name}: its link went down {downed} times since the last look")
    many = {c: by for c, by in grown.items() if by > ERRORS_MAX}
    if many:
        return bad(f"{name}: {', '.join(f'{by} new {c}' for c, by in many.items())}")
    return ok(f"{name} is {state.lower()}")


def infiniband(look: Look) -> Reading:
    ports = sorted((look.sys / "class/infiniband").glob("*/ports/*"))
    return worst((_port(look, port) for port in ports), "no InfiniBand or RoCE port here")


def addresses(look: Look) -> Reading:
    """Those that the agent chose at its start: workers are told them, and its store is known by one."""
    here = {address for each in networks.interfaces() if each.is_up for address in each.usable}
    gone = [each for each in look.addresses if each not in here and not is_loopback(each)]
    if gone:
        return bad(f"no interface that is up has {', '.join(gone)}, which this node's agent chose at its start")
    if not look.addresses:
        return unknown("no agent chose one")
    return ok(f"{', '.join(look.addresses)} still there")


CHECKS = (Check("nic", interfaces), Check("infiniband", infiniband), Check("addresses", addresses, tries=3))
