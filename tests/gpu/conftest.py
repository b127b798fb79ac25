"""GPU tests run where there are GPUs, and nowhere else. tests/gpu/run.sh runs all of them and the benches."""

from __future__ import annotations

from pathlib import Path

import pytest

# Not asked of the driver: pytest's process must stay without a CUDA context, because it plays the agent.
NUM_GPUS = len([path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()])
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.timeout(120))
        wanted = 2 if "two_gpus" in item.fixturenames else 1  # type: ignore[attr-defined]
        if wanted > NUM_GPUS:
            item.add_marker(pytest.mark.skip(reason=f"{NUM_GPUS} GPUs here, {wanted} needed"))


@pytest.fixture
def two_gpus() -> None:
    """Marks a test that needs them."""
