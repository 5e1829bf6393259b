"""Notices helper processes of the agent that hang instead of dying: the master, the fork server, the store host, the
checksummer (which is only watched for being stopped: no process waits for it).

A helper that dies is replaced at once, because the kernel says so. One that hangs is made to die, with SIGKILL, and is
then replaced in the same way; the workers notice neither. What proves that it hangs:

    it is stopped by a signal       three readings of its state in a row, half a second in all: a batch system that
                                    suspends a job stops all of its processes, and lets them go on together
    it does not answer a request    within a limit that is far beyond what answers take on a busy machine

Time in which it waits for a disk (state D) is no proof and does not count: it will answer when the disk does, and no
signal ends it before. Time in which the agent itself did not run does not count either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from holdfast.util.logs import get_logger
from holdfast.util.processes import DISK_WAIT, STOPPED, process_state, processor_time_s

READ_EVERY_S = 0.25
STOPPED_READINGS = 3
"""Readings in a row that prove that a process is stopped and not only about to go on."""
LATE_TIMES = 4.0
"""A tick that comes so many times too late was held up by whatever holds up this process too."""
BUSY_SHARE = 0.1
"""The share of a processor's time above which a process computes, and is late rather than stuck."""
BUSY_TIMES = 8.0
"""How much longer a process that computes may take to answer."""

log = get_logger(__name__)


class Helper(NamedTuple):
    """A process that this agent started and that it replaces when it ends."""

    name: str
    pid: int
    kill: Callable[[], None]


class StoppedWatch:
    """Kills helpers that a signal has stopped."""

    def __init__(self, helpers: Callable[[], Iterable[Helper]]) -> None:
        self._helpers = helpers
        self._readings: dict[int, int] = {}

    async def run(self) -> None:
        """Read the states of all helpers until the task is cancelled."""
        while True:
            await asyncio.sleep(READ_EVERY_S)  # what counts is that it stays stopped, and for that there is no event
            self.look()

    def look(self) -> None:
        """Read the states once, and kill helpers that were stopped in so many readings."""
        helpers = list(self._helpers())
        self._readings = {
            helper.pid: self._readings.get(helper.pid, 0) + 1
            for helper in helpers
            if process_state(helper.pid) == STOPPED
        }
        for helper in helpers:
            if self._readings.get(helper.pid) == STOPPED_READINGS:
                text = f"{helper.name} (process {helper.pid}) was stopped by a signal: killing it; it is replaced"
                log.warning("helper-stopped", text)
                helper.kill()


class UnansweredTime:
    """How long a process has owed an answer, as far as that is its own fault."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._idle_s = self._busy_s = 0.0
        self._answers = -1
        self._looked_at: float | None = None
        self._spent_s = 0.0

    def look(self, answers: int, state: str, spent_s: float, now: float, tick_s: float) -> bool:
        """Record how many answers have come, the process's state and its processor time; return whether it hangs."""
        passed_s = tick_s if self._looked_at is None else now - self._looked_at
        used_s, self._spent_s, self._looked_at = spent_s - self._spent_s, spent_s, now
        if answers != self._answers:
            self._answers, self._idle_s, self._busy_s = answers, 0.0, 0.0
        elif passed_s <= tick_s * LATE_TIMES and state != DISK_WAIT:
            if used_s > BUSY_SHARE * passed_s:
                self._busy_s += passed_s
            else:
                self._idle_s += passed_s
        return self._idle_s + self._busy_s / BUSY_TIMES > self._limit_s


async def answers_in_time(answer: asyncio.Future[Any], pid: int, limit_s: float) -> bool:
    """Wait for an answer of a process; return False when it is overdue."""
    clock, unanswered = asyncio.get_running_loop().time, UnansweredTime(limit_s)
    tick_s = min(1.0, limit_s / 2)
    while not answer.done():
        if unanswered.look(0, process_state(pid), processor_time_s(pid), clock(), tick_s):
            return False
        await asyncio.wait([answer], timeout=tick_s)
    return True


async def kill_unless_answered(answer: asyncio.Future[Any], helper: Helper, limit_s: float) -> None:
    """Kill a helper that does not answer in time; whatever waits for the answer sees the helper's end."""
    if not await answers_in_time(answer, helper.pid, limit_s):
        text = f"{helper.name} (process {helper.pid}) has not answered for {limit_s:.0f} s: killing it; it is replaced"
        log.warning("helper-unresponsive", text)
        helper.kill()
