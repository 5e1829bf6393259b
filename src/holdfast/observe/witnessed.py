"""Whether a job's committed steps were made of the samples they should have been made of, from its journal alone.

The journal has what the order of samples follows from (DataDescribed), and a chain over what every rank was really
handed (StepsWitnessed; core/ledger.py). The chain that the plan would have given is computed here and compared. The
plan has each sample once an epoch, so where the chains agree, the run had too. What can be wrong:

    differs        a step of a stretch was made of other samples than planned; or between two jobs
    unwitnessed    what a step was made of is not known any more, as a node was lost with its memory
    missing        steps without any witness
    unexplained    steps that were passed over without anybody having asked for it

After a start from a checkpoint the steps behind it are made again: the later ones count, all are judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import msgspec

from holdfast.core.events import DataSource
from holdfast.core.ledger import START, link, link_unwitnessed
from holdfast.core.records import DataDescribed, DataSkipped, JobCreated, JobFinished, StepsWitnessed, ViewFormed
from holdfast.core.sentences import stretches
from holdfast.errors import UsageError
from holdfast.journal import Entry

if TYPE_CHECKING:
    from holdfast.data.plan import Plan

Stretch = tuple[int, int]
"""First and last step."""


class Finding(msgspec.Struct, frozen=True):
    """Something that is wrong."""

    source: str
    kind: Literal["differs", "unwitnessed", "missing", "unexplained"]
    first_step: int
    last_step: int
    text: str


class History(msgspec.Struct):
    """One source of data in one life of the job."""

    source: str
    since_view: int
    described: DataSource | None
    pieces: list[StepsWitnessed] = []
    asked: list[Stretch] = []
    """Stretches that the script skipped."""

    @property
    def first_step(self) -> int:
        return self.pieces[0].first_step

    @property
    def last_step(self) -> int:
        return self.pieces[-1].last_step

    @property
    def samples(self) -> int:
        return sum(piece.samples for piece in self.pieces)

    @property
    def skipped(self) -> list[Stretch]:
        return [stretch for piece in self.pieces for stretch in piece.skipped]

    @property
    def unwitnessed(self) -> list[Stretch]:
        return [stretch for piece in self.pieces for stretch in piece.unwitnessed]


class Witnessed(msgspec.Struct):
    """All that a journal tells of its data."""

    job_id: str
    is_over: bool
    histories: list[History]

    def of(self, source: str) -> list[History]:
        """Of one source, life after life."""
        return [history for history in self.histories if history.source == source]

    @property
    def sources(self) -> list[str]:
        return list(dict.fromkeys(history.source for history in self.histories))


def gather(entries: Sequence[Entry]) -> Witnessed:
    """What the journal tells, in order."""
    records = [entry.record for entry in entries]
    lives = [record.view.number for record in records if isinstance(record, ViewFormed) and not record.view.kept]
    described = [record for record in records if isinstance(record, DataDescribed)]
    found: dict[tuple[int, int], History] = {}
    for piece in (record for record in records if isinstance(record, StepsWitnessed)):
        key = (piece.since_view, piece.source)
        if key not in found:
            source = _description(described, lives, *key)
            name = source.name if source else f"source {piece.source}"
            found[key] = History(name, piece.since_view, source, [], _asked(records, lives, *key))
        found[key].pieces.append(piece)
    job_id = next((record.job_id for record in records if isinstance(record, JobCreated)), "")
    is_over = any(isinstance(record, JobFinished) for record in records)
    return Witnessed(job_id, is_over, [found[key] for key in sorted(found)])


def _views(lives: Sequence[int], since_view: int) -> range:
    """The views of a life."""
    return range(since_view, min((view for view in lives if view > since_view), default=2**62))


def _description(
    described: Sequence[DataDescribed], lives: Sequence[int], since_view: int, source: int
) -> DataSource | None:
    views = _views(lives, since_view)
    said = [record.sources for record in described if record.view in views and source < len(record.sources)]
    return said[-1][source] if said else None


def _asked(records: Sequence[object], lives: Sequence[int], since_view: int, source: int) -> list[Stretch]:
    views = _views(lives, since_view)
    return [
        (record.first_step, record.end_step - 1)
        for record in records
        if isinstance(record, DataSkipped) and record.source == source and record.view in views
    ]


# --- one job


def judge(witnessed: Witnessed) -> list[Finding]:
    """Everything that is wrong, the first of each kind and history."""
    findings = [finding for history in witnessed.histories for finding in _judge_history(history)]
    for source in witnessed.sources:
        for before, after in pairwise(witnessed.of(source)):
            if after.first_step > before.last_step + 1:
                gap = (before.last_step + 1, after.first_step - 1)
                findings.append(_finding(source, "missing", gap, "between two starts nobody witnessed them"))
    return findings


def _judge_history(history: History) -> Iterator[Finding]:
    for before, after in pairwise(history.pieces):
        if after.first_step != before.last_step + 1:
            gap = (before.last_step + 1, after.first_step - 1)
            yield _finding(history.source, "missing", gap, "the journal goes on behind them")
            return
    if unasked := [stretch for stretch in history.skipped if not _is_within(stretch, history.asked)]:
        yield _finding(history.source, "unexplained", unasked[0], "they were passed over, and nobody asked for it")
    if unknown := history.unwitnessed:
        why = "what was handed out is not known: memory was lost before it was read"
        yield _finding(history.source, "unwitnessed", unknown[0], f"{why} (in all: {stretches(unknown)})")
    if history.described is None:
        yield _finding(history.source, "differs", (history.first_step, history.last_step), "it was never described")
    elif wrong := _first_wrong(history, plan_of(history.described)):
        piece = (wrong.first_step, wrong.last_step)
        yield _finding(history.source, "differs", piece, "one of them was made of other samples than planned")


def _finding(
    source: str, kind: Literal["differs", "unwitnessed", "missing", "unexplained"], steps: Stretch, why: str
) -> Finding:
    which = f"step {steps[0]}" if steps[0] == steps[1] else f"steps {steps[0]} to {steps[1]}"
    return Finding(source, kind, *steps, f"{source}: {which}: {why}")


def _is_within(stretch: Stretch, asked: Sequence[Stretch]) -> bool:
    begin = stretch[0]
    while covering := [last for first, last in asked if first <= begin <= last]:
        begin = max(covering) + 1
        if begin > stretch[1]:
            return True
    return False


def _first_wrong(history: History, plan: Plan) -> StepsWitnessed | None:
    """The first piece whose chain is not what the plan gives."""
    chain = START
    expected = _expected(history, plan)
    for piece in history.pieces:
        for step in _steps(piece):
            number, count, total = next(expected)
            assert number == step
            is_known = not any(first <= step <= last for first, last in piece.unwitnessed)
            chain = link(chain, step, count, total) if is_known else link_unwitnessed(chain, step)
        if chain.hex() != piece.chain:
            return piece
    return None


def _steps(piece: StepsWitnessed) -> Iterator[int]:
    """Those that were not skipped."""
    step = piece.first_step
    for first, last in [*piece.skipped, (piece.last_step + 1, piece.last_step)]:
        yield from range(step, first)
        step = last + 1


def _expected(history: History, plan: Plan) -> Iterator[tuple[int, int, int]]:
    from holdfast.data.ledger import planned_witnesses

    step = history.first_step
    for first, last in [*history.skipped, (history.last_step + 1, history.last_step)]:
        yield from planned_witnesses(plan, range(step, first))
        step = last + 1


def plan_of(source: DataSource) -> Plan:
    """The plan that a description stands for."""
    try:
        from holdfast.data.order import Locality
        from holdfast.data.plan import make_plan
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


def compare(mine: Witnessed, other: Witnessed) -> list[Finding]:
    """Where two jobs were made of different samples, if each is as its own plan says. By the last life of each: what it
    repeated counts."""
    findings = []
    for source in [name for name in mine.sources if name not in other.sources]:
        findings.append(Finding(source, "missing", 0, 0, f"{source}: the other job has no data of this name"))
    for source in [name for name in mine.sources if name in other.sources]:
        if difference := _difference(source, mine.of(source), other.of(source)):
            findings.append(difference)
    return findings


def _difference(source: str, mine: Sequence[History], other: Sequence[History]) -> Finding | None:
    common = range(max(mine[0].first_step, other[0].first_step), min(mine[-1].last_step, other[-1].last_step) + 1)
    for step, here, there in zip(common, _timeline(mine, common), _timeline(other, common), strict=True):
        if here is not None and there is not None and here != there:
            why = "one job skipped it" if () in (here, there) else "the two jobs had different samples"
            return _finding(source, "differs", (step, step), why)
    return None


def _timeline(lives: Sequence[History], steps: range) -> Iterator[tuple[int, ...] | None]:
    """By step: what the plan of the life that made it last gave it; () if it was skipped, None if it is not known."""
    from holdfast.data.ledger import planned_witnesses

    begin = steps.start
    while begin < steps.stop:
        life = next((life for life in reversed(lives) if life.first_step <= begin <= life.last_step), None)
        later = [life.first_step for life in lives if life.first_step > begin]
        end = min([steps.stop, *later, *([life.last_step + 1] if life else [])])
        if life is None or life.described is None:
            yield from (None for _ in range(begin, end))
        else:
            for step, count, total in planned_witnesses(plan_of(life.described), range(begin, end)):
                is_unknown = any(first <= step <= last for first, last in life.unwitnessed)
                is_skipped = any(first <= step <= last for first, last in life.skipped)
                yield None if is_unknown else () if is_skipped else (count, total)
        begin = end
