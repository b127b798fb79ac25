"""Questions of other threads to a daemon's loop, answered between two of its turns.

No look at the machine's state sees half a step, and a loop that stands still is seen: it answers nobody. A daemon that
nobody asks spends nothing.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass
from typing import Any

LOOK_S_MAX = 5.0
QUESTIONS_MAX = 64


@dataclass
class _Question:
    look: Callable[[], Any]
    answer: Future[Any]


class LoopBusy(Exception):
    """The daemon's loop did not answer in time."""


class LoopQuestions:
    """Poll ``fileno`` for reading and call ``serve`` when it is readable."""

    def __init__(self) -> None:
        self._questions: deque[_Question] = deque(maxlen=QUESTIONS_MAX)
        self._is_open = True
        self._awake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self._awake

    def serve(self) -> None:
        """In the loop."""
        os.read(self._awake, 4096)
        while self._questions:
            question = self._questions.popleft()
            if question.answer.set_running_or_notify_cancel():
                try:
                    question.answer.set_result(question.look())
                except Exception as error:  # a look that fails is the asker's, never the loop's, end
                    question.answer.set_exception(error)

    def look(self, what: Callable[[], Any]) -> Any:
        """In any other thread: its value, looked up by the loop; LoopBusy after LOOK_S_MAX."""
        question = _Question(what, Future())
        self._questions.append(question)
        if not self._is_open:
            raise LoopBusy("the daemon ends")
        os.write(self._waker, b"?")
        try:
            return question.answer.result(LOOK_S_MAX)
        except TimeoutError:
            question.answer.cancel()
            raise LoopBusy(f"the daemon's loop did not answer in {LOOK_S_MAX:g} s") from None

    def refuse(self) -> None:
        """No more questions; who waits is told."""
        self._is_open = False
        while self._questions:
            self._questions.popleft().answer.cancel()

    def close(self) -> None:
        """After every thread that may ask has ended."""
        self.refuse()
        os.close(self._awake)
        os.close(self._waker)
