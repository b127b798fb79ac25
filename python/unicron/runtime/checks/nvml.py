"""GPUs by NVML: memory errors, remapped rows, NVLink, PCIe width, throttling. Needs no CUDA context, so it disturbs
nobody. nvidia-ml-py is the vendor's own binding (an extra: without it, or without a GPU, these say unknown).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from unicron.runtime.checks.check import Check, Look, Reading, bad, ok, unknown, worst

LINKS_MAX = 18
LINK_ERRORS_MAX = 100  # new ones between two looks

Device = tuple[Any, int, Any]  # (pynvml, index, handle)


class NoNvml(Exception):
    pass


@contextmanager
def library() -> Iterator[Any]:
    """pynvml, initialised. Raises NoNvml with the reason."""
    try:
        import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise NoNvml("nvidia-ml-py is not installed: pip install 'unicron[gpu]'") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as problem:
        raise NoNvml(f"no NVML here: {problem}") from None
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def of_each(look_at: Callable[[Look, Device], Reading]) -> Callable[[Look], Reading]:
    """A check of one device, of all of them. A device that does not answer its own handle is lost."""

    def run(look: Look) -> Reading:
        try:
            with library() as nvml:
                return worst(_readings(nvml, look), "the driver sees no GPU")
        except NoNvml as why:
            return unknown(str(why))

    def _readings(nvml: Any, look: Look) -> Iterator[Reading]:
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                yield look_at(look, (nvml, index, nvml.nvmlDeviceGetHandleByIndex(index)))
            except nvml.NVMLError as problem:
                code = problem.value
                if code in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                    yield bad(f"GPU {index}: {problem}")
                else:
                    yield unknown(f"GPU {index}: {problem}")

    return run


def memory_errors(look: Look, device: Device) -> Reading:
    nvml, index, handle = device
    kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    count = int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, since))
    if count:
        return bad(f"GPU {index}: {count} uncorrected memory errors since its driver was loaded; reset it")
    return ok(f"GPU {index}: no uncorrected memory error")


def remapped_rows(look: Look, device: Device) -> Reading:
    nvml, index, handle = device
    corrected, uncorrected, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(handle)
    if has_failed:
        return bad(f"GPU {index}: a row could not be remapped; replace the GPU")
    if is_pending:
        return bad(f"GPU {index}: a row waits to be remapped; reset the GPU")
    return ok(f"GPU {index}: {corrected + uncorrected} rows remapped")


def nvlink(look: Look, device: Device) -> Reading:
    """A link that is down beside others that are up, and errors that grow."""
    nvml, index, handle = device
    states: dict[int, bool] = {}
    counters: dict[str, int] = {}
    for link in range(LINKS_MAX):
        try:
            states[link] = bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
            for name in ("REPLAY", "RECOVERY", "CRC_FLIT"):
                kind = getattr(nvml, f"NVML_NVLINK_ERROR_DL_{name}")
                counters[f"{link} {name.lower()}"] = int(nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, kind))
        except nvml.NVMLError:
            continue
    if not any(states.values()):
        return unknown(f"GPU {index} has no NVLink")
    down = [str(link) for link, is_up in states.items() if not is_up]
    many = {name: by for name, by in look.growth(f"nvlink {index}", counters).items() if by > LINK_ERRORS_MAX}
    if down:
        return bad(f"GPU {index}: NVLink {', '.join(down)} down, {len(states) - len(down)} up")
    if many:
        return bad(f"GPU {index}: {', '.join(f'{by} new errors of NVLink {name}' for name, by in many.items())}")
    return ok(f"GPU {index}: {len(states)} NVLinks up")


def pcie(look: Look, device: Device) -> Reading:
    nvml, index, handle = device
    width = int(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle))
    most = int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
    if 0 < width < most:
        return bad(f"GPU {index}: PCIe x{width} instead of x{most}; seat it anew")
    return ok(f"GPU {index}: PCIe x{width}")


def throttling(look: Look, device: Device) -> Reading:
    """By the hardware: heat, power brake, slowdown. A power cap by software is the owner's wish."""
    nvml, index, handle = device
    now = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    named = {
        "slowdown": nvml.nvmlClocksThrottleReasonHwSlowdown,
        "heat": nvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        "power brake": nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    }
    why = [name for name, bit in named.items() if now & int(bit)]
    if why:
        return bad(f"GPU {index} is slowed by its hardware: {', '.join(why)}")
    return ok(f"GPU {index} is not slowed by its hardware")


CHECKS = (
    Check("gpu_memory_errors", of_each(memory_errors), limit_s=20.0),
    Check("gpu_remapped_rows", of_each(remapped_rows), limit_s=20.0),
    Check("gpu_nvlink", of_each(nvlink), limit_s=20.0),
    Check("gpu_pcie", of_each(pcie), limit_s=20.0, tries=3),
    Check("gpu_throttling", of_each(throttling), limit_s=30.0, tries=3, pause_s=2.0),
)
