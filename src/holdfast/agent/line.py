"""The agent's unix socket, on which workers that call `hf.init()` enrol, and their lines from then on.

The socket has a name of the kernel's own (an abstract one), not a file: an agent that is killed leaves nothing behind.
Who connects must be of the same user and know the nonce that the agent gave to one worker; each nonce is good for one
connection. Anybody else, and anybody who does not keep to the protocol, is hung up on: a stranger's bytes are a line in
the log, never a crash.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
from typing import Protocol

import msgspec
import structlog

from holdfast.errors import WireError
from holdfast.wire.local import FrameReader, encode, socket_address
from holdfast.wire.session import Enrol, FromWorker, ToWorker

READ_BYTES = 65_536
UNSENT_BYTES_MAX = 2**20
"""A worker's side thread reads at once, or never will."""
ENROL_TIMEOUT_S = 10.0
STRANGERS_MAX = 64
"""Connections that have not enrolled."""
NAME_PREFIX = "@holdfast-"
_CREDENTIALS = struct.Struct("3i")

log = structlog.get_logger("agent")


class Listener(Protocol):
    """Who hears what workers say. A worker is named by its nonce."""

    def enrolled(self, worker: str, pid: int, line: Line, repairs: bool) -> bool:
        """False: there is no such worker, or it has a line already."""

    def heard(self, worker: str, message: FromWorker) -> None: ...

    def line_lost(self, worker: str) -> None: ...


class Line:
    """The connection to one worker. Sending never waits: what the socket does not take is buffered, up to a bound."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def send(self, message: ToWorker) -> None:
        """Nothing happens if the worker is gone: its end is seen elsewhere."""
        transport = self._writer.transport
        if transport.is_closing():
            return
        self._writer.write(encode(message))
        if transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            log.warning("a worker does not read what it is told: hanging up on it")
            transport.abort()

    def close(self) -> None:
        self._writer.close()


class LineServer:
    """Listens from `start` to `close`."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.name = ""
        """Of the socket, as wire.local.socket_address takes it; empty while there is none."""
        self._server: asyncio.Server | None = None
        self._conversations: set[asyncio.Task[None]] = set()
        self._strangers = 0

    async def start(self) -> None:
        """Raises OSError where no socket can be made: workers then run as if they had not heard of Holdfast."""
        name = f"{NAME_PREFIX}{secrets.token_hex(8)}"
        self._server = await asyncio.start_unix_server(self._converse, socket_address(name))
        self.name = name

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for conversation in self._conversations:
            conversation.cancel()
        await asyncio.gather(*self._conversations, return_exceptions=True)
        self.name = ""

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._conversations.add(task)
        try:
            await self._hear_out(reader, writer)
        except (WireError, OSError, TimeoutError) as error:
            log.warning(f"hung up on a process at the workers' socket: {error or type(error).__name__}")
        except asyncio.CancelledError:
            pass  # at the end; the streams' own callback takes a cancelled task for an error
        finally:
            self._conversations.discard(task)
            writer.close()

    async def _hear_out(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameReader(msgspec.msgpack.Decoder(FromWorker))
        messages: list[FromWorker] = []
        worker = await self._welcome(reader, writer, frames, messages)
        if not worker:
            return
        try:
            while True:
                for message in messages:
                    self._listener.heard(worker, message)
                try:
                    data = await reader.read(READ_BYTES)
                except ConnectionError:
                    return  # killed with words of ours unread: gone is gone
                if not data:
                    return
                frames.feed(data)
                messages = [message for message, _ in frames.frames()]
        finally:
            self._listener.line_lost(worker)

    async def _welcome(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        frames: FrameReader[FromWorker],
        further: list[FromWorker],
    ) -> str:
        """The nonce of the worker that enrolled, empty for none; what it said in the same breath is in `further`."""
        check_peer(writer.get_extra_info("socket"))
        if self._strangers >= STRANGERS_MAX:
            raise WireError(f"{STRANGERS_MAX} others have connected and not enrolled")
        self._strangers += 1
        try:
            async with asyncio.timeout(ENROL_TIMEOUT_S):
                while not further:
                    if not (data := await reader.read(READ_BYTES)):
                        return ""  # connected, said nothing, went away
                    frames.feed(data)
                    further += [message for message, _ in frames.frames()]
        finally:
            self._strangers -= 1
        first = further.pop(0)
        if not isinstance(first, Enrol):
            raise WireError(f"it began with {type(first).__name__}, not with its name")
        if not self._listener.enrolled(first.worker, first.pid, Line(writer), first.repairs):
            raise WireError(f"process {first.pid} is no worker of this agent, or one that has a line already")
        return first.worker


def check_peer(connection: socket.socket) -> None:
    """Raises WireError for another user's process; root may do as it likes anyway."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    if user not in (os.getuid(), 0):
        raise WireError(f"process {pid} belongs to user {user}")


def new_nonce() -> str:
    """By which one worker is known on its line."""
    return secrets.token_hex(16)
