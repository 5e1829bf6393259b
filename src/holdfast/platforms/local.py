"""The platform of whoever has none: a deny list in the state directory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from holdfast.core.health.reputation import Mark
from holdfast.journal import BOOK_NAME, NodeBook
from holdfast.platforms.base import LOCAL


class LocalPlatform:
    """Machines are marked in the book of nodes. A mark that has run out counts no more."""

    name = LOCAL

    def __init__(self, state_dir: Path, clock: Callable[[], float] = time.time) -> None:
        self._book = NodeBook(state_dir / BOOK_NAME)
        self._clock = clock

    def mark_unschedulable(self, mark: Mark) -> None:
        self._book.mark(mark)

    def mark_schedulable(self, machine: str) -> bool:
        return self._book.unmark(machine)

    def unschedulable(self) -> dict[str, Mark]:
        now = self._clock()
        marks = self._book.marks()
        return {name: mark for name, mark in marks.items() if mark.until is None or mark.until > now}

    def annotate(self, machine: str, notes: Mapping[str, str]) -> None:
        self._book.annotate(machine, notes)

    def annotations(self, machine: str) -> dict[str, str]:
        return self._book.annotations(machine)
