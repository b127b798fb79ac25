"""Where the dashboard is served, and to whom. Apart, so that a coordinator without one does not import it."""

from __future__ import annotations

import msgspec


class DashboardSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    listen: str = "127.0.0.1:7073"
    token_file: str = ""  # whoever shows what stands in it may look; needed where `listen` is not loopback
