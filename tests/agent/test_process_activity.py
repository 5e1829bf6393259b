"""What processes do, as the kernel tells: real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from holdfast.agent.process_activity import Activity, describe_state, read_activity, time_spent_s
from holdfast.util.processes import process_state
from support.nest import eventually


@contextmanager
def process(code: str) -> Iterator[int]:
    running = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        yield running.pid
    finally:
        running.kill()
        running.communicate()


DOING = {
    "import time; time.sleep(1000)": Activity.ASLEEP,
    "import sys; sys.stdin.read()": Activity.OUTSIDE,
    "import socket; a, b = socket.socketpair(); a.recv(1)": Activity.OUTSIDE,
    "import select, socket; a, b = socket.socketpair(); select.select([a], [], [])": Activity.OUTSIDE,
    "import subprocess; subprocess.run(['sleep', '1000'])": Activity.OUTSIDE,
    "import threading; l = threading.Lock(); l.acquire(); l.acquire()": Activity.IDLE,
    "while True: pass": Activity.RUNNABLE,
    "import threading, time\ndef work():\n while True: pass\n"
    "threading.Thread(target=work, daemon=True).start()\ntime.sleep(1000)": Activity.RUNNABLE,
    "import os, time\nif os.fork(): time.sleep(1000)\nimport ctypes; ctypes.CDLL(None).prctl(1, 9)\n"
    "while True: pass": Activity.RUNNABLE,
}


@pytest.mark.parametrize("code", DOING, ids=lambda code: code.replace("import ", "")[:40])
def test_what_a_process_does_is_known(code: str) -> None:
    with process(code) as pid:
        eventually(lambda: [read_activity(pid).activity for _ in range(5)] == [DOING[code]] * 5, f"it is {DOING[code]}")


def test_a_process_that_sleeps_again_and_again_is_not_in_one_sleep() -> None:
    with process("import time\nwhile True: time.sleep(0.01)") as pid:
        eventually(lambda: read_activity(pid).activity is Activity.ASLEEP, "it sleeps")
        before = read_activity(pid).switches
        eventually(lambda: read_activity(pid).switches > before, "it has run meanwhile")


def test_a_stopped_process_is_known_and_described() -> None:
    with process("import time; time.sleep(1000)") as pid:
        os.kill(pid, signal.SIGSTOP)
        eventually(lambda: read_activity(pid).activity is Activity.STOPPED, "it is stopped")
        assert process_state(pid) == "T" and "stopped by a signal" in describe_state(pid)


def test_what_a_process_has_spent_grows_with_its_work() -> None:
    before = time_spent_s(os.getpid())
    total = 0
    while time_spent_s(os.getpid()) < before + 0.05:
        total += sum(range(1000))
    assert time_spent_s(2**22) == 0.0 and process_state(2**22) == "X", "no such process"
