"""The workers' output line by line, once or for as long as the job goes on.

Without a view in the choice, the newest one is read, and following goes on into each later one. A view's files are
read until its workers are gone for certain, so what they say while they are stopped is not lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Literal

import msgspec

from holdfast.errors import UsageError
from holdfast.observe.outputs import Output, Outputs, absence
from holdfast.observe.source import POLL_S, Source, follow
from holdfast.observe.tail import Tail

Stream = Literal["stdout", "stderr"]


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Whose output, and how much of it."""

    view: int | None = None
    rank: int | None = None
    streams: tuple[Stream, ...] = ("stdout", "stderr")
    lines_max: int | None = None
    """The last lines of each file; None: all of them."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a worker's output, with its end if it has one."""

    view: int
    rank: int
    node_id: str
    stream: Stream
    text: bytes
    alone: bool
    """Whether it can only be this rank's."""


class Note(msgspec.Struct, frozen=True):
    """Something about the output that a person should know."""

    sentence: str


class _Followed(msgspec.Struct, frozen=True):
    output: Output
    stream: Stream
    tail: Tail
    alone: bool


class Reader:
    """Reads the chosen output on from where it stopped, whenever it is asked to look."""

    def __init__(self, outputs: Outputs, choice: Choice) -> None:
        self._outputs, self._choice = outputs, choice
        self._next_view = choice.view or 0
        self._open: dict[int, list[_Followed]] = {}
        self._unseen: list[Output] = []

    @property
    def is_over(self) -> bool:
        """Whether nothing more can come, though the job goes on: the one view that was asked for is over."""
        return self._choice.view is not None and self._next_view > self._choice.view and not self._open

    def look(self, *, last: bool) -> Iterator[Line | Note]:
        """What is new. `last`: nothing will be written after this look."""
        yield from self._open_views()
        yield from self._absences()
        for view in list(self._open):
            is_over = last or self._outputs.is_over(view)  # known before the files are read to their end
            for followed in self._open[view]:
                yield from _lines(followed, last=is_over)
            if is_over:
                del self._open[view]

    def _open_views(self) -> Iterator[Note]:
        newest = self._outputs.newest
        if self._choice.view is None:
            first = self._next_view == 0
            self._next_view = newest if first else self._next_view
            for view in range(self._next_view, newest + 1) if newest else ():
                if not first and not self._outputs.is_known(view):
                    break
                yield from self._begin(view, first)
                self._next_view = view + 1
        elif self._next_view == self._choice.view and newest:
            yield from self._begin(self._next_view, first=True)
            self._next_view += 1

    def _begin(self, view: int, first: bool) -> Iterator[Note]:
        if not first:
            yield Note(f"view {view} begins")
        try:
            outputs = self._outputs.of(view, self._choice.rank)
        except UsageError as error:
            if first:
                raise
            yield Note(str(error))  # the world became smaller; it may grow again
            return
        self._unseen += outputs
        lines_max = self._choice.lines_max if first else None  # of a later view, all is news
        self._open[view] = [
            _Followed(output, stream, self._tail(output.directory / f"{stream}.log", lines_max), len(outputs) == 1)
            for output in outputs
            if output.directory
            for stream in self._choice.streams
        ]

    def _tail(self, path: Path, lines_max: int | None) -> Tail:
        """Where the file of a worker that lives on was read to in the view before; else from its beginning."""
        for followed in self._open.values():
            for number, one in enumerate(followed):
                if one.tail.path == path:
                    return followed.pop(number).tail
        return Tail(path, lines_max)

    def _absences(self) -> Iterator[Note]:
        unseen = [o for o in self._unseen if o.directory is None or not o.directory.is_dir()]
        missing = [output for output in unseen if self._outputs.has_started(output)]
        self._unseen = [output for output in unseen if output not in missing]
        yield from (Note(sentence) for sentence in absence(missing))


def read_output(outputs: Outputs, choice: Choice) -> Iterator[Line | Note]:
    """What is there now."""
    return Reader(outputs, choice).look(last=True)


async def follow_output(source: Source, choice: Choice) -> AsyncGenerator[Line | Note, None]:
    """What is there now, and what comes until the job is over."""
    outputs = Outputs()
    reader = Reader(outputs, choice)
    learning = asyncio.create_task(_learn(source, outputs))
    try:
        while not reader.is_over:
            is_last = learning.done()
            for item in reader.look(last=is_last):
                yield item
            if is_last:
                learning.result()  # raises what ended it, if it was not the job's end
                return
            await asyncio.wait({learning}, timeout=POLL_S)
    finally:
        learning.cancel()
        await asyncio.wait({learning})


async def _learn(source: Source, outputs: Outputs) -> None:
    async with aclosing(follow(source)) as pages:
        async for page in pages:
            outputs.take(page)


def _lines(followed: _Followed, *, last: bool) -> Iterator[Line]:
    output = followed.output
    for text in followed.tail.lines(last=last):
        yield Line(
            view=output.view,
            rank=output.rank,
            node_id=output.node_id,
            stream=followed.stream,
            text=text,
            alone=followed.alone,
        )
