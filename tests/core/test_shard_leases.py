"""Leases of streamed shards as pure data: who gets which turn, and what becomes of failures."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.shard_leases import (
    TRIES_MAX,
    Lease,
    LeaseBook,
    LeasedShard,
    LeaseRules,
    ShardProblem,
    ShardRemainder,
    StreamEnd,
    StreamState,
    TakenShard,
    from_plain,
    grant,
    has_next_epoch,
    is_used_up,
    open_book,
    open_next_epoch,
    record_leases,
    record_problem,
    take,
    to_plain,
    unknown_reports,
)


def turns(book: LeaseBook) -> list[list[int]]:
    return [[lease.turn for lease in leases] for leases in book.held]


def after(book: LeaseBook, *taken: list[TakenShard]) -> LeaseBook:
    """One round: what each slot took, then grants."""
    return grant(take(book, list(taken)))


@pytest.mark.parametrize(
    ("rules", "held"),
    [
        (LeaseRules(shards=10, slots=3), [[0, 3], [1, 4], [2, 5]]),
        (LeaseRules(shards=1, slots=2), [[0, 2], [1, 3]]),  # across: the same shard's readings of four epochs
        (LeaseRules(shards=4, slots=3, epochs=1), [[0], [1], [2]]),  # nobody keeps ahead what others will need
        (LeaseRules(shards=2, slots=3, epochs=1), [[0], [1], []]),
        (LeaseRules(shards=4, slots=3, across=False), [[0], [1], [2]]),
    ],
)
def test_the_first_leases_go_round(rules: LeaseRules, held: list[list[int]]) -> None:
    assert turns(open_book(rules)) == held


def test_a_lease_that_ends_makes_room_for_the_next_turn() -> None:
    book = open_book(LeaseRules(shards=10, slots=2))
    book = after(book, [TakenShard(5)], [TakenShard(3, StreamEnd.ENDED), TakenShard(2)])
    assert book.held == ((LeasedShard(0, 0, 5), LeasedShard(2, 2, 0)), (LeasedShard(3, 3, 2), LeasedShard(4, 4, 0)))


def test_a_failed_shard_is_read_on_by_another_slot_then_at_the_end_of_the_epoch_then_no_more() -> None:
    book = open_book(LeaseRules(shards=3, slots=2, epochs=1))
    assert turns(book) == [[0], [1]]
    book = after(book, [TakenShard(5, StreamEnd.FAILED)], [TakenShard(4)])
    assert turns(book) == [[2], [1, 0]], "not to the slot that failed"
    book = after(book, [], [TakenShard(0, StreamEnd.ENDED)])
    assert book.held[1] == (LeasedShard(3, 0, 5, 1),), "from its cursor on"
    book = after(book, [TakenShard(1)], [TakenShard(2, StreamEnd.FAILED)])
    assert book.held[1] == (LeasedShard(4, 0, 7, 2),), "there is nothing else left, so the same slot may try"
    book = after(book, [TakenShard(1, StreamEnd.ENDED)], [TakenShard(0, StreamEnd.FAILED)])
    assert book.quarantined == (ShardRemainder(0, 7, TRIES_MAX, 1),)
    assert is_used_up(book) and not has_next_epoch(book)


def test_the_second_failure_waits_for_the_end_of_the_epoch() -> None:
    book = open_book(LeaseRules(shards=100, slots=2))
    book = after(book, [TakenShard(5, StreamEnd.FAILED), TakenShard(0, StreamEnd.ENDED)], [])
    book = after(book, [], [TakenShard(0, StreamEnd.ENDED)])
    assert book.held[1][1] == LeasedShard(book.granted - 1, 0, 5, 1), "at once to another slot"
    book = after(book, [], [TakenShard(0, StreamEnd.ENDED), TakenShard(0, StreamEnd.FAILED)])
    rounds = 0
    while book.remainders:
        assert book.next_turn < 100 + 2
        book = after(book, [TakenShard(0, StreamEnd.ENDED)], [TakenShard(0, StreamEnd.ENDED)])
        rounds += 1
    assert rounds > 40
    assert 0 in [lease.turn for leases in book.held for lease in leases]


def test_a_shard_in_quarantine_has_its_turn_in_the_next_epoch() -> None:
    book = open_book(LeaseRules(shards=1, slots=1, across=False))
    for _ in range(TRIES_MAX):
        book = after(book, [TakenShard(0, StreamEnd.FAILED)])
    assert is_used_up(book) and book.quarantined
    assert open_next_epoch(book).held == ((LeasedShard(TRIES_MAX, 1, 0),),)


def test_a_book_survives_being_written_down() -> None:
    book = open_book(LeaseRules(shards=3, slots=2, epochs=4))
    book = after(book, [TakenShard(5, StreamEnd.FAILED)], [TakenShard(4)])
    assert from_plain(book.rules, to_plain(book)) == book


@st.composite
def streams(draw: st.DrawFn) -> tuple[LeaseRules, list[int], list[tuple[int, int, int]]]:
    """Rules, the number of records of each shard, and failures: (turn, record, how often)."""
    sizes = draw(st.lists(st.integers(0, 12), min_size=1, max_size=6))
    rules = LeaseRules(len(sizes), draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.booleans()))
    turn = st.integers(0, rules.shards * rules.epochs - 1)
    return rules, sizes, draw(st.lists(st.tuples(turn, st.integers(0, 12), st.integers(1, 4)), max_size=3))


@settings(max_examples=150, deadline=None)
@given(streams(), st.integers(1, 4), st.integers(0, 999))
def test_every_record_of_every_epoch_once_but_for_what_is_listed(stream: Any, share: int, seed: int) -> None:
    rules, sizes, failures = stream
    chance = random.Random(seed)
    left = {(turn, record): times for turn, record, times in failures}
    book = open_book(rules)
    seen: list[Any] = []
    for _ in range(2_000):
        if is_used_up(book):
            if not has_next_epoch(book):
                break
            book = open_next_epoch(book)
        taken, read, fell = [], [], dict(left)
        for leases in book.held:
            parts, wanted = [], share
            for lease in leases:
                count, end = 0, StreamEnd.OPEN
                while count < wanted:
                    at = (lease.turn, lease.cursor + count)
                    if at[1] >= sizes[lease.turn % rules.shards]:
                        end = StreamEnd.ENDED
                        break
                    if fell.get(at, 0) > 0:
                        fell[at] -= 1
                        end = StreamEnd.FAILED
                        break
                    read.append(at)
                    count += 1
                parts.append(TakenShard(count, end))
                wanted -= count
                if end is StreamEnd.OPEN:
                    break
            taken.append(parts)
        if chance.random() < 0.2:
            continue  # the step was broken and is repeated: nothing of it counts
        left, seen, book = fell, seen + read, after(book, *taken)
    else:
        raise AssertionError("it does not come to an end")
    lost = {
        (rest.turn, record)
        for rest in book.quarantined
        for record in range(rest.cursor, sizes[rest.turn % rules.shards])
    }
    every = {(turn, r) for turn in range(rules.shards * rules.epochs) for r in range(sizes[turn % rules.shards])}
    assert len(seen) == len(set(seen))
    assert set(seen) == every - lost


def test_the_master_notes_what_it_does_not_know() -> None:
    state = StreamState()
    lease, other = Lease(4, 1, 0, "a", 0), Lease(6, 1, 1, "b", 3)
    first = ShardProblem(slot=1, epoch=0, shard="a", cursor=7, tries=1, why="OSError: gone")
    last = ShardProblem(slot=1, epoch=0, shard="a", cursor=7, tries=TRIES_MAX, why="OSError: gone")
    assert unknown_reports(None, [lease], [first]) == ([lease], [first])
    record_leases(state, [lease])
    record_problem(state, first)
    assert unknown_reports(state, [lease, other], [first, last]) == ([other], [last])
    record_problem(state, last)
    assert (state.leases, state.failures, list(state.quarantined)) == (1, 2, [(0, "a")])
