"""Xids by NVML's events, for agents that may not read the kernel log (a container): a process that prints each as the
line the kernel log would have, and ends with its reader. Where there is no NVML it ends at once.
"""

from __future__ import annotations

import os
import sys

from unicron.runtime.checks.nvml import NoNvml, library

WAIT_MS = 1_000


def main() -> int:
    parent = os.getppid()
    try:
        with library() as nvml:
            events = nvml.nvmlEventSetCreate()
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
            while os.getppid() == parent:
                try:
                    event = nvml.nvmlEventSetWait_v2(events, WAIT_MS)
                except nvml.NVMLError as problem:
                    if problem.value == nvml.NVML_ERROR_TIMEOUT:
                        continue
                    raise
                bus = nvml.nvmlDeviceGetPciInfo(event.device).busId
                name = bus.decode() if isinstance(bus, bytes) else str(bus)
                print(f"NVRM: Xid (PCI:{name}): {int(event.eventData)}, by an event of NVML", flush=True)
    except NoNvml as why:
        sys.stderr.write(f"{why}\n")
        return 1
    except BrokenPipeError:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
