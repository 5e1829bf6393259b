"""The time of a job: near the wall clock's, and never set.

Decisions compare times, and journals hold them, so a clock that is set back by an hour would bring each verdict an hour
late, and one that is set forward would bring it at once. A term therefore reads the wall clock once, when it begins,
and counts on with the machine's steady clock, which goes on while the machine is suspended.

The next term may run on another machine, whose wall clock differs. Its time begins where the journal's ends, at the
earliest: the times of a job only grow. If its clock is behind, the pause between the two terms counts as none; if it is
ahead, as longer than it was, which costs no verdict on a node: they all have the time to reconnect (evolve.py).

What agents say of times is translated: reports carry their own clock's time of sending.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec.structs import replace

from holdfast.core.events import Event, StepInterrupted, WorkerFailed


def steady_s() -> float:
    """Return a time that is never set and that goes on while the machine is suspended, where the system has one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class JobClock:
    """The clock of one term."""

    def __init__(
        self,
        not_before: float = 0.0,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = steady_s,
    ) -> None:
        self._steady = steady
        self._offset_s = max(wall(), not_before) - steady()

    def __call__(self) -> float:
        """Return the job's time."""
        return self._offset_s + self._steady()


class AgentClock:
    """How far an agent's clock is from the master's, as far as its reports tell.

    A report arrives later than it was sent, never earlier: so the smallest difference seen is the best guess.
    """

    def __init__(self) -> None:
        self._difference_s: float | None = None

    def heard(self, sent_at: float, now: float) -> None:
        """Take in the time at which a report was sent, by the agent's clock; 0 if it does not say."""
        if sent_at:
            difference_s = now - sent_at
            known = self._difference_s
            self._difference_s = difference_s if known is None else min(known, difference_s)

    def translated(self, event: Event, now: float) -> Event:
        """Return the event with the master's times, none of which is yet to come."""
        match event:
            case WorkerFailed(failure=failure):
                return replace(event, failure=replace(failure, failed_at=self._at(failure.failed_at, now)))
            case StepInterrupted(step_error=step_error):
                return replace(event, step_error=replace(step_error, at=self._at(step_error.at, now)))
            case _:
                return event

    def _at(self, at: float, now: float) -> float:
        return min(at + (self._difference_s or 0.0), now)
