"""The loss scale of fp16: Megatron's own scaler, told by the commit, and carried where the state goes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from unicron.training import megatron_cpu  # noqa: E402
from unicron.training.loss_scale import LossScale, LossScaleRefused  # noqa: E402

megatron_cpu.install()


def optimizer(number: int = 1, initial: float = 1024.0) -> Any:
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    def part() -> Any:
        return SimpleNamespace(grad_scaler=DynamicGradScaler(initial, 1.0, 2.0, 0.5, 3, 2))

    return part() if number == 1 else SimpleNamespace(chained_optimizers=[part() for _ in range(number)])


def test_without_a_scaler_the_scale_is_one() -> None:
    scale = LossScale(SimpleNamespace(grad_scaler=None), exact=True)
    assert not scale and scale.value == 1.0 and scale.state() == []
    scale.stepped(True)
    with scale.put_aside():
        pass


def test_it_falls_with_overflows_and_grows_without() -> None:
    scale = LossScale(optimizer(), exact=False)
    for found_inf in (True, True):  # of the first one Megatron only takes note (hysteresis 2)
        scale.stepped(found_inf)
    assert scale.value == 512.0
    for _ in range(3):
        scale.stepped(False)
    assert scale.value == 1024.0


@pytest.mark.parametrize("number", [1, 2])
def test_an_heir_goes_on_where_its_predecessor_stood(number: int) -> None:
    ours, heirs = LossScale(optimizer(number), exact=False), LossScale(optimizer(number, 4.0), exact=False)
    for found_inf in (True, True, False, False):
        ours.stepped(found_inf)
    heirs.load(ours.state())
    assert heirs.state() == ours.state() and len(ours.state()) == number
    for found_inf in (False, False, True, True, False):
        ours.stepped(found_inf)
        heirs.stepped(found_inf)
        assert heirs.value == ours.value


def test_megatron_does_not_unscale_meanwhile() -> None:
    chained = optimizer(2)
    scale = LossScale(chained, exact=False)
    scalers = [part.grad_scaler for part in chained.chained_optimizers]
    with pytest.raises(ZeroDivisionError), scale.put_aside():
        assert [part.grad_scaler for part in chained.chained_optimizers] == [None, None]
        raise ZeroDivisionError
    assert [part.grad_scaler for part in chained.chained_optimizers] == scalers


def test_exact_mode_refuses_it_by_name() -> None:
    with pytest.raises(LossScaleRefused, match="exact mode adds gradients as integers"):
        LossScale(optimizer(), exact=True)


def test_a_scale_that_nobody_multiplies_by_is_refused() -> None:
    scale = LossScale(optimizer(), exact=False)
    with pytest.raises(LossScaleRefused, match=r"config\.grad_scale_func = optimizer\.scale_loss"):
        scale.require_use(SimpleNamespace(grad_scale_func=None))
    scale.require_use(SimpleNamespace(grad_scale_func=lambda loss: loss))
    LossScale(SimpleNamespace(grad_scaler=None), exact=False).require_use(SimpleNamespace())
