"""Workers' own time, sampled from their records."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from holdfast.agent.step_times import STEPS_MIN, StepTimeWatch
from holdfast.wire.progress_page import ProgressPage


class Reports:
    def __init__(self) -> None:
        self.view, self.waiting = 1, 0
        self.reported: list[Any] = []

    def report(self, kind: Any, step_times: Any) -> None:
        self.reported.append([(time.local_rank, time.own_s) for time in step_times])


def test_the_median_of_the_steps_that_were_seenis_reported() -> None:
    workers: Any = [
        SimpleNamespace(nonce=f"w{rank}", local_rank=rank, page=ProgressPage.private()) for rank in range(2)
    ]
    reports: Any = Reports()
    watch = StepTimeWatch(lambda: workers, reports)
    for step in range(STEPS_MIN + 1):
        for worker in workers:
            own_ms = 900 if step == 2 else 50 + 10 * worker.local_rank
            worker.page.set(step=step, own_ns=own_ms * 1_000_000)
        watch.read()
        watch.read()  # the same step again is no new sample
        watch.report() if step < STEPS_MIN else None
    assert reports.reported == [], "too few to compare"
    watch.report()
    assert reports.reported == [[(0, 0.05), (1, 0.06)]]
    reports.view = 2
    watch.read()
    watch.report()
    assert len(reports.reported) == 1, "another view starts again"
