"""The coordinator's file, as a struct."""

from __future__ import annotations

import msgspec

from unicron.coordinator.config import CoordinatorConfig
from unicron.runtime.dashboard_settings import DashboardSettings
from unicron.runtime.endpoints import parse_endpoint
from unicron.runtime.webhook import WebhookSettings


class EtcdSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    endpoints: tuple[str, ...]  # host:port of the members
    prefix: str = "unicron"  # of all keys of this cluster
    lease_s: int = 2  # a leader that is not heard for so long has a successor, half a second later at most
    request_s: float = 2.0  # one call of one member
    ca: str = ""  # of the members' certificates; "": no TLS
    certificate: str = ""  # ours, where the members want one
    key: str = ""


class CoordinatorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """CONFIG.yaml of `unicron coordinator`."""

    listen: str = "127.0.0.1:7070"
    keys: str = "keys"
    journal: str = "journal.db"
    etcd: EtcdSettings | None = None  # the journal of several coordinators; then `journal` is not used
    journal_pages_max: int = 0  # of 4 KiB; 0: what the disk has
    metrics: str = "127.0.0.1:7071"  # /metrics, /healthz, /readyz; "": none. Whoever reaches it reads it
    dashboard: DashboardSettings | None = None  # a page that shows the cluster; read-only
    gpu: str = ""  # type of the slots (H100-80GB ...): what `unicron submit` models T(t, x) for; "": no GPUs
    webhook: WebhookSettings | None = None  # alerts, by HTTP POST
    machine: CoordinatorConfig = CoordinatorConfig()

    @property
    def journal_name(self) -> str:
        """Which journal it is, for people."""
        return f"the journal under {self.etcd.prefix!r} in etcd" if self.etcd is not None else self.journal


def listens_at(settings: CoordinatorSettings) -> tuple[str, int]:
    """Raises EndpointProblem."""
    is_bare = settings.listen.startswith(":")
    return parse_endpoint(f"127.0.0.1{settings.listen}" if is_bare else settings.listen, "listen", listens=True)
