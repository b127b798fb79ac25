"""The policies by name; each is a small model whose numbers stand in parameters.py."""

from __future__ import annotations

from unicron.simulate.policies.elastic import Bamboo, Oobleck, TorchFT, Varuna
from unicron.simulate.policies.fixed import ByteRobust, Megatron, NVRx, TrainMover
from unicron.simulate.policies.planned import Unicron, UnicronPublished, UnicronStandby
from unicron.simulate.policies.policy import Policy, Setting

POLICIES: dict[str, type[Policy]] = {
    kind.name: kind
    for kind in (
        Unicron, UnicronStandby, UnicronPublished, TrainMover, Megatron, Varuna, Bamboo, Oobleck, TorchFT, NVRx,
        ByteRobust,
    )
}  # fmt: skip

__all__ = ["POLICIES", "Policy", "Setting"]
