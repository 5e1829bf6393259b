"""A worker that is at work may take as long as it likes to end; one that does nothing is found."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack

import pytest

from agent.test_process_activity import process
from holdfast.agent.late_ends import Idleness, idleness
from holdfast.agent.process_activity import Activity, read_activity, waits_outside
from holdfast.util.processes import processor_time_s
from support.nest import eventually

AT_WORK = {
    "computes": "while True: pass",
    "sleeps": "import time; time.sleep(1000)",
    "waits for a child": "import subprocess; subprocess.run(['sleep', '1000'])",
    "waits for a thread that sends": (
        "import socket, threading\na, b = socket.socketpair()\nt = threading.Thread(target=b.recv, args=(1,))\n"
        "t.start(); t.join()"
    ),
}
STUCK = "import threading; l = threading.Lock(); l.acquire(); l.acquire()"


def watch(pid: int, looks: int) -> tuple[Idleness, float]:
    """What is known of a process after some looks, and the time of the last one."""
    found: Idleness | None = None
    for _ in range(looks):
        now = time.monotonic()
        found = idleness(pid, found, now)
        time.sleep(0.2)
    assert found is not None
    return found, now


@pytest.mark.parametrize("code", AT_WORK.values(), ids=AT_WORK)
def test_a_process_that_is_at_something_is_never_idle(code: str) -> None:
    with process(code) as pid:
        eventually(lambda: waits_outside(pid) or processor_time_s(pid) > 0.3, "it has started")
        found, now = watch(pid, 5)
        assert found.since == now


def test_a_process_that_others_keep_from_its_processor_is_at_work() -> None:
    there = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})\n"
    with ExitStack() as stack:
        pid = stack.enter_context(process(there + "while True: pass"))
        eventually(lambda: processor_time_s(pid) > 0.3, "it has started")
        os.setpriority(os.PRIO_PROCESS, pid, 19)
        others = [stack.enter_context(process(there + "while True: pass")) for _ in range(4)]
        eventually(lambda: min(processor_time_s(other) for other in others) > 0.1, "the others have started")
        found = idleness(pid, None, time.monotonic())
        eventually(lambda: idleness(pid, found, time.monotonic()).since > found.since, "it waits for its turn")


def test_a_process_that_waits_for_a_lock_is_idle_since_then() -> None:
    with process(STUCK) as pid:
        eventually(lambda: read_activity(pid).activity is Activity.IDLE, "it waits")
        found, now = watch(pid, 5)
        assert found.since < now
