"""unicron: a self-healing manager for LLM training. In a script: `with unicron.join() as session: ...`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unicron.training import Metrics, RoleChanged, Session, join

__all__ = ["Metrics", "RoleChanged", "Session", "join"]
__version__ = "0.5.0"


def __getattr__(name: str) -> Any:
    """torch and megatron are imported by those who train, not by the command line or the daemons."""
    if name in __all__:
        from unicron import training

        return getattr(training, name)
    raise AttributeError(f"module 'unicron' has no attribute {name!r}")
