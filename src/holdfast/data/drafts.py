"""Which records a step of a stream has: settled in rounds, before its first batch is handed out.

In a round each rank looks how much of their leases its slots can have, and tells all others in one small all-reduce;
where a shard ended too early, the next is granted and another round follows. So every step is full as long as there are
records, all ranks know how many the step has, and all have the same next book. Nothing of it counts before the step is
committed: a draft can be thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.core import leases as core
from holdfast.core.leases import AHEAD, Book, End, Held, Taken
from holdfast.errors import ShardError, UsageError

FAILURES_PER_SLOT = 2
"""If more readings fail in one step, beside those of one shard that is tried again and again, it is the storage, and
nothing is put in quarantine for that."""

Take = Callable[[int, Sequence[Held], int], list[Taken]]
"""What a slot can have of its leases, of so many records that it wants; nothing, if it is another rank's."""
Agree = Callable[[list[int]], list[int]]
"""The element-wise maximum over all ranks."""


class Segment(NamedTuple):
    """Consecutive records of a lease."""

    lease: Held
    first: int
    length: int


class Failure(NamedTuple):
    """A lease that could not be read on."""

    lease: Held
    rest: core.Remainder


@dataclass
class Draft:
    """A step that is settled and not committed."""

    book: Book
    """After it."""
    segments: list[list[Segment]]
    """By slot."""
    leases: list[tuple[int, Held]] = field(default_factory=list)
    """Granted for it, with their slots."""
    failures: list[Failure] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Its records on all ranks."""
        return sum(self.count(slot) for slot in range(len(self.segments)))

    def count(self, slot: int) -> int:
        """The records of a slot."""
        return sum(part.length for part in self.segments[slot])


class Settler:
    """`shares` are the slots' parts of the global batch."""

    def __init__(self, shares: Sequence[int], take: Take, agree: Agree) -> None:
        self._shares, self._take, self._agree = shares, take, agree

    def settle(self, book: Book, mark: int) -> Draft:
        """The next step after this book. `mark` is a number that differs where ranks do not have the same stream."""
        draft = Draft(book, [[] for _ in self._shares])
        failures_max = FAILURES_PER_SLOT * len(self._shares) + core.TRIES_MAX
        grants_max = book.granted + 2 * book.rules.shards + AHEAD * book.rules.slots
        while True:
            if not draft.total and core.is_used_up(draft.book) and core.has_next_epoch(draft.book):
                self._adopt(draft, core.open_next_epoch(draft.book))
            self._round(draft, mark)
            if len(draft.failures) > failures_max:
                raise ShardError(f"{len(draft.failures)} readings of shards failed in one step: it is the storage")
            if draft.book.granted > grants_max and not draft.total:
                raise ShardError("all shards were opened and no record was in them")
            if not self._goes_on(draft):
                return draft

    def _round(self, draft: Draft, mark: int) -> None:
        wishes = [share - draft.count(slot) for slot, share in enumerate(self._shares)]
        own = [self._take(slot, draft.book.held[slot], wish) for slot, wish in enumerate(wishes)]
        taken = self._exchange(own, mark)
        for slot, (held, parts) in enumerate(zip(draft.book.held, taken, strict=True)):
            for lease, part in zip(held, parts, strict=False):
                if part.records:
                    draft.segments[slot].append(Segment(lease, lease.cursor, part.records))
                if part.end is End.FAILED:
                    rest = core.Remainder(lease.turn, lease.cursor + part.records, lease.tries + 1, slot)
                    draft.failures.append(Failure(lease, rest))
        self._adopt(draft, core.grant(core.take(draft.book, taken)))
        if len(draft.book.quarantined) > core.QUARANTINED_MAX:
            raise ShardError(f"more than {core.QUARANTINED_MAX:,} shards could not be read")

    def _adopt(self, draft: Draft, book: Book) -> None:
        before, draft.book = draft.book.granted, book
        if book.granted > before:
            draft.leases += [(s, lease) for s, held in enumerate(book.held) for lease in held if lease.number >= before]

    def _exchange(self, taken: list[list[Taken]], mark: int) -> list[list[Taken]]:
        """Everybody's. A slot is one rank's, so the maximum over ranks is what its rank says."""
        values = [mark, -mark]
        for parts in taken:
            for part in parts + [Taken(0)] * (AHEAD - len(parts)):
                values += [part.records, int(part.end)]
        numbers = self.checked(values)
        pairs = [Taken(numbers[at], End(numbers[at + 1])) for at in range(0, len(numbers), 2)]
        return [pairs[at : at + AHEAD] for at in range(0, len(pairs), AHEAD)]

    def checked(self, values: list[int]) -> list[int]:
        """The maxima of what follows the mark, which must be everybody's. `values` begin with it, both ways round."""
        highest, lowest, *numbers = self._agree(values)
        if highest != -lowest:
            raise UsageError("the ranks have different shards or settings: give every rank the same stream")
        return numbers

    def _goes_on(self, draft: Draft) -> bool:
        """Whether a slot lacks records and may have some; or there are none at all, and another epoch can be opened."""
        book = draft.book
        if any(book.held[slot] and draft.count(slot) < share for slot, share in enumerate(self._shares)):
            return True
        return not draft.total and core.is_used_up(book) and core.has_next_epoch(book)
