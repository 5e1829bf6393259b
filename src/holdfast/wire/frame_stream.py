"""Frames over an asyncio transport, plain or TLS: the part of a control connection that both ends share."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Coroutine
from typing import Any

from holdfast.errors import WireError
from holdfast.wire.frames import FrameBuffer, frame_of

READ_AHEAD_BYTES = 256 * 1024
"""Received beyond one frame of the largest size before the other side has to wait."""
WRITE_BUFFER_BYTES = 1024 * 1024
KEEPALIVE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 10, 5, 2
"""For a side that has nothing to say: a machine that lost power is noticed after some 20 seconds all the same."""
LEAVE_S = 0.5
CLOSE_S = 1.0
"""How long what was sent may take to get out before a connection is dropped."""


class FrameStream(asyncio.Protocol):
    """One connection. One task reads; any may write."""

    def __init__(self, limit: int, *, expects_preamble: bool) -> None:
        self.buffer = FrameBuffer(limit, expects_preamble=expects_preamble)
        self._transport: asyncio.Transport | None = None
        self._readable: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._is_tls = self._is_ahead = self._is_over = self._is_leaving = False
        self._closed = asyncio.get_running_loop().create_future()
        self.error: Exception | None = None
        """What ended the connection, if it was not the other side's wish."""
        self.is_silent = True
        """Whether nothing was ever received."""

    # --- for asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        self._is_tls = transport.get_extra_info("ssl_object") is not None
        if (plain := transport.get_extra_info("socket")) is not None:
            _keep_alive(plain)

    def data_received(self, data: bytes) -> None:
        self.is_silent = False
        if self._is_leaving:
            return
        self.buffer.feed(data)
        if len(self.buffer) > self.buffer.limit + READ_AHEAD_BYTES and self._transport is not None:
            self._transport.pause_reading()
            self._is_ahead = True
        _wake(self._readable)

    def eof_received(self) -> bool:
        self._is_over = True
        _wake(self._readable)
        return not self._is_tls  # stay open for an answer; TLS cannot

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        _wake(self._writable)
        self._writable = None

    def connection_lost(self, error: Exception | None) -> None:
        self._is_over, self.error = True, error
        _wake(self._readable)
        _wake(self._writable)
        _wake(self._closed)

    # --- for the connection's user

    async def read(self) -> bytes | None:
        """Return the next payload; None when the connection is over. WireError if the bytes are not frames."""
        while (payload := self.buffer.next()) is None:
            if self._is_over:
                return None
            self._readable = asyncio.get_running_loop().create_future()
            try:
                await self._readable
            finally:
                self._readable = None
        if self._is_ahead and len(self.buffer) <= self.buffer.limit and self._transport is not None:
            self._is_ahead = False
            self._transport.resume_reading()
        return payload

    def write(self, payload: bytes) -> None:
        """Send a frame, now or as soon as the other side has read what was sent before."""
        self.write_raw(frame_of(payload))

    def write_raw(self, data: bytes) -> None:
        """Send bytes that are not a frame: the preamble, or an answer to a stranger."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    async def drain(self) -> None:
        """Wait until the other side has read most of what was sent. WireError if the connection ends before."""
        if self._writable is not None:
            await asyncio.shield(self._writable)
        if self._transport is None or self._transport.is_closing():
            raise WireError(f"the connection is closed{f' ({self.error})' if self.error else ''}")

    @property
    def unsent_bytes(self) -> int:
        """How much of what was sent is still in this process."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    @property
    def certificate(self) -> bytes:
        """The other side's certificate as DER; empty without TLS, or where it showed none."""
        tls = self._transport.get_extra_info("ssl_object") if self._transport is not None else None
        return (tls.getpeercert(binary_form=True) or b"") if tls is not None else b""

    def finish(self) -> None:
        """End the connection after what was sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    async def leave(self) -> None:
        """End the connection after what was sent, and read on for a moment without looking at it: bytes that were never
        read would turn the end into a reset, and our last words might be lost."""
        self._is_leaving = True
        if self._transport is None or self._transport.is_closing() or not self._transport.can_write_eof():
            return self.finish()
        try:
            self._transport.write_eof()
        except OSError:  # the other side has reset the connection
            return self.finish()
        if self._is_ahead:
            self._transport.resume_reading()
        if not self._is_over:
            self._readable = asyncio.get_running_loop().create_future()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await self._readable
        self.finish()

    async def close(self) -> None:
        """End the connection after what was sent, if the other side reads it soon, and wait for that."""
        self.finish()
        if self._transport is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await asyncio.shield(self._closed)
            self.abort()


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)


def _keep_alive(plain: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is gone already, or is no TCP socket
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
        milliseconds = 1_000 * (KEEPALIVE_S + KEEPALIVE_PROBES * KEEPALIVE_INTERVAL_S)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


async def until_first_ends(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run the reader and the writer of a connection until one of them ends, and end the other; raise its exception."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
