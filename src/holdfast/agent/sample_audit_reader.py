"""Which samples this node's workers were given, read from their progress pages and reported to the master.

The pages are read twice a second, and more often where steps are so short that half a ring would fill in that time: no
entry is overwritten before it was read, unless this process did not run. Then the steps in between are reported as
lost. The ring of a worker that ends is read to its end in the same moment, before the end is reported; so the master
has everything when it hears that the last worker has ended.

An open entry waits at its barrier: its outcome is seen at the next reading. That of a dead worker is reported as it is;
the other workers know whether it counts.

What was reported is stored for a while, and reported again on a new connection: a master that was restarted has only
what its journal has.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable

from holdfast.agent.reports import Reports
from holdfast.agent.worker_processes import Worker
from holdfast.core.events import DataAnnounced, SamplesReported, SessionPart
from holdfast.core.sample_audit import PATIENCE_S, RECORD_EVERY_S, RECORD_STEPS_MAX, TOTAL_MODULUS
from holdfast.wire.progress_page import RING_ENTRIES, ProgressMark, ProgressPage, SampleEntry

READ_EVERY_S = 0.5
READ_EVERY_MIN_S = 0.02
PARTS_A_REPORT_MAX = 512
STORED_S = RECORD_EVERY_S + PATIENCE_S + 15.0
"""Longer than a master may take to journal what it got. While it is away, nothing is dropped for its age."""
STORED_PARTS_MAX = 8 * RECORD_STEPS_MAX
"""The same limit by number: that many steps, in some parts each."""
LOST_STEPS_MAX = 100_000
UNSENT_AUDITS_MAX = 1_000
"""Reports that the master has not confirmed: no more are made until it is back. The rings overflow, and that is
reported."""


class AuditReading:
    """The position up to which one worker's ring was read."""

    def __init__(self) -> None:
        self._number = 0
        self._last: dict[int, SampleEntry] = {}
        self._is_behind = False

    def news(self, page: ProgressPage, is_final: bool) -> list[tuple[SampleEntry, bool]]:
        """Return entries whose outcome is known, in order, each with whether it was committed. Entries with -1 samples
        stand for those that were overwritten. `is_final`: the worker has ended, nothing more will be known."""
        found: list[tuple[SampleEntry, bool]] = []
        written = page.get("audited")
        while self._number < written:
            if self._number + RING_ENTRIES < written:
                self._number, self._is_behind = written - RING_ENTRIES, True
            read = page.read(self._number + 1)
            if read.entry is None:
                if is_final:
                    break  # it died while it wrote
                self._is_behind = True  # it was overwritten in this moment
            elif read.mark == ProgressMark.OPEN and not is_final:
                break
            elif read.mark != ProgressMark.VOID:
                was_applied = read.entry.job_step <= page.get("applied_step")  # it died between the two words
                found += self._fill_gap(read.entry, read.mark == ProgressMark.COMMITTED or was_applied)
            self._number += 1
        return found

    def _fill_gap(self, entry: SampleEntry, is_committed: bool) -> list[tuple[SampleEntry, bool]]:
        before = self._last.get(entry.source)
        self._last[entry.source] = entry
        lost = range(before.step + 1, entry.step) if before and self._is_behind else range(0)
        self._is_behind = False
        return [
            *((entry._replace(step=step, samples=-1, total=bytes(16)), True) for step in lost[-LOST_STEPS_MAX:]),
            (entry, is_committed),
        ]


class SampleAuditReader:
    """Reads the rings of all workers that have a process (`workers`) and reports what is new."""

    def __init__(self, workers: Callable[[], Iterable[Worker]], reports: Reports) -> None:
        self._workers, self._reports = workers, reports
        self._readings: dict[str, AuditReading] = {}
        self._sent: deque[tuple[float, SessionPart]] = deque(maxlen=STORED_PARTS_MAX)
        self._every_s = READ_EVERY_S

    async def run(self) -> None:
        """Read and report until the task is cancelled."""
        while True:
            await asyncio.sleep(self._every_s)  # plain memory: there is no event for what is written there
            if self._reports.waiting <= UNSENT_AUDITS_MAX:
                self.read()

    def read(self, gone: Worker | None = None) -> None:
        """Read all rings now, and for the last time that of a worker that has just ended."""
        found: list[tuple[SampleEntry, bool]] = []
        most = 0
        for worker in [*self._workers(), *([gone] if gone else [])]:
            if worker.script_pid == 0:
                continue  # it has no session
            reading = self._readings.setdefault(worker.nonce, AuditReading())
            news = reading.news(worker.page, is_final=worker is gone)
            most = max(most, len(news))
            found += news
        if gone:
            self._readings.pop(gone.nonce, None)
        else:
            self._adapt(most)
        self._send(combined(found))

    def _adapt(self, entries: int) -> None:
        """Read so often that a quarter of a ring fills between two readings, so that twice the speed does no harm."""
        wanted_s = self._every_s * RING_ENTRIES / 4 / max(entries, 1)
        self._every_s = min(max(wanted_s, READ_EVERY_MIN_S), READ_EVERY_S)

    def _send(self, parts: list[SessionPart]) -> None:
        now = time.monotonic()
        while self._sent and not self._reports.waiting and self._sent[0][0] < now - STORED_S:
            self._sent.popleft()
        self._sent.extend((now, part) for part in parts)
        for first in range(0, len(parts), PARTS_A_REPORT_MAX):
            self._reports.report(SamplesReported, parts=tuple(parts[first : first + PARTS_A_REPORT_MAX]))

    def resend(self) -> None:
        """Report what is stored again, on a new connection."""
        parts = [part for _, part in self._sent]
        self._sent.clear()
        self._send(parts)

    def describe(self, ranked: Iterable[Worker], view: int) -> None:
        """Report the data of rank 0 if it is on this node; called when all workers are in the view."""
        for worker in ranked:
            if worker.assignment is not None and worker.assignment.rank == 0 and worker.data:
                self._reports.report(DataAnnounced, view=view, sources=worker.data)


def combined(found: Iterable[tuple[SampleEntry, bool]]) -> list[SessionPart]:
    """Return entries of several ranks as one part for each source, view and step, in the order of steps within a view.
    Lost entries and those that are not known to be committed make parts of their own."""
    groups: dict[tuple[int, int, int, bool, bool], list[SampleEntry]] = {}
    for entry, is_committed in found:
        key = (entry.view, entry.step, entry.source, is_committed, entry.samples < 0)
        groups.setdefault(key, []).append(entry)
    return [_part(groups[key], key[3]) for key in sorted(groups)]


def _part(entries: list[SampleEntry], is_committed: bool) -> SessionPart:
    first = entries[0]
    total = sum(int.from_bytes(entry.total, "big") for entry in entries) % TOTAL_MODULUS
    return SessionPart(
        source=first.source,
        view=first.view,
        world_size=first.world_size,
        ranks=tuple(sorted(entry.rank for entry in entries)),
        step=first.step,
        count=sum(entry.samples for entry in entries) if first.samples >= 0 else -1,
        total=total.to_bytes(16, "big"),
        committed=is_committed,
    )
