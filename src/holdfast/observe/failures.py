"""The failures of workers, from the journal alone: it works when log files are gone or on another machine. Pure.

Failures of one view belong together. Views come newest first, because the last one ended the job or is the one that a
person is looking at; within a view the root cause comes first, and the collateral failures that it caused are folded.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from holdfast.core.faults.failures import Failure, describe, is_collateral, root_cause
from holdfast.core.records import WorkerFailedRecord
from holdfast.journal import JournalEntry


class ViewFailures(msgspec.Struct, frozen=True):
    """The failures of one view: those to be shown in full, the cause first, and the collateral ones."""

    view: int
    shown: tuple[Failure, ...]
    folded: tuple[Failure, ...]


class FailureRow(msgspec.Struct, frozen=True, kw_only=True):
    """One failure as `holdfast logs --failed -o json` prints it."""

    view: int
    rank: int
    node_id: str
    root_cause: bool
    collateral: bool
    sentence: str
    exit_code: int
    failure: Failure


def failures_by_view(entries: Iterable[JournalEntry], *, view: int | None, rank: int | None) -> list[ViewFailures]:
    """Return all failures of the job, or those of one view or rank. A rank that was asked for is not folded."""
    failures = [entry.record.failure for entry in entries if isinstance(entry.record, WorkerFailedRecord)]
    chosen = [f for f in failures if view in (None, f.view) and rank in (None, f.rank)]
    views = sorted({failure.view for failure in chosen}, reverse=True)
    return [_in_view(number, [f for f in chosen if f.view == number]) for number in views]


def rows(failures: ViewFailures) -> list[FailureRow]:
    """Return the failures of a view for programs, in the same order."""
    return [_row(failure, index == 0) for index, failure in enumerate(failures.shown + failures.folded)]


def _in_view(number: int, failures: list[Failure]) -> ViewFailures:
    cause = root_cause(failures)
    rest = sorted((f for f in failures if f is not cause), key=lambda f: (f.failed_at, f.rank))
    folded = tuple(f for f in rest if is_collateral(f))
    shown = [f for f in rest if f not in folded]
    return ViewFailures(number, (*([cause] if cause else []), *shown), folded)


def _row(failure: Failure, first: bool) -> FailureRow:
    return FailureRow(
        view=failure.view,
        rank=failure.rank,
        node_id=failure.node_id,
        root_cause=first,
        collateral=is_collateral(failure) and not first,
        sentence=describe(failure),
        exit_code=failure.exit_code,
        failure=failure,
    )
