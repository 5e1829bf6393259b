"""Workers' own time, sampled from their records."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from holdfast.agent.pace import STEPS_MIN, PaceWatch
from holdfast.wire.progress import ProgressPage


class Reports:
    def __init__(self) -> None:
        self.view, self.told = 1, []

    def paces(self, paces: Any) -> None:
        self.told.append([(pace.local_rank, pace.own_s) for pace in paces])


def test_the_median_of_the_steps_that_were_seen_is_told() -> None:
    workers: Any = [SimpleNamespace(nonce=f"w{seat}", seat=seat, page=ProgressPage.private()) for seat in range(2)]
    reports: Any = Reports()
    watch = PaceWatch(lambda: workers, reports)
    for step in range(STEPS_MIN + 1):
        for worker in workers:
            own_ms = 900 if step == 2 else 50 + 10 * worker.seat
            worker.page.set(step=step, own_ns=own_ms * 1_000_000)
        watch.look()
        watch.look()  # the same step again is no new sample
        watch.tell() if step < STEPS_MIN else None
    assert reports.told == [], "too few to compare"
    watch.tell()
    assert reports.told == [[(0, 0.05), (1, 0.06)]]
    reports.view = 2
    watch.look()
    watch.tell()
    assert len(reports.told) == 1, "another view begins anew"
