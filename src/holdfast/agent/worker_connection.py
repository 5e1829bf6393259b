"""The agent's unix socket, on which workers that call `hf.init()` enrol, and its connections to them from then on.

The socket has an abstract name, not a file: an agent that is killed leaves nothing behind. A process that connects must
belong to the same user and know the nonce that the agent gave to one worker; each nonce is good for one connection. All
others, and those that break the protocol, are disconnected: their bytes are a line in the log, never a crash.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
from typing import Protocol

import msgspec

from holdfast.errors import WireError
from holdfast.util.logs import get_logger
from holdfast.wire.launch_messages import FrameReader, encode, socket_address
from holdfast.wire.strangers import StrangerLog, unproved_max
from holdfast.wire.worker_messages import Enrol, FromWorker, ScriptFailed, ToWorker

READ_BYTES = 65_536
UNSENT_BYTES_MAX = 2**20
"""More than this is never unsent to a worker that reads: its side thread reads at once."""
ENROL_TIMEOUT_S = 10.0
PENDING_MAX = 64
"""How many connections may wait that have not enrolled."""
BACKLOG_CONNECTIONS = 256
ACCEPTS_MAX = 16
"""Connections accepted in one go. One of another user is closed in the same moment: it never waits for anything."""
DESCRIPTORS_PAUSE_S = 0.2
"""How long nothing is accepted when this process has no descriptor left."""
NAME_PREFIX = "@holdfast-"
_CREDENTIALS = struct.Struct("3i")

log = get_logger(__name__)


class WorkerListener(Protocol):
    """The receiver of workers' messages. A worker is named by its nonce."""

    def enrolled(self, worker: str, pid: int, connection: WorkerConnection, repairs: bool) -> bool:
        """Accept a worker; return False if there is no such worker, or it is connected already."""

    def script_failed(self, worker: str, pid: int) -> None:
        """Record that the script of a worker without a session has failed; its process is about to end."""

    def received(self, worker: str, message: FromWorker) -> None:
        """Act on a message."""

    def connection_lost(self, worker: str) -> None:
        """Record that the worker is not connected any more."""


class WorkerConnection:
    """The connection to one worker. Sending never waits: what the socket does not take is buffered, up to a bound."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def send(self, message: ToWorker) -> None:
        """Send a message. Nothing happens if the worker has disconnected: its end is seen elsewhere."""
        transport = self._writer.transport
        if transport.is_closing():
            return
        self._writer.write(encode(message))
        if transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            log.warning("worker-disconnected", "a worker does not read its messages: disconnecting it")
            transport.abort()

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()


class WorkerServer:
    """The listening socket, from `start` to `close`."""

    def __init__(self, listener: WorkerListener) -> None:
        self._listener = listener
        self.name = ""
        """The socket's name, as `socket_address` takes it; empty while there is none."""
        self._listening: socket.socket | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._pending, self._pending_max = 0, unproved_max(PENDING_MAX)
        self._strangers = StrangerLog("workers")

    async def start(self) -> None:
        """Open the socket. Raises OSError if that is impossible: workers then run without a session."""
        name = f"{NAME_PREFIX}{secrets.token_hex(8)}"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listening.bind(socket_address(name))
            listening.listen(BACKLOG_CONNECTIONS)
        except OSError:
            listening.close()
            raise
        self._listening, self.name = listening, name
        self._resume()

    async def close(self) -> None:
        """Close the socket and all connections."""
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._listening.close()
            self._listening = None
        if self._pause is not None:
            self._pause.cancel()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._strangers.close()
        self.name = ""

    def _resume(self) -> None:
        if self._listening is not None:
            asyncio.get_running_loop().add_reader(self._listening, self._accept, self._listening)

    def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPTS_MAX):
            try:
                connection, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._strangers.turned_away("unknown", f"no connection can be accepted now: {error.strerror}")
                loop.remove_reader(listening)
                self._pause = loop.call_later(DESCRIPTORS_PAUSE_S, self._resume)
                return
            try:
                check_peer(connection)
            except (WireError, OSError) as error:
                self._strangers.turned_away(_peer_name(connection), str(error))
                connection.close()
                continue
            task = loop.create_task(self._serve(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, connection: socket.socket) -> None:
        peer, writer = _peer_name(connection), None
        try:
            reader, writer = await asyncio.open_unix_connection(sock=connection)
            await self._receive(reader, writer)
        except (WireError, OSError, TimeoutError) as error:
            self._strangers.turned_away(peer, str(error) or type(error).__name__)
        finally:
            (writer or connection).close()

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameReader(msgspec.msgpack.Decoder(FromWorker))
        messages: list[FromWorker] = []
        worker = await self._enrol(reader, writer, frames, messages)
        if not worker:
            return
        try:
            while True:
                for message in messages:
                    self._listener.received(worker, message)
                try:
                    data = await reader.read(READ_BYTES)
                except ConnectionError:
                    return  # it was killed before it had read all messages
                if not data:
                    return
                frames.feed(data)
                messages = [message for message, _ in frames.frames()]
        finally:
            self._listener.connection_lost(worker)

    async def _enrol(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        frames: FrameReader[FromWorker],
        further: list[FromWorker],
    ) -> str:
        """Return the nonce of the worker that enrolled, empty for none. Messages that came with it are in `further`."""
        if self._pending >= self._pending_max:
            raise WireError(f"{self._pending_max} other processes have connected and not enrolled")
        self._pending += 1
        try:
            async with asyncio.timeout(ENROL_TIMEOUT_S):
                while not further:
                    if not (data := await reader.read(READ_BYTES)):
                        return ""  # it disconnected without a message
                    frames.feed(data)
                    further += [message for message, _ in frames.frames()]
        finally:
            self._pending -= 1
        first = further.pop(0)
        if isinstance(first, ScriptFailed):
            self._listener.script_failed(first.worker, first.pid)
            return ""
        if not isinstance(first, Enrol):
            raise WireError(f"its first message was {type(first).__name__}, not Enrol")
        if not self._listener.enrolled(first.worker, first.pid, WorkerConnection(writer), first.repairs):
            raise WireError(f"process {first.pid} is not a worker of this agent, or is connected already")
        return first.worker


def check_peer(connection: socket.socket) -> None:
    """Raise WireError for another user's process; root can do anything anyway."""
    pid, user = _credentials(connection)
    if user not in (os.getuid(), 0):
        raise WireError(f"process {pid} belongs to user {user}")


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    return pid, user


def _peer_name(connection: socket.socket) -> str:
    """Return user and process as address and port are written, so that a user has one line a minute."""
    try:
        pid, user = _credentials(connection)
    except OSError:
        return "a process"
    return f"user {user}:{pid}"


def new_nonce() -> str:
    """Return the secret by which one worker is known when it connects."""
    return secrets.token_hex(16)
