"""Which records a step of a stream has: agreed on in rounds, before its first batch is handed out.

In a round each rank finds how much of their leases its slots can have, and all ranks share that in one small
all-reduce; where a shard ended too early, the next is granted and another round follows. So every step is full as long
as there are records, all ranks know how many the step has, and all have the same next book. Nothing of it counts before
the step is committed: a plan can be dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.core import shard_leases as core
from holdfast.core.shard_leases import AHEAD, LeaseBook, LeasedShard, StreamEnd, TakenShard
from holdfast.errors import ShardError, UsageError

FAILURES_PER_SLOT = 2
"""If more readings fail in one step, beside those of one shard that is tried again and again, it is the storage that
fails, and nothing is put in quarantine."""

RECORDS_END = 2**48
"""More than the records of any batch."""

AvailableRecords = Callable[[int, Sequence[LeasedShard], int], list[TakenShard]]
"""A function that returns what a slot can have of its leases, given how many records it wants; nothing, if it is
another rank's."""
Agree = Callable[[list[int]], list[int]]
"""The element-wise maximum over all ranks."""


class StreamSegment(NamedTuple):
    """Consecutive records of a lease."""

    lease: LeasedShard
    first: int
    length: int


class ShardReadFailure(NamedTuple):
    """A lease whose shard could not be read any further."""

    lease: LeasedShard
    rest: core.ShardRemainder


@dataclass
class StreamStepPlan:
    """A step that all ranks agreed on and that is not committed yet."""

    book: LeaseBook
    """The leases after the step."""
    segments: list[list[StreamSegment]]
    """The segments of each slot."""
    leases: list[tuple[int, LeasedShard]] = field(default_factory=list)
    """Granted for it, with their slots."""
    failures: list[ShardReadFailure] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Return its number of records on all ranks."""
        return sum(self.count(slot) for slot in range(len(self.segments)))

    def count(self, slot: int) -> int:
        """Return the number of records of a slot."""
        return sum(part.length for part in self.segments[slot])


class StreamNegotiation:
    """The agreement of all ranks on a step. `shares` are the slots' parts of the global batch."""

    def __init__(self, shares: Sequence[int], available: AvailableRecords, agree: Agree) -> None:
        self._shares, self._available, self._agree = shares, available, agree

    def agree(self, book: LeaseBook, fingerprint: int) -> StreamStepPlan:
        """Agree on the next step after this book. `mark` is a number that differs where ranks do not have the same
        stream."""
        plan = StreamStepPlan(book, [[] for _ in self._shares])
        failures_max = FAILURES_PER_SLOT * len(self._shares) + core.TRIES_MAX
        grants_max = book.granted + 2 * book.rules.shards + AHEAD * book.rules.slots
        while True:
            if not plan.total and core.is_used_up(plan.book) and core.has_next_epoch(plan.book):
                self._adopt(plan, core.open_next_epoch(plan.book))
            self._round(plan, fingerprint)
            if len(plan.failures) > failures_max:
                raise ShardError(f"{len(plan.failures)} readings of shards failed in one step: it is the storage")
            if plan.book.granted > grants_max and not plan.total:
                raise ShardError("all shards were opened and no record was in them")
            if not self._needs_another_round(plan):
                return plan

    def _round(self, plan: StreamStepPlan, fingerprint: int) -> None:
        missing = [share - plan.count(slot) for slot, share in enumerate(self._shares)]
        own = [self._available(slot, plan.book.held[slot], wanted) for slot, wanted in enumerate(missing)]
        taken = self._exchange(own, fingerprint)
        for slot, (held, parts) in enumerate(zip(plan.book.held, taken, strict=True)):
            for lease, part in zip(held, parts, strict=False):
                if part.records:
                    plan.segments[slot].append(StreamSegment(lease, lease.cursor, part.records))
                if part.end is StreamEnd.FAILED:
                    rest = core.ShardRemainder(lease.turn, lease.cursor + part.records, lease.tries + 1, slot)
                    plan.failures.append(ShardReadFailure(lease, rest))
        self._adopt(plan, core.grant(core.take(plan.book, taken)))
        if len(plan.book.quarantined) > core.QUARANTINED_MAX:
            raise ShardError(f"more than {core.QUARANTINED_MAX:,} shards could not be read")

    def _adopt(self, plan: StreamStepPlan, book: LeaseBook) -> None:
        before, plan.book = plan.book.granted, book
        if book.granted > before:
            plan.leases += [(s, lease) for s, held in enumerate(book.held) for lease in held if lease.number >= before]

    def _exchange(self, taken: list[list[TakenShard]], fingerprint: int) -> list[list[TakenShard]]:
        """Return what all ranks can have. Of ranks that have the same slot, each reads for itself, and one may fail
        where another does not: all take what every one of them can have."""
        values = [fingerprint, -fingerprint]
        for parts in taken:
            values += [_as_number(part) for part in parts] + [0] * (AHEAD - len(parts))
        found = [_from_number(number) for number in self.checked(values)]
        return [found[at : at + AHEAD] for at in range(0, len(found), AHEAD)]

    def checked(self, values: list[int]) -> list[int]:
        """Return the maxima of what follows the mark, which must be the same on all ranks. `values` begin with it, as
        itself and negated."""
        highest, lowest, *numbers = self._agree(values)
        if highest != -lowest:
            raise UsageError("the ranks have different shards or settings: give every rank the same stream")
        return numbers

    def _needs_another_round(self, plan: StreamStepPlan) -> bool:
        """Return whether a slot is short of records and may get some, or there are none at all and another epoch can be
        opened."""
        book = plan.book
        if any(book.held[slot] and plan.count(slot) < share for slot, share in enumerate(self._shares)):
            return True
        return not plan.total and core.is_used_up(book) and core.has_next_epoch(book)


def _as_number(taken: TakenShard) -> int:
    """Return a number that is the larger, the fewer records there are; 0 is that of a rank that has not the slot."""
    return (RECORDS_END - taken.records) * len(StreamEnd) + int(taken.end)


def _from_number(number: int) -> TakenShard:
    if not number:
        return TakenShard(0)
    missing, end = divmod(number, len(StreamEnd))
    return TakenShard(RECORDS_END - missing, StreamEnd(end))
