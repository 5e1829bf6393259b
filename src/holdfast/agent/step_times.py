"""The step times of this node's workers, from their progress pages: reported to the master every few seconds.

A page has the own time of the last step only, so the times are a sample of the steps, one at each reading: enough for a
median, and nothing that a worker would have to wait for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from statistics import median

from holdfast.agent.reports import Reports
from holdfast.agent.worker_processes import Worker
from holdfast.core.events import StepTime, StepTimesReported

READ_EVERY_S = 0.25
REPORT_EVERY_S = 5.0
STEPS_MIN = 4
STEPS_MAX = 64


class StepTimeWatch:
    """Reads the progress pages of the workers with a local rank, for as long as the agent runs."""

    def __init__(
        self, ranked: Callable[[], list[Worker]], reports: Reports, report_every_s: float = REPORT_EVERY_S
    ) -> None:
        self._ranked, self._reports, self._report_every_s = ranked, reports, report_every_s
        self._view = 0
        self._seen: dict[str, tuple[int, deque[float]]] = {}

    async def run(self) -> None:
        """Read and report until the task is cancelled."""
        readings = 0
        while True:
            await asyncio.sleep(READ_EVERY_S)  # shared memory: there is no event for a change
            self.read()
            readings += 1
            if readings * READ_EVERY_S >= self._report_every_s:
                readings = 0
                self.report()

    def read(self) -> None:
        """Add a sample for each worker that has made a step since the last reading."""
        if self._view != self._reports.view:
            self._view, self._seen = self._reports.view, {}
        for worker in self._ranked():
            step, own_ns = worker.page.get("step"), worker.page.get("own_ns")
            last, samples = self._seen.setdefault(worker.nonce, (step, deque(maxlen=STEPS_MAX)))
            if step > last and own_ns > 0:
                samples.append(own_ns / 1e9)
                self._seen[worker.nonce] = (step, samples)

    def report(self) -> None:
        """Report the medians, once there is something to compare. Old times are of no use: while the master is away
        nothing is reported."""
        step_times = []
        for worker in self._ranked():
            _, samples = self._seen.get(worker.nonce, (0, deque()))
            if worker.local_rank is not None and len(samples) >= STEPS_MIN:
                step_times.append(StepTime(worker.local_rank, median(samples), len(samples)))
        if step_times and self._view and self._reports.waiting == 0:
            self._reports.report(StepTimesReported, step_times=tuple(step_times))
