"""Whether gloo has come to rest: it writes into no tensor any more, though an operation of it has not ended.

Gloo forgets an operation whose message was half sent or half received when its connection broke (guarded.py): a thread
sleeps in it until the operation's time-out, and then raises. The same tensors may be given to another communicator
meanwhile only if no thread writes into them, and there are two who could:

    the device's thread   reads from sockets into tensors. Gloo closes a socket when it has read to its end, so when all
                          sockets of a communicator are closed, nothing is read any more
    the work threads      add what came. One that sleeps all the time, between two looks, is not doing so; and nothing
                          wakes it any more but its time-out, as that would be the device's thread
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from holdfast.worker.collectives import sockets

LOOK_AGAIN_S = 0.01
TASKS = Path("/proc/self/task")
SLEEPS = "S (sleeping)"
DEVICE_THREAD = "gloo_tcp_loop"
"""The name that gloo gives to a device's thread. It wakes many times a second with nothing to do."""


def threads() -> frozenset[int]:
    """Return the ids of the threads of this process that could be work threads: all but those of gloo's devices."""
    found = [int(name) for name in os.listdir(TASKS)]  # noqa: PTH208 - called where milliseconds count
    return frozenset(thread for thread in found if _name_of(thread) != DEVICE_THREAD)


def is_at_rest(connections: Mapping[int, int], workers: Collection[int], pause_s: float = LOOK_AGAIN_S) -> bool:
    """Return whether these connections (descriptor, inode) are closed, and these threads asleep."""
    if any(sockets.state(fd, inode) for fd, inode in connections.items()):
        return False
    before = [_runs_of(thread) for thread in workers]
    if not all(before):
        return False
    time.sleep(pause_s)
    return before == [_runs_of(thread) for thread in workers]


def _name_of(thread: int) -> str:
    try:
        return (TASKS / str(thread) / "comm").read_text().strip()
    except OSError:  # it has ended meanwhile
        return ""


def _runs_of(thread: int) -> str:
    """Return how often a thread that sleeps has run; empty if it does not sleep. One that has ended runs no more."""
    try:
        lines = (TASKS / str(thread) / "status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between opening and reading
        return "ended"
    fields = dict(line.split(":", 1) for line in lines)
    if fields["State"].strip() != SLEEPS:
        return ""
    return f"{fields['voluntary_ctxt_switches'].strip()} {fields['nonvoluntary_ctxt_switches'].strip()}"
