"""Collectives that were run again, read from workers' records."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from holdfast.agent.retry_watch import RetryWatch
from holdfast.wire.progress_page import ProgressPage


class Reports:
    def __init__(self) -> None:
        self.reported: list[list[tuple[int, int]]] = []

    def report_optional(self, kind: Any, retries: Any) -> None:
        self.reported.append([(one.local_rank, one.count) for one in retries])


def test_each_retry_is_reported_once() -> None:
    workers: Any = [
        SimpleNamespace(nonce=f"w{rank}", local_rank=rank, page=ProgressPage.private()) for rank in range(2)
    ]
    reports: Any = Reports()
    watch = RetryWatch(lambda: workers, reports)
    watch.read()
    workers[1].page.set(retries=2)
    watch.read()
    watch.read()
    workers[0].page.set(retries=1)
    workers[1].page.set(retries=5)
    watch.read()
    workers[1] = SimpleNamespace(nonce="w2", local_rank=1, page=ProgressPage.private())
    watch.read()
    workers[1].page.set(retries=1)  # of another process
    watch.read()
    assert reports.reported == [[(1, 2)], [(0, 1), (1, 3)], [(1, 1)]]
