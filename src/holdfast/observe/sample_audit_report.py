"""Whether a job's committed steps used the samples they should have used, from its journal alone.

The journal has what determines the order of samples (DataAnnouncedRecord), and a chain of digests over what every rank
really received (StepsAudited; core/sample_audit.py). The chain that the plan would have given is computed here and
compared. The plan has each sample once an epoch, so where the chains agree, the run had too. What can be wrong:

    differs        a step used other samples than planned; or two jobs used different ones
    unaudited      what a step used is unknown, because a node was lost with its memory
    missing        steps of which there is no audit at all
    unexplained    steps were skipped, and the script had not asked for it

After a start from a checkpoint the steps behind it are made again: the later ones count, all are judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import msgspec

from holdfast.core.events import DataSource
from holdfast.core.records import (
    DataAnnouncedRecord,
    DataSkippedRecord,
    JobCreated,
    JobFinished,
    StepsAudited,
    ViewFormed,
)
from holdfast.core.sample_audit import START, link, link_unaudited
from holdfast.core.sentences import stretches
from holdfast.errors import UsageError
from holdfast.journal import JournalEntry

if TYPE_CHECKING:
    from holdfast.data.step_plan import StepPlan

Stretch = tuple[int, int]
"""First and last step."""


class AuditFinding(msgspec.Struct, frozen=True):
    """Something that is wrong with some steps."""

    source: str
    kind: Literal["differs", "unaudited", "missing", "unexplained"]
    first_step: int
    last_step: int
    text: str


class SampleHistory(msgspec.Struct):
    """The audit of one source of data from one start of all workers to the next."""

    source: str
    since_view: int
    described: DataSource | None
    audits: list[StepsAudited] = []
    asked: list[Stretch] = []
    """Stretches that the script skipped."""

    @property
    def first_step(self) -> int:
        return self.audits[0].first_step

    @property
    def last_step(self) -> int:
        return self.audits[-1].last_step

    @property
    def samples(self) -> int:
        return sum(audit.samples for audit in self.audits)

    @property
    def skipped(self) -> list[Stretch]:
        return [stretch for audit in self.audits for stretch in audit.skipped]

    @property
    def unaudited(self) -> list[Stretch]:
        return [stretch for audit in self.audits for stretch in audit.unaudited]


class SampleAuditReport(msgspec.Struct):
    """Everything a journal has about the samples that a job used."""

    job_id: str
    is_over: bool
    histories: list[SampleHistory]

    def of(self, source: str) -> list[SampleHistory]:
        """Return the histories of one source, in order."""
        return [history for history in self.histories if history.source == source]

    @property
    def sources(self) -> list[str]:
        return list(dict.fromkeys(history.source for history in self.histories))


def read_audits(entries: Sequence[JournalEntry]) -> SampleAuditReport:
    """Return the audits of a journal, in order."""
    records = [entry.record for entry in entries]
    incarnations = [
        record.view.number for record in records if isinstance(record, ViewFormed) and not record.view.keeps_workers
    ]
    described = [record for record in records if isinstance(record, DataAnnouncedRecord)]
    found: dict[tuple[int, int], SampleHistory] = {}
    for audit in (record for record in records if isinstance(record, StepsAudited)):
        key = (audit.since_view, audit.source)
        if key not in found:
            source = _description(described, incarnations, *key)
            name = source.name if source else f"source {audit.source}"
            found[key] = SampleHistory(name, audit.since_view, source, [], _asked(records, incarnations, *key))
        found[key].audits.append(audit)
    job_id = next((record.job_id for record in records if isinstance(record, JobCreated)), "")
    is_over = any(isinstance(record, JobFinished) for record in records)
    return SampleAuditReport(job_id, is_over, [found[key] for key in sorted(found)])


def _views(incarnations: Sequence[int], since_view: int) -> range:
    """Return the views from one start of all workers to the next."""
    return range(since_view, min((view for view in incarnations if view > since_view), default=2**62))


def _description(
    described: Sequence[DataAnnouncedRecord], incarnations: Sequence[int], since_view: int, source: int
) -> DataSource | None:
    views = _views(incarnations, since_view)
    said = [record.sources for record in described if record.view in views and source < len(record.sources)]
    return said[-1][source] if said else None


def _asked(records: Sequence[object], incarnations: Sequence[int], since_view: int, source: int) -> list[Stretch]:
    views = _views(incarnations, since_view)
    return [
        (record.first_step, record.end_step - 1)
        for record in records
        if isinstance(record, DataSkippedRecord) and record.source == source and record.view in views
    ]


# --- one job


def judge(report: SampleAuditReport) -> list[AuditFinding]:
    """Return what is wrong, the first of each kind and history."""
    findings = [finding for history in report.histories for finding in _judge_history(history)]
    for source in report.sources:
        for before, after in pairwise(report.of(source)):
            if after.first_step > before.last_step + 1:
                gap = (before.last_step + 1, after.first_step - 1)
                findings.append(
                    _finding(source, "missing", gap, "no rank reported them, between two starts of the workers")
                )
    return findings


def _judge_history(history: SampleHistory) -> Iterator[AuditFinding]:
    for before, after in pairwise(history.audits):
        if after.first_step != before.last_step + 1:
            gap = (before.last_step + 1, after.first_step - 1)
            yield _finding(history.source, "missing", gap, "the journal has no audit of them")
            return
    if unasked := [stretch for stretch in history.skipped if not _is_within(stretch, history.asked)]:
        yield _finding(
            history.source, "unexplained", unasked[0], "they were skipped, and the script had not asked for it"
        )
    if unknown := history.unaudited:
        why = "which samples were used is unknown: a node was lost before its memory was read"
        yield _finding(history.source, "unaudited", unknown[0], f"{why} (in all: {stretches(unknown)})")
    if history.described is None:
        yield _finding(
            history.source,
            "differs",
            (history.first_step, history.last_step),
            "the journal does not describe this source of data",
        )
    elif wrong := _first_wrong(history, plan_of(history.described)):
        steps = (wrong.first_step, wrong.last_step)
        yield _finding(history.source, "differs", steps, "one of them used other samples than planned")


def _finding(
    source: str, kind: Literal["differs", "unaudited", "missing", "unexplained"], steps: Stretch, why: str
) -> AuditFinding:
    which = f"step {steps[0]}" if steps[0] == steps[1] else f"steps {steps[0]} to {steps[1]}"
    return AuditFinding(source, kind, *steps, f"{source}: {which}: {why}")


def _is_within(stretch: Stretch, asked: Sequence[Stretch]) -> bool:
    begin = stretch[0]
    while covering := [last for first, last in asked if first <= begin <= last]:
        begin = max(covering) + 1
        if begin > stretch[1]:
            return True
    return False


def _first_wrong(history: SampleHistory, plan: StepPlan) -> StepsAudited | None:
    """Return the first audit whose chain is not the plan's."""
    chain = START
    expected = _expected(history, plan)
    for audit in history.audits:
        for step in _steps(audit):
            number, count, total = next(expected)
            assert number == step
            is_known = not any(first <= step <= last for first, last in audit.unaudited)
            chain = link(chain, step, count, total) if is_known else link_unaudited(chain, step)
        if chain.hex() != audit.chain:
            return audit
    return None


def _steps(audit: StepsAudited) -> Iterator[int]:
    """Yield the steps that were not skipped."""
    step = audit.first_step
    for first, last in [*audit.skipped, (audit.last_step + 1, audit.last_step)]:
        yield from range(step, first)
        step = last + 1


def _expected(history: SampleHistory, plan: StepPlan) -> Iterator[tuple[int, int, int]]:
    from holdfast.data.sample_digest import planned_digests

    step = history.first_step
    for first, last in [*history.skipped, (history.last_step + 1, history.last_step)]:
        yield from planned_digests(plan, range(step, first))
        step = last + 1


def plan_of(source: DataSource) -> StepPlan:
    """Return the plan of a source of data."""
    try:
        from holdfast.data.order import Locality
        from holdfast.data.step_plan import make_plan
    except ImportError as error:
        raise UsageError(f"computing the planned samples needs NumPy: {error}") from None
    return make_plan(
        source.size,
        global_batch_size=source.global_batch_size,
        seed=int(source.seed),
        slots=source.slots,
        shuffle=source.shuffle,
        last_batch=source.last_batch,  # type: ignore[arg-type]  # the plan refuses what it does not know
        locality=Locality(*source.locality) if source.locality else None,
        fingerprint=source.fingerprint,
    )


# --- two jobs


def compare(mine: SampleAuditReport, other: SampleAuditReport) -> list[AuditFinding]:
    """Return where two jobs used different samples, if each followed its own plan. If a job repeated a step, the last
    time counts."""
    findings = []
    for source in [name for name in mine.sources if name not in other.sources]:
        findings.append(AuditFinding(source, "missing", 0, 0, f"{source}: the other job has no data of this name"))
    for source in [name for name in mine.sources if name in other.sources]:
        if difference := _difference(source, mine.of(source), other.of(source)):
            findings.append(difference)
    return findings


def _difference(source: str, mine: Sequence[SampleHistory], other: Sequence[SampleHistory]) -> AuditFinding | None:
    common = range(max(mine[0].first_step, other[0].first_step), min(mine[-1].last_step, other[-1].last_step) + 1)
    for step, here, there in zip(common, _timeline(mine, common), _timeline(other, common), strict=True):
        if here is not None and there is not None and here != there:
            why = "one job skipped it" if () in (here, there) else "the two jobs had different samples"
            return _finding(source, "differs", (step, step), why)
    return None


def _timeline(histories: Sequence[SampleHistory], steps: range) -> Iterator[tuple[int, ...] | None]:
    """Yield by step what the last history with that step planned: () if it was skipped, None if it is unknown."""
    from holdfast.data.sample_digest import planned_digests

    begin = steps.start
    while begin < steps.stop:
        history = next((one for one in reversed(histories) if one.first_step <= begin <= one.last_step), None)
        later = [one.first_step for one in histories if one.first_step > begin]
        end = min([steps.stop, *later, *([history.last_step + 1] if history else [])])
        if history is None or history.described is None:
            yield from (None for _ in range(begin, end))
        else:
            for step, count, total in planned_digests(plan_of(history.described), range(begin, end)):
                is_unknown = any(first <= step <= last for first, last in history.unaudited)
                is_skipped = any(first <= step <= last for first, last in history.skipped)
                yield None if is_unknown else () if is_skipped else (count, total)
        begin = end
