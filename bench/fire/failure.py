"""A promise that was broken, and processes that are made to be killed."""

from __future__ import annotations

import faulthandler
import os
import signal
import traceback
from collections.abc import Callable

BROKEN = 86
"""How a process ends that has met a bug, and not its killer."""


class BrokenError(Exception):
    """A promise was. Says which, and when."""


def start(work: Callable[[], None]) -> int:
    """A process of our own making; its id. It ends by a signal, as the work says, or with BROKEN."""
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
