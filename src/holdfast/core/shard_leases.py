"""Leases of streamed shards: which slot reads which shard, from which record on. Pure.

A stream is a list of shards with unknown numbers of records, read once an epoch. A *turn* is one reading of one shard:
turn t is of epoch t // shards. Slots, not ranks, read: each holds a lease or two, reads them to their ends one after
the other, and gets the next turn when it has room. The `LeaseBook` is all there is to know, the same on every rank.

The rule: a lease is granted by the commit of a step, and by nothing else.

1. In each step every rank reads what its slots need, and the ranks exchange how many records each slot took of each
   lease it holds, and which leases came to their end or failed. `take` and `grant` make the next book of that. All
   ranks do so alike; a slot whose leases ended too early is granted the next at once and reads on, in another round.
2. The next book takes effect when the step is committed. A step that is repeated starts from the book before it. So a
   record counts exactly once, whichever rank read it, and a worker of a view that is over can grant and consume
   nothing: it does not get through a commit.
3. A shard that fails keeps its cursor: what was read before the failure counts, the rest is leased again, to the next
   other slot that has room, and once more at the end of the epoch. After TRIES_MAX failures the rest is quarantined:
   listed, with its cursor, in the book and the journal. In the next epoch it has its turn again.
4. Grants are made in one order: first to slots that hold nothing, then to those that hold one, by slot. Nothing
   depends on who was faster, so an undisturbed run and a repaired one have the same leases.

The master keeps the journal of it: `StreamReported` says what a committed step granted and what failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import msgspec

TRIES_MAX = 3
"""Readings of a shard that may fail in an epoch: one is chance, two can be the same machine."""
AHEAD = 2
"""Leases a slot holds: the one it reads, and the next, which can be opened before it is needed."""
QUARANTINED_MAX = 10_000
"""More than this is no longer a matter of bad shards."""
REPORTS_MAX = 256
"""Leases or problems in one message."""
WHY_CHARS_MAX = 500


class StreamEnd(IntEnum):
    """How far the reading of a lease has come."""

    OPEN = 0
    ENDED = 1
    FAILED = 2


class LeaseRules(msgspec.Struct, frozen=True):
    """What does not change in a run."""

    shards: int
    slots: int
    epochs: int = 0
    """0: without end."""
    across: bool = True
    """Whether slots that are done with an epoch begin the next while others are not."""


class LeasedShard(msgspec.Struct, frozen=True, array_like=True):
    """A lease that a slot holds."""

    number: int
    """Grants are numbered from 0 over the whole run."""
    turn: int
    cursor: int
    """The first record that is not committed."""
    tries: int = 0
    """Readings of this turn that have failed before."""


class ShardRemainder(msgspec.Struct, frozen=True, array_like=True):
    """What is left of a turn whose reading failed."""

    turn: int
    cursor: int
    tries: int
    slot: int
    """The one that failed last."""


class TakenShard(msgspec.Struct, frozen=True, array_like=True):
    """What a slot took of one of its leases."""

    records: int
    end: StreamEnd = StreamEnd.OPEN


class LeaseBook(msgspec.Struct, frozen=True):
    """All leases of a stream before a step."""

    rules: LeaseRules
    epoch: int
    """The one whose turns may be granted; later ones too, where slots go across."""
    next_turn: int
    granted: int
    held: tuple[tuple[LeasedShard, ...], ...]
    """By slot, in the order of reading."""
    remainders: tuple[ShardRemainder, ...] = ()
    quarantined: tuple[ShardRemainder, ...] = ()


def open_book(rules: LeaseRules) -> LeaseBook:
    """Return the leases before the first step."""
    return grant(LeaseBook(rules=rules, epoch=0, next_turn=0, granted=0, held=((),) * rules.slots))


def take(book: LeaseBook, taken: Sequence[Sequence[TakenShard]]) -> LeaseBook:
    """Return the leases after the slots have read. `taken` is by slot, in the order of its leases, and may be
    shorter."""
    held: list[tuple[LeasedShard, ...]] = []
    failed: list[ShardRemainder] = []
    for slot, (leases, of_slot) in enumerate(zip(book.held, taken, strict=True)):
        held.append(_after(leases, of_slot))
        failed += _failures(slot, leases, of_slot)
    again = tuple(rest for rest in failed if rest.tries < TRIES_MAX)
    given_up = tuple(rest for rest in failed if rest.tries >= TRIES_MAX)
    return msgspec.structs.replace(
        book,
        held=tuple(held),
        remainders=book.remainders + again,
        quarantined=book.quarantined + given_up,
    )


def _after(leases: tuple[LeasedShard, ...], taken: Sequence[TakenShard]) -> tuple[LeasedShard, ...]:
    if not any(part.records or part.end for part in taken):
        return leases
    kept = [
        msgspec.structs.replace(lease, cursor=lease.cursor + part.records)
        for lease, part in zip(leases, taken, strict=False)
        if part.end is StreamEnd.OPEN
    ]
    return (*kept, *leases[len(taken) :])


def _failures(slot: int, leases: tuple[LeasedShard, ...], taken: Sequence[TakenShard]) -> list[ShardRemainder]:
    return [
        ShardRemainder(lease.turn, lease.cursor + part.records, lease.tries + 1, slot)
        for lease, part in zip(leases, taken, strict=False)
        if part.end is StreamEnd.FAILED
    ]


def grant(book: LeaseBook) -> LeaseBook:
    """Grant leases to every slot that has room, as far as there are turns."""
    for room in range(1, AHEAD + 1):
        for slot in range(book.rules.slots):
            if len(book.held[slot]) < room:
                book = _grant_one(book, slot, is_ahead=bool(book.held[slot]))
    return book


def _grant_one(book: LeaseBook, slot: int, *, is_ahead: bool) -> LeaseBook:
    for at, rest in enumerate(book.remainders):
        if _is_due(book, rest, slot, is_ahead):
            others = book.remainders[:at] + book.remainders[at + 1 :]
            lease = LeasedShard(book.granted, rest.turn, rest.cursor, rest.tries)
            return _with_lease(msgspec.structs.replace(book, remainders=others), slot, lease)
    if book.next_turn >= _last_turn(book) or (is_ahead and not _may_keep_ahead(book)):
        return book
    lease = LeasedShard(book.granted, book.next_turn, 0)
    return _with_lease(msgspec.structs.replace(book, next_turn=book.next_turn + 1), slot, lease)


def _with_lease(book: LeaseBook, slot: int, lease: LeasedShard) -> LeaseBook:
    held = (*book.held[:slot], (*book.held[slot], lease), *book.held[slot + 1 :])
    return msgspec.structs.replace(book, held=held, granted=book.granted + 1)


def _is_due(book: LeaseBook, rest: ShardRemainder, slot: int, is_ahead: bool) -> bool:
    """Return whether the slot may read the remainder: another slot at once after the first failure, later ones when the
    epoch has no more turns. The slot that failed gets it back only if it has nothing else to read, or is the only
    one."""
    is_epoch_used_up = book.next_turn >= (rest.turn // book.rules.shards + 1) * book.rules.shards
    if slot != rest.slot:
        return rest.tries == 1 or is_epoch_used_up
    return is_epoch_used_up and (not is_ahead or book.rules.slots == 1)


def _last_turn(book: LeaseBook) -> float:
    """Return the turn before which turns may be granted."""
    rules = book.rules
    if not rules.across:
        return (book.epoch + 1) * rules.shards
    return rules.epochs * rules.shards if rules.epochs else float("inf")


def _may_keep_ahead(book: LeaseBook) -> bool:
    """Return whether slots may hold a second lease: the last turns are for slots that have none."""
    return _last_turn(book) - book.next_turn >= book.rules.slots


def is_used_up(book: LeaseBook) -> bool:
    """Return whether nothing is left to read, in this epoch if slots do not go across."""
    return not any(book.held) and not book.remainders and book.next_turn >= _last_turn(book)


def has_next_epoch(book: LeaseBook) -> bool:
    """Return whether another epoch can be opened explicitly."""
    return not book.rules.across and not (book.rules.epochs and book.epoch + 1 >= book.rules.epochs)


def open_next_epoch(book: LeaseBook) -> LeaseBook:
    """Open the next epoch once all slots are done with this one, where slots do not go across."""
    assert is_used_up(book) and has_next_epoch(book), "an epoch is opened when the one before is used up"
    return grant(msgspec.structs.replace(book, epoch=book.epoch + 1))


def oldest_turn(book: LeaseBook) -> int:
    """Return the first turn that is not complete: its epoch is the one the stream is in."""
    turns = [lease.turn for leases in book.held for lease in leases] + [rest.turn for rest in book.remainders]
    return min(turns, default=book.next_turn)


def to_plain(book: LeaseBook) -> dict[str, Any]:
    """Return the leases as plain numbers in lists, which any format can hold."""
    rests = {"remainders": book.remainders, "quarantined": book.quarantined}
    return {
        "epoch": book.epoch,
        "next_turn": book.next_turn,
        "granted": book.granted,
        "held": [[list(msgspec.structs.astuple(lease)) for lease in leases] for leases in book.held],
        **{name: [list(msgspec.structs.astuple(rest)) for rest in group] for name, group in rests.items()},
    }


def from_plain(rules: LeaseRules, plain: Any) -> LeaseBook:
    """Return the leases from what `to_plain` returned. Raises msgspec.ValidationError if it is something else."""
    return msgspec.convert({**plain, "rules": msgspec.to_builtins(rules)}, LeaseBook)


# --- what the journal keeps of it


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """A grant, for the journal."""

    number: int
    slot: int
    epoch: int
    shard: str
    first: int
    """The first record that is read under it."""


class ShardProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A reading of a shard that failed."""

    slot: int
    epoch: int
    shard: str
    cursor: int
    """Records before it were read and count."""
    tries: int
    why: str
    """Empty if the rank that reports it is not the one that failed."""

    @property
    def is_last(self) -> bool:
        """Return whether it is not retried in its epoch."""
        return self.tries >= TRIES_MAX


NEVER = -1


@dataclass
class StreamState:
    """What the master knows of a stream."""

    epoch: int = 0
    """The highest of which a shard was leased."""
    leases: int = 0
    """Granted in the whole run, including those before a restart of all workers."""
    last: dict[int, int] = field(default_factory=dict)
    """By slot: the number of its newest lease, since all workers last restarted."""
    failures: int = 0
    quarantined: dict[tuple[int, str], ShardProblem] = field(default_factory=dict)
    """By epoch and shard."""
    told: set[tuple[int, str, int]] = field(default_factory=set)
    """Problems that are known, by epoch, shard and number of tries: of the last two epochs."""


@dataclass
class Streams:
    """All streams of a job."""

    since_view: int = 0
    """The first view of those who live: what was said before it is of a state that is gone."""
    by_name: dict[str, StreamState] = field(default_factory=dict)


def begin_run(streams: Streams, view: int) -> None:
    """Begin again from a checkpoint: leases are granted again from there. Only evolve calls this."""
    streams.since_view = view
    for state in streams.by_name.values():
        state.last.clear()


def unknown_reports(
    state: StreamState | None, leases: Sequence[Lease], problems: Sequence[ShardProblem]
) -> tuple[list[Lease], list[ShardProblem]]:
    """Return what the master does not know yet: everything is reported again in each view."""
    if state is None:
        return list(leases), list(problems)
    fresh = [lease for lease in leases if lease.number > state.last.get(lease.slot, NEVER)]
    return fresh, [problem for problem in problems if not _is_known(state, problem)]


def _is_known(state: StreamState, problem: ShardProblem) -> bool:
    if problem.is_last and (problem.epoch, problem.shard) in state.quarantined:
        return True
    return (problem.epoch, problem.shard, problem.tries) in state.told


def record_leases(state: StreamState, leases: Sequence[Lease]) -> None:
    """Record granted leases. Only evolve calls this."""
    for lease in leases:
        state.last[lease.slot] = max(lease.number, state.last.get(lease.slot, NEVER))
        state.epoch = max(state.epoch, lease.epoch)
    state.leases += len(leases)


def record_problem(state: StreamState, problem: ShardProblem) -> None:
    """Record a shard that failed. Only evolve calls this."""
    state.failures += 1
    state.told = {known for known in state.told if known[0] >= problem.epoch - 1}
    state.told.add((problem.epoch, problem.shard, problem.tries))
    if problem.is_last and len(state.quarantined) < QUARANTINED_MAX:
        state.quarantined[(problem.epoch, problem.shard)] = problem
