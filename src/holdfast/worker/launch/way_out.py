"""A worker's way out of a process group, so that no worker hangs at its end (pytorch#56297).

torch's gloo backend has threads that need the interpreter's lock for a moment after each collective: what they release
then may hold a Python object, as the last all-reduce of a backward always does. The backend's destructor joins these
threads. A thread that destroys it while holding the lock waits forever. In a process that has been warm from the start
the end follows the last backward within a millisecond, so this is seen in every third run of a common kind of script.

    a DDP that is the last user of its group      its C++ part destroys the group under the lock: so each DDP gets
    (`destroy_process_group()` came first)        a user of the group that lives longer (`torch_compat`), in Python,
                                                  where torch does release the lock
    the interpreter comes down                    a thread that asks for the lock now never gets it, or ends the
                                                  process by an abort: so they are waited for, last of all exit handlers

The wait is for threads that have work to do, not for those that wait for other ranks, and it has a limit.
"""

from __future__ import annotations

import atexit
import sys
import time
from pathlib import Path

THREAD_NAME = "pt_gloo_runloop"
SETTLE_LIMIT_S = 1.0
PAUSE_S = 0.001


def install() -> None:
    """Arrange for the wait. To be called before the user's code: exit handlers run in the reverse order."""
    atexit.register(settle)


def settle() -> None:
    """Wait until the threads of gloo sleep though the interpreter's lock was free."""
    if "torch.distributed" not in sys.modules:
        return
    before, deadline = gloo_threads(), time.monotonic() + SETTLE_LIMIT_S
    while before and time.monotonic() < deadline:
        time.sleep(PAUSE_S)  # releases the lock: a thread that waits for it gets it, and has been switched to then
        now = gloo_threads()
        if now == before and all(state == "S" for state, _ in now.values()):
            return
        before = now


def gloo_threads() -> dict[str, tuple[str, str]]:
    """Return the state of each thread of gloo that runs collectives, and how often it has been switched to or away
    from."""
    found: dict[str, tuple[str, str]] = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text().strip() != THREAD_NAME:
                continue
            lines = (task / "status").read_text().splitlines()
        except OSError:
            continue  # it has ended meanwhile
        state = next((line.split()[1] for line in lines if line.startswith("State:")), "")
        found[task.name] = (state, " ".join(line for line in lines if "ctxt_switches" in line))
    return found
