"""What a training script imports (through `unicron`): join(), Session. The only part with torch and megatron."""

from unicron.training.roles import RoleChanged
from unicron.training.session import Metrics, Session, join

__all__ = ["Metrics", "RoleChanged", "Session", "join"]
