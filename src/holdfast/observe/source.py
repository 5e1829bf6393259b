"""A job's records, from its journal's file or from its live master (remote.py).

A source yields pages without end: the first has everything so far, each later one what is new. `read` returns the first
page; `follow` goes on until the job is over. No record is lost or repeated between two pages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

from holdfast.core.records import JobFinished
from holdfast.journal import JournalEntry, read_entries

POLL_S = 0.1
"""Time between two reads of the journal: short enough for a person, and a query takes a tenth of a millisecond."""

Page = list[JournalEntry]


class JobSource(Protocol):
    """A place that records come from."""

    def pages(self) -> AsyncGenerator[Page, None]:
        """Yield everything so far, then what is new, without end."""


class JournalSource:
    """The journal's file, while its master runs or afterwards."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def pages(self) -> AsyncGenerator[Page, None]:
        """Yield everything so far, then what is new, without end."""
        page = read_entries(self.path)
        yield page
        seen = page[-1].seq if page else 0
        while True:
            await asyncio.sleep(POLL_S)
            if page := read_entries(self.path, seen):
                seen = page[-1].seq
                yield page


async def read(source: JobSource) -> Page:
    """Return everything so far."""
    async with aclosing(source.pages()) as pages:
        async for page in pages:
            return page
    raise AssertionError("a source has always a next page")


async def follow(source: JobSource) -> AsyncGenerator[Page, None]:
    """Yield everything so far, then what is new until the job is over."""
    async with aclosing(source.pages()) as pages:
        async for page in pages:
            yield page
            if any(isinstance(entry.record, JobFinished) for entry in page):
                return
