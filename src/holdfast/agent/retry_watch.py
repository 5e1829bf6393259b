"""The collectives that this node's workers ran again, from their progress pages: reported when there are new ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast.agent.reports import Reports
from holdfast.agent.worker_processes import Worker
from holdfast.core.events import CollectivesRetried, RetryCount

READ_EVERY_S = 0.25


class RetryWatch:
    """Reads the progress pages of the workers with a local rank, for as long as the agent runs."""

    def __init__(self, ranked: Callable[[], list[Worker]], reports: Reports) -> None:
        self._ranked, self._reports = ranked, reports
        self._seen: dict[str, int] = {}

    async def run(self) -> None:
        """Read and report until the task is cancelled."""
        while True:
            await asyncio.sleep(READ_EVERY_S)  # shared memory: there is no event for a change
            self.read()

    def read(self) -> None:
        """Report what was run again since the last reading."""
        workers = [worker for worker in self._ranked() if worker.local_rank is not None]
        counts = {worker.nonce: worker.page.get("retries") for worker in workers}
        new = tuple(
            RetryCount(worker.local_rank, counts[worker.nonce] - self._seen.get(worker.nonce, 0))
            for worker in workers
            if worker.local_rank is not None and counts[worker.nonce] > self._seen.get(worker.nonce, 0)
        )
        self._seen = counts
        if new:
            self._reports.report_optional(CollectivesRetried, retries=new)
