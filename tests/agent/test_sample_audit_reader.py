"""Rings of sample entries: written by one process, read by another, whatever happens to the writer."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from holdfast.agent.reports import Reports
from holdfast.agent.sample_audit_reader import PARTS_A_REPORT_MAX, AuditReading, SampleAuditReader, combined
from holdfast.agent.worker_processes import Worker
from holdfast.core.events import Event, SamplesReported, SessionPart
from holdfast.wire.progress_page import (
    FIELDS_BYTES,
    PAGE_BYTES,
    RING_ENTRIES,
    ProgressMark,
    ProgressPage,
    SampleEntry,
)
from support.nest import ENVIRONMENT
from support.worker_groups import WorkerGroupUnderTest, worker_group

WRITER = """
import os, sys
from pathlib import Path
from holdfast.wire.progress_page import SampleEntry, ProgressMark, ProgressPage
page = ProgressPage.open(Path(sys.argv[1]))
for step in range(3):
    number = page.add_entry(SampleEntry(1, 0, 2, 0, step, step, 6, bytes([step]) * 16))
    if step == 0:
        page.mark(number, ProgressMark.COMMITTED)
    if step == 1:
        page.set(applied_step=1)
os.kill(os.getpid(), 9)
"""


def entry(step: int, rank: int = 0, view: int = 1, total: int = 1) -> SampleEntry:
    return SampleEntry(view, rank, 2, 0, step, step, 6, total.to_bytes(16, "big"))


def commit(page: ProgressPage, step: int, **changes: Any) -> None:
    page.mark(page.add_entry(entry(step, **changes)), ProgressMark.COMMITTED)


def steps(found: list[tuple[SampleEntry, bool]]) -> list[tuple[int, int, bool]]:
    return [(one.step, one.samples, is_committed) for one, is_committed in found]


def test_entries_come_once_and_an_open_one_waits() -> None:
    page, reading = ProgressPage.private(), AuditReading()
    commit(page, 0)
    number = page.add_entry(entry(1))
    assert steps(reading.news(page, False)) == [(0, 6, True)]
    assert reading.news(page, False) == []
    page.mark(number, ProgressMark.VOID)
    commit(page, 1, view=2)
    assert [(one.step, one.view) for one, _ in reading.news(page, False)] == [(1, 2)]
    page.add_entry(entry(2))
    assert steps(reading.news(page, True)) == [(2, 6, False)], "the last word of a dead worker"


def test_a_dead_worker_left_its_entries() -> None:
    page, descriptor = ProgressPage.in_memory()
    try:
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        ended = subprocess.run([sys.executable, "-c", WRITER, path], env=ENVIRONMENT, capture_output=True, check=False)
        assert ended.returncode == -9, ended.stderr
        # Committed; begun to apply, so committed though it is not marked; and one of which nobody here knows.
        assert steps(AuditReading().news(page, True)) == [(0, 6, True), (1, 6, True), (2, 6, False)]
    finally:
        os.close(descriptor)
        page.close()


def test_half_an_entry_is_none() -> None:
    page = ProgressPage.private()
    commit(page, 0)
    commit(page, 1)
    second = FIELDS_BYTES + (PAGE_BYTES - FIELDS_BYTES) // RING_ENTRIES
    page._memory[second : second + 8] = bytes(8)  # as if it were being written
    assert page.read(2).entry is None and page.read(1).entry is not None
    assert steps(AuditReading().news(page, True)) == [(0, 6, True)]
    reading = AuditReading()
    assert steps(reading.news(page, False)) == [(0, 6, True)]
    commit(page, 2)
    assert steps(reading.news(page, False)) == [(1, -1, True), (2, 6, True)], "what is lost is said to be lost"


def test_what_was_overwritten_is_reported_as_lost() -> None:
    page, reading = ProgressPage.private(), AuditReading()
    commit(page, 0)
    reading.news(page, False)
    for step in range(1, RING_ENTRIES + 11):
        commit(page, step)
    found = steps(reading.news(page, False))
    assert [step for step, _, _ in found] == list(range(1, RING_ENTRIES + 11))
    assert [step for step, samples, _ in found if samples < 0] == list(range(1, 11))


def worker(number: int) -> Worker:
    page, descriptor = ProgressPage.in_memory()
    return Worker(number, number, page, descriptor, script_pid=1)


def test_ranks_of_a_node_are_added_up_and_reported_again_to_another_master() -> None:
    workers, events = [worker(0), worker(1)], list[Event]()
    reader = SampleAuditReader(lambda: workers, Reports("a", lambda: "life", events.append))
    for step in range(4):
        for rank, one in enumerate(workers):
            commit(one.page, step, rank=rank, total=2**128 - 1 if rank else 5)
    commit(workers[0].page, 4)
    reader.read()
    (said,) = events
    assert isinstance(said, SamplesReported)
    assert [(part.step, part.ranks, part.count) for part in said.parts][-2:] == [(3, (0, 1), 12), (4, (0,), 6)]
    assert said.parts[0].total == (4).to_bytes(16, "big")
    reader.read()
    assert len(events) == 1, "nothing new"
    reader.resend()
    assert events[1] == said
    for one in workers:
        one.close()


def test_reports_are_bounded() -> None:
    found = [(entry(step), True) for step in range(PARTS_A_REPORT_MAX + 1)]
    events = list[Event]()
    reader = SampleAuditReader(list, Reports("a", lambda: "life", events.append))
    reader._send(combined(found))
    assert [len(event.parts) for event in events if isinstance(event, SamplesReported)] == [PARTS_A_REPORT_MAX, 1]


def test_what_is_not_alike_is_not_added_up() -> None:
    lost = entry(1, rank=1)._replace(samples=-1)
    parts: list[SessionPart] = combined([(entry(1), True), (lost, True), (entry(2), True), (entry(2, rank=1), False)])
    assert [(part.step, part.ranks, part.count, part.committed) for part in parts] == [
        (1, (0,), 6, True),
        (1, (1,), -1, True),
        (2, (1,), 6, False),
        (2, (0,), 6, True),
    ]


def test_the_last_entries_of_a_worker_are_sent_before_its_end_is(tmp_path: Path) -> None:
    async def test(under: WorkerGroupUnderTest) -> None:
        pids = await under.begin()
        first, second, _ = under.worker_group.ranked
        commit(first.page, 7)
        second.page.add_entry(entry(7, rank=1))
        os.kill(pids[1], signal.SIGKILL)
        await under.event("WorkerFailed")
        said = [type(event).__name__ for event in under.events]
        assert said.index("SamplesReported") < said.index("WorkerFailed")
        (audited,) = under.of("SamplesReported")
        assert [(part.ranks, part.committed) for part in audited.parts] == [((1,), False), ((0,), True)]

    async def run() -> None:
        async with worker_group(tmp_path) as under:
            await test(under)

    asyncio.run(run())
