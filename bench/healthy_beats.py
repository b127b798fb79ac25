"""The beats of a long healthy run, simulated, through the table of the coordinator's listener: no node may be lost.

Every node beats twice a second to the coordinator and to two witnesses, as in runtime/beats.py. Datagrams are lost and
late one by one and in bursts: on one node's way to the coordinator, of all that a node says, of all that the
coordinator hears; some are held and come at once. Agents stand still for seconds. The coordinator freezes for 30 s (its
beats wait in the socket, and it looks before it reads or after), its clock is set by an hour, forwards and back. What
the table calls silent is probed, over the same lossy way, and judged by the coordinator's own rule
(nodes.evidence_of_loss), with who waits at that moment in the same run. MODELLED: times and losses are drawn
from seeded distributions.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from unicron import _core
from unicron.coordinator.config import CoordinatorConfig
from unicron.coordinator.nodes import Word, evidence_of_loss, word_of_waits
from unicron.runtime.agent_process import SAMPLE_MS
from unicron.runtime.beats import FEW_PERIOD_MS as PERIOD_MS
from unicron.runtime.beats import LOOK_MS, WITNESSES
from unicron.runtime.probe import PROBE_MS_MAX

NODES = 8
LOST, LATE, LATE_MS = 1e-3, 1e-4, 300.0  # of single datagrams; how late they are
DELAY_MS = 0.3
FREEZE_MS, FREEZE_EVERY_MS = 30_000.0, 2 * 3.6e6
STEP_MS, STEP_EVERY_MS = 3.6e6, 91 * 3.6e6
MARGIN_MS = 60_000.0  # at the end of a chunk of time nothing begins that would reach into the next

Floats = np.ndarray


class Kind(NamedTuple):
    """Bursts of a kind. all_nodes: whoever beats to the coordinator, else one node; witnesses: their copies, too."""

    name: str
    per_hour: float
    mean_ms: float
    loss: tuple[float, float] = (1.0, 1.0)
    all_nodes: bool = False
    witnesses: bool = False
    is_held: bool = False  # not lost: all of it comes at the end
    answers: bool = False  # its machine answers a probe all the while


KINDS = (
    Kind("a node's way to the coordinator", 2.0, 5_000.0, (0.3, 1.0)),
    Kind("all that a node says", 1.0, 3_000.0, (0.3, 0.9), witnesses=True),
    Kind("all that the coordinator hears", 0.5, 3_000.0, (0.3, 0.9), all_nodes=True),
    Kind("a node's beats come late", 1.0, 1_500.0, is_held=True, witnesses=True),
    Kind("all beats come late", 0.5, 1_500.0, all_nodes=True, is_held=True),
    Kind("an agent stands still", 1.0, 2_000.0, witnesses=True, answers=True),
)


class Burst(NamedTuple):
    kind: Kind
    begin_ms: float
    end_ms: float
    node: int  # -1: all
    loss: float


class Wait(NamedTuple):
    """A time in which the coordinator takes a node's rank for one that waits."""

    begin_ms: float
    end_ms: float
    node: int


@dataclass
class Result:
    beats: int = 0
    lost: int = 0  # on their way to the coordinator
    bursts: int = 0
    freezes: int = 0
    clock_steps: int = 0
    vouched: int = 0
    suspicions: int = 0  # silent here and to all witnesses
    unanswered: int = 0  # probes of them
    waits: int = 0  # of ranks that were told as standing still in a collective
    nodes: list[tuple[float, int, str]] = field(default_factory=list)  # (ms, node, evidence): declared lost

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "nodes"}


@dataclass(frozen=True)
class Silence:
    """A node that is really gone: says nothing from then on, and everybody waits for it after `waits_ms`."""

    node: int
    begin_ms: float
    waits_ms: float
    in_burst: float = 0.0  # share that is lost meanwhile of all that the coordinator hears

    def burst(self) -> Burst:
        return Burst(KINDS[2], self.begin_ms - 10_000.0, self.begin_ms + 20_000.0, -1, self.in_burst)


@dataclass
class _Suspect:
    since_ms: float
    next_ms: float  # when it is judged again
    is_silent: bool = True  # to all; else a witness hears it
    answer: str = ""
    coming: tuple[str, float] | None = None  # an answer, and when


class Beats:
    """Chunk after chunk of one run."""

    def __init__(self, seed: int, silence: Silence | None = None) -> None:
        self.rng = np.random.default_rng(seed)
        self.result = Result()
        self.silence = silence
        self._config = CoordinatorConfig()
        self._table = _core.BeatReplay(NODES, PERIOD_MS, LOOK_MS)
        self._phase = self.rng.uniform(0.0, PERIOD_MS, NODES)
        self._next = 0  # beat of each node
        self._late: list[Floats] = [np.empty(0) for _ in range(4)]  # of the chunk before: read, node, sequence, seen
        self._late[3] = np.empty((0, 2 * WITNESSES), dtype=np.int32)
        self._heard_ms = np.full((NODES, WITNESSES), -1.0)  # newest beat of each node at each of its witnesses
        self._offset_ms = 0.0  # of the coordinator's clock
        self._suspects: dict[int, _Suspect] = {}

    def run(self, begin_ms: float, end_ms: float, waits: list[Wait]) -> None:
        """waits: sorted by their begin."""
        self.result.waits += len(waits)
        bursts, freezes = self._draw(begin_ms, end_ms)
        read, node, sequence, seen = self._said(end_ms, bursts)
        for at, is_read_first in freezes:
            waited = (read >= at) & (read < at + FREEZE_MS)
            read[waited] = at + FREEZE_MS + (0.0 if is_read_first else 0.5)
        order = np.argsort(read, kind="stable")
        read, node, sequence, seen = (each[order] for each in (read, node, sequence, seen))
        count = int(np.searchsorted(read, end_ms))
        self._late = [each[count:] for each in (read, node, sequence, seen)]
        judge = _Judge(self, bursts, [at for at, _ in freezes], waits)
        steps = self._steps(begin_ms, end_ms, freezes)
        done = 0
        for at in [*steps, end_ms]:
            until = int(np.searchsorted(read, at)) if at < end_ms else count
            part = slice(done, until)
            pauses = [(f + self._offset_ms, f + FREEZE_MS + self._offset_ms) for f, _ in freezes]
            changes = self._table.replay(
                node[part].astype(np.int32), sequence[part].astype(np.int32), read[part] + self._offset_ms,
                np.ascontiguousarray(seen[part]).ravel(), np.array(pauses, dtype=float).ravel(), at + self._offset_ms,
            )  # fmt: skip
            for now_ms, number, hearing, _ in changes:
                judge.hear(now_ms - self._offset_ms, number, hearing)
            done = until
            if at < end_ms:
                self._set_clock(at)
        judge.until(end_ms)

    # ------------------------------------------------------------ what happens

    def _draw(self, begin_ms: float, end_ms: float) -> tuple[list[Burst], list[tuple[float, bool]]]:
        rng, hours = self.rng, (end_ms - begin_ms) / 3.6e6
        latest = end_ms - MARGIN_MS
        if latest <= begin_ms:
            return [], []
        bursts = []
        for kind in KINDS:
            for _ in range(rng.poisson(kind.per_hour * hours)):
                at, ms = rng.uniform(begin_ms, latest), min(rng.exponential(kind.mean_ms), MARGIN_MS / 2)
                node = -1 if kind.all_nodes else int(rng.integers(NODES))
                bursts.append(Burst(kind, at, at + ms, node, rng.uniform(*kind.loss)))
        if self.silence is not None and begin_ms <= self.silence.begin_ms < end_ms and self.silence.in_burst:
            bursts.append(self.silence.burst())
        times = np.sort(rng.uniform(begin_ms, latest, rng.poisson((end_ms - begin_ms) / FREEZE_EVERY_MS)))
        apart = [at for at, before in zip(times, [-np.inf, *times], strict=False) if at - before > 2 * FREEZE_MS]
        freezes = [(float(at), bool(rng.random() < 0.5)) for at in apart]
        self.result.bursts += len(bursts)
        self.result.freezes += len(freezes)
        return bursts, freezes

    def _steps(self, begin_ms: float, end_ms: float, freezes: list[tuple[float, bool]]) -> list[float]:
        """When the coordinator's clock is set; not while it stands still, when nobody would notice."""
        count = self.rng.poisson((end_ms - begin_ms) / STEP_EVERY_MS)
        times = np.sort(self.rng.uniform(begin_ms, end_ms, count)).tolist()
        return [at for at in times if not any(f - 100.0 <= at <= f + FREEZE_MS + 100.0 for f, _ in freezes)]

    def _set_clock(self, at: float) -> None:
        before = self._offset_ms
        self._offset_ms += self.rng.choice((-STEP_MS, STEP_MS))
        self.result.clock_steps += 1
        if self._offset_ms > before:  # the looks of an hour are not taken
            pause = np.array([at + before, at + self._offset_ms])
            none = np.empty(0, dtype=np.int32)
            self._table.replay(none, none, np.empty(0), none, pause, at + self._offset_ms)

    # ------------------------------------------------------------ datagrams

    def _said(self, end_ms: float, bursts: list[Burst]) -> list[Floats]:
        """When each beat is read by the coordinator, of whom, its number, and whom its sender heard how long ago."""
        last = max(int(end_ms / PERIOD_MS) + 1, self._next)
        number = np.arange(self._next, last)
        self._next = last
        sent = number[:, None] * float(PERIOD_MS) + self._phase
        read = self._arrivals(sent, (), bursts, to_witness=False)
        theirs = self._arrivals(sent, (WITNESSES,), bursts, to_witness=True)
        seen = self._seen(sent, theirs)
        kept = np.isfinite(read)
        self.result.beats += read.size
        self.result.lost += int((~kept).sum())
        numbers, nodes = np.broadcast_arrays(number[:, None] + 1, np.arange(NODES))
        fresh = (read[kept], nodes[kept], numbers[kept], seen[kept])
        return [np.concatenate([old, new]) for old, new in zip(self._late, fresh, strict=True)]

    def _arrivals(self, sent: Floats, copies: tuple[int, ...], bursts: list[Burst], *, to_witness: bool) -> Floats:
        """[beat][node] and, of witnesses, [witness]; infinity: lost."""
        rng, shape = self.rng, (*sent.shape, *copies)
        times = np.broadcast_to(sent.reshape(*sent.shape, *[1] * len(copies)), shape).copy()
        fate = rng.random(shape, dtype=np.float32)
        times += DELAY_MS * rng.exponential(1.0, shape)
        late = fate > 1.0 - LATE
        times[late] += rng.exponential(LATE_MS, int(late.sum()))
        times[fate < LOST] = np.inf
        for burst in bursts:
            if to_witness and not burst.kind.witnesses:
                continue
            for node in range(NODES) if burst.node < 0 else (burst.node,):
                first, last = np.searchsorted(sent[:, node], (burst.begin_ms, burst.end_ms))
                hit = times[first:last, node]
                if burst.kind.is_held:
                    np.maximum(hit, burst.end_ms, out=hit)
                else:
                    hit[rng.random(hit.shape) < burst.loss] = np.inf
        if self.silence is not None:
            times[sent[:, self.silence.node] >= self.silence.begin_ms, self.silence.node] = np.inf
        return times

    def _seen(self, sent: Floats, theirs: Floats) -> Floats:
        """Pairs (node, age) of each beat: a node is a witness of the two before it."""
        seen = np.empty((*sent.shape, 2 * WITNESSES), dtype=np.int32)
        for node in range(NODES):
            for offset in range(WITNESSES):
                other = (node - 1 - offset) % NODES
                heard = theirs[:, other, offset]
                heard = np.sort(heard[np.isfinite(heard)])
                heard = np.concatenate([self._heard_ms[other, offset : offset + 1], heard])
                newest = heard[np.searchsorted(heard, sent[:, node], side="right") - 1]
                seen[:, node, 2 * offset] = other
                seen[:, node, 2 * offset + 1] = np.where(newest < 0, -1, sent[:, node] - newest)
                self._heard_ms[other, offset] = heard[-1]
        return seen


class _Judge:
    """The coordinator's part: suspects are probed, and judged at every answer and verdict timer."""

    def __init__(self, beats: Beats, bursts: list[Burst], freezes: list[float], waits: list[Wait]) -> None:
        self._beats, self._bursts, self._freezes = beats, bursts, freezes
        self._waits = waits
        self._longest_ms = max((wait.end_ms - wait.begin_ms for wait in waits), default=0.0)

    def hear(self, now_ms: float, node: int, hearing: str) -> None:
        self.until(now_ms)
        suspects, result = self._beats._suspects, self._beats.result
        suspect = suspects.get(node)
        if hearing == "vouched":
            result.vouched += 1
        if hearing == "heard":
            suspects.pop(node, None)
        elif suspect is not None:
            suspect.is_silent = hearing == "silent"
        elif hearing == "silent" and not any(known == node for _, known, _ in result.nodes):
            result.suspicions += 1
            suspects[node] = _Suspect(now_ms, now_ms)

    def until(self, end_ms: float) -> None:
        for node, suspect in [*self._beats._suspects.items()]:
            while suspect.next_ms <= end_ms:
                if evidence := self._judge(node, suspect):
                    self._beats.result.nodes.append((suspect.next_ms, node, evidence))
                    del self._beats._suspects[node]
                    break

    def _judge(self, node: int, suspect: _Suspect) -> str:
        """Once, and when again. Out of a freeze timers come before what was said meanwhile: the worst order."""
        now_ms, config = suspect.next_ms, self._beats._config
        thawed = next((at + FREEZE_MS for at in self._freezes if at <= now_ms < at + FREEZE_MS), None)
        if thawed is not None:
            now_ms = suspect.next_ms = thawed
        if suspect.coming is not None and suspect.coming[1] <= now_ms:
            suspect.answer, suspect.coming = suspect.coming[0], None
        elapsed_ms = now_ms - suspect.since_ms
        evidence = evidence_of_loss(
            suspect.answer, "nobody hears its beats" if suspect.is_silent else "", elapsed_ms,
            is_past=elapsed_ms >= config.silence_ms_max, word=self._word(node, now_ms), is_awaited=False,
        )  # fmt: skip
        if not evidence:
            if suspect.coming is None:
                suspect.coming = self._probe(node, now_ms)
                self._beats.result.unanswered += suspect.coming[0] == "unknown"
            suspect.next_ms = now_ms + config.reconnect_grace_ms
        return evidence

    def _probe(self, node: int, now_ms: float) -> tuple[str, float]:
        """(answer, when): a connection that is not made at the first try is not made in time."""
        silence = self._beats.silence
        unknown = ("unknown", now_ms + PROBE_MS_MAX)
        if silence is not None and node == silence.node and now_ms >= silence.begin_ms:
            return unknown
        for burst in self._bursts:
            if burst.kind.answers or burst.node not in (-1, node) or not burst.begin_ms <= now_ms < burst.end_ms:
                continue
            is_late = burst.kind.is_held and burst.end_ms - now_ms > PROBE_MS_MAX
            if is_late or (not burst.kind.is_held and self._beats.rng.random() < burst.loss):
                return unknown
        return ("alive", now_ms + 1.0)

    def _word(self, node: int, now_ms: float) -> Word:
        """Of the ranks on other nodes that are heard."""
        silence, lost = self._beats.silence, self._beats.result.nodes
        if silence is not None and not lost and now_ms >= silence.begin_ms + silence.waits_ms:
            return Word.ENOUGH
        place, waiting = bisect_right(self._waits, now_ms, key=lambda wait: wait.begin_ms), set()
        while place > 0 and self._waits[place - 1].begin_ms >= now_ms - self._longest_ms:
            place -= 1
            if now_ms <= self._waits[place].end_ms:
                waiting.add(self._waits[place].node)
        heard = [other for other in range(NODES) if other != node and other not in self._beats._suspects]
        return word_of_waits([other in waiting for other in heard])


def wait(begin_ms: float, end_ms: float, node: int) -> Wait:
    """end_ms: when the rank goes on; its agent sees that with its next sample."""
    return Wait(min(begin_ms, end_ms), end_ms + SAMPLE_MS, node)
