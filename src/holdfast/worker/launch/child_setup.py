"""From a fork of the server to a process of its own: what a new worker does before anything of the user's runs.

    orphaned on purpose   the intermediate that forked it exits, and the kernel gives it to the agent, a subreaper
    on a leash            PR_SET_PDEATHSIG, set only now: it fires when the *present* parent dies
    alone                 a session of its own, default signals, no descriptors but 0, 1, 2 and preloaded modules' own
    at home               its environment, directory, title and seeds
    announced             its pid on the report pipe, as the last act before it runs

The report is the line between "never ran" and "may have run": see fork_server.py.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Sequence, Set
from pathlib import Path
from typing import NoReturn

from holdfast.wire.launch_messages import LaunchFailed, LaunchWorker, Report, WorkerLaunched, encode
from holdfast.worker.launch import reset_interpreter
from holdfast.worker.launch.error_file import write_error_file

REASON_CHARS_MAX = 1000  # so that a report is one atomic write to a pipe
ORPHAN_EXIT_CODE = 75
# The signal comes at once; this is for the day on which it does not.
PARENT_CHECK_S = 0.05

_PR_SET_PDEATHSIG = 1
# Told to us by the kernel when the intermediate has died; ignored by default, should one come late.
_PARENT_DIED = signal.SIGURG
_libc = ctypes.CDLL(None)


def report(pipe: int, message: Report) -> None:
    """Write a report to the agent. Raises OSError where the agent does not listen any more."""
    os.write(pipe, encode(message))


def report_failure(pipe: int, request_id: int, pid: int, reason: str, *, is_unfit: bool = False) -> None:
    try:
        report(pipe, LaunchFailed(request_id, pid, reason[:REASON_CHARS_MAX], is_unfit))
    except OSError:
        return  # the agent has given up: there is none to report to


def announce(pipe: int, request_id: int) -> None:
    """Report this worker's pid, or exit: a worker that cannot report must not run, as no agent would know of it."""
    try:
        report(pipe, WorkerLaunched(request_id, os.getpid()))
    except OSError:
        os._exit(ORPHAN_EXIT_CODE)
    os.close(pipe)


def adopt_agent(intermediate_pid: int, agent_pid: int) -> None:
    """Wait to be the agent's child, and make sure not to outlive it. No other thread may have been started by now: it
    would be given the signal in our place, and lose it."""
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
    """Set signals as at the start of an interpreter, which ignores SIGPIPE and SIGXFSZ; programs expect these to be
    default."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) not in (signal.SIG_DFL, None):
            signal.signal(number, signal.SIG_DFL)
    if not for_exec:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def close_descriptors(keep: Set[int]) -> None:
    """Close all descriptors but the standard streams and `keep`."""
    for descriptor in open_descriptors() - keep:
        os.close(descriptor)


def open_descriptors() -> Set[int]:
    """Return the descriptors above the standard streams, without the one used for listing them."""
    found = {int(name) for name in os.listdir("/proc/self/fd")}  # noqa: PTH208
    return {descriptor for descriptor in found if descriptor > 2 and is_open(descriptor)}


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def set_environment(request: LaunchWorker, for_exec: bool) -> None:
    """Set environment, directory, interpreter state and title. Raises OSError where the environment or the directory
    cannot be had."""
    os.environ.clear()
    os.environb.update(request.env)
    os.chdir(request.cwd)
    if not for_exec:
        reset_interpreter.forget()
        set_title([os.fsencode(sys.executable), b"-u", *request.argv])


# --- what `ps` and `pgrep -f` show of this process
#
# Every worker is a fork of one server and would carry its command line. People look for their script's name, so the
# memory that the kernel shows as the command line is overwritten. It cannot grow: the agent pads the server's own with
# blanks (`--title-room`), and what does not fit is cut.

# Positions in /proc/self/stat, counted after the process name, which may itself contain blanks.
_ARG_START, _ARG_END = 45, 46


def set_title(arguments: Sequence[bytes]) -> None:
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    if len(fields) <= _ARG_END:
        return  # a kernel or sandbox that does not tell: the title is a courtesy
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    room = end - start
    if start and room > 1:
        ctypes.memmove(start, b"\0".join(arguments)[: room - 1].ljust(room, b"\0"), room)


# --- another program in place of the forked interpreter: `--no-python`, and Python itself for `--start-method spawn`

# As a shell says it.
NOT_FOUND_EXIT_CODE = 127
NOT_EXECUTABLE_EXIT_CODE = 126


def become_program(argv: tuple[bytes, ...]) -> NoReturn:
    """Replace this process by a program, which is looked for on the worker's own PATH."""
    try:
        os.execvpe(argv[0], argv, os.environ)
    except OSError as error:
        write_error_file(error)
        sys.stderr.write(f"holdfast: cannot run {os.fsdecode(argv[0])!r}: {error.strerror}\n")
        os._exit(NOT_FOUND_EXIT_CODE if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE_EXIT_CODE)


# --- processors near the worker's device: torchrun's `--numa-binding`, by torch's own rules

CANNOT_BIND_EXIT_CODE = 2


def bind_to_numa(mode: str, local_rank: int) -> None:
    """Bind this worker to the processors near its device. One that cannot be bound does not start: it would be slow,
    and no message would say why."""
    if not mode:
        return
    logger = logging.getLogger("torch.numa.binding")
    logger.disabled = True  # it logs the traceback of what is one sentence below
    try:
        from holdfast.torch_compat import bind_to_numa_node

        bind_to_numa_node(mode, local_rank)
    except Exception as error:  # torch raises whatever its lookups raise: no device, no driver, no sysfs, no numactl
        refuse_binding(mode, local_rank, error)
    finally:
        logger.disabled = False


def refuse_binding(mode: str, local_rank: int, error: Exception) -> NoReturn:
    write_error_file(error)
    reason = " ".join(str(error).split())
    sys.stderr.write(
        f"holdfast: --numa-binding {mode} cannot be applied to local rank {local_rank}: "
        f"{type(error).__name__}: {reason}; leave the flag out, or run where there is a device to bind to\n"
    )
    sys.exit(CANNOT_BIND_EXIT_CODE)
