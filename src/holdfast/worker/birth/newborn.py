"""From a fork of the server to a process of its own: what a newborn does before anything of the user's runs.

    orphaned on purpose   the intermediate that forked it exits, and the kernel gives it to the agent, a subreaper
    on a leash            PR_SET_PDEATHSIG, set only now: it fires when the *present* parent dies
    alone                 a session of its own, default signals, no descriptors but 0, 1, 2 and preloaded modules' own
    at home               its environment, directory, title and seeds
    announced             its pid on the report pipe, as the last act before it runs

The report is the line between "never ran" and "may have run": see forkserver.py.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Set

from holdfast.wire.local import NotStarted, Report, Start, Started, encode
from holdfast.worker.birth import like_new
from holdfast.worker.birth.title import set_title

REASON_CHARS_MAX = 1000  # so that a report is one atomic write to a pipe
ORPHAN_EXIT_CODE = 75
# The signal comes at once; this is for the day on which it does not.
PARENT_CHECK_S = 0.05

_PR_SET_PDEATHSIG = 1
# Told to us by the kernel when the intermediate has died; ignored by default, should one come late.
_PARENT_DIED = signal.SIGURG
_libc = ctypes.CDLL(None)


def report(pipe: int, message: Report) -> None:
    """Raises OSError where nobody listens any more."""
    os.write(pipe, encode(message))


def report_failure(pipe: int, request_id: int, pid: int, reason: str) -> None:
    try:
        report(pipe, NotStarted(request_id, pid, reason[:REASON_CHARS_MAX]))
    except OSError:
        return  # whoever asked has given up; there is nobody to tell


def announce(pipe: int, request_id: int) -> None:
    """Whoever cannot report must not run: nobody would know of it."""
    try:
        report(pipe, Started(request_id, os.getpid()))
    except OSError:
        os._exit(ORPHAN_EXIT_CODE)
    os.close(pipe)


def leave_home(intermediate_pid: int, agent_pid: int) -> None:
    """Waits to be the agent's child, and makes sure not to outlive it. No other thread may have been started by now:
    it would be given the signal in our place, and lose it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {_PARENT_DIED})
    _libc.prctl(_PR_SET_PDEATHSIG, _PARENT_DIED)
    while os.getppid() == intermediate_pid:
        signal.sigtimedwait({_PARENT_DIED}, PARENT_CHECK_S)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {_PARENT_DIED})
    die_with(agent_pid)


def die_with(parent_pid: int) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the line above, so no signal will come
        os._exit(ORPHAN_EXIT_CODE)


def reset_signals(for_exec: bool) -> None:
    """As at the start of an interpreter, which ignores SIGPIPE and SIGXFSZ; programs expect these to be default."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) not in (signal.SIG_DFL, None):
            signal.signal(number, signal.SIG_DFL)
    if not for_exec:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def close_descriptors(keep: Set[int]) -> None:
    """All but the standard streams and `keep`."""
    for descriptor in open_descriptors() - keep:
        os.close(descriptor)


def open_descriptors() -> Set[int]:
    """Those above the standard streams, without the one used for listing them."""
    found = {int(name) for name in os.listdir("/proc/self/fd")}  # noqa: PTH208
    return {descriptor for descriptor in found if descriptor > 2 and is_open(descriptor)}


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def settle(request: Start, for_exec: bool) -> None:
    """Raises OSError where the environment or the directory cannot be had."""
    os.environ.clear()
    os.environb.update(request.env)
    os.chdir(request.cwd)
    if not for_exec:
        like_new.forget()
        set_title([os.fsencode(sys.executable), b"-u", *request.argv])
