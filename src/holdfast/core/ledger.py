"""Which samples the committed steps were made of, put together from what every rank was handed.

Workers leave a witness of each step in their progress records: how many samples, and the sum of their digests
(data/ledger.py). Agents send them on (agent/ledger.py). Here they are added up:

1. A step's witnesses count together if they are of one view. When those of all its ranks are there, and one of them
   knows that the step was committed, the step is witnessed. A view in which it was not committed never gets there.
2. Witnessed steps are chained in their order: link = H(link before, step, number of samples, sum). So the last link
   stands for all steps before it. The journal gets a link every few seconds, not one a step.
3. A step that a later one has left behind, and whose witnesses cannot come any more, is named as unwitnessed, and the
   chain goes on over a mark in its place: what cannot be known is neither guessed nor hides what can.
4. Steps that the script skipped (DataSkipped) and that nobody was handed are passed over.
5. A view that keeps no worker begins a new life: it goes back to a checkpoint. Each life has a chain of its own, from
   its first step on. The old one's is closed when the first step of the new one is witnessed: by then all that was left
   of the old one has been heard.

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
TOTAL_MODULUS = 2 ** (8 * DIGEST_BYTES)
RECORD_EVERY_S = 5.0
RECORD_STEPS_MAX = 1_024
"""Witnessed steps are not left out of the journal for longer. What agents keep to send again is more than this."""
PATIENCE_S = 10.0
"""For witnesses of an earlier view, from workers that are on their way out."""
PENDING_STEPS_MAX = 65_536
LIVES_MAX = 4
VIEWS_MAX = 64


def link(before: bytes, step: int, count: int, total: int) -> bytes:
    """The link of a witnessed step."""
    text = before + step.to_bytes(8, "little") + count.to_bytes(8, "little") + total.to_bytes(DIGEST_BYTES, "little")
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest()


def link_unwitnessed(before: bytes, step: int) -> bytes:
    """The mark in the place of one that is not."""
    return hashlib.blake2b(before + step.to_bytes(8, "little") + b"unwitnessed", digest_size=DIGEST_BYTES).digest()


@dataclass
class Sums:
    """What is known of one step in one view."""

    world_size: int
    seen: int = 0
    """The ranks that are counted, as bits."""
    count: int = 0
    total: int = 0
    is_committed: bool = False
    is_lost: bool = False
    """A rank's witness is known to be gone."""

    @property
    def is_complete(self) -> bool:
        return self.is_committed and self.seen == (1 << self.world_size) - 1

    def add(self, part: e.Part) -> None:
        self.seen |= _bits(part.ranks)
        self.is_committed |= part.committed
        if part.count < 0:
            self.is_lost = True
        else:
            self.count += part.count
            self.total = (self.total + int.from_bytes(part.total, "big")) % TOTAL_MODULUS


@dataclass
class Chain:
    """One source of data in one life."""

    next_step: int = -1
    """The first that is not in the journal; -1: none is."""
    link: bytes = START
    recorded_at: float = 0.0
    skips: list[tuple[int, int]] = field(default_factory=list)
    """First and end of stretches that were skipped."""


@dataclass
class Heard:
    """What is known of one source beyond its chain. Soft."""

    steps: dict[int, dict[int, Sums]] = field(default_factory=dict)
    """By step and view."""
    ready: list[int] = field(default_factory=list)
    """Steps that are complete in some view, in order."""
    views_since: dict[int, float] = field(default_factory=dict)
    """When each view was first heard of."""

    def complete(self, step: int) -> tuple[int, Sums] | None:
        """The view in which a step is complete, and its sums there."""
        return next(((view, sums) for view, sums in self.steps.get(step, {}).items() if sums.is_complete), None)


@dataclass
class Life:
    """From a start of all workers to the next."""

    since_view: int
    sources: tuple[e.DataSource, ...] | None = None
    chains: dict[int, Chain] = field(default_factory=dict)
    heard: dict[int, Heard] = field(default_factory=dict, compare=False)


@dataclass
class Ledger:
    """All that is not over."""

    lives: list[Life] = field(default_factory=list)

    def life_of(self, view: int) -> Life | None:
        """The one that a view belongs to; None: it is over, and its chain closed."""
        return next((life for life in reversed(self.lives) if life.since_view <= view), None)


# --- what is heard


def decide(
    ledger: Ledger, event: e.SamplesWitnessed | e.DataAnnounced | e.StretchSkipped, now: float
) -> list[r.Record]:
    """The records that an event makes true; none for what is known."""
    match event:
        case e.SamplesWitnessed(parts=parts):
            news = tuple(part for part in parts if _is_news(ledger, part))
            return [r.SamplesNoted(at=now, parts=news)] if news else []
        case e.DataAnnounced(view=view, sources=sources):
            life = ledger.life_of(view)
            known = life is None or life.sources == sources
            return [] if known else [r.DataDescribed(at=now, view=view, sources=sources)]
        case e.StretchSkipped(view=view, source=source, name=name, first_step=first, end_step=end, why=why):
            life = ledger.life_of(view)
            if life is None or (source in life.chains and (first, end) in life.chains[source].skips):
                return []
            return [r.DataSkipped(at=now, view=view, source=source, name=name, first_step=first, end_step=end, why=why)]


def _is_news(ledger: Ledger, part: e.Part) -> bool:
    life = ledger.life_of(part.view)
    if life is None or not part.ranks or max(part.ranks) >= part.world_size:
        return False
    chain, heard = life.chains.get(part.source), life.heard.get(part.source)
    sums = heard.steps.get(part.step, {}).get(part.view) if heard else None
    is_open = chain is None or part.step >= chain.next_step
    return is_open and (sums is None or not sums.seen & _bits(part.ranks))


def _bits(ranks: tuple[int, ...]) -> int:
    bits = 0
    for rank in ranks:
        bits |= 1 << rank
    return bits


# --- what changes


def begin_life(ledger: Ledger, view: int) -> None:
    """All workers start anew in this view."""
    ledger.lives = [*ledger.lives[-LIVES_MAX + 1 :], Life(view)]


def evolve(ledger: Ledger, record: r.SamplesNoted | r.StepsWitnessed | r.DataDescribed | r.DataSkipped) -> None:
    """Apply one record."""
    match record:
        case r.SamplesNoted(at=at, parts=parts):
            for part in parts:
                _note(ledger, part, at)
        case r.DataDescribed(view=view, sources=sources):
            if life := ledger.life_of(view):
                life.sources = sources
        case r.DataSkipped(view=view, source=source, first_step=first, end_step=end):
            if life := ledger.life_of(view):
                life.chains.setdefault(source, Chain()).skips.append((first, end))
        case r.StepsWitnessed():
            _advance(ledger, record)


def _note(ledger: Ledger, part: e.Part, at: float) -> None:
    life = ledger.life_of(part.view)
    assert life is not None
    heard = life.heard.setdefault(part.source, Heard())
    heard.views_since.setdefault(part.view, at)
    was_complete = heard.complete(part.step) is not None
    sums = heard.steps.setdefault(part.step, {}).setdefault(part.view, Sums(part.world_size))
    if sums.seen & _bits(part.ranks):
        return  # twice in one event
    sums.add(part)
    if not was_complete and sums.is_complete:
        insort(heard.ready, part.step)


def _advance(ledger: Ledger, record: r.StepsWitnessed) -> None:
    ledger.lives = [life for life in ledger.lives if life.since_view >= record.since_view]
    life = ledger.life_of(record.since_view)
    assert life is not None and life.since_view == record.since_view, "a chain of a life that is over"
    chain = life.chains.setdefault(record.source, Chain())
    chain.next_step, chain.recorded_at = record.last_step + 1, record.at
    chain.link = bytes.fromhex(record.chain)
    heard = life.heard.setdefault(record.source, Heard())
    heard.ready = heard.ready[bisect_right(heard.ready, record.last_step) :]
    for step in [step for step in heard.steps if step <= record.last_step]:
        del heard.steps[step]
    for view in sorted(heard.views_since)[:-VIEWS_MAX]:
        del heard.views_since[view]


# --- what follows


def conclude(ledger: Ledger, now: float, is_final: bool = False) -> r.StepsWitnessed | None:
    """The next piece of a chain that is due for the journal. `is_final`: nothing more will be heard."""
    for life, later in zip_longest(ledger.lives, ledger.lives[1:]):
        is_over = is_final or (later is not None and any(heard.ready for heard in later.heard.values()))
        for source, heard in life.heard.items():
            chain = life.chains.get(source, Chain())
            if _is_due(chain, heard, now, is_over) and (
                record := _piece(life.since_view, source, chain, heard, now, is_over)
            ):
                return record
    return None


def _is_due(chain: Chain, heard: Heard, now: float, is_over: bool) -> bool:
    is_time = now - chain.recorded_at >= RECORD_EVERY_S or len(heard.ready) >= RECORD_STEPS_MAX
    return is_over or (bool(heard.ready) and is_time)


def _piece(
    since_view: int, source: int, chain: Chain, heard: Heard, now: float, is_over: bool
) -> r.StepsWitnessed | None:
    piece = _Piece(chain, _first(chain, heard))
    for steps, verdict in _verdicts(since_view, chain, heard, now, is_over):
        piece.take(steps, verdict)
    return piece.record(since_view, source, now) if piece.last_step >= piece.first_step else None


def _verdicts(
    since_view: int, chain: Chain, heard: Heard, now: float, is_over: bool
) -> Iterator[tuple[range, Sums | str]]:
    """The steps that can be chained now, each with what it is: its sums, or "skipped", or "unwitnessed"."""
    step = _first(chain, heard)
    known = list(heard.ready)
    if is_over:  # also those that were committed and will not be complete
        known = sorted({step for step, views in heard.steps.items() if any(s.is_committed for s in views.values())})
    for target in known:
        gaps = list(_gaps(chain.skips, heard.steps, range(step, target)))
        is_waited_for = any(verdict == "unwitnessed" for _, verdict in gaps)
        if is_waited_for and not is_over and not _may_leave_behind(since_view, heard, target, now):
            return
        yield from gaps
        found = heard.complete(target)
        yield range(target, target + 1), "unwitnessed" if found is None or found[1].is_lost else found[1]
        step = target + 1


def _gaps(skips: Sequence[tuple[int, int]], known: Collection[int], steps: range) -> Iterator[tuple[range, str]]:
    """Steps between two witnessed ones, in stretches."""
    begin = steps.start
    while begin < steps.stop:
        over = [end for first, end in skips if first <= begin < end and begin not in known]
        if over:
            end = min([steps.stop, max(over), *(step for step in known if step > begin)])
        elif begin in known:
            end = begin + 1
        else:
            end = min([steps.stop, *(first for first, _ in skips if first > begin)])
        yield range(begin, end), "skipped" if over else "unwitnessed"
        begin = end


def _first(chain: Chain, heard: Heard) -> int:
    return chain.next_step if chain.next_step >= 0 else min(heard.steps, default=0)


def _may_leave_behind(since_view: int, heard: Heard, target: int, now: float) -> bool:
    """Whether no witness of a step before this one can come: every rank's come in the order of steps, so only those of
    a view before could be on their way."""
    found = heard.complete(target)
    assert found is not None
    is_late = now - heard.views_since.get(found[0], now) >= PATIENCE_S
    return found[0] == since_view or is_late or len(heard.ready) >= PENDING_STEPS_MAX


class _Piece:
    """A part of a chain in the making."""

    def __init__(self, chain: Chain, first_step: int) -> None:
        self.first_step, self.last_step = first_step, first_step - 1
        self._link, self._samples = chain.link, 0
        self._ranges: dict[str, list[tuple[int, int]]] = {"skipped": [], "unwitnessed": []}

    def take(self, steps: range, verdict: Sums | str) -> None:
        """The next steps."""
        if isinstance(verdict, Sums):
            self._link = link(self._link, steps.start, verdict.count, verdict.total)
            self._samples += verdict.count
        else:
            _extend(self._ranges[verdict], steps)
        if verdict == "unwitnessed":
            for step in steps:
                self._link = link_unwitnessed(self._link, step)
        self.last_step = steps.stop - 1

    def record(self, since_view: int, source: int, now: float) -> r.StepsWitnessed:
        return r.StepsWitnessed(
            at=now,
            since_view=since_view,
            source=source,
            first_step=self.first_step,
            last_step=self.last_step,
            samples=self._samples,
            chain=self._link.hex(),
            unwitnessed=tuple(self._ranges["unwitnessed"]),
            skipped=tuple(self._ranges["skipped"]),
        )


def _extend(ranges: list[tuple[int, int]], steps: range) -> None:
    """Add steps to (first, last) pairs in order."""
    if ranges and ranges[-1][1] == steps.start - 1:
        ranges[-1] = (ranges[-1][0], steps.stop - 1)
    else:
        ranges.append((steps.start, steps.stop - 1))
