"""Whom a line speaks of when that is not its speaker, and which key of the input that is. Pure.

Launchers, schedulers and barriers name ranks by number, alone or in a list; the network names the other end by host or
address. The input names its texts as it likes: 3, rank3, node-1/rank_3.log, node-7.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from unicron.diagnosis.lines import NOT_IN_WORLD, has_rank

NAMED_MAX = 64  # ranks of one list
_ITEM = re.compile(r"(\d{1,7})(?:\s?-\s?(\d{1,7}))?")
_FIELD = re.compile(r"\brank=(\d{1,7})\b")
NUMBERS = r"\d{1,7}(?:(?:, ?and |, ?| and |-)\d{1,7}){0,64}"  # 3 or 0, 2-5; in a pattern's group
# What a rank did, or what was done to it, when it ended.
_END = (
    r"(?i:(?:has |have |was |were |is |are |worker |process |unexpectedly |suddenly ){0,3}"
    r"(?:exit(?:ed|s)|died|dead|crashed|killed|terminated|aborted|failed|disappeared|vanished|preempted)\b)"
)

# How launchers say whose end they tell of.
_ENDED = re.compile(
    rf"\bsrun: error: [\w.-]{{1,80}}: tasks? (?P<srun>{NUMBERS}): |"
    r"\bprocess rank (?P<mpirun>\d{1,7}) with PID |"
    r"(?:ProcessExitedException: process|-- Process) (?P<spawn>\d{1,7}) terminated with |"
    r"\[rank: (?P<child>\d{1,7})\] Child process with PID |"
    rf"\b[Rr]anks?[ \[(=:]{{1,2}}(?P<plain>{NUMBERS})[\])]?:? {_END}"
)
_ENDED_PID = re.compile(r"\[(?P<a>\d{2,8})\] exit(?:s|ed)\b|(?i:\b(?:sub)?process|\bpid)[=: ]{1,3}(?P<b>\d{2,8})\b")
_ENDED_WORDS = ("ank", "rocess", "srun")
_TOTAL = re.compile(r"(?i:\bworld.?size[ =:]{1,2}|\bof |\d/)(?P<total>\d{1,7})\b")
_MENTIONED = re.compile(rf"{NOT_IN_WORLD}(?i:ranks?)[ =:#_-]{{0,2}}[\[{{(]?(?P<ranks>{NUMBERS})\b(?!\])")
_PEER = re.compile(
    r"\b(?:[Pp]eer|[Ff]rom|[Tt]o) (?:\[(?P<a>[\w.:-]{1,80})\]|(?P<b>[\w.-]{1,80}))(?:<\d{1,5}>|:\d{1,5}\b)"
)
# What NCCL says of its own host: the head of its lines, and the interface it uses.
_OWN_HOST = re.compile(r"(?P<host>[A-Za-z][\w.-]{0,80}):\d{1,8}:\d{1,8} \[\d{1,3}\] ")
_OWN_ADDRESS = re.compile(r"(?:Bootstrap : Using|NET/Socket : Using|OOB) (?:\[\d+\])?[\w.-]{1,20}:(?P<ip>[\d.]{7,15})<")
_OWN_SOCKET = re.compile(r"\baddr=\[(?P<ip>[\da-f.:]{7,45})\]:\d{1,5}, remote=")
_PLACED = re.compile(
    rf"^\W{{0,3}}(?:\w+ ){{0,3}}?{NOT_IN_WORLD}(?i:rank)[ =:#_-]{{1,2}}(?P<rank>\d{{1,7}})\b"
    r"(?!.{0,80}\b(?i:peer|from|to|connect\w*|reset|refused|timed)\b).{0,60}?\b(?P<ip>\d{1,3}(?:\.\d{1,3}){3})\b"
)
_PID = re.compile(r"(?i)\bpid[=: ]{1,3}(?P<pid>\d{2,8})\b")
_RANK_KEY = re.compile(
    r"(?i)(?:.*[^a-z])?(?:rank|r|proc|process|trainer|task)[ _:=\[-]{0,2}(?P<number>\d{1,7})\]?"
    r"(?:\.\w{1,4}|[ @,:/(].*)?"
)
_PARTS = re.compile(r"[\s/:@(),]+")


def numbers(text: str) -> tuple[str, ...]:
    """The ranks of a list like ``0, 2-5`` or ``Id(rank=3, node='n1')``, at most NAMED_MAX."""
    found: list[str] = []
    text = ",".join(_FIELD.findall(text)) if "rank=" in text else text
    for first, last in _ITEM.findall(text):
        end = min(int(last or first), int(first) + NAMED_MAX)
        found += [str(number) for number in range(int(first), end + 1)]
    return tuple(dict.fromkeys(found))[:NAMED_MAX]


def as_number(rank: str) -> tuple[int, str]:
    """Sorts ranks by number."""
    return (int(rank) if rank.isascii() and rank.isdigit() else -1, rank)


def absent(present: str, line: str) -> tuple[str, ...]:
    """The ranks that are not in a list of those that came, if they are fewer: of as many as the line says there are."""
    there = set(map(int, numbers(present)))
    found = _TOTAL.search(line)
    total = max(int(found["total"][:7]) if found is not None else 0, max(there, default=-1) + 1)
    missing = [str(number) for number in range(min(total, 2 * NAMED_MAX)) if number not in there]
    return tuple(missing) if 2 * len(missing) <= total else ()


def ended(line: str) -> tuple[str, ...]:
    """The ranks whose end a launcher's line tells of."""
    found = _ENDED.search(line) if any(word in line for word in _ENDED_WORDS) else None
    return numbers(found[found.lastgroup]) if found is not None and found.lastgroup else ()


def mentioned(line: str) -> tuple[str, ...]:
    """The ranks that a line mentions in one place; nothing where it mentions others elsewhere."""
    if not has_rank(line):
        return ()
    found = {match["ranks"] for match in _MENTIONED.finditer(line)}
    return numbers(found.pop()) if len(found) == 1 else ()


def ended_pids(line: str) -> tuple[str, ...]:
    """The numbers of the processes that a line tells of."""
    return tuple(found["a"] or found["b"] for found in _ENDED_PID.finditer(line))


def peer(line: str) -> str:
    """The host or address that a line names as the other end: ``peer node-7<41210>``, ``peer [10.0.0.4]:1042``."""
    found = _PEER.search(line) if "<" in line or "]:" in line else None
    return (found["a"] or found["b"]).removeprefix("::ffff:") if found is not None else ""


def own_addresses(line: str) -> tuple[str, ...]:
    """Host and address of the speaker, as NCCL and torch's store print them."""
    host, address = _OWN_HOST.match(line), _OWN_ADDRESS.search(line) or _OWN_SOCKET.search(line)
    return tuple(found for found in (host and short(host["host"]), address and address["ip"]) if found)


def placed(line: str) -> tuple[str, str]:
    """A rank and the address that a line says it has, both "" if it does not: ``rank 3 is on 10.0.0.4``."""
    found = _PLACED.match(line)
    return (found["rank"], found["ip"]) if found is not None else ("", "")


def own_pids(line: str) -> tuple[str, ...]:
    """Process numbers in what a rank says: its own, or those of its helpers."""
    return tuple(found["pid"] for found in _PID.finditer(line))


def parts(key: str) -> tuple[str, ...]:
    """The names in a key of several: ``dmesg n2``, ``rank 1 (n2)``. Numbers alone name nobody."""
    found = tuple(part for part in _PARTS.split(key) if part and not part.isdigit())
    return found if found != (key,) else ()


def short(host: str) -> str:
    """A host's name without its domain; an address as it is."""
    return host if host[:1].isdigit() else host.partition(".")[0].lower()


class Keys:
    """The keys of an input by what others call them. What two keys could be is neither."""

    def __init__(self, keys: Collection[str]) -> None:
        self._keys = keys
        self._called: dict[str, str] = {}
        for key in keys:
            found = _RANK_KEY.fullmatch(key)
            called = {short(key), *parts(key), str(int(found["number"])) if found is not None else key} - {key}
            for name in called:
                self._called[name] = key if self._called.get(name, key) == key else ""

    def find(self, name: str) -> str:
        """The key of a rank or host; "" if there is none."""
        for called in (name, short(name)):
            if called in self._keys:
                return called
            if self._called.get(called):
                return self._called[called]
        return ""
