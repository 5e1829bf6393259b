"""A job's records, wherever they are: one method, two implementations (the other one is in remote.py).

The first page is everything so far, each later one is news, and there is always a next one. `read` is satisfied with
the first page; `follow` goes on until the job is over, and nothing is lost or repeated between two pages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

from holdfast.core.records import JobFinished
from holdfast.journal import Entry, read_entries

POLL_S = 0.1
"""How often the journal's file is looked at: soon enough for eyes, and a query of a tenth of a millisecond."""

Page = list[Entry]


class Source(Protocol):
    """Where records come from."""

    def pages(self) -> AsyncGenerator[Page, None]:
        """Everything so far, then news for ever."""


class JournalSource:
    """The journal's file, beside its master or after it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def pages(self) -> AsyncGenerator[Page, None]:
        """Everything so far, then news for ever."""
        page = read_entries(self.path)
        yield page
        seen = page[-1].seq if page else 0
        while True:
            await asyncio.sleep(POLL_S)
            if page := read_entries(self.path, seen):
                seen = page[-1].seq
                yield page


async def read(source: Source) -> Page:
    """Everything so far."""
    async with aclosing(source.pages()) as pages:
        async for page in pages:
            return page
    raise AssertionError("a source has always a next page")


async def follow(source: Source) -> AsyncGenerator[Page, None]:
    """Everything so far, then news until the job is over."""
    async with aclosing(source.pages()) as pages:
        async for page in pages:
            yield page
            if any(isinstance(entry.record, JobFinished) for entry in page):
                return
