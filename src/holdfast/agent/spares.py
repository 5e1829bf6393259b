"""The spares of this node: workers without a rank that have run the script up to its first step and wait there.

They are kept at a number that the master names, and only made where nothing else is going on: one at a time, while
every worker with a rank is in its view. A spare that ends is replaced; but when several in a row end before they could
be of use, whatever ends them would end the next one too: then there are none, and the log says so, once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from holdfast.agent.autopsy import signal_name
from holdfast.agent.workers import Worker
from holdfast.wire.session import Prepare

EARLY_ENDS_MAX = 3
EARLY_S = 10.0
"""A spare that ends sooner after it parked was of no use."""

log = structlog.get_logger("agent")


class Spares:
    """Who waits here. `hire` makes another; `changed` is told how many are parked, when that changes."""

    def __init__(self, hire: Callable[[], Worker | None], changed: Callable[[int], None]) -> None:
        self._hire, self._changed = hire, changed
        self._workers: list[Worker] = []
        self._early_ends = 0
        self._told = 0
        self.prepare: Prepare | None = None
        """What a new one is told about the job; None: nothing is known yet."""

    @property
    def workers(self) -> tuple[Worker, ...]:
        return tuple(self._workers)

    @property
    def parked(self) -> int:
        return sum(self._is_parked(worker) for worker in self._workers)

    def keep(self, wanted: int, quiet: bool) -> None:
        """Bring their number closer to what is wanted; more only while it is `quiet`."""
        for worker in self._workers[wanted:]:
            self._workers.remove(worker)
            worker.kill()
        under_way = any(not self._is_parked(worker) for worker in self._workers)
        missing = len(self._workers) < wanted
        if quiet and missing and not under_way and self.prepare and self._early_ends < EARLY_ENDS_MAX:
            if (hired := self._hire()) is not None:
                self._workers.append(hired)
            else:
                self._count_early_end("it could not be started")
        self._tell()

    def take(self) -> Worker | None:
        """One that is parked, no longer a spare from now on."""
        for worker in self._workers:
            if self._is_parked(worker):
                self._workers.remove(worker)
                worker.is_spare = False
                self._early_ends = 0
                self._tell()
                return worker
        return None

    def park(self, worker: Worker) -> None:
        """It is ready."""
        worker.parked_at = asyncio.get_running_loop().time()
        self._tell()

    def unheard(self) -> None:
        """The line to one of them is lost."""
        self._tell()

    def lost(self, worker: Worker, why: str) -> None:
        """It has ended."""
        if worker not in self._workers:
            return
        self._workers.remove(worker)
        parked_s = asyncio.get_running_loop().time() - worker.parked_at if worker.parked_at is not None else 0.0
        if parked_s >= EARLY_S:
            self._early_ends = 0
            log.warning(f"a spare was lost ({why}); another one takes its place")
        else:
            self._count_early_end(why)
        self._tell()

    def forget(self) -> None:
        """All of them, at once: the workers start anew."""
        for worker in self._workers:
            worker.dismissed = True
        self._workers.clear()
        self._early_ends = 0
        self._tell()

    def _count_early_end(self, why: str) -> None:
        self._early_ends += 1
        if self._early_ends < EARLY_ENDS_MAX:
            log.warning(f"a spare was lost before it could be of use ({why})")
        elif self._early_ends == EARLY_ENDS_MAX:
            log.error(f"{EARLY_ENDS_MAX} spares in a row were lost before they could be of use ({why}): making no more")

    def _is_parked(self, worker: Worker) -> bool:
        return worker.parked_at is not None and not worker.ended and worker.line is not None

    def _tell(self) -> None:
        if self.parked != self._told:
            self._told = self.parked
            self._changed(self._told)


def describe_exit(code: int) -> str:
    """How a spare ended, in a few words."""
    return f"exit code {code}" if code >= 0 else signal_name(-code)
