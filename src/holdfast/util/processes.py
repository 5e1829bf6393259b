"""What the kernel says of processes, and of the machine that they run on."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

DISK_WAIT = "D"
"""The state of a process that waits for a disk. It cannot be killed before the disk answers."""
STOPPED = "T"
"""The state of a process that a signal (SIGSTOP) has stopped. A debugger's is a small t."""
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def module_command(module: str) -> list[str]:
    """Return the command line of a helper process: one of our modules. -P keeps the working directory, which is the
    user's, off the search path: a `statistics.py` there would come before Python's own."""
    return [sys.executable, "-P", "-m", module]


def process_state(pid: int) -> str:
    """Return the letter of /proc/PID/stat for the main thread; X if there is no such process."""
    fields = _stat_fields(pid)
    return fields[0] if fields else "X"


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped the process."""
    return process_state(pid) == STOPPED


def processor_time_s(pid: int) -> float:
    """Return the processor time that a process has used so far; 0 if there is no such process."""
    fields = _stat_fields(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND if fields else 0.0


def boot_id() -> str:
    """Return an id that changes with every boot of the machine."""
    return read_or_empty("/proc/sys/kernel/random/boot_id")


def machine_id() -> str:
    """Return an id that stays the same over boots; it has the host name, as cloned images share the number."""
    return f"{socket.gethostname()}/{read_or_empty('/etc/machine-id')}"


def read_or_empty(path: str) -> str:
    """Return a small file's text; empty if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the program's name; the first is the state."""
    return read_or_empty(f"/proc/{pid}/stat").rpartition(")")[2].split()
