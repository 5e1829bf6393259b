"""The journal's file as a source."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from holdfast.core.records import JobFinished
from holdfast.errors import JournalError
from holdfast.journal import JournalEntry
from holdfast.observe.source import JournalSource, follow, read
from support.scenario import JobOnDisk


def test_reading_gives_everything_so_far(tmp_path: Path) -> None:
    job = JobOnDisk(tmp_path).join("a").start("a")
    entries = asyncio.run(read(JournalSource(job.path)))
    assert [entry.seq for entry in entries] == list(range(1, len(entries) + 1))
    assert entries == job.entries() and len(entries) > 4
    job.close()


def test_following_gives_each_record_once_and_ends_with_the_job(tmp_path: Path) -> None:
    job = JobOnDisk(tmp_path)

    async def watch() -> list[JournalEntry]:
        async with aclosing(follow(JournalSource(job.path))) as pages:
            seen = await anext(pages)
            assert len(seen) == 3
            for change in (lambda: job.join("a"), lambda: job.start("a"), lambda: job.succeed("a")):
                waiting = asyncio.create_task(anext(pages))
                change()
                seen += await waiting
            with pytest.raises(StopAsyncIteration):
                await anext(pages)
        return seen

    assert asyncio.run(watch()) == job.entries()
    assert isinstance(job.entries()[-1].record, JobFinished)
    job.close()


def test_following_a_finished_job_ends_at_once(tmp_path: Path) -> None:
    job = JobOnDisk(tmp_path).join("a").start("a").succeed("a").close()

    async def all_pages() -> list[list[JournalEntry]]:
        return [page async for page in follow(JournalSource(job.path))]

    assert asyncio.run(all_pages()) == [job.entries()]


def test_a_journal_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="there is no journal"):
        asyncio.run(read(JournalSource(tmp_path / "journal.sqlite")))
