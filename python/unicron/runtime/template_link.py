"""An agent's connection to the template: forks asked for, forks and ends reported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from unicron.messages import ChildStatus, Fork, Forked, MessageRefused, decode, encode
from unicron.runtime.framing import FramedSocket, FrameRefused, connect


class TemplateLink:
    """Poll ``fileno``. ConnectionError from any method: the template is gone, and its children with
    it.
    """

    def __init__(self, path: Path, timeout_ms: int) -> None:
        self._link = FramedSocket(connect(path, timeout_ms))

    def fileno(self) -> int:
        return self._link.fileno()

    @property
    def wants_to_write(self) -> bool:
        return self._link.wants_to_write

    def fork(self, request: Fork) -> None:
        self._link.send(encode(request))

    def flush(self) -> None:
        self._link.flush()

    def receive(self) -> Iterator[Forked | ChildStatus]:
        for frame in self._link.receive():
            try:
                message = decode(frame)
            except MessageRefused as error:
                raise FrameRefused(str(error)) from None
            if not isinstance(message, Forked | ChildStatus):
                raise FrameRefused(f"a template does not send {type(message).__name__}")
            yield message

    def close(self) -> None:
        self._link.close()
