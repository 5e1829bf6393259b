"""The worker's side of stacks on request (wire/stack_dumps.py): a signal handler in C, set before the script runs."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import resource

from holdfast.wire.stack_dumps import STACKS_SIGNAL, STACKS_VARIABLE

DESCRIPTOR_MIN = 900
"""Scripts that close descriptors by number close low ones, and new files get the lowest free number: the dump must
never be written to another file."""


def install() -> None:
    """Have the fault handler write all stacks to the agent's file when the signal comes. A worker without an agent, or
    one that cannot open the file, runs without."""
    path = os.environ.get(STACKS_VARIABLE)
    if not path:
        return
    try:
        opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        return
    try:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        lowest = DESCRIPTOR_MIN if limit == resource.RLIM_INFINITY else max(min(DESCRIPTOR_MIN, limit - 16), 3)
        descriptor = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, lowest)
    except OSError:
        return
    finally:
        os.close(opened)
    faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True, chain=False)
