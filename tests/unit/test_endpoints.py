"""host:port, wherever somebody gives it: what cannot be one is refused at once, by name, in one line."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
import zmq

from unicron.cli import main
from unicron.runtime import client, coordinator_daemon, endpoints, keys
from unicron.runtime.agent_process import AgentProcess, AgentSettings
from unicron.runtime.client import CoordinatorSilent, from_environment
from unicron.runtime.coordinator_settings import CoordinatorSettings, EtcdSettings, listens_at
from unicron.runtime.dashboard import Dashboard
from unicron.runtime.dashboard_settings import DashboardSettings
from unicron.runtime.endpoints import EndpointProblem, endpoints_of, numeric, parse_endpoint
from unicron.runtime.etcd import Etcd
from unicron.runtime.files import FileProblem
from unicron.runtime.store_server import PortInUse, bind

NO_PORTS = ("127.0.0.1:99999", "127.0.0.1:65536", "127.0.0.1:-1")
NO_ENDPOINTS = ("xxx", "127.0.0.1", ":", "", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:١", "h:1_0", "h: 7", "a b:1",
                "http://127.0.0.1:17370", "ipc:///tmp/x:1", "10.0.0.1:0;10.0.0.2:7070")  # fmt: skip
OF_IPV6 = ("[::1]:7070", "::1:7070", "tcp://[fd00::2]:7070")
SETTINGS = {"node": "n0", "keys": "keys", "slots": 1, "understudies": 0}


def test_what_is_one() -> None:
    assert parse_endpoint("tcp://10.0.0.1:7070") == ("10.0.0.1", 7070)
    assert parse_endpoint("gpu_1.rack-2:65535") == ("gpu_1.rack-2", 65535)
    assert parse_endpoint("h:0", listens=True) == ("h", 0)
    assert parse_endpoint("[fd00::2]:2379", may_be_ipv6=True) == ("fd00::2", 2379)
    assert endpoints_of("a:1, tcp://b:2,") == ("tcp://a:1", "tcp://b:2")


@pytest.mark.parametrize("text", [*NO_PORTS, *NO_ENDPOINTS, *OF_IPV6, "127.0.0.1:0"])
def test_what_is_none_is_refused_with_its_name_and_whose_it_is(text: str) -> None:
    for given in (text, f"127.0.0.1:17370,{text}") if text else (text,):
        with pytest.raises(EndpointProblem) as problem:
            endpoints_of(given, "UNICRON_COORDINATOR")
        said = str(problem.value)
        assert said.startswith(f"UNICRON_COORDINATOR: {text!r}") and "\n" not in said
        assert text not in NO_PORTS or said.endswith(": the port must be 1 to 65535")
        assert text not in OF_IPV6 or said.endswith("is an IPv6 address; this version speaks IPv4")
    if text != "127.0.0.1:0" and not text.startswith(":"):
        with pytest.raises(EndpointProblem, match=r"^listen: "):
            listens_at(CoordinatorSettings(listen=text))


@pytest.mark.parametrize("text", ["", ",", " , "])
def test_of_no_address_at_all(text: str) -> None:
    with pytest.raises(EndpointProblem, match=r"^--coordinator: .* names no coordinator: give host:port"):
        endpoints_of(text)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UNICRON_COORDINATOR", raising=False)
    keys.make_directory(tmp_path / "keys")
    return tmp_path


@pytest.mark.parametrize("text", [*NO_PORTS, "xxx", "http://127.0.0.1:1", "[::1]:1", "127.0.0.1:0", ",", "a..b:7"])
def test_a_command_says_so_at_once(text: str, alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert main(["ps", "--coordinator", text]) == 1
    said = capsys.readouterr().err
    assert said.startswith("unicron ps: --coordinator: ") and said.count("\n") == 1 and text in said
    assert time.monotonic() - began < client.ANSWER_MS_MAX / 4000


def test_of_an_address_in_the_environment(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICRON_COORDINATOR", "head")
    with pytest.raises(EndpointProblem, match=r"^UNICRON_COORDINATOR: 'head' is not host:port"):
        from_environment()


def test_a_name_that_means_no_address_is_said_unless_another_does(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(host: str) -> str:
        if host == "nosuch.invalid":
            raise OSError(socket.EAI_NONAME, "Name or service not known")
        return "127.0.0.1"

    monkeypatch.setattr(endpoints, "numeric", look_up)
    with pytest.raises(EndpointProblem, match=r"^--coordinator: no address is known of nosuch.invalid:7070: Name or"):
        from_environment("nosuch.invalid:7070")
    with from_environment("nosuch.invalid:7070,head:7070") as found:
        assert found.address == "nosuch.invalid:7070,head:7070"


def test_one_of_several_that_listens_is_one_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(keys.KeyProblem):
        from_environment(f"127.0.0.1:1,127.0.0.1:{server.getsockname()[1]}")
    with pytest.raises(CoordinatorSilent, match="no cluster is at"):
        from_environment("127.0.0.1:1,127.0.0.1:2")


def test_a_name_of_ipv6_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(host: str, port: object, family: int, kind: int) -> list[object]:
        if family == socket.AF_INET:
            raise socket.gaierror(socket.EAI_ADDRFAMILY, "Address family for hostname not supported")
        return [(family, kind, 0, "", ("fd00::1", 0, 0, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with pytest.raises(OSError, match="head has IPv6 addresses only; this version speaks IPv4"):
        numeric("head")


@pytest.mark.parametrize("text", ["127.0.0.1:99999", "127.0.0.1:0", "[::1]:7070", "head", "", ","])
def test_an_agent_is_not_started_with_one(text: str, tmp_path: Path) -> None:
    with pytest.raises(EndpointProblem, match=r"^--coordinator: "):
        AgentProcess(AgentSettings(**SETTINGS, run_dir=str(tmp_path), coordinator=text))


@pytest.mark.parametrize("text", ["127.0.0.1:99999", "127.0.0.1:-1", "nohost", "[::1]:7070"])
def test_a_coordinator_listens_on_none(text: str, tmp_path: Path) -> None:
    """Also one of several, which would listen only when it is wanted to decide."""
    etcd = EtcdSettings(("127.0.0.1:1",))
    journal = str(tmp_path / "journal.db")
    for settings in (CoordinatorSettings(text, journal=journal), CoordinatorSettings(text, etcd=etcd)):
        with pytest.raises(EndpointProblem, match=r"^listen: "):
            coordinator_daemon.run(settings)
    assert not Path(journal).exists()


def test_a_bare_port_is_loopbacks() -> None:
    assert listens_at(CoordinatorSettings(listen=":7070")) == ("127.0.0.1", 7070)


def test_other_addresses_of_the_coordinators_file() -> None:
    with pytest.raises(EndpointProblem, match=r"^dashboard.listen: '127.0.0.1:99999': the port must be"):
        Dashboard(DashboardSettings("127.0.0.1:99999"), lambda: None)  # type: ignore[arg-type, return-value]
    pytest.importorskip("etcd3gw")
    with pytest.raises(FileProblem, match=r"^etcd.endpoints: '127.0.0.1:99999': the port must be"):
        coordinator_daemon.new_client(EtcdSettings(("127.0.0.1:99999",)))
    Etcd(EtcdSettings(("[::1]:2379",))).close()


@pytest.mark.parametrize(
    ("host", "port", "said"),
    [
        ("nosuch.invalid", 17270, "cannot listen on nosuch.invalid:17270: .*this machine has no such name or address"),
        ("192.0.2.77", 0, "cannot listen on 192.0.2.77:0: this machine has no such name or address"),
        ("127.0.0.1", 99999, "cannot listen on 127.0.0.1:99999: the port must be 1 to 65535"),
        ("127.0.0.1", -1, "cannot listen on 127.0.0.1:-1: the port must be 1 to 65535"),
        ("::1", 0, "cannot listen on ::1:0: ::1 has IPv6 addresses only; this version speaks IPv4"),
    ],
)
def test_who_listens_says_what_is_wrong(host: str, port: int, said: str) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, pytest.raises(OSError, match=said):
        bind(router, host, port)


def test_who_listens_by_a_name() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.ROUTER) as other:
        address = bind(router, "localhost", 0)
        assert address.startswith("tcp://127.0.0.1:")
        with pytest.raises(PortInUse):
            bind(other, *parse_endpoint(address))
