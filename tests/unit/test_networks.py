"""The interfaces of this machine, as the kernel tells them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from unicron.agent.interfaces import NoInterface
from unicron.cli.nodes import network_words
from unicron.runtime import networks
from unicron.runtime.coordinator_link import from_source
from unicron.runtime.doctor import networks_found

ALL = networks.interfaces()
OUTSIDE = next((each for each in ALL if each.is_up and not each.is_loopback and each.usable), None)
needs_a_way_out = pytest.mark.skipif(OUTSIDE is None, reason="no interface but loopback is up here")


def test_loopback_is_there_and_no_interface_is_missing() -> None:
    assert {each.name for each in ALL} == {name for _, name in socket.if_nameindex()}
    loopback = next(each for each in ALL if each.name == "lo")
    assert loopback.is_up and loopback.is_loopback and "127.0.0.1/8" in loopback.addresses
    assert loopback.rated_mbit == 0


def test_the_way_to_this_machine_is_loopback() -> None:
    route = networks.route_to("tcp://127.0.0.1:7070")
    assert (route.own, route.peer, route.towards) == ("127.0.0.1", "127.0.0.1", "127.0.0.1:7070")
    chosen = networks.choose_networks(("tcp://127.0.0.1:7070",), "", "", {})
    assert (chosen.control.interface, chosen.state.interface) == ("lo", "lo")
    assert chosen.doubts == () and not chosen.is_named


@needs_a_way_out
def test_the_interface_of_an_address() -> None:
    assert OUTSIDE is not None
    own = OUTSIDE.usable[0]
    chosen = networks.choose_networks((f"tcp://{own}:7070",), "", "", {})
    assert (chosen.control.interface, chosen.control.address) == (OUTSIDE.name, own)
    environment = {"UNICRON_INTERFACE": own, "UNICRON_STATE_INTERFACE": "lo"}
    chosen = networks.choose_networks(("tcp://127.0.0.1:7070",), "", "", environment)
    assert (chosen.control.interface, chosen.control.why) == (OUTSIDE.name, "UNICRON_INTERFACE")
    assert (chosen.state.interface, chosen.state.why) == ("lo", "UNICRON_STATE_INTERFACE")
    chosen = networks.choose_networks(("tcp://127.0.0.1:7070",), "lo", "", environment)
    assert (chosen.control.interface, chosen.control.why, chosen.is_named) == ("lo", "--interface", True)


def test_a_coordinator_that_has_no_address_and_another_that_has() -> None:
    nowhere = "tcp://no-such-host.invalid:7070"
    assert networks.route_to(nowhere).problem
    assert networks.route_to_any((nowhere, "tcp://127.0.0.1:7070")).own == "127.0.0.1"
    with pytest.raises(NoInterface, match=r"no way to no-such-host.invalid:7070"):
        networks.choose_networks((nowhere,), "", "", {})
    assert networks.choose_networks((nowhere,), "lo", "", {}).control.interface == "lo"
    assert "no way to no-such-host.invalid:7070 now" in networks.choose_networks((nowhere,), "lo", "", {}).doubts[0]


def test_another_word_for_the_interface_is_called_by_its_own_name() -> None:
    here = ("tcp://127.0.0.1:7070",)
    for host in ("lo", "127.0.0.1", "localhost", "127.0.0.0/8"):
        control = networks.choose_networks(here, "", "", {"UNICRON_INTERFACE": "no-such-0"}, host=host).control
        assert (control.interface, control.why) == ("lo", "--host")
    assert networks.choose_networks(here, "lo", "", {}, host="no-such-0").control.why == "--interface"
    unknown = r"^--host: 'no-such.invalid' is no interface here, and as a host's name: .* There are: lo 127"
    for host, problem in (("no-such.invalid", unknown), ("fd00::2", "^--host: fd00::2 is of IPv6"),
                          ("a..b", "^--host: 'a..b' is no interface"), ("192.0.2.77", "^--host: 192.0.2.77: no int"),
                          ("10.0.0.0/99", "^--host: '10.0.0.0/99' is no ")):  # fmt: skip
        with pytest.raises(NoInterface, match=problem):
            networks.choose_networks(here, "", "", {}, host=host)


def test_a_rated_speed_is_one_of_hardware(tmp_path: Path) -> None:
    def card(name: str, speed: str, *lower: Path, device: bool = False) -> Path:
        made = tmp_path / name
        made.mkdir()
        (made / "speed").write_text(f"{speed}\n")
        if device:
            (made / "device").mkdir()
        for each in lower:
            (made / f"lower_{each.name}").symlink_to(each)
        return made

    real = card("eth0", "25000", device=True)
    assert networks.rated_mbit(real) == 25_000
    assert networks.rated_mbit(card("virtual", "-1", device=True)) == 0
    veth = card("veth0", "10000")
    assert networks.rated_mbit(veth) == networks.rated_mbit(card("bridge", "10000", veth)) == 0
    bond = card("bond0", "50000", real)
    assert networks.rated_mbit(card("bond0.7", "50000", bond)) == 50_000
    (tmp_path / "ib0").mkdir()
    assert networks.rated_mbit(tmp_path / "ib0") == 0


WANTED = """
import sys
from unicron.runtime import networks
found = {each.name: each for each in networks.interfaces()}
assert found["veth0"].is_up and found["veth0"].addresses[:1] == ("10.77.0.1/24",), found
assert found["veth0"].rated_mbit == 0, found
assert not found["veth1"].is_up and not found["lo"].is_up, found
chosen = networks.choose_networks(("tcp://10.77.0.9:7070",), "", "", {})
assert chosen.control.interface == "veth0" and chosen.control.address == "10.77.0.1", chosen
try:
    networks.choose_networks(("tcp://10.77.0.9:7070",), "veth1", "", {})
except OSError as problem:
    assert "veth1 is down" in str(problem), problem
else:
    sys.exit("an interface that is down was chosen")
"""
SETUP = (
    "ip link add veth0 type veth peer name peer0 && ip link add veth1 type veth peer name peer1"
    " && ip address add 10.77.0.1/24 dev veth0 && ip address add 10.78.0.1/24 dev veth1"
    " && ip link set veth0 up && ip link set peer0 up"
    # the kernel says a moment later that they run
    " && for look in $(seq 100); do ip link show veth0 | grep -q 'state UP' && break; sleep 0.05; done"
)


def test_in_a_network_of_its_own() -> None:
    """/sys still shows the machine's there: what is up and has which address is the kernel's word."""
    isolated = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c"]
    if shutil.which("ip") is None or subprocess.run([*isolated, SETUP], capture_output=True).returncode:
        pytest.skip("no network namespaces, or no ip, here")
    script = f'{SETUP} && exec "$0" -c "$1"'
    ended = subprocess.run(
        [*isolated, script, sys.executable, WANTED], capture_output=True, text=True, timeout=30, env={**os.environ}
    )
    assert ended.returncode == 0, ended.stderr


def test_the_line_comes_from_the_interface_that_was_named() -> None:
    assert from_source("tcp://10.0.0.1:7070", "") == "tcp://10.0.0.1:7070"
    assert from_source("tcp://10.0.0.1:7070", "10.0.0.2") == "tcp://10.0.0.2:0;10.0.0.1:7070"
    assert from_source("tcp://10.0.0.1:7070", "127.0.0.1") == "tcp://10.0.0.1:7070"


def test_doctor_says_what_there_is_and_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UNICRON_INTERFACE", "UNICRON_STATE_INTERFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    rows = {each.name: each for each in networks_found("127.0.0.1:7070", "", "")}
    assert "127.0.0.1/8" in rows["interface lo"].value and rows["interface lo"].meaning == ""
    assert rows["control network"].value.startswith("lo 127.0.0.1")
    assert rows["control network"].meaning == "route to 127.0.0.1:7070"
    assert rows["state network"].meaning == "the same as control"
    monkeypatch.setenv("UNICRON_INTERFACE", "lo")
    rows = {each.name: each for each in networks_found("203.0.113.1:7070", "", "")}
    assert rows["control network"].meaning == "UNICRON_INTERFACE"
    if OUTSIDE is not None:
        assert rows["network"].state == "note" and "loopback" in rows["network"].meaning
    rows = {each.name: each for each in networks_found("127.0.0.1:7070", "", "no-such-0")}
    assert rows["network"].state == "bad" and "--state-interface: no interface 'no-such-0'" in rows["network"].meaning


def test_doctor_calls_no_address_fit_that_no_agent_could_take(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ("127.0.0.1:99999", "127.0.0.1:0", "[::1]:7070", "head", ","):
        rows = {each.name: each for each in networks_found(given, "", "")}
        assert rows["network"].state == "bad" and rows["network"].meaning.startswith(f"--coordinator: {given!r}")
    monkeypatch.setenv("UNICRON_COORDINATOR", "127.0.0.1:99999")
    rows = {each.name: each for each in networks_found("", "", "")}
    assert rows["network"].meaning.startswith("UNICRON_COORDINATOR: '127.0.0.1:99999'")


def test_nodes_shows_both_where_they_differ() -> None:
    control = {"interface": "eth0", "address": "10.0.0.2"}
    assert network_words(control, control) == "eth0"
    assert network_words(control, {"interface": "ib0", "address": "10.9.0.2"}) == "eth0, state ib0"
    assert network_words({"interface": "", "address": "172.16.0.1"}, control) == "172.16.0.1, state eth0"
    assert network_words(None, None) == "-"
