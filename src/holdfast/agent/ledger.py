"""What this node's workers were handed, read from their progress records and sent to the master.

The records are read twice a second, and more often where steps are so short that half a ring would fill meanwhile: no
entry is overwritten before it was read, unless this process did not run. Then the steps in between are sent as lost. A
worker that ends is read to the end in the same moment, before its end is reported; so the master has everything when it
hears that the last one is done.

An open entry waits at its barrier: what becomes of it is seen at the next reading. That of a dead worker is sent as it
is; the others know whether it counts.

What was sent is kept for a while, and sent again when the connection is made anew: a master that was restarted has only
what its journal has.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable

from holdfast.agent.reports import Reports
from holdfast.agent.workers import Worker
from holdfast.core.events import Part
from holdfast.core.ledger import PATIENCE_S, RECORD_EVERY_S, RECORD_STEPS_MAX, TOTAL_MODULUS
from holdfast.wire.progress import RING_ENTRIES, Entry, Mark, ProgressPage

READ_EVERY_S = 0.5
READ_EVERY_MIN_S = 0.02
PARTS_A_REPORT_MAX = 512
KEPT_S = RECORD_EVERY_S + PATIENCE_S + 15.0
"""Beyond what a master may have heard and not yet journaled. While it is away, nothing is forgotten for its age."""
KEPT_PARTS_MAX = 8 * RECORD_STEPS_MAX
"""The same by number: of that many steps, in some pieces each."""
LOST_STEPS_MAX = 100_000
WAITING_REPORTS_MAX = 1_000
"""Unheard by the master: no more is sent until it is back. The rings overflow, and that is told."""


class Reading:
    """How far one worker's ring was read."""

    def __init__(self) -> None:
        self._number = 0
        self._last: dict[int, Entry] = {}
        self._is_behind = False

    def news(self, page: ProgressPage, is_final: bool) -> list[tuple[Entry, bool]]:
        """Entries whose fate is known, in order, with whether they were committed; in place of those that were
        overwritten, entries of less than no samples. `is_final`: its worker is gone, nothing more will be known."""
        found: list[tuple[Entry, bool]] = []
        written = page.get("witnessed")
        while self._number < written:
            if self._number + RING_ENTRIES < written:
                self._number, self._is_behind = written - RING_ENTRIES, True
            read = page.read(self._number + 1)
            if read.entry is None:
                if is_final:
                    break  # it died while it wrote
                self._is_behind = True  # it was overwritten in this moment
            elif read.mark == Mark.OPEN and not is_final:
                break
            elif read.mark != Mark.VOID:
                has_begun = read.entry.job_step <= page.get("begun")  # it died between the two words
                found += self._take(read.entry, read.mark == Mark.COMMITTED or has_begun)
            self._number += 1
        return found

    def _take(self, entry: Entry, is_committed: bool) -> list[tuple[Entry, bool]]:
        before = self._last.get(entry.source)
        self._last[entry.source] = entry
        lost = range(before.step + 1, entry.step) if before and self._is_behind else range(0)
        self._is_behind = False
        return [
            *((entry._replace(step=step, samples=-1, total=bytes(16)), True) for step in lost[-LOST_STEPS_MAX:]),
            (entry, is_committed),
        ]


class LedgerKeeper:
    """One for the life of an agent. `workers` are all that have a process."""

    def __init__(self, workers: Callable[[], Iterable[Worker]], reports: Reports) -> None:
        self._workers, self._reports = workers, reports
        self._readings: dict[str, Reading] = {}
        self._sent: deque[tuple[float, Part]] = deque(maxlen=KEPT_PARTS_MAX)
        self._every_s = READ_EVERY_S

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(self._every_s)  # plain memory: there is no event for what is written there
            if self._reports.waiting <= WAITING_REPORTS_MAX:
                self.read()

    def read(self, gone: Worker | None = None) -> None:
        """All rings now, and that of a worker that has just ended for the last time."""
        found: list[tuple[Entry, bool]] = []
        most = 0
        for worker in [*self._workers(), *([gone] if gone else [])]:
            if worker.script_pid == 0:
                continue  # one without a session
            reading = self._readings.setdefault(worker.nonce, Reading())
            news = reading.news(worker.page, is_final=worker is gone)
            most = max(most, len(news))
            found += news
        if gone:
            self._readings.pop(gone.nonce, None)
        else:
            self._adapt(most)
        self._send(combined(found))

    def _adapt(self, entries: int) -> None:
        """A quarter of a ring between two readings, so that twice the speed is no surprise."""
        wished_s = self._every_s * RING_ENTRIES / 4 / max(entries, 1)
        self._every_s = min(max(wished_s, READ_EVERY_MIN_S), READ_EVERY_S)

    def _send(self, parts: list[Part]) -> None:
        now = time.monotonic()
        while self._sent and not self._reports.waiting and self._sent[0][0] < now - KEPT_S:
            self._sent.popleft()
        self._sent.extend((now, part) for part in parts)
        for first in range(0, len(parts), PARTS_A_REPORT_MAX):
            self._reports.witnessed(tuple(parts[first : first + PARTS_A_REPORT_MAX]))

    def say_again(self) -> None:
        """A connection was made anew."""
        parts = [part for _, part in self._sent]
        self._sent.clear()
        self._send(parts)

    def describe(self, seated: Iterable[Worker], view: int) -> None:
        """All workers are in the view: if rank 0 is here, say what its data is."""
        for worker in seated:
            if worker.place is not None and worker.place.rank == 0 and worker.data:
                self._reports.described(view, worker.data)


def combined(found: Iterable[tuple[Entry, bool]]) -> list[Part]:
    """Entries of several ranks as one part for each source, view and step; in the order of steps within a view. What is
    lost, and what is not known to be committed, is not mixed with the rest."""
    groups: dict[tuple[int, int, int, bool, bool], list[Entry]] = {}
    for entry, is_committed in found:
        key = (entry.view, entry.step, entry.source, is_committed, entry.samples < 0)
        groups.setdefault(key, []).append(entry)
    return [_part(groups[key], key[3]) for key in sorted(groups)]


def _part(entries: list[Entry], is_committed: bool) -> Part:
    first = entries[0]
    total = sum(int.from_bytes(entry.total, "big") for entry in entries) % TOTAL_MODULUS
    return Part(
        source=first.source,
        view=first.view,
        world_size=first.world_size,
        ranks=tuple(sorted(entry.rank for entry in entries)),
        step=first.step,
        count=sum(entry.samples for entry in entries) if first.samples >= 0 else -1,
        total=total.to_bytes(16, "big"),
        committed=is_committed,
    )
