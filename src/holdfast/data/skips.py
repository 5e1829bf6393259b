"""Steps that are passed over: a stretch of data that does harm, as loss spikes are cured by going round their batches.

The plan stays as it is, so all other steps have the samples they would have had; the steps of a stretch are simply not
taken. What is asked for in samples is rounded to whole steps. Only what has not been handed out can be passed over.

It is part of the state, and must be asked for on every rank alike, as all that a script does to its state: in a session
the ranks compare at each commit, and stop with a sentence if they differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from holdfast.errors import UsageError

SKIPS_MAX = 1_000
WHY_CHARS_MAX = 200


class Skip(NamedTuple):
    """One stretch."""

    steps: range
    why: str


class Skips:
    """All of a loader's, in the order in which they were asked for. Shared by all who walk through its steps."""

    def __init__(self) -> None:
        self._skips: list[Skip] = []
        self.changes = 0
        """How often they have changed: who has looked ahead must look again."""

    def __iter__(self) -> Iterator[Skip]:
        return iter(self._skips)

    def __len__(self) -> int:
        return len(self._skips)

    def __contains__(self, step: int) -> bool:
        return any(step in skip.steps for skip in self._skips)

    def __str__(self) -> str:
        return ",".join(f"{skip.steps.start}-{skip.steps.stop}" for skip in self._skips)

    def add(self, steps: range, why: str) -> None:
        """Pass over these as well."""
        if len(self._skips) >= SKIPS_MAX:
            raise UsageError(f"{SKIPS_MAX} stretches are passed over already: leave such samples out of the dataset")
        self._skips.append(Skip(steps, why[:WHY_CHARS_MAX]))
        self.changes += 1

    def following(self, step: int) -> int:
        """The step itself, or the next one that is taken."""
        while found := next((skip for skip in self._skips if step in skip.steps), None):
            step = found.steps.stop
        return step

    def taken(self, steps: range) -> list[range]:
        """What is left of a run of steps."""
        left, begin = [], self.following(steps.start)
        while begin < steps.stop:
            ends = [skip.steps.start for skip in self._skips if skip.steps.start > begin]
            end = min([steps.stop, *ends])
            left.append(range(begin, end))
            begin = self.following(end)
        return left

    def state(self) -> list[list[Any]]:
        """For the loader's state."""
        return [[skip.steps.start, skip.steps.stop, skip.why] for skip in self._skips]

    def load(self, state: list[list[Any]]) -> None:
        """As it was."""
        loaded = [Skip(range(int(first), int(end)), str(why)) for first, end, why in state]
        self.changes += loaded != self._skips
        self._skips = loaded
