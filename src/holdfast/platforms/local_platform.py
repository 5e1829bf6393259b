"""The platform of machines without one: a deny list in the state directory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from holdfast.core.health.reputation import CordonMark
from holdfast.journal import BOOK_NAME, MachineBook
from holdfast.platforms.platform import LOCAL


class LocalPlatform:
    """A platform that marks machines in the database of machines. An expired mark does not count."""

    name = LOCAL

    def __init__(self, state_dir: Path, clock: Callable[[], float] = time.time) -> None:
        self._machines = MachineBook(state_dir / BOOK_NAME)
        self._clock = clock

    def mark_unschedulable(self, mark: CordonMark) -> None:
        self._machines.mark(mark)

    def mark_schedulable(self, machine: str) -> bool:
        return self._machines.unmark(machine)

    def unschedulable(self) -> dict[str, CordonMark]:
        now = self._clock()
        marks = self._machines.marks()
        return {name: mark for name, mark in marks.items() if mark.until is None or mark.until > now}

    def annotate(self, machine: str, notes: Mapping[str, str]) -> None:
        self._machines.annotate(machine, notes)

    def annotations(self, machine: str) -> dict[str, str]:
        return self._machines.annotations(machine)
