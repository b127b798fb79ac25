"""The coordinator as a pure machine: events in, actions out (machine.py). Nothing here does I/O."""

from unicron.coordinator.config import CoordinatorConfig
from unicron.coordinator.incident import Incident
from unicron.coordinator.job import Job
from unicron.coordinator.machine import CoordinatorMachine

__all__ = ["CoordinatorConfig", "CoordinatorMachine", "Incident", "Job"]
