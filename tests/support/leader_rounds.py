"""Rounds of faults against several coordinators: real coordinators, agents, workers and an etcd of three members.

    python -m leader_rounds --seed 7 --rounds 20      (tests/support in PYTHONPATH; `make leaders` does it)

In every round one thing, by the seed, happens to the coordinator that decides or to etcd: it is killed, frozen for
longer than its lease and resumed, cut off from etcd, or told to end; or a member of etcd is killed. Then another one
decides (or the same one still does), and what must hold is looked at: nobody decided after its successor had begun; no
order that was acknowledged is forgotten; the workers of both tasks are the same processes and did not stand still
meanwhile; all of the time is accounted for as training; and no incident is known.

Rounds come in sets of one cluster each, a round of every fault; --record keeps the rows of a set that ended well, and a
set that is there already is not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from clusters import eventually, plain_job
from etcd_members import EtcdMembers
from leader_record import Record, Row
from several_coordinators import BEGAN, LEASE_S, TAKEN_OVER_S_MAX, SeveralCoordinators, second_of_day, seconds
from unicron.coordinator.journal import TermBegan, decode_entry
from unicron.runtime import processes
from unicron.runtime.client import CoordinatorRefused, CoordinatorSilent
from unicron.runtime.etcd import Etcd
from unicron.runtime.journal_etcd import unpack

FAULTS = ("kill", "freeze", "cut", "end", "member")
TASKS = ("t0", "t1")
PAUSE_S_MAX = 1.5  # between two iterations of 10 ms: a takeover takes longer, a busy machine's pause is shorter
ACCOUNT_S_MAX = 1.0  # by which a task's accounts and our clock may differ
SENT = re.compile(r"^(\d\d):(\d\d):(\d\d\.\d+) unicron\.coordinator INFO send ", re.MULTILINE)


class Rounds:
    def __init__(
        self, seed: int, folder: Path, say: Callable[[str], None] = lambda _: None, freeze_s: float = 0.0
    ) -> None:
        """freeze_s: a frozen one stays so for this long at least, beside until its successor decides."""
        self._freeze_s = freeze_s
        self._seed = seed
        self._random = random.Random(seed)
        self._say = say
        self._orders: list[str] = []
        self.rows: list[Row] = []
        self._etcd = EtcdMembers(folder)
        self.cluster = SeveralCoordinators(self._etcd, folder)
        self._folder = folder
        self._fault_s = 0.0  # second of the day
        self._fault_monotonic_s = 0.0
        self._answered_s = 0.0

    def run(self, faults: tuple[str, ...]) -> None:
        cluster = self.cluster
        cluster.start(30)
        for task in TASKS:
            env = {"PLAIN_PAUSES": str(self._folder / f"{task}.pauses")}
            cluster.submit(plain_job(task, self._folder, iterations=10_000_000, env=env))
        eventually(lambda: min(self._iterations().values()) > 3, 30)
        pids = {task: self._members(task) for task in TASKS}
        for number, fault in enumerate(faults, 1):
            self._order(f"waits-{number}")
            name, term = cluster.leader()
            iterations, accounts = self._iterations(), self._accounts()
            self._pauses()  # of what was before
            self._begin()
            getattr(self, f"_{fault}")(name, term)
            self._look(pids, iterations)
            self._check_accounts(accounts)
            self._note(number, fault, term)
        self._check_terms()

    def close(self) -> list[int]:
        try:
            return self.cluster.stop()
        finally:
            self._etcd.close()

    def _begin(self) -> None:
        """The fault is now."""
        self._fault_s = second_of_day()
        self._fault_monotonic_s = time.monotonic()

    def _note(self, number: int, fault: str, term: int) -> None:
        taken_s = self.cluster.taken_over_s(term, self._fault_s)
        joined_s = None if taken_s is None else self.cluster.joined_s(self._fault_s)
        pause_s = self._pauses()
        assert pause_s < PAUSE_S_MAX, f"a task stood still for {pause_s:.2f} s"
        row = Row(self._seed, number, fault, taken_s, joined_s, self._answered_s, pause_s, os.getloadavg()[0])
        self.rows.append(row)
        self._say(row.words())

    # ------------------------------------------------------------ faults

    def _kill(self, name: str, term: int) -> None:
        self._begin()
        os.kill(self.cluster.pid(name), signal.SIGKILL)
        self.cluster.wait_ended(name)
        self._wait_for_successor(term)
        self.cluster.start_one(name)

    def _end(self, name: str, term: int) -> None:
        self._begin()
        os.kill(self.cluster.pid(name), signal.SIGTERM)
        assert self.cluster.wait_ended(name) == 0
        self._wait_for_successor(term)
        self.cluster.start_one(name)

    def _freeze(self, name: str, term: int) -> None:
        """At any moment of its loop; resumed while its successor decides, and while somebody asks it something."""
        time.sleep(self._random.uniform(0.0, 0.5))
        self._begin()
        os.kill(self.cluster.pid(name), signal.SIGSTOP)
        frozen_s = time.monotonic()
        try:
            self._wait_for_successor(term)
            time.sleep(self._random.uniform(0.0, 1.0) + max(0.0, frozen_s + self._freeze_s - time.monotonic()))
            asker = self.cluster.client_of(name)
        finally:
            os.kill(self.cluster.pid(name), signal.SIGCONT)
        with asker, contextlib.suppress(CoordinatorSilent):
            raise AssertionError(f"{name} still answers: {asker.ask('ping', timeout_ms=1000)}")
        self._wait_until_it_waits(name)

    def _cut(self, name: str, term: int) -> None:
        self._begin()
        for wire in self.cluster.wires[name]:
            wire.cut()
        try:
            self._wait_for_successor(term)
        finally:
            for wire in self.cluster.wires[name]:
                wire.mend()
        self._wait_until_it_waits(name)

    def _member(self, name: str, term: int) -> None:
        """Whichever it is, etcd's own leader too: whether the coordinator keeps its lease is not said."""
        member = self._random.randrange(len(self._etcd.endpoints))
        self._begin()
        self._etcd.kill(member)
        self._order(f"without-member-{member}-in-{term}")
        self._answered()
        self._etcd.start(member)
        self._etcd.wait_until_up()

    # ------------------------------------------------------------ what must hold

    def _order(self, name: str) -> None:
        """One that is acknowledged, and must not be forgotten: a task that waits, because all slots are held."""
        job = plain_job(name, self._folder)
        with contextlib.suppress(CoordinatorRefused):  # known already: its answer was lost
            self.cluster.patiently("submit", job=msgspec.to_builtins(job))
        self._orders.append(name)

    def _wait_for_successor(self, term: int) -> None:
        eventually(lambda: self.cluster.taken_over_s(term, self._fault_s), TAKEN_OVER_S_MAX)
        eventually(lambda: int(self.cluster.patiently("ping")["term"]) > term, TAKEN_OVER_S_MAX)
        self._answered()

    def _answered(self) -> None:
        self._answered_s = time.monotonic() - self._fault_monotonic_s  # the clock of the day may be set meanwhile

    def _wait_until_it_waits(self, name: str) -> None:
        def waits() -> bool:
            log = self.cluster.logs()[name]
            return log.rfind("waits: ") > log.rfind("begins")

        eventually(waits, TAKEN_OVER_S_MAX)

    def _iterations(self) -> dict[str, int]:
        views = {task: self.cluster.patiently("describe", task=task) for task in TASKS}
        return {
            task: min((int(worker["iteration"]) for worker in view["workers"] if worker["is_member"]), default=-1)
            for task, view in views.items()
        }

    def _members(self, task: str) -> set[int]:
        workers = self.cluster.patiently("describe", task=task)["workers"]
        return {w["pid"] for w in workers if w["is_member"] and w["phase"] == "ready" and w["pid"]}

    def _look(self, pids: dict[str, set[int]], iterations: dict[str, int]) -> None:
        cluster = self.cluster

        def all_known(task: str) -> bool:
            view = cluster.patiently("describe", task=task)
            return view["phase"] == "running" and self._members(task) == pids[task]

        for task in TASKS:
            eventually(functools.partial(all_known, task), TAKEN_OVER_S_MAX)
        eventually(lambda: all(now > iterations[task] for task, now in self._iterations().items()))
        found = cluster.patiently("incidents")
        incidents = [i for i in found if i["severity"] != "INFO"]  # a busy machine makes ranks slow, which is only told
        assert incidents == [], "\n".join(f"{i['id']} {i['severity']} {i['task']}: {i['cause']}" for i in incidents)
        known = {task["task"] for task in cluster.patiently("ps")}
        assert known >= {*TASKS, *self._orders}, sorted({*self._orders} - known)

    def _pauses(self) -> float:
        """The longest time, since the last call, that a worker took from one iteration to the next."""
        longest = 0.0
        for path in self._folder.glob("*.pauses.*"):
            text = path.read_text()
            path.write_text("")
            longest = max([longest, *(float(line) for line in text.split())])
        return longest

    def _accounts(self) -> dict[str, tuple[float, float, float]]:
        """Of each task: our clock, the seconds of all kinds, and those of training."""
        found = {}
        for task in TASKS:
            spent = self.cluster.patiently("describe", task=task)["spent_s"]
            found[task] = (time.monotonic(), sum(spent.values()), spent["running"])
        return found

    def _check_accounts(self, before: dict[str, tuple[float, float, float]]) -> None:
        for task, now in self._accounts().items():
            clock_s, all_s, training_s = (new - old for new, old in zip(now, before[task], strict=True))
            assert abs(all_s - clock_s) < ACCOUNT_S_MAX, f"{task}: {clock_s:.2f} s passed, {all_s:.2f} s accounted for"
            assert abs(training_s - all_s) < 1e-6, f"{task}: of {all_s:.2f} s {training_s:.2f} s are training"

    def _check_terms(self) -> None:
        """In the journal terms grow by one; in the logs nobody sends after its successor has begun."""
        client = Etcd(self._etcd.settings())
        batches: dict[str, bytes] = {}
        for key, part in client.items("unicron/journal/", "unicron/journal/~"):
            folder = key.rpartition("/")[0]
            batches[folder] = batches.get(folder, b"") + part
        client.close()
        entries = [decode_entry(entry) for batch in batches.values() for entry in unpack(batch)]
        terms = [entry.term for entry in entries if isinstance(entry, TermBegan)]
        assert terms == [*range(1, len(terms) + 1)] and len(terms) >= 2, terms
        began: dict[int, float] = {}
        last_sent: dict[int, float] = {}
        for log in self.cluster.logs().values():
            own = [(int(m[4]), seconds(m)) for m in BEGAN.finditer(log)]
            began.update(own)
            for sent in map(seconds, SENT.finditer(log)):
                of = [term for term, at in own if at <= sent + 0.5]  # its first orders come with the term's beginning
                last_sent[of[-1]] = max(sent, last_sent.get(of[-1], 0.0))
        late = [(term, sent, began[term + 1]) for term, sent in last_sent.items() if sent > began.get(term + 1, 1e9)]
        assert not late, f"(term, sent, successor began): {late}"


def faults_of(seed: int, rounds: int) -> tuple[str, ...]:
    """Each kind before any comes again."""
    order = random.Random(seed)
    found: list[str] = []
    while len(found) < rounds:
        found += order.sample(FAULTS, len(FAULTS))
    return tuple(found[:rounds])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m leader_rounds")
    parser.add_argument("--seed", type=int, default=0, help="of the first set; the next ones count on")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--freeze-s", type=float, default=30.0, help="a frozen one stays so at least this long")
    parser.add_argument("--record", type=Path, help="where rows are kept, and found again")
    parser.add_argument("--minutes", type=float, default=600.0, help="no set is begun after that")
    options = parser.parse_args()
    record = Record(options.record, LEASE_S)
    until_s = time.monotonic() + 60 * options.minutes
    for number in range(-(-options.rounds // len(FAULTS))):
        seed = options.seed + number
        if not record.has(seed) and time.monotonic() < until_s:
            record.add(one_set(seed, options.freeze_s))
    print(record.words())
    return record.exit_code()


def one_set(seed: int, freeze_s: float) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="unicron-leaders-") as folder:
        rounds = Rounds(seed, Path(folder), lambda text: print(text, flush=True), freeze_s)
        try:
            rounds.run(faults_of(seed, len(FAULTS)))
        finally:
            left = rounds.close()
    assert left == [] and processes.find(rounds.cluster.directory) == []
    return rounds.rows


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what it started ends with it
    sys.exit(main())
