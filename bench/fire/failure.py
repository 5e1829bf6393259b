"""A promise that was broken, and processes that are made to be killed."""

from __future__ import annotations

import faulthandler
import os
import signal
import traceback
from collections.abc import Callable

BROKEN = 86
"""The exit code of a process that met a bug before it was killed."""


class BrokenError(Exception):
    """A promise was broken: which, and when."""


def start(work: Callable[[], None]) -> int:
    """Start a process; return its id. It ends by a signal, as the work says, or with BROKEN."""
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        faulthandler.register(signal.SIGUSR1)  # for one that stands still: where?
        work()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(BROKEN)
