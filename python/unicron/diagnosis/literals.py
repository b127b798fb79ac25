"""Which words a pattern cannot match without: a cheap test before the dear one.

A line of a log is given to a hundred patterns, and nearly always none of them matches. Every match of
``(?i)no space left|disk .{0,9}full`` contains "no space left" or "disk ": looking for those costs a tenth of running
the pattern. The words are read off the parsed pattern, so they cannot be forgotten when a rule is changed.

And a line that has nothing in common with any of a thousand words is told by its trigrams: each word is filed under the
one of its trigrams that is rare in text, so a line's own trigrams say which words could be in it at all.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from typing import Any

WORD_CHARS_MIN = 3  # a trigram
SAME_DIGIT = {ord(digit): "5" for digit in "0123456789"}  # every digit is the same one in a shape


def shape(line: str) -> str:
    """The line with every digit the same: lines of a log have few shapes."""
    return line.translate(SAME_DIGIT)


def words(pattern: str) -> tuple[str, ...] | None:
    """Words of which every match contains at least one; None when there are none to be had.

    In lower case and with equal digits: to be looked for in ``shape(line).lower()``. Only for patterns compiled with
    re.ASCII, because without it (?i) pairs letters that lower() does not.
    """
    parsed = _parsed(pattern)
    found = _of_sequence(parsed) if parsed is not None else None
    return None if found is None else tuple(sorted({shape(word.lower()) for word in found}))


def same_digits(pattern: str) -> str | None:
    r"""A pattern that matches the shape of every line the pattern matches; None where that cannot be had.

    Digits of the pattern become the one digit of shapes, classes of digits the class of all. Not for patterns that
    forbid digits: there more lines alike would mean fewer matches.
    """
    if "(?!" in pattern or "(?<!" in pattern:
        return pattern if all(_same_digit(token) == token for token in _TOKEN.findall(pattern)) else None
    return _TOKEN.sub(lambda token: _same_digit(token[0]), pattern)


_TOKEN = re.compile(r"\\.|\{[\d,]+\}|\[(?:\\.|[^\]\\])*\]|\d")


def _same_digit(token: str) -> str:
    if token.isdigit():
        return "5"
    if token.startswith("[") and not token.startswith("[^") and any(char.isdigit() for char in token):
        return "[0-9" + re.sub(r"\d(?:-\d)?", "", token[1:])
    return token


class WordIndex:
    """Finds which of many sets of words have one in a line.

    Args:
        sets: by position; None is a set that is always found.
    """

    def __init__(self, sets: Iterable[tuple[str, ...] | None]) -> None:
        self._always: list[int] = []
        self._words: dict[str, dict[str, list[int]]] = {}
        for position, words in enumerate(sets):
            if words is None:
                self._always.append(position)
            for word in words or ():
                self._words.setdefault(_rarest_trigram(word), {}).setdefault(word, []).append(position)

    def find(self, low: str) -> list[int]:
        """Positions of the sets with a word in a line, in order. `low`: shape(line).lower()"""
        found = set(self._always)
        for trigram in self._words.keys() & {low[begin : begin + 3] for begin in range(len(low) - 2)}:
            for word, positions in self._words[trigram].items():
                if word in low:
                    found.update(positions)
        return sorted(found)


_COMMON = "etaoinsrhldcu 5m"  # characters of a log, the commonest first


def _rarest_trigram(word: str) -> str:
    trigrams = [word[begin : begin + 3] for begin in range(len(word) - 2)]
    return min(trigrams, key=lambda trigram: sum(len(_COMMON) - _COMMON.index(c) for c in trigram if c in _COMMON))


def _parsed(pattern: str) -> Any:
    """The standard library's own tree; None under a Python that keeps it elsewhere: then every pattern is asked."""
    try:
        return importlib.import_module("re._parser").parse(pattern, re.ASCII)
    except ModuleNotFoundError:
        return None


def _of_sequence(items: Iterable[Any]) -> set[str] | None:
    candidates: list[set[str]] = []
    run = ""
    for op, argument in items:
        name = str(op)
        if name == "LITERAL":
            run += chr(argument)
            continue
        if name in ("AT", "ASSERT_NOT"):
            continue  # takes no characters: what is before and behind it touch
        candidates += [{run}] if len(run) >= WORD_CHARS_MIN else []
        run = ""
        found = _of_item(name, argument)
        candidates += [found] if found else []
    candidates += [{run}] if len(run) >= WORD_CHARS_MIN else []
    return max(candidates, key=lambda found: (min(map(len, found)), -len(found)), default=None)


def _of_item(name: str, argument: Any) -> set[str] | None:
    if name == "SUBPATTERN":
        return _of_sequence(argument[-1])
    if name == "ASSERT":
        return _of_sequence(argument[1])
    if name == "ATOMIC_GROUP":
        return _of_sequence(argument)
    if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        return _of_sequence(argument[2]) if argument[0] >= 1 else None
    if name == "BRANCH":
        branches = [_of_sequence(branch) for branch in argument[1]]
        known = [found for found in branches if found]
        return set().union(*known) if len(known) == len(branches) else None
    return None
