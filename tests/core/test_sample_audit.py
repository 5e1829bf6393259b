"""The ledger as tables: what is heard of the steps, and what the journal says of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core import sample_audit
from holdfast.core.sample_audit import PATIENCE_S, RECORD_EVERY_S, START, SampleAudit, link, link_unaudited
from support.world import World, durable

SOURCE = e.DataSource(
    name="data",
    size=100,
    seed="0",
    global_batch_size=4,
    slots=4,
    shuffle=True,
    last_batch="short",
    locality=(),
    fingerprint="",
)


def part(
    step: int, *ranks: int, view: int = 1, world: int = 2, committed: bool = True, count: int = 2
) -> e.SessionPart:
    """Each rank's share has its rank for a sum."""
    total = sum(ranks) + 100 * step if count >= 0 else 0
    return e.SessionPart(
        0, view, world, ranks, step, count * len(ranks) if count > 0 else count, _bytes(total), committed
    )


def _bytes(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Book:
    """A ledger in its first life, with a clock."""

    def __init__(self) -> None:
        self.ledger, self.now = SampleAudit(), 1000.0
        self.records: list[r.StepsAudited] = []
        sample_audit.begin_run(self.ledger, 1)

    def hear(self, *parts: e.SessionPart) -> None:
        event = e.SamplesReported(node_id="a", incarnation="a.1", parts=parts)
        for record in sample_audit.decide(self.ledger, event, self.now):
            sample_audit.evolve(self.ledger, record)  # type: ignore[arg-type]
        self.settle()

    def settle(self, is_final: bool = False) -> None:
        while record := sample_audit.conclude(self.ledger, self.now, is_final):
            sample_audit.evolve(self.ledger, record)
            self.records.append(record)

    def skip(self, first: int, end: int) -> list[r.Record]:
        life: dict[str, Any] = {"node_id": "a", "incarnation": "a.1", "view": 1}
        event = e.DataSkipped(**life, source=0, name="data", first_step=first, end_step=end, why="spike")
        records = sample_audit.decide(self.ledger, event, self.now)
        for record in records:
            sample_audit.evolve(self.ledger, record)  # type: ignore[arg-type]
        return records

    def pass_time(self, seconds: float = RECORD_EVERY_S) -> None:
        self.now += seconds
        self.settle()

    @property
    def spans(self) -> list[tuple[int, int]]:
        return [(record.first_step, record.last_step) for record in self.records]


def chain_of(*steps: int, start: bytes = START, missing: tuple[int, ...] = ()) -> str:
    """Of two ranks with two samples each."""
    chain = start
    for step in steps:
        chain = link_unaudited(chain, step) if step in missing else link(chain, step, 4, 1 + 200 * step)
    return chain.hex()


def test_steps_are_chained_when_all_ranks_are_heard_whatever_comes_first() -> None:
    book = Book()
    book.hear(part(1, 0), part(0, 1))
    assert not book.records
    book.hear(part(0, 0), part(1, 1))
    book.pass_time()
    assert book.spans == [(0, 1)]
    assert (book.records[-1].chain, book.records[-1].samples) == (chain_of(0, 1), 8)


def test_the_journal_grows_by_time_not_by_step() -> None:
    book = Book()
    for step in range(100):
        book.hear(part(step, 0), part(step, 1))
        book.now += 0.1
    book.pass_time()
    assert 2 <= len(book.records) <= 4
    assert book.spans[0][0] == 0 and book.spans[-1][1] == 99
    assert book.records[-1].chain == chain_of(*range(100))


def test_what_was_heard_before_is_no_news() -> None:
    book = Book()
    book.hear(part(0, 0), part(0, 0), part(0, 1), part(1, 0))
    again = e.SamplesReported(node_id="a", incarnation="a.2", parts=(part(0, 0), part(1, 0)))
    assert sample_audit.decide(book.ledger, again, book.now) == []
    assert book.records[-1].samples == 4


def test_a_dead_worker_who_did_not_know_counts_if_another_does() -> None:
    book = Book()
    book.hear(part(0, 0, committed=False), part(0, 1, committed=False))
    book.pass_time()
    assert not book.records, "nobody knows that it was committed"
    book.hear(part(0, 0, view=2), part(0, 1, view=2))
    book.hear(part(1, 0, view=2, committed=False), part(1, 1, view=2))
    book.pass_time()
    assert book.records[-1].chain == chain_of(0, 1)


def test_a_repeated_step_counts_in_the_view_in_which_all_have_it() -> None:
    book = Book()
    book.hear(part(0, 0), part(0, 1), part(1, 0))  # rank 1's node is lost with its memory, and step 1 is repeated
    book.hear(part(1, 0, view=2, world=1, count=4), part(2, 0, view=2, world=1, count=4))
    book.pass_time()
    one = link(bytes.fromhex(chain_of(0)), 1, 4, 100)
    assert (book.spans[-1][1], book.records[-1].chain) == (2, link(one, 2, 4, 200).hex())
    assert not any(record.unaudited for record in book.records)


def test_what_never_becomes_complete_is_named_and_the_chain_goes_on() -> None:
    book = Book()
    book.hear(part(0, 0), part(0, 1), part(1, 0))
    book.hear(part(2, 0, 1, view=2))
    book.pass_time(PATIENCE_S - 1)
    assert book.spans == [(0, 0)], "those of the view before may be on their way"
    book.pass_time(1)
    assert (book.spans[-1], book.records[-1].unaudited) == ((1, 2), ((1, 1),))
    before = bytes.fromhex(chain_of(0, 1, missing=(1,)))
    assert book.records[-1].chain == link(before, 2, 2 * 2, 201).hex()
    book.hear(part(1, 1))
    assert book.spans[-1] == (1, 2), "too late"


def test_within_one_view_nothing_comes_late() -> None:
    book = Book()
    book.hear(part(0, 0, 1), part(1, 0), part(2, 0, 1))
    book.pass_time()
    assert book.records[-1].unaudited == ((1, 1),)


def test_a_lost_entry_makes_its_step_unaudited() -> None:
    book = Book()
    book.hear(part(0, 0, 1), part(1, 0), part(1, 1, count=-1), part(2, 0, 1))
    book.pass_time()
    assert (book.spans[-1][1], book.records[-1].unaudited) == (2, ((1, 1),))


def test_at_the_end_everything_is_said() -> None:
    book = Book()
    book.hear(part(0, 0, 1), part(1, 0, 1), part(2, 0), part(3, 0, committed=False))
    book.settle(is_final=True)
    assert (book.spans[-1][1], book.records[-1].unaudited) == (2, ((2, 2),))


def test_a_skipped_stretch_is_passed_over_and_what_is_handed_out_of_it_counts() -> None:
    book = Book()
    (record,) = book.skip(2, 10**12)
    assert isinstance(record, r.DataSkippedRecord) and record.name == "data", "though nobody has described the data yet"
    assert book.skip(2, 10**12) == [], "every rank says so"
    book.hear(part(0, 0, 1), part(1, 0, 1), part(3, 0, 1), part(10**12, 0, 1))
    book.pass_time()
    skipped = [stretch for record in book.records for stretch in record.skipped]
    assert skipped == [(2, 2), (4, 10**12 - 1)]
    assert not any(record.unaudited for record in book.records)


def test_a_start_from_a_checkpoint_is_a_life_of_its_own() -> None:
    book = Book()
    book.hear(part(0, 0, 1), part(1, 0, 1))
    sample_audit.begin_run(book.ledger, 5)
    book.hear(part(2, 0, 1))  # from workers that were stopped for it
    book.hear(part(1, 0, 1, view=5))
    book.pass_time()
    incarnations = [(record.since_view, record.first_step, record.last_step) for record in book.records]
    assert incarnations[0][:2] == (1, 0) and max(last for since, _, last in incarnations if since == 1) == 2
    assert [life for life in incarnations if life[0] == 5] == [(5, 1, 1)]
    assert book.records[-1].chain == link(START, 1, 4, 101).hex()
    book.hear(part(3, 0, 1))
    assert book.records[-1].since_view == 5, "what an old life says is over"


@pytest.mark.parametrize("restart", [False, True])
def test_through_a_master_and_its_restart(restart: bool) -> None:
    world = World(nodes=(1, 1), workers=2, session=e.SessionInfo())
    world.do(world.hello("a"))
    life = world.job.nodes["a"].incarnation
    announced = e.DataAnnounced(node_id="a", incarnation=life, view=1, sources=(SOURCE,))
    first = e.SamplesReported(node_id="a", incarnation=life, parts=(part(0, 0, 1), part(1, 0)))
    world.do(announced, announced, first)
    described = [record for record in world.history if isinstance(record, r.DataAnnouncedRecord)]
    assert [record.sources for record in described] == [(SOURCE,)]
    if restart:
        world.restart_master()
        world.do(world.hello("a"), first)
    world.do(e.SamplesReported(node_id="a", incarnation=life, parts=(part(1, 1), part(2, 0, 1))))
    world.do(e.SamplesReported(node_id="a", incarnation="another life", parts=(part(3, 0, 1),)))
    world.wait(RECORD_EVERY_S)
    world.do()
    audited = [record for record in world.history if isinstance(record, r.StepsAudited)]
    assert (audited[0].first_step, audited[-1].last_step) == (0, 2)
    assert durable(world.replayed()) == durable(world.job)


@given(st.integers(0, 2**32))
@settings(max_examples=200)
def test_any_course_of_views_and_deliveries_gives_the_undisturbed_chain(seed: int) -> None:
    """Ranks come and go, steps are repeated in new views, reports are late, doubled and mixed; no page is lost."""
    chance = random.Random(seed)
    totals = {step: 1_000_003 * (step + 1) for step in range(chance.randint(1, 12))}
    book, view, step = Book(), 1, 0
    letters: dict[int, list[e.SessionPart]] = {}
    while step < len(totals):
        world = chance.randint(1, 4)
        end = min(step + chance.randint(0, 4), len(totals))
        for committed in range(step, end):
            _hand_out(letters, committed, totals[committed], view, world, knowing=chance.randint(1, world))
        step = end
        for rank in range(chance.randint(0, world - 1)):
            # A step that is repeated: only those who died at its barrier speak of it.
            letters.setdefault(rank, []).append(e.SessionPart(0, view, world, (rank,), step, 1, _bytes(7), False))
        view += 1
    while speakers := [rank for rank, left in letters.items() if left]:
        rank, count = chance.choice(speakers), chance.randint(1, 5)
        said, letters[rank] = letters[rank][:count], letters[rank][count:]
        for _ in range(chance.randint(1, 2)):
            book.hear(*said)
    book.settle(is_final=True)
    chain = START
    for number, total in totals.items():
        chain = link(chain, number, 4, total)
    assert book.records[-1].chain == chain.hex() and book.spans[-1][1] == len(totals) - 1


def _hand_out(
    letters: dict[int, list[e.SessionPart]], step: int, total: int, view: int, world: int, knowing: int
) -> None:
    """A committed step: `knowing` ranks know so, the others died at once."""
    for rank in range(world):
        share = total - sum(range(world)) if rank == 0 else rank
        count = 4 if rank == 0 else 0
        one = e.SessionPart(0, view, world, (rank,), step, count, _bytes(share), rank < knowing)
        letters.setdefault(rank, []).append(one)
