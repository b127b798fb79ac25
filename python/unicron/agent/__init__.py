"""The agent as a pure machine: events in, actions out (machine.py). Nothing here does I/O."""

from unicron.agent.config import AgentConfig
from unicron.agent.machine import AgentMachine

__all__ = ["AgentConfig", "AgentMachine"]
