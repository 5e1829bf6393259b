"""Did the kernel kill this process because memory ran out?

The kernel does not say so: the process gets SIGKILL, as from `kill -9`. But before that it counts, in two places:

1. the victim's memory cgroup (`oom_kill`): precise, if the process was seen in that cgroup while it lived.
   A zombie shows "/" under cgroup v1, and a process may move after its start, hence `sample()`, about once a second;
2. /proc/vmstat: every such kill on the machine, so only a recent rise says anything about one process, and nothing
   where the kernel's log can be read and names other victims.

Each counted kill explains one process. Otherwise a survivor of the first worker's OOM kill that is stopped an hour
later with `kill -9` would be called out of memory too.

Nothing here raises: files may be absent, unreadable or of another kernel, and then there is no evidence.
"""

from __future__ import annotations

import io
import os
import re
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from holdfast.util.cgroups import Group, counter, find_mounts, group_of, levels, limit_bytes, read

WATCHED_MAX = 4096
# A process of many gigabytes takes seconds to go after it was chosen, and samples come about once a second.
MACHINE_SAMPLES_KEPT = 5

KERNEL_LOG_RECORD_BYTES = 8_192
VICTIM = re.compile(rb"Killed process (\d+)")

COUNTER_FILES = ("memory.events.local", "memory.events", "memory.oom_control")


@dataclass
class MemoryBaseline:
    """What the counters said when this process was first seen, less the kills already explained."""

    group: Group | None
    group_start: int
    machine_start: int
    verdict: str = ""


class MemoryWatch:
    """Watches processes for evidence that the kernel OOM-killed them."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._kernel_log = Path("/dev/kmsg") if proc == Path("/proc") else proc / "kmsg"
        self._mounts = find_mounts(proc)
        self._watched: dict[int, MemoryBaseline] = {}
        self._machine_samples = deque([machine_kills(proc)], maxlen=MACHINE_SAMPLES_KEPT)

    def watch(self, pid: int) -> None:
        """Start to watch a process; to be called as soon as it exists."""
        self._watched.pop(pid, None)
        while len(self._watched) >= WATCHED_MAX:
            self._watched.pop(next(iter(self._watched)))
        known = self._watched[pid] = MemoryBaseline(None, 0, machine_kills(self._proc))
        self._find_group(pid, known)

    def sample(self) -> None:
        """Read again which cgroups the processes are in and how many were killed; to be called about once a second."""
        self._machine_samples.append(machine_kills(self._proc))
        for pid, known in self._watched.items():
            self._find_group(pid, known)

    def evidence(self, pid: int) -> str:
        """Return the evidence of an OOM kill, or "". Only for a process that SIGKILL ended: an answer uses up a
        kill."""
        known = self._watched.get(pid)
        if known is None:
            return ""
        known.verdict = known.verdict or self._group_evidence(known) or self._machine_evidence(pid, known)
        return known.verdict

    def forget(self, pid: int) -> None:
        """Stop watching a process that has ended and was examined."""
        self._watched.pop(pid, None)

    def _find_group(self, pid: int, known: MemoryBaseline) -> None:
        group = group_of(pid, self._proc, self._mounts)
        if group is None or group == known.group or (known.group and group.name == "/"):
            return
        count = oom_kills(group)
        if count is not None:
            known.group, known.group_start = group, count

    def _group_evidence(self, known: MemoryBaseline) -> str:
        if known.group is None:
            return ""
        before, after = known.group_start, oom_kills(known.group) or 0
        if after <= before:
            return ""
        self._use_up_kill(known.group)
        return f"cgroup {known.group.name}: oom_kill {before} → {after}, {describe_limit(known.group)}"

    def _machine_evidence(self, pid: int, known: MemoryBaseline) -> str:
        before, after = max(self._machine_samples[0], known.machine_start), machine_kills(self._proc)
        if after <= before:
            return ""
        victims = logged_victims(self._kernel_log)
        if victims and pid not in victims:
            return ""
        self._use_up_kill(None)
        return f"the machine ran out of memory: /proc/vmstat oom_kill {before} → {after} in the last seconds"

    def _use_up_kill(self, group: Group | None) -> None:
        self._machine_samples = deque([count + 1 for count in self._machine_samples], MACHINE_SAMPLES_KEPT)
        for known in self._watched.values():
            known.machine_start += 1
            if group is not None and known.group == group:
                known.group_start += 1


def logged_victims(kernel_log: Path) -> set[int]:
    """Return the processes that the kernel's log names as killed for memory; empty where it cannot be read."""
    try:
        log = os.open(kernel_log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return set()
    with os.fdopen(log, "rb", buffering=0) as records:
        found = (VICTIM.search(record) for record in iter(lambda: next_record(records), b""))
        return {int(victim[1]) for victim in found if victim}


def next_record(records: io.FileIO) -> bytes:
    """Return the next record of the kernel's log; nothing at its end."""
    while True:
        try:
            return records.read(KERNEL_LOG_RECORD_BYTES) or b""
        except BrokenPipeError:
            continue  # it was overwritten: the next one is there
        except OSError:
            return b""


def machine_kills(proc: Path) -> int:
    """Return how many processes the kernel has OOM-killed since the machine started."""
    return counter(read(proc / "vmstat"), "oom_kill") or 0


def oom_kills(group: Group) -> int | None:
    """Return how many processes of this very cgroup were OOM-killed; None if this kernel does not count them."""
    for file in COUNTER_FILES:
        count = counter(read(group.directory / file), "oom_kill")
        if count is not None:
            return count
    return None


def describe_limit(group: Group) -> str:
    """Return the lowest limit of the cgroup and those above it: it is the one that was hit."""
    limits = [found for directory in levels(group) if (found := limit_bytes(directory)) is not None]
    if not limits:
        return "no limit: the machine ran out of memory"
    return f"limit {min(limits) / 2**20:.1f}".removesuffix(".0") + " MiB"
