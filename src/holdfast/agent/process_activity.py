"""What a process does, from /proc: whether it is stopped, works, sleeps, or waits for something from outside.

    stopped    state T of its main thread: SIGSTOP, or a terminal's. It does nothing until it is continued
    runnable   a thread of it, or of a child, is in state R or D: it computes, waits for a processor or for a disk
    asleep     its main thread is inside of one `time.sleep`: it has not run once between two readings, and nothing of
               it is runnable. A loop that sleeps and looks again does run, and is not asleep. Threads that wake up now
               and then do not end a sleep (`Reading.sleeps`): on a busy machine they are often found runnable
    outside    its main thread waits for something that is not in this process: a socket, a pipe, a file, a child
    idle       none of these: it waits for a lock, or the kernel does not say for what

The kernel says what a thread waits for to its own user's processes, unless it was built or told not to; then nothing
is asleep or outside, and everything that does not run is idle.
"""

from __future__ import annotations

import platform
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from holdfast.util.processes import DISK_WAIT, STOPPED, process_state, processor_time_s, read_or_empty

DISK_BYTES_A_SECOND = 10e6
CHILDREN_MAX = 256
WATCHING_THREADS = frozenset({"gloo_tcp_loop"})
GENERATIONS = 2
"""A data loader's workers are children; what they start is looked at too."""
RUNNABLE_STATES = frozenset("RD")
STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in an uninterruptible wait, as for a disk",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
}

_SLEEPS = {"x86_64": {35, 230, 34}, "aarch64": {101, 115}}
"""System calls by processor: nanosleep, clock_nanosleep, pause."""
_SELECTS = {"x86_64": {23, 270}, "aarch64": {72}}
"""select, pselect6: a sleep if they look at no descriptor, as Python's was before version 3.11."""
_OUTSIDE = {
    "x86_64": {
        *(0, 1, 7, 16, 17, 18, 19, 20, 42, 43, 44, 45, 46, 47, 61, 72, 73, 74, 75, 76, 77, 82, 87, 162),
        *(232, 247, 257, 271, 281, 285, 288, 295, 296, 299, 306, 307, 332, 441),
    },
    "aarch64": {
        *(22, 25, 29, 32, 46, 47, 56, 62, 63, 64, 65, 66, 67, 68, 73, 81, 82, 83, 84, 95, 202, 203, 206, 207),
        *(211, 212, 242, 243, 260, 267, 269, 291, 441),
    },
}
"""read, write, poll, epoll_wait, recv, send, connect, accept, wait4, waitid, flock, fcntl, fsync, open, stat and the
like."""


class Activity(Enum):
    """What a process does; see the table above."""

    STOPPED = "stopped"
    RUNNABLE = "runnable"
    ASLEEP = "asleep"
    OUTSIDE = "outside"
    IDLE = "idle"


class Reading(NamedTuple):
    """What a process does at one moment, and how often its main thread has been switched to or away from so far."""

    activity: Activity
    switches: int
    sleeps: bool = False
    """Whether the main thread is inside of a sleep, whatever other threads do; not where one waits for a disk."""
    waits_for_device: bool = False
    """Whether its device has not done what it was told, while its page stands still. The main thread may spin."""

    def is_same_sleep(self, before: Reading) -> bool:
        """Return whether the main thread is still in the sleep in which an earlier reading found it."""
        return self.sleeps and before.sleeps and self.switches == before.switches


def read_activity(pid: int) -> Reading:
    """Return what the process does."""
    state = process_state(pid)
    if state == STOPPED:
        return Reading(Activity.STOPPED, 0)
    if state in RUNNABLE_STATES:
        return Reading(Activity.RUNNABLE, 0)
    activity, states = _thread_activity(Path(f"/proc/{pid}")), _thread_states(pid)
    sleeps = activity is Activity.ASLEEP and DISK_WAIT not in states
    if activity is not Activity.OUTSIDE and not states.isdisjoint(RUNNABLE_STATES):
        activity = Activity.RUNNABLE
    return Reading(activity, _switches(pid), sleeps)


def time_spent_s(pid: int) -> float:
    """Return the time that a process and its children have used of processors, and of disks at 10 MB a second; 0 where
    that is unknown."""
    return sum(own_time_spent_s(process) for process in _family(pid))


def own_time_spent_s(pid: int) -> float:
    """Return the time that the process alone has used."""
    try:
        counters = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    except (OSError, ValueError):
        return 0.0
    moved_bytes = int(counters.get("read_bytes", 0)) + int(counters.get("write_bytes", 0))
    return processor_time_s(pid) + moved_bytes / DISK_BYTES_A_SECOND


def queued_s(pid: int) -> float:
    """Return how long threads of a process and of its children have waited for a processor, without those of gloo that
    watch connections; 0 where that is unknown."""
    return sum(_queued_s(task) for process in _family(pid) for task in _tasks(process))


def _queued_s(task: Path) -> float:
    try:
        if (task / "comm").read_text().strip() in WATCHING_THREADS:
            return 0.0
        return int((task / "schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def describe_state(pid: int) -> str:
    """Return what a process that does not answer does, in words."""
    state = process_state(pid)
    channel = read_or_empty(f"/proc/{pid}/wchan").strip("0")
    where = f", in the kernel's {channel}" if channel else ""
    return f"{STATES.get(state, state)}{where}"


def _stat(path: Path) -> list[str]:
    return path.read_text(errors="replace").rpartition(")")[2].split()


def waits_outside(pid: int) -> bool:
    """Return whether any thread of the process is asleep, or waits for something outside of it, except the threads of
    gloo, which watch their connections for as long as there is a group."""
    for task in _tasks(pid):
        is_outside = _thread_activity(task) in (Activity.ASLEEP, Activity.OUTSIDE)
        if is_outside and read_or_empty(f"{task}/comm").strip() not in WATCHING_THREADS:
            return True
    return False


def _tasks(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


def _thread_activity(task: Path) -> Activity:
    """Return ASLEEP, OUTSIDE or IDLE, by the system call that a thread is in; a process's own is its main thread's."""
    machine = platform.machine()
    try:
        words = (task / "syscall").read_text().split()
        number, first = int(words[0]), int(words[1], 16)
    except (OSError, ValueError, IndexError):  # not allowed, or running meanwhile
        return Activity.IDLE
    is_select = number in _SELECTS.get(machine, ())
    if number in _SLEEPS.get(machine, ()) or (is_select and first == 0):
        return Activity.ASLEEP
    return Activity.OUTSIDE if is_select or number in _OUTSIDE.get(machine, ()) else Activity.IDLE


def _switches(pid: int) -> int:
    """Return how often the main thread has given up or lost its processor."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    except (OSError, ValueError, IndexError):
        return 0


def _thread_states(pid: int) -> set[str]:
    """Return the states of all threads of the process and of its children."""
    found = set[str]()
    for process in _family(pid):
        try:
            found |= {_stat(task / "stat")[0] for task in Path(f"/proc/{process}/task").iterdir()}
        except (OSError, IndexError):
            continue  # it has ended meanwhile
    return found


def _family(pid: int) -> list[int]:
    """Return the process and its children."""
    found = last = [pid]
    for _ in range(GENERATIONS):
        last = [child for one in last for child in _children(one)]
        found = [*found, *last]
    return found[: CHILDREN_MAX + 1]


def _children(pid: int) -> list[int]:
    try:
        tasks = [task.joinpath("children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
        return [int(child) for task in tasks for child in task.split()]
    except (OSError, ValueError):
        return []
