"""The workers' output line by line, once or for as long as the job goes on.

Without a view in the filter the newest one is read, and following goes on into each later one. A view's files are read
until its workers have certainly ended, so what they write while they are stopped is not lost.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Literal

import msgspec

from holdfast.errors import UsageError
from holdfast.observe.log_locations import LogLocations, WorkerLog, missing_sentences
from holdfast.observe.source import POLL_S, JobSource, follow

READ_BYTES_MAX = 256 * 1024
LINE_BYTES_MAX = 64 * 1024
"""A longer line is shown in several."""

# A carriage return ends a line too (progress bars). The last alternative is a line whose end has not come yet.
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+")

Stream = Literal["stdout", "stderr"]


class LogFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which output is read, and how much of it."""

    view: int | None = None
    rank: int | None = None
    streams: tuple[Stream, ...] = ("stdout", "stderr")
    lines_max: int | None = None
    """The last lines of each file; None: all of them."""


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a worker's output, with its end if it has one."""

    view: int
    rank: int
    node_id: str
    stream: Stream
    text: bytes
    is_only_rank: bool
    """Whether no other rank's output is read."""


class LogNote(msgspec.Struct, frozen=True):
    """Something about the output that a person should know."""

    sentence: str


class Tail:
    """One file that still grows, read from the beginning or from its last lines, and then onwards.

    It is opened for each read: a thousand followed workers cost no descriptors.
    """

    def __init__(self, path: Path, lines_max: int | None = None) -> None:
        self.path = path
        self._lines_max = lines_max
        self._read_bytes: int | None = None
        self._rest = b""

    def lines(self, *, last: bool = False) -> Iterator[bytes]:
        """Return the new lines, with their ends. `last`: no more will come, so a line without an end counts too."""
        while chunk := self._chunk():
            yield from self._complete(self._rest + chunk)
        if last and self._rest:
            yield self._rest
            self._rest = b""

    def _chunk(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                if self._read_bytes is None:
                    self._read_bytes = start_of_last(file.fileno(), self._lines_max)
                chunk = os.pread(file.fileno(), READ_BYTES_MAX, self._read_bytes)
        except FileNotFoundError:
            self._read_bytes = self._read_bytes or 0  # once the file exists, all of it is new
            return b""
        except OSError:
            return b""
        self._read_bytes += len(chunk)
        return chunk

    def _complete(self, data: bytes) -> list[bytes]:
        """Return the lines that have ended, and store the rest. A carriage return at the end may be half of an end."""
        lines = _LINE.findall(data)
        self._rest = b""
        if not lines[-1].endswith(b"\n") and len(lines[-1]) < LINE_BYTES_MAX:
            self._rest = lines.pop()
        return lines


def start_of_last(fd: int, lines_max: int | None) -> int:
    """Return where the last lines begin, searched from the end: the file may be huge."""
    if lines_max is None:
        return 0
    at_bytes = end_bytes = os.fstat(fd).st_size
    newlines_left = lines_max
    while at_bytes > 0 and newlines_left > 0:
        from_bytes = max(at_bytes - READ_BYTES_MAX, 0)
        block = os.pread(fd, at_bytes - from_bytes, from_bytes)
        position = len(block) - (at_bytes == end_bytes)  # the last line's own end does not count
        while (position := block.rfind(b"\n", 0, position)) >= 0:
            newlines_left -= 1
            if newlines_left == 0:
                return from_bytes + position + 1
        at_bytes = from_bytes
    return at_bytes


class _OpenLog(msgspec.Struct, frozen=True):
    log: WorkerLog
    stream: Stream
    tail: Tail
    is_only_rank: bool


class LogReader:
    """A reader of the chosen output that goes on where it stopped."""

    def __init__(self, locations: LogLocations, log_filter: LogFilter) -> None:
        self._locations, self._filter = locations, log_filter
        self._next_view = log_filter.view or 0
        self._open: dict[int, list[_OpenLog]] = {}
        self._unseen: list[WorkerLog] = []

    @property
    def is_over(self) -> bool:
        """Whether nothing more can come, though the job goes on: the one view that was asked for is over."""
        return self._filter.view is not None and self._next_view > self._filter.view and not self._open

    def read_new(self, *, last: bool) -> Iterator[LogLine | LogNote]:
        """Return what is new. `last`: nothing will be written after this call."""
        yield from self._open_views()
        yield from self._report_missing()
        for view in list(self._open):
            is_over = last or self._locations.is_over(view)  # known before the files are read to their end
            for open_log in self._open[view]:
                yield from _lines(open_log, last=is_over)
            if is_over:
                del self._open[view]

    def _open_views(self) -> Iterator[LogNote]:
        newest = self._locations.newest
        if self._filter.view is None:
            first = self._next_view == 0
            self._next_view = newest if first else self._next_view
            for view in range(self._next_view, newest + 1) if newest else ():
                if not first and not self._locations.is_known(view):
                    break
                yield from self._open_view(view, first)
                self._next_view = view + 1
        elif self._next_view == self._filter.view and newest:
            yield from self._open_view(self._next_view, first=True)
            self._next_view += 1

    def _open_view(self, view: int, first: bool) -> Iterator[LogNote]:
        if not first:
            yield LogNote(f"view {view} begins")
        try:
            logs = self._locations.find(view, self._filter.rank)
        except UsageError as error:
            if first:
                raise
            yield LogNote(str(error))  # the world became smaller; it may grow again
            return
        self._unseen += logs
        lines_max = self._filter.lines_max if first else None  # of a later view, everything is new
        self._open[view] = [
            _OpenLog(log, stream, self._tail(log.directory / f"{stream}.log", lines_max), len(logs) == 1)
            for log in logs
            if log.directory
            for stream in self._filter.streams
        ]

    def _tail(self, path: Path, lines_max: int | None) -> Tail:
        """Return the tail of a file: for a surviving worker the one of the view before, else a new one."""
        for open_logs in self._open.values():
            for number, one in enumerate(open_logs):
                if one.tail.path == path:
                    return open_logs.pop(number).tail
        return Tail(path, lines_max)

    def _report_missing(self) -> Iterator[LogNote]:
        unseen = [log for log in self._unseen if log.directory is None or not log.directory.is_dir()]
        missing = [log for log in unseen if self._locations.has_started(log)]
        self._unseen = [log for log in unseen if log not in missing]
        yield from (LogNote(sentence) for sentence in missing_sentences(missing))


def read_output(locations: LogLocations, log_filter: LogFilter) -> Iterator[LogLine | LogNote]:
    """Return the output that is there now."""
    return LogReader(locations, log_filter).read_new(last=True)


async def follow_output(source: JobSource, log_filter: LogFilter) -> AsyncGenerator[LogLine | LogNote, None]:
    """Return the output that is there now, and what comes until the job is over."""
    locations = LogLocations()
    reader = LogReader(locations, log_filter)
    updating = asyncio.create_task(_update(source, locations))
    try:
        while not reader.is_over:
            is_last = updating.done()
            for item in reader.read_new(last=is_last):
                yield item
            if is_last:
                updating.result()  # raises what ended it, if it was not the job's end
                return
            await asyncio.wait({updating}, timeout=POLL_S)
    finally:
        updating.cancel()
        await asyncio.wait({updating})


async def _update(source: JobSource, locations: LogLocations) -> None:
    async with aclosing(follow(source)) as pages:
        async for page in pages:
            locations.add(page)


def _lines(open_log: _OpenLog, *, last: bool) -> Iterator[LogLine]:
    log = open_log.log
    for text in open_log.tail.lines(last=last):
        yield LogLine(
            view=log.view,
            rank=log.rank,
            node_id=log.node_id,
            stream=open_log.stream,
            text=text,
            is_only_rank=open_log.is_only_rank,
        )
