"""The agent's ends of the local connections, driven by its event loop."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from holdfast.errors import WireError
from holdfast.wire.local import FrameReader, Message, Report, encode, send_part

PIPE_READ_BYTES = 65_536

MessageT = TypeVar("MessageT")


class Link(Generic[MessageT]):
    """One end of a socketpair to a process of ours. Each message is handed to `on_message` as it comes."""

    def __init__(
        self,
        connection: socket.socket,
        decoder: msgspec.msgpack.Decoder[MessageT],
        on_message: Callable[[MessageT], None],
    ) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._reader = FrameReader(decoder)
        self._on_message = on_message
        self._sending = asyncio.Lock()  # a frame must not begin in the middle of another
        self._may_write = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection, self._receive)

    async def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Raises ConnectionError if the other side is gone. Not to be cancelled: half a frame would garble the next."""
        frame = memoryview(encode(message, len(descriptors)))
        async with self._sending:
            while frame:
                if self._connection.fileno() < 0:
                    raise BrokenPipeError("the connection was closed")
                try:
                    sent = send_part(self._connection, frame, descriptors)
                except BlockingIOError:
                    await self._writable()
                    continue
                frame, descriptors = frame[sent:], ()

    def close(self) -> None:
        """Senders that wait for room get a ConnectionError."""
        if self._connection.fileno() < 0:
            return
        self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)
        self._reader.close()
        self._connection.close()
        self._may_write.set()

    def _receive(self) -> None:
        try:
            alive = self._reader.receive(self._connection)
        except BlockingIOError:
            return
        except OSError:
            alive = False
        if not alive:
            self._loop.remove_reader(self._connection)  # its process's end is seen by its pidfd
        for message, _ in self._reader.frames():
            self._on_message(message)

    async def _writable(self) -> None:
        self._may_write.clear()
        self._loop.add_writer(self._connection, self._may_write.set)
        await self._may_write.wait()
        if self._connection.fileno() >= 0:
            self._loop.remove_writer(self._connection)


class ReportPipe:
    """Where one launch reports. What comes is a report, or the end of file: nobody is left who could ever report."""

    def __init__(self, on_report: Callable[[Report], None]) -> None:
        self._on_report = on_report
        self._frames: FrameReader[Report] = FrameReader(msgspec.msgpack.Decoder(Report))
        self._loop = asyncio.get_running_loop()
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)
        self.outcome: asyncio.Future[Report | None] = self._loop.create_future()
        self._loop.add_reader(self._reading, self.poll)

    def poll(self) -> None:
        """Takes what is there. `on_report` is called in the same breath, so that no newborn is unknown for a moment."""
        if self.outcome.done():
            return
        try:
            data = os.read(self._reading, PIPE_READ_BYTES)
        except BlockingIOError:
            return
        self._frames.feed(data)
        report = next(iter(self._frames.frames()), (None, []))[0]
        if data and report is None:
            raise WireError("a report came in pieces, though it is one write to a pipe")
        self._close_reading()
        if report is not None:
            self._on_report(report)
        self.outcome.set_result(report)

    def close_writing(self) -> None:
        """Once the request is sent, or cannot be: from then on only the other side's copies count."""
        os.close(self.writing)
        self.poll()

    def _close_reading(self) -> None:
        self._loop.remove_reader(self._reading)
        os.close(self._reading)
