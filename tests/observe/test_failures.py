"""What went wrong, the cause first."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.observe.failures import ViewFailures, failures_by_view, rows
from support.scenario import BOOM, COLLATERAL, JobOnDisk


@pytest.fixture
def job(tmp_path: Path) -> JobOnDisk:
    """View 1: rank 3 fails, ranks 0 and 1 after it, though rank 0's news came first. View 2: rank 2 fails."""
    job = JobOnDisk(tmp_path, workers=4).join("a").start("a").pass_s(10)
    first = job.failed("a", 0, failed_at=job.now - 0.5, **COLLATERAL)
    cause = job.failed("a", 3, failed_at=job.now - 0.1, **BOOM)
    job.do(first, cause, job.failed("a", 1, **COLLATERAL))
    return job.offer("a").start("a").pass_s(10).fail("a", 2, **BOOM)


def shape(failures: list[ViewFailures]) -> list[tuple[int, list[int], list[int]]]:
    return [(f.view, [x.rank for x in f.shown], [x.rank for x in f.folded]) for f in failures]


def test_views_come_newest_first_and_the_cause_before_its_collateral(job: JobOnDisk) -> None:
    assert shape(failures_by_view(job.entries(), view=None, rank=None)) == [(2, [2], []), (1, [3], [0, 1])]


def test_one_view_can_be_asked_for(job: JobOnDisk) -> None:
    assert shape(failures_by_view(job.entries(), view=1, rank=None)) == [(1, [3], [0, 1])]


def test_a_rank_that_was_asked_for_is_shown_in_full_even_if_it_is_collateral(job: JobOnDisk) -> None:
    assert shape(failures_by_view(job.entries(), view=None, rank=0)) == [(1, [0], [])]


def test_two_real_failures_of_a_view_are_both_shown_the_earlier_one_first(tmp_path: Path) -> None:
    job = JobOnDisk(tmp_path).join("a").start("a").pass_s(10)
    job.do(job.failed("a", 0, **BOOM), job.failed("a", 1, failed_at=job.now - 1, **BOOM))
    assert shape(failures_by_view(job.entries(), view=None, rank=None)) == [(1, [1, 0], [])]


def test_when_all_is_collateral_the_first_of_it_stands_for_the_cause(tmp_path: Path) -> None:
    job = JobOnDisk(tmp_path).join("a").start("a").pass_s(10)
    job.do(job.failed("a", 0, **COLLATERAL), job.failed("a", 1, failed_at=job.now - 1, **COLLATERAL))
    assert shape(failures_by_view(job.entries(), view=None, rank=None)) == [(1, [1], [0])]


def test_rows_say_which_is_the_cause_and_which_are_collateral(job: JobOnDisk) -> None:
    table = rows(failures_by_view(job.entries(), view=1, rank=None)[0])
    assert [(row.rank, row.root_cause, row.collateral) for row in table] == [
        (3, True, False),
        (0, False, True),
        (1, False, True),
    ]
    assert table[0].failure.traceback == BOOM["traceback"]
    assert table[0].sentence == "rank 3 on a exited with code 1: ValueError: boom"


def test_a_job_without_failures_has_none(tmp_path: Path) -> None:
    job = JobOnDisk(tmp_path).join("a").start("a").succeed("a")
    assert failures_by_view(job.entries(), view=None, rank=None) == []
