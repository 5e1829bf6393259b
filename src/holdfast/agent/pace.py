"""How fast this node's workers are, from their progress records: told to the master every few seconds.

A record has the own time of the last step only, so what is kept is a sample of the steps, taken whenever it is looked:
enough for a median, and nothing that a worker would have to wait for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from statistics import median

from holdfast.agent.reports import Reports
from holdfast.agent.workers import Worker
from holdfast.core.events import Pace

LOOK_EVERY_S = 0.25
REPORT_EVERY_S = 5.0
STEPS_MIN = 4
STEPS_MAX = 64


class PaceWatch:
    """One for the life of an agent."""

    def __init__(
        self, seated: Callable[[], list[Worker]], reports: Reports, report_every_s: float = REPORT_EVERY_S
    ) -> None:
        self._seated, self._reports, self._report_every_s = seated, reports, report_every_s
        self._view = 0
        self._seen: dict[str, tuple[int, deque[float]]] = {}

    async def run(self) -> None:
        """Look for ever."""
        looks = 0
        while True:
            await asyncio.sleep(LOOK_EVERY_S)  # a record in shared memory tells nobody that it has changed
            self.look()
            looks += 1
            if looks * LOOK_EVERY_S >= self._report_every_s:
                looks = 0
                self.tell()

    def look(self) -> None:
        """Take a sample of each worker that has made a step since the last one."""
        if self._view != self._reports.view:
            self._view, self._seen = self._reports.view, {}
        for worker in self._seated():
            step, own_ns = worker.page.get("step"), worker.page.get("own_ns")
            last, samples = self._seen.setdefault(worker.nonce, (step, deque(maxlen=STEPS_MAX)))
            if step > last and own_ns > 0:
                samples.append(own_ns / 1e9)
                self._seen[worker.nonce] = (step, samples)

    def tell(self) -> None:
        """The master, once there is something to compare."""
        paces = []
        for worker in self._seated():
            _, samples = self._seen.get(worker.nonce, (0, deque()))
            if worker.seat is not None and len(samples) >= STEPS_MIN:
                paces.append(Pace(worker.seat, median(samples), len(samples)))
        if paces and self._view:
            self._reports.paces(tuple(paces))
