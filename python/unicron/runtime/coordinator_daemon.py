"""`unicron coordinator`: one that decides at once, with a journal in SQLite, or one of several that wait for each
other, with a journal in etcd.

Of several, each waits until the leader's key is free, decides as long as its lease lasts, and waits again. Only the one
that decides listens: whoever calls all addresses finds it.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from unicron.runtime import keys, logs
from unicron.runtime.coordinator_process import EXIT_FOLLOWED, EXIT_JOURNAL, EXIT_RENEWED, CoordinatorProcess
from unicron.runtime.coordinator_settings import CoordinatorSettings, EtcdSettings, listens_at
from unicron.runtime.ending import Ending, rise
from unicron.runtime.endpoints import EndpointProblem
from unicron.runtime.files import FileProblem, write_atomically
from unicron.runtime.journal_problem import JournalProblem, LeadershipLost
from unicron.runtime.journal_sqlite import SqliteJournal

if TYPE_CHECKING:  # imported where they are configured
    from prometheus_client.core import Metric

    from unicron.runtime.election import Leadership
    from unicron.runtime.etcd import Etcd
    from unicron.runtime.exposition import Exposition

LOOK_MS = 100  # between two looks whether the leader's key is free

log = logging.getLogger("unicron.coordinator")


def run(settings: CoordinatorSettings, lifeline: int = -1, ready: Path | None = None) -> int:
    """Until it is told to end: its exit code. ready: file that gets the endpoint whenever this one decides."""
    listens_at(settings)  # now, not in the hour in which this one is wanted to decide
    ending = Ending(lifeline)
    ending.catch_signals()
    rise()
    try:
        if settings.etcd is not None:
            return _run_among_several(settings, settings.etcd, ending, ready)
        code = EXIT_RENEWED
        while code == EXIT_RENEWED:
            journal = SqliteJournal(Path(settings.journal), pages_max=settings.journal_pages_max)
            process = CoordinatorProcess(settings, journal, ending)
            settings = msgspec.structs.replace(settings, listen=process.endpoint.removeprefix("tcp://"))
            code = _decide(process, ready)
        return code
    except JournalProblem as problem:
        sys.stderr.write(f"unicron coordinator: {problem}\n")
        return EXIT_JOURNAL
    finally:
        ending.close()


def _decide(process: CoordinatorProcess, ready: Path | None) -> int:
    if ready:
        write_atomically(ready, process.endpoint)
    return process.run()


def _run_among_several(settings: CoordinatorSettings, etcd: EtcdSettings, ending: Ending, ready: Path | None) -> int:
    require_etcd()
    from unicron.runtime.etcd import EtcdProblem
    from unicron.runtime.journal_etcd import EtcdJournal, cluster_clock_ms

    while True:
        leadership = _wait_to_lead(settings, etcd, ending)
        if leadership is None:
            log.info("stopped: %s", ending.reason)
            return 0
        client = new_client(etcd)
        try:
            journal = EtcdJournal(client, leadership)
            _refuse_to_forget(settings, journal.is_empty)
            leadership.offset_ms = cluster_clock_ms(client)
        except BaseException as problem:
            leadership.close()
            client.close()
            if not isinstance(problem, EtcdProblem | LeadershipLost):
                raise
            log.warning("cannot begin: %s", problem)
            continue
        code = _decide(CoordinatorProcess(settings, journal, ending, leadership), ready)
        if code not in (EXIT_FOLLOWED, EXIT_RENEWED):
            return code


def _refuse_to_forget(settings: CoordinatorSettings, is_empty: bool) -> None:
    path = Path(settings.journal)
    if is_empty and path.is_file() and path.stat().st_size:
        raise JournalProblem(
            f"etcd holds no journal yet, but {path} does: copy it with `unicron coordinator CONFIG --copy-from {path}`,"
            " or move that file away to begin with nothing"
        )


# ---------------------------------------------------------------- waiting


def _wait_to_lead(settings: CoordinatorSettings, etcd: EtcdSettings, ending: Ending) -> Leadership | None:
    """None: told to end."""
    from unicron.runtime.election import own_name, try_to_lead
    from unicron.runtime.etcd import EtcdProblem

    client = new_client(etcd)
    waiting = _Waiting(settings.metrics, ending)
    try:
        while not ending.reason:
            try:
                answer = try_to_lead(client, own_name(settings.listen))
            except EtcdProblem as problem:
                answer = f"etcd does not answer: {problem}"
            if not isinstance(answer, str):
                log.info("decides now")
                return answer
            waiting.look(answer, LOOK_MS)
        return None
    finally:
        waiting.close()
        client.close()


class _Waiting:
    """What others see of one that waits."""

    def __init__(self, metrics: str, ending: Ending) -> None:
        self._why = ""
        self._ending = ending
        self._exposition: Exposition | None = None
        if metrics:
            from unicron.runtime.exposition import Exposition

            self._exposition = Exposition(metrics)
            self._exposition.watch(self._families, lambda: f"waits: {self._why}")

    def _families(self) -> Iterable[Metric]:
        from unicron.runtime.exposition import number

        yield number("leader", "1 where this coordinator decides, 0 where it waits.", 0)

    def look(self, why: str, wait_ms: int) -> None:
        if why != self._why:
            self._why = why
            log.info("waits: %s", why)
        poller = zmq.Poller()
        self._ending.register(poller)
        if self._exposition is not None:
            poller.register(self._exposition.fileno(), zmq.POLLIN)
        ready = dict(poller.poll(wait_ms))
        self._ending.look(ready)
        if self._exposition is not None and self._exposition.fileno() in ready:
            self._exposition.serve()

    def close(self) -> None:
        if self._exposition is not None:
            self._exposition.close()


# ---------------------------------------------------------------- etcd


def require_etcd() -> None:
    try:
        import etcd3gw  # noqa: F401
    except ModuleNotFoundError:
        raise FileProblem("etcd is configured and its client is not installed: pip install 'unicron[etcd]'") from None


def new_client(settings: EtcdSettings) -> Etcd:
    from unicron.runtime.election import LEASE_S_MIN
    from unicron.runtime.etcd import Etcd

    if not (math.isfinite(settings.request_s) and settings.request_s > 0):
        raise FileProblem(f"etcd.request_s is {settings.request_s}: give seconds above 0")
    try:
        # whoever hangs on one member must be able to ask another one while its lease lasts
        client = Etcd(msgspec.structs.replace(settings, request_s=min(settings.request_s, settings.lease_s / 2)))
        if settings.lease_s < LEASE_S_MIN:
            client.close()
            raise ValueError(f"etcd.lease_s is {settings.lease_s}, and must be {LEASE_S_MIN} at least")
        return client
    except (EndpointProblem, ValueError) as error:
        raise FileProblem(str(error)) from None


def copy_journal(settings: CoordinatorSettings, path: Path) -> int:
    """A journal in SQLite, whose coordinator must have ended, into etcd; the number of entries."""
    from unicron.runtime.election import own_name, try_to_lead
    from unicron.runtime.journal_etcd import copy_into

    if settings.etcd is None:
        raise FileProblem("the configuration has no etcd: nothing to copy into")
    if not path.is_file():
        raise FileProblem(f"no journal {path}")
    require_etcd()
    from unicron.runtime.etcd import EtcdProblem

    source = SqliteJournal(path)
    try:
        client = new_client(settings.etcd)
        answer = try_to_lead(client, own_name("unicron coordinator --copy-from"))
        if isinstance(answer, str):
            client.close()
            raise JournalProblem(f"a coordinator decides already ({answer}): end it, it began with another journal")
        return copy_into(client, answer, list(source.entries()), str(path))
    except EtcdProblem as problem:
        where, _, said = str(problem).partition(": ")
        raise JournalProblem(f"etcd does not answer at {where} ({said}): start it, or mend etcd.endpoints") from None
    finally:
        source.close()


def main(arguments: list[str] | None = None) -> int:
    """For a local cluster: python -m unicron.runtime.coordinator_daemon (people use the command
    line).
    """
    parser = argparse.ArgumentParser(prog="python -m unicron.runtime.coordinator_daemon")
    parser.add_argument("--config", type=Path, required=True, help="CoordinatorSettings as JSON")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--lifeline", type=int, default=-1)
    parser.add_argument("--ready", type=Path, help="file that gets the endpoint once it listens")
    options = parser.parse_args(arguments)
    logs.set_up(options.log)
    settings = msgspec.json.decode(options.config.read_bytes(), type=CoordinatorSettings)
    try:
        return run(settings, options.lifeline, options.ready)
    except (OSError, FileProblem, keys.KeyProblem) as problem:
        sys.stderr.write(f"unicron coordinator: {problem}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
