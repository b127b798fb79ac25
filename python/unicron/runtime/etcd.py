"""A small part of etcd's API over several members: transactions, reads, leases; every call is bounded.

etcd3gw speaks etcd's JSON gateway over one address. Here the member is changed when a call fails, and errors get names.
A call may have been carried out although its answer was lost, so whoever repeats one must be able to see what became of
it; nothing is repeated here.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from typing import Any

import etcd3gw
import requests
from etcd3gw.exceptions import Etcd3Exception

from unicron.runtime.coordinator_settings import EtcdSettings
from unicron.runtime.endpoints import parse_endpoint

READ_KEYS_MAX = 64  # of one answer
RETRY_S = 0.1
API = "/v3/"  # etcd 3.4 and later


class EtcdProblem(Exception):
    """A call failed; the text says how. It may have been carried out all the same."""


class EtcdFull(EtcdProblem):
    """No space is left under etcd's quota."""


SHORTLY = (  # what urllib3 says in the middle of several lines
    ("Connection refused", "connection refused"),
    ("timed out", "no answer in time"),
    ("Name or service not known", "no address is known of it"),
    ("Temporary failure in name resolution", "no address is known of it"),
    ("No route to host", "no route to it"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not trusted: see etcd.ca"),
)


def _said(error: Exception) -> str:
    text = getattr(error, "detail_text", None) or str(error) or type(error).__name__
    return next((short for known, short in SHORTLY if known in text), text)


class Etcd:
    """Not for two threads at once."""

    def __init__(self, settings: EtcdSettings) -> None:
        if not settings.endpoints:
            raise ValueError("etcd.endpoints is empty: name the members, as host:port")
        self.settings = settings
        self._session = requests.Session()
        self._session.trust_env = False  # no proxy stands between a coordinator and its journal
        if settings.ca:
            self._session.verify = settings.ca
            if settings.certificate:
                self._session.cert = (settings.certificate, settings.key)
        self._clients = [
            self._client(*parse_endpoint(endpoint, "etcd.endpoints", may_be_ipv6=True))
            for endpoint in settings.endpoints
        ]

    def _client(self, host: str, port: int) -> etcd3gw.Etcd3Client:
        protocol = "https" if self.settings.ca else "http"
        return etcd3gw.Etcd3Client(
            host, port, protocol, timeout=self.settings.request_s, api_path=API, session=self._session
        )

    def post(self, path: str, payload: dict[str, Any]) -> dict[str, Any]:
        """One call of the present member; another one is the present one after a failure."""
        client = self._clients[0]
        try:
            return dict(client.post(client.get_url(path), json=payload))
        except (Etcd3Exception, requests.RequestException, ValueError) as error:
            self._clients = [*self._clients[1:], client]
            text = f"{client.host}:{client.port}: {_said(error)}"
            full = "database space exceeded" in text or "NOSPACE" in text
            raise (EtcdFull if full else EtcdProblem)(text) from None

    def read(self, payload: dict[str, Any]) -> dict[str, Any]:
        """A read asks every member, twice, before it gives up."""
        for _ in range(2 * len(self._clients) - 1):
            try:
                return self.post("/kv/range", payload)
            except EtcdProblem:
                time.sleep(RETRY_S)
        return self.post("/kv/range", payload)

    def transaction(
        self, compare: list[dict[str, Any]], success: list[dict[str, Any]], failure: list[dict[str, Any]]
    ) -> tuple[bool, list[dict[str, Any]]]:
        """(whether all of ``compare`` held, the answers of what was done)."""
        answer = self.post("/kv/txn", {"compare": compare, "success": success, "failure": failure})
        return bool(answer.get("succeeded")), list(answer.get("responses", ()))

    def get(self, key: str) -> tuple[bytes, int] | None:
        """(value, create revision)."""
        found = self.read({"key": coded(key)}).get("kvs")
        return value_of(found[0]) if found else None

    def items(self, first: str, end: str) -> Iterator[tuple[str, bytes]]:
        """Keys from ``first`` up to ``end`` in order, all of one revision."""
        revision = 0
        while True:
            question = {"key": coded(first), "range_end": coded(end), "limit": READ_KEYS_MAX, "revision": revision}
            answer = self.read(question)
            revision = revision or int(answer["header"]["revision"])
            for each in answer.get("kvs", ()):
                key = base64.b64decode(each["key"]).decode(errors="surrogateescape")  # a stranger's need not be text
                yield key, value_of(each)[0]
                first = key + "\0"
            if not answer.get("more"):
                return

    def grant(self) -> int:
        """A lease; its id."""
        return int(self.post("/lease/grant", {"TTL": self.settings.lease_s, "ID": 0})["ID"])

    def refresh(self, lease: int) -> bool:
        """False when it is over."""
        return int(self.post("/lease/keepalive", {"ID": lease}).get("result", {}).get("TTL", 0)) > 0

    def revoke(self, lease: int) -> None:
        self.post("/lease/revoke", {"ID": lease})

    def close(self) -> None:
        self._session.close()


def coded(text: str | bytes) -> str:
    return base64.b64encode(text.encode(errors="surrogateescape") if isinstance(text, str) else text).decode()


def value_of(found: dict[str, Any]) -> tuple[bytes, int]:
    return base64.b64decode(found.get("value", "")), int(found["create_revision"])


def put(key: str, value: bytes, lease: int = 0) -> dict[str, Any]:
    request: dict[str, Any] = {"key": coded(key), "value": coded(value)}
    if lease:
        request["lease"] = lease
    return {"request_put": request}


def read(key: str) -> dict[str, Any]:
    return {"request_range": {"key": coded(key)}}


def delete_between(first: str, end: str) -> dict[str, Any]:
    return {"request_delete_range": {"key": coded(first), "range_end": coded(end)}}


def is_absent(key: str) -> dict[str, Any]:
    return is_created_at(key, 0)


def is_created_at(key: str, revision: int) -> dict[str, Any]:
    """A key that was deleted and made again has another revision: so its life has a number of its own."""
    return {"key": coded(key), "target": "CREATE", "result": "EQUAL", "create_revision": str(revision)}


def is_value(key: str, value: bytes) -> dict[str, Any]:
    return {"key": coded(key), "target": "VALUE", "result": "EQUAL", "value": coded(value)}
