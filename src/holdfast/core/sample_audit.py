"""Which samples the committed steps used, from the reports of every rank.

Workers leave a report of each step in their progress records: how many samples, and the sum of their digests
(data/sample_digest.py). Agents send them on (agent/sample_audit_reader.py). Here they are added up:

1. The reports of a step are added up by view. When those of all its ranks are there, and one of them knows that the
   step was committed, the step is audited. In a view in which it was not committed that never happens.
2. Audited steps are chained in their order: link = H(link before, step, number of samples, sum). So the last link
   stands for all steps before it. The journal gets a link every few seconds, not one a step.
3. A step that a later one has left behind, and whose reports cannot arrive any more, is recorded as unaudited; the
   chain has a mark in its place, so that the steps after it can still be verified.
4. Steps that the script skipped (DataSkippedRecord) and that no rank read are left out.
5. A view that keeps no worker begins a new run: it goes back to a checkpoint. Each run has a chain of its own, from
   its first step on. The old chain is closed when the first step of the new run is audited: by then all reports of the
   old one have arrived.

What is not yet in the journal is soft: an agent sends it again when the master is another one.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right, insort
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from holdfast.core import events as e
from holdfast.core import records as r

DIGEST_BYTES = 16
START = bytes(DIGEST_BYTES)
"""The link before the first step."""
TOTAL_MODULUS: int = 2 ** (8 * DIGEST_BYTES)
RECORD_EVERY_S = 5.0
RECORD_STEPS_MAX = 1_024
"""Audited steps are not left out of the journal for longer. What agents keep to send again is more than this."""
PATIENCE_S = 10.0
"""How long to wait for reports of an earlier view, from workers that are ending."""
PENDING_STEPS_MAX = 65_536
RUNS_MAX = 4
VIEWS_MAX = 64


def link(before: bytes, step: int, count: int, total: int) -> bytes:
    """Return the link of an audited step."""
    text = before + step.to_bytes(8, "little") + count.to_bytes(8, "little") + total.to_bytes(DIGEST_BYTES, "little")
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest()


def link_unaudited(before: bytes, step: int) -> bytes:
    """Return the link of a step whose samples are unknown."""
    return hashlib.blake2b(before + step.to_bytes(8, "little") + b"unaudited", digest_size=DIGEST_BYTES).digest()


@dataclass
class SampleSums:
    """What is known of one step in one view."""

    world_size: int
    seen: int = 0
    """The ranks that are counted, as bits."""
    count: int = 0
    total: int = 0
    is_committed: bool = False
    is_lost: bool = False
    """A rank's report is known to be lost."""

    @property
    def is_complete(self) -> bool:
        return self.is_committed and self.seen == (1 << self.world_size) - 1

    def add(self, part: e.SessionPart) -> None:
        self.seen |= _bits(part.ranks)
        self.is_committed |= part.committed
        if part.count < 0:
            self.is_lost = True
        else:
            self.count += part.count
            self.total = (self.total + int.from_bytes(part.total, "big")) % TOTAL_MODULUS


@dataclass
class AuditChain:
    """One source of data in one run."""

    next_step: int = -1
    """The first that is not in the journal; -1: none is."""
    link: bytes = START
    recorded_at: float = 0.0
    skips: list[tuple[int, int]] = field(default_factory=list)
    """First and end of stretches that were skipped."""


@dataclass
class AuditedSamples:
    """What is known of one source beyond its chain. Soft."""

    steps: dict[int, dict[int, SampleSums]] = field(default_factory=dict)
    """By step and view."""
    ready: list[int] = field(default_factory=list)
    """Steps that are complete in some view, in order."""
    views_since: dict[int, float] = field(default_factory=dict)
    """When each view was first heard of."""

    def complete(self, step: int) -> tuple[int, SampleSums] | None:
        """Return the view in which a step is complete, and its sums there."""
        return next(((view, sums) for view, sums in self.steps.get(step, {}).items() if sums.is_complete), None)


@dataclass
class AuditRun:
    """What is known from one start of all workers to the next."""

    since_view: int
    sources: tuple[e.DataSource, ...] | None = None
    chains: dict[int, AuditChain] = field(default_factory=dict)
    heard: dict[int, AuditedSamples] = field(default_factory=dict, compare=False)


@dataclass
class SampleAudit:
    """All that is not over."""

    runs: list[AuditRun] = field(default_factory=list)

    def run_of(self, view: int) -> AuditRun | None:
        """Return the run that a view belongs to; None if it is over and its chain is closed."""
        return next((run for run in reversed(self.runs) if run.since_view <= view), None)


# --- what is heard


def decide(
    audit: SampleAudit, event: e.SamplesReported | e.DataAnnounced | e.DataSkipped, now: float
) -> list[r.Record]:
    """Return the records that an event makes true; none if it is already known."""
    match event:
        case e.SamplesReported(parts=parts):
            news = tuple(part for part in parts if _is_news(audit, part))
            return [r.SamplesReportedRecord(at=now, parts=news)] if news else []
        case e.DataAnnounced(view=view, sources=sources):
            run = audit.run_of(view)
            known = run is None or run.sources == sources
            return [] if known else [r.DataAnnouncedRecord(at=now, view=view, sources=sources)]
        case e.DataSkipped(view=view, source=source, name=name, first_step=first, end_step=end, why=why):
            run = audit.run_of(view)
            if run is None or (source in run.chains and (first, end) in run.chains[source].skips):
                return []
            return [
                r.DataSkippedRecord(
                    at=now, view=view, source=source, name=name, first_step=first, end_step=end, why=why
                )
            ]


def _is_news(audit: SampleAudit, part: e.SessionPart) -> bool:
    run = audit.run_of(part.view)
    if run is None or not part.ranks or max(part.ranks) >= part.world_size:
        return False
    chain, heard = run.chains.get(part.source), run.heard.get(part.source)
    sums = heard.steps.get(part.step, {}).get(part.view) if heard else None
    is_open = chain is None or part.step >= chain.next_step
    return is_open and (sums is None or not sums.seen & _bits(part.ranks))


def _bits(ranks: tuple[int, ...]) -> int:
    bits = 0
    for rank in ranks:
        bits |= 1 << rank
    return bits


# --- what changes


def begin_run(audit: SampleAudit, view: int) -> None:
    """Begin a new chain: all workers restart in this view."""
    audit.runs = [*audit.runs[-RUNS_MAX + 1 :], AuditRun(view)]


def evolve(
    audit: SampleAudit, record: r.SamplesReportedRecord | r.StepsAudited | r.DataAnnouncedRecord | r.DataSkippedRecord
) -> None:
    """Apply one record."""
    match record:
        case r.SamplesReportedRecord(at=at, parts=parts):
            for part in parts:
                _note(audit, part, at)
        case r.DataAnnouncedRecord(view=view, sources=sources):
            if run := audit.run_of(view):
                run.sources = sources
        case r.DataSkippedRecord(view=view, source=source, first_step=first, end_step=end):
            if run := audit.run_of(view):
                run.chains.setdefault(source, AuditChain()).skips.append((first, end))
        case r.StepsAudited():
            _advance(audit, record)


def _note(audit: SampleAudit, part: e.SessionPart, at: float) -> None:
    run = audit.run_of(part.view)
    assert run is not None
    heard = run.heard.setdefault(part.source, AuditedSamples())
    heard.views_since.setdefault(part.view, at)
    was_complete = heard.complete(part.step) is not None
    sums = heard.steps.setdefault(part.step, {}).setdefault(part.view, SampleSums(part.world_size))
    if sums.seen & _bits(part.ranks):
        return  # twice in one event
    sums.add(part)
    if not was_complete and sums.is_complete:
        insort(heard.ready, part.step)


def _advance(audit: SampleAudit, record: r.StepsAudited) -> None:
    audit.runs = [run for run in audit.runs if run.since_view >= record.since_view]
    run = audit.run_of(record.since_view)
    assert run is not None and run.since_view == record.since_view, "a chain of a run that is over"
    chain = run.chains.setdefault(record.source, AuditChain())
    chain.next_step, chain.recorded_at = record.last_step + 1, record.at
    chain.link = bytes.fromhex(record.chain)
    heard = run.heard.setdefault(record.source, AuditedSamples())
    heard.ready = heard.ready[bisect_right(heard.ready, record.last_step) :]
    for step in [step for step in heard.steps if step <= record.last_step]:
        del heard.steps[step]
    for view in sorted(heard.views_since)[:-VIEWS_MAX]:
        del heard.views_since[view]


# --- what follows


def conclude(audit: SampleAudit, now: float, is_final: bool = False) -> r.StepsAudited | None:
    """Return the next segment of a chain that is due for the journal. `is_final`: no further reports will come."""
    for run, later in zip_longest(audit.runs, audit.runs[1:]):
        is_over = is_final or (later is not None and any(heard.ready for heard in later.heard.values()))
        for source, heard in run.heard.items():
            chain = run.chains.get(source, AuditChain())
            if _is_due(chain, heard, now, is_over) and (
                record := _piece(run.since_view, source, chain, heard, now, is_over)
            ):
                return record
    return None


def _is_due(chain: AuditChain, heard: AuditedSamples, now: float, is_over: bool) -> bool:
    is_time = now - chain.recorded_at >= RECORD_EVERY_S or len(heard.ready) >= RECORD_STEPS_MAX
    return is_over or (bool(heard.ready) and is_time)


def _piece(
    since_view: int, source: int, chain: AuditChain, heard: AuditedSamples, now: float, is_over: bool
) -> r.StepsAudited | None:
    piece = _AuditSegment(chain, _first(chain, heard))
    for steps, verdict in _verdicts(since_view, chain, heard, now, is_over):
        piece.take(steps, verdict)
    return piece.record(since_view, source, now) if piece.last_step >= piece.first_step else None


def _verdicts(
    since_view: int, chain: AuditChain, heard: AuditedSamples, now: float, is_over: bool
) -> Iterator[tuple[range, SampleSums | str]]:
    """Yield the steps that can be chained now, each with its sums, or "skipped", or "unaudited"."""
    step = _first(chain, heard)
    known = list(heard.ready)
    if is_over:  # also those that were committed and will not be complete
        known = sorted({step for step, views in heard.steps.items() if any(s.is_committed for s in views.values())})
    for target in known:
        gaps = list(_gaps(chain.skips, heard.steps, range(step, target)))
        is_waited_for = any(verdict == "unaudited" for _, verdict in gaps)
        if is_waited_for and not is_over and not _may_leave_behind(since_view, heard, target, now):
            return
        yield from gaps
        found = heard.complete(target)
        yield range(target, target + 1), "unaudited" if found is None or found[1].is_lost else found[1]
        step = target + 1


def _gaps(skips: Sequence[tuple[int, int]], known: Collection[int], steps: range) -> Iterator[tuple[range, str]]:
    """Yield the steps between two audited ones, in ranges."""
    begin = steps.start
    while begin < steps.stop:
        over = [end for first, end in skips if first <= begin < end and begin not in known]
        if over:
            end = min([steps.stop, max(over), *(step for step in known if step > begin)])
        elif begin in known:
            end = begin + 1
        else:
            end = min([steps.stop, *(first for first, _ in skips if first > begin)])
        yield range(begin, end), "skipped" if over else "unaudited"
        begin = end


def _first(chain: AuditChain, heard: AuditedSamples) -> int:
    return chain.next_step if chain.next_step >= 0 else min(heard.steps, default=0)


def _may_leave_behind(since_view: int, heard: AuditedSamples, target: int, now: float) -> bool:
    """Return whether no report of an earlier step can still arrive: each rank reports in the order of steps, so only
    reports of an earlier view could be on their way."""
    found = heard.complete(target)
    assert found is not None
    is_late = now - heard.views_since.get(found[0], now) >= PATIENCE_S
    return found[0] == since_view or is_late or len(heard.ready) >= PENDING_STEPS_MAX


class _AuditSegment:
    """A part of a chain in the making."""

    def __init__(self, chain: AuditChain, first_step: int) -> None:
        self.first_step, self.last_step = first_step, first_step - 1
        self._link, self._samples = chain.link, 0
        self._ranges: dict[str, list[tuple[int, int]]] = {"skipped": [], "unaudited": []}

    def take(self, steps: range, verdict: SampleSums | str) -> None:
        """Append the next steps."""
        if isinstance(verdict, SampleSums):
            self._link = link(self._link, steps.start, verdict.count, verdict.total)
            self._samples += verdict.count
        else:
            _extend(self._ranges[verdict], steps)
        if verdict == "unaudited":
            for step in steps:
                self._link = link_unaudited(self._link, step)
        self.last_step = steps.stop - 1

    def record(self, since_view: int, source: int, now: float) -> r.StepsAudited:
        return r.StepsAudited(
            at=now,
            since_view=since_view,
            source=source,
            first_step=self.first_step,
            last_step=self.last_step,
            samples=self._samples,
            chain=self._link.hex(),
            unaudited=tuple(self._ranges["unaudited"]),
            skipped=tuple(self._ranges["skipped"]),
        )


def _extend(ranges: list[tuple[int, int]], steps: range) -> None:
    """Add steps to (first, last) pairs in order."""
    if ranges and ranges[-1][1] == steps.start - 1:
        ranges[-1] = (ranges[-1][0], steps.stop - 1)
    else:
        ranges.append((steps.start, steps.stop - 1))
