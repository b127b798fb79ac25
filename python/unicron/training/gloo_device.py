"""The network that this worker's process groups take: what its agent chose, unless a person told gloo or NCCL another.

gloo's own default is whatever the machine's name resolves to, which on many machines is loopback, and a device that is
made by hand does not look at GLOO_SOCKET_IFNAME.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import torch.distributed as dist

from unicron.agent.interfaces import nccl_interfaces

ADDRESS = "UNICRON_STATE_ADDRESS"  # of the interface that the agent chose; only where nobody else chose one


class StateAddressGone(RuntimeError):
    """The node's own fault, known by this name to the coordinator (diagnosis.py): it says nothing about the code, and
    may come again at the same place."""


def make_device() -> Any:
    address, named = os.environ.get(ADDRESS, ""), os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if address:
        try:
            return dist.ProcessGroupGloo.create_device(hostname=address)
        except RuntimeError as error:
            raise StateAddressGone(
                f"this node has lost {address}, the address that its agent chose for state: bring its interface back,"
                f" or give the agent another --state-interface ({error})"
            ) from None
    if named:
        return dist.ProcessGroupGloo.create_device(interface=named)
    return dist.ProcessGroupGloo.create_default_device()


def interface_name(*, on_gpu: bool) -> str:
    """As people or the agent told it; "" where nobody did, or where NCCL was left the choice among several."""
    if not on_gpu:
        return os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    told = os.environ.get("NCCL_SOCKET_IFNAME", "")
    if not told or told.startswith("^"):
        return ""
    taken = nccl_interfaces(told, [name for _, name in socket.if_nameindex()])
    return taken[0] if len(taken) == 1 else ""
