"""The spares of this node: workers without a rank that have run the script up to its first step and wait there.

The master names how many there should be. They are started one at a time, and only while every worker with a rank is in
its view. A spare that ends is replaced; but when several in a row end early, whatever ends them would end the next one
too: then no more are started, and the log says so, once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast.agent.autopsy import signal_name
from holdfast.agent.worker_processes import Worker
from holdfast.util.logs import get_logger
from holdfast.wire.worker_messages import Prepare

EARLY_ENDS_MAX = 3
EARLY_S = 10.0
"""A spare that ends sooner after it was ready counts as an early end."""

log = get_logger(__name__)


class Spares:
    """The spares of a node. `start` starts another; `changed` is called with the number of parked spares when it
    changes."""

    def __init__(self, start: Callable[[], Worker | None], changed: Callable[[int], None]) -> None:
        self._start, self._changed = start, changed
        self._workers: list[Worker] = []
        self._early_ends = 0
        self._reported = 0
        self.prepare: Prepare | None = None
        """What is sent to a new spare about the job; None: nothing is known yet."""

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All spares, ready or not."""
        return tuple(self._workers)

    @property
    def parked(self) -> int:
        """The number of spares that are ready."""
        return sum(self._is_parked(worker) for worker in self._workers)

    def adjust(self, wanted: int, is_quiet: bool) -> None:
        """Bring their number closer to what is wanted; start one only while `is_quiet`."""
        for worker in self._workers[wanted:]:
            self._workers.remove(worker)
            worker.kill()
        under_way = any(not self._is_parked(worker) for worker in self._workers)
        missing = len(self._workers) < wanted
        if is_quiet and missing and not under_way and self.prepare and self._early_ends < EARLY_ENDS_MAX:
            if (started := self._start()) is not None:
                self._workers.append(started)
            else:
                self._count_early_end("it could not be started")
        self._report()

    def take(self) -> Worker | None:
        """Return a parked worker that is no spare from now on; None if there is none."""
        for worker in self._workers:
            if self._is_parked(worker):
                self._workers.remove(worker)
                worker.is_spare = False
                self._early_ends = 0
                self._report()
                return worker
        return None

    def park(self, worker: Worker) -> None:
        """Record that a spare is ready."""
        worker.parked_at = asyncio.get_running_loop().time()
        self._report()

    def connection_lost(self) -> None:
        """Report the number of parked spares after a connection was lost."""
        self._report()

    def lost(self, worker: Worker, why: str) -> None:
        """Record that a spare has ended."""
        if worker not in self._workers:
            return
        self._workers.remove(worker)
        parked_s = asyncio.get_running_loop().time() - worker.parked_at if worker.parked_at is not None else 0.0
        if parked_s >= EARLY_S:
            self._early_ends = 0
            log.warning("spare-lost", f"a spare was lost ({why}): starting another")
        else:
            self._count_early_end(why)
        self._report()

    def forget(self) -> None:
        """Dismiss all spares: the workers of the job are restarted."""
        for worker in self._workers:
            worker.dismissed = True
        self._workers.clear()
        self._early_ends = 0
        self._report()

    def _count_early_end(self, why: str) -> None:
        self._early_ends += 1
        if self._early_ends < EARLY_ENDS_MAX:
            log.warning("spare-ended-early", f"a spare ended early ({why}): starting another")
        elif self._early_ends == EARLY_ENDS_MAX:
            text = f"{EARLY_ENDS_MAX} spares in a row ended early ({why}): starting no more until workers are restarted"
            log.error("spares-given-up", text)

    def _is_parked(self, worker: Worker) -> bool:
        return worker.parked_at is not None and not worker.ended and worker.connection is not None

    def _report(self) -> None:
        if self.parked != self._reported:
            self._reported = self.parked
            self._changed(self._reported)


def describe_exit(code: int) -> str:
    """Return how a spare ended, in a few words."""
    return f"exit code {code}" if code >= 0 else signal_name(-code)
