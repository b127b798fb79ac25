"""Misuse that mypy must refuse; each line names the error's code. Not run."""

from unicron import _core

page = _core.PulsePage("fd", 0)  # arg-type
page.stage = 3  # misc
_core.WorkerMonitor(3, page).next_frame()  # call-arg
_core.Supervisor().watch(page)  # call-arg
answer: str = _core.checksum(b"")  # assignment
