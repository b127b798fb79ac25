"""A daemon's priority: above busy trainers where that is permitted, and nothing it starts inherits it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.timeout(30)

SAYS = textwrap.dedent(
    """
    import os, subprocess, sys, threading
    from unicron.runtime.ending import rise, settle

    def mine():
        return os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK

    def of_a_child():
        code = "import os; print(os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0))"
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()

    found = []
    rise()
    thread = threading.Thread(target=lambda: found.append(mine()))
    thread.start()
    thread.join()
    settle()
    print(mine(), *found, of_a_child())
    """
)


def test_threads_made_before_it_settles_inherit_and_programs_do_not() -> None:
    done = subprocess.run([sys.executable, "-c", SAYS], capture_output=True, text=True, check=True)
    main, thread, child, niceness = map(int, done.stdout.split())
    if main != os.SCHED_RR:
        pytest.skip("no real-time priority is permitted here")
    assert (thread, child, niceness) == (os.SCHED_RR, os.SCHED_OTHER, 0)
