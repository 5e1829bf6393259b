"""Connections between agents (or watchers) and the master: frames (frames.py) over TCP, with TLS where the job has it.

The server accepts connections itself, so that it decides how many strangers may wait, answers every one of them, and
survives a lack of descriptors. Who has not proved the token (auth.py) in `PROOF_TIMEOUT_S` is turned away. Each client
has a connection of its own, so that a broken one says something about its own peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
from collections.abc import Awaitable, Callable

import msgspec

from holdfast.errors import WireError
from holdfast.wire.auth import ClientHandshake, Refusal, Role, Seal, ServerHandshake
from holdfast.wire.control_messages import FromMaster, ToMaster
from holdfast.wire.frame_stream import FrameStream
from holdfast.wire.frames import ANSWER, HANDSHAKE_FRAME_BYTES_MAX, PREAMBLE, ForeignBytesError, decode, encode
from holdfast.wire.store_passage import VALIDATE, StorePassage
from holdfast.wire.strangers import UnprovedConnections, printable, unproved_max
from holdfast.wire.tls import TLS_HANDSHAKE
from holdfast.wire.tls import Tls as Tls

PAGE_FRAME_BYTES_MAX = 64 * 1024 * 1024
"""Limit of what a master sends: a page with one record, the view of ten thousand nodes, is a few megabytes."""
REPORT_FRAME_BYTES_MAX = 1024 * 1024
"""Limit of what a master receives: a failure with its traceback and log tail is some tens of kilobytes."""
PROOF_TIMEOUT_S = 20.0
"""From the connection to the proof of the token: a busy master has all of a thousand agents at once."""
UNPROVED_MAX = 2_048
UNPROVED_PER_ADDRESS_MAX = 1_024
"""Agents prove themselves in milliseconds, but a thousand may start at once behind one address."""
CROWDED_S = 1.0
"""When the port is full of unproved connections, those older than this give way to new ones. Only time in which this
process could have read from them counts (`_Patience`)."""
PATIENCE_TICK_S = 0.05
BACKLOG_CONNECTIONS = 4_096
ACCEPTS_MAX = 64
"""Connections accepted in one go, so that those that are there are not held up."""
DESCRIPTORS_PAUSE_S = 0.2
"""How long nothing is accepted when this process has no descriptor left."""
DISCARD_BYTES = 64 * 1024
UNSENT_BYTES_MAX = 64 * 1024 * 1024
"""An agent that reads none of so much is as good as gone; its connection is ended."""

# Made once: a decoder of such unions takes a while to make, and a thousand agents may connect at once.
_to_master: msgspec.msgpack.Decoder[ToMaster] = msgspec.msgpack.Decoder(ToMaster)
_from_master: msgspec.msgpack.Decoder[FromMaster | Refusal] = msgspec.msgpack.Decoder(FromMaster | Refusal)


class ClientConnection:
    """An agent's or watcher's side."""

    def __init__(self, stream: FrameStream, seal: Seal, opener: Seal) -> None:
        self._stream, self._seal, self._opener = stream, seal, opener

    async def send(self, message: ToMaster) -> None:
        """Send one message. WireError if the connection is gone."""
        self._stream.write(self._seal.close(encode(message)))
        await self._stream.drain()

    async def receive(self) -> FromMaster:
        """Return the next message. WireError if the connection is gone, or if the master ends it with a sentence."""
        frame = await self._stream.read()
        if frame is None:
            raise _ended(self._stream)
        message = decode(_from_master, self._opener.open(frame))
        if isinstance(message, Refusal):
            raise WireError(printable(message.why))
        return message

    async def close(self) -> None:
        """End the connection."""
        await self._stream.close()


async def connect(
    host: str, port: int, *, token: str, role: Role, tls: Tls | None, timeout_s: float
) -> ClientConnection:
    """Connect and authenticate, both ways. WireError with a sentence if that cannot be done."""
    context = tls.client_context(check_hostname=True) if tls else None
    stream = FrameStream(HANDSHAKE_FRAME_BYTES_MAX, expects_preamble=False)
    try:
        async with asyncio.timeout(timeout_s):
            await _open(stream, host, port, context)
            return await _client_handshake(stream, token, role)
    except TimeoutError:
        stream.abort()
        raise WireError(f"no answer from {host}:{port} in {timeout_s:.1f} s") from None
    except BaseException:
        stream.abort()
        raise


async def _open(stream: FrameStream, host: str, port: int, context: ssl.SSLContext | None) -> None:
    try:
        await asyncio.get_running_loop().create_connection(lambda: stream, host, port, ssl=context)
    except TimeoutError:
        raise  # of the system: it is said in the same words as ours
    except ssl.SSLCertVerificationError as error:
        raise WireError(f"the certificate of {host}:{port} is not accepted: {error.verify_message}") from error
    except ssl.SSLError as error:
        raise WireError(f"no TLS connection to {host}:{port}: {error.reason or error}") from error
    except OSError as error:
        raise WireError(f"cannot connect to {host}:{port}: {error.strerror or error}") from error


async def _client_handshake(stream: FrameStream, token: str, role: Role) -> ClientConnection:
    handshake = ClientHandshake(token, role, "the master", stream.certificate)
    stream.write_raw(PREAMBLE)
    stream.write(handshake.first)
    while handshake.keys is None:
        try:
            payload = await stream.read()
        except WireError as error:
            raise WireError(_explain_no_frame(stream) or str(error)) from error
        if payload is None:
            raise _ended(stream)
        if (answer := handshake.receive(payload)) is not None:
            stream.write(answer)
    stream.buffer.limit = PAGE_FRAME_BYTES_MAX
    return ClientConnection(stream, *handshake.seals())


def _explain_no_frame(stream: FrameStream) -> str:
    if not stream.buffer.starts_with(ANSWER[:10]):
        return ""
    return "the other side does not take this for its protocol: give the same TLS flags and Holdfast version everywhere"


def _ended(stream: FrameStream) -> WireError:
    if stream.error is None:
        return WireError("the other side ended the connection")
    reason = stream.error.strerror if isinstance(stream.error, OSError) else None
    return WireError(f"the connection broke: {reason or stream.error}")


class ServerConnection:
    """The master's side of one agent's or watcher's connection."""

    def __init__(self, stream: FrameStream, role: Role, peer: str, seal: Seal, opener: Seal) -> None:
        self.role = role
        self.peer = peer
        self._stream, self._seal, self._opener = stream, seal, opener

    def send(self, message: FromMaster | Refusal) -> None:
        """Send one message, without waiting: it is sealed now and leaves as the other side reads. One that does not
        read is disconnected."""
        if self._stream.unsent_bytes > UNSENT_BYTES_MAX:
            self._stream.abort()
        self._stream.write(self._seal.close(encode(message)))

    async def drain(self) -> None:
        """Wait until the other side has read most of what was sent. WireError if the connection ends before."""
        await self._stream.drain()

    async def receive(self) -> ToMaster | None:
        """Return the next message; None when the connection is over. WireError if it is not one."""
        frame = await self._stream.read()
        return None if frame is None else decode(_to_master, self._opener.open(frame))

    def finish(self) -> None:
        """End the connection after what was sent."""
        self._stream.finish()

    def abort(self) -> None:
        """End the connection at once."""
        self._stream.abort()


Handler = Callable[[ServerConnection], Awaitable[None]]
Stranger = Callable[[str, str], None]


class Server:
    """Listens for agents and watchers. `stranger(peer, why)` is called for everyone who is turned away. Clients of
    torch's store are passed on to the address that `torch_store` returns (store_passage.py)."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str,
        tls: Tls | None,
        stranger: Stranger,
        torch_store: Callable[[], tuple[str, int] | None] | None = None,
    ) -> None:
        self._host, self._port, self._token, self._stranger = host, port, token, stranger
        self._passage = StorePassage(torch_store) if torch_store is not None and tls is None else None
        self._context = tls.server_context() if tls else None
        self._certificate = tls.certificate() if tls else b""
        self._handler: Handler | None = None
        self._listeners: list[socket.socket] = []
        self._unproved = UnprovedConnections(unproved_max(UNPROVED_MAX), UNPROVED_PER_ADDRESS_MAX)
        self._newcomers: dict[_Newcomer, None] = {}  # in the order in which they came
        self._patience = _Patience(lambda: bool(self._newcomers))
        self._tasks: set[asyncio.Task[None]] = set()
        self._streams: set[FrameStream] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._is_accepting = False

    async def start(self, handler: Handler) -> int:
        """Listen, and call the handler for every connection that has proved itself; return the port. WireError if the
        address cannot be had."""
        self._handler = handler
        try:
            self._listeners = await _listen(self._host, self._port)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise WireError(f"cannot listen on {self._host}:{self._port}: {reason}") from error
        self._resume()
        return int(self._listeners[0].getsockname()[1])

    async def stop(self, grace_s: float) -> None:
        """End all connections; those that are about to end by themselves have a moment to."""
        self._suspend()
        for listener in self._listeners:
            listener.close()
        self._listeners = []
        for newcomer in self._newcomers:
            newcomer.task.cancel()
        if self._tasks and grace_s > 0:
            await asyncio.wait(self._tasks, timeout=grace_s)
        for stream in self._streams:
            stream.abort()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- accepting

    def _resume(self) -> None:
        self._pause = None
        if not self._is_accepting:
            self._is_accepting = True
            for listener in self._listeners:
                asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _suspend(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        if self._is_accepting:
            self._is_accepting = False
            for listener in self._listeners:
                asyncio.get_running_loop().remove_reader(listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_MAX):
            if self._unproved.is_full and not self._make_room():
                return
            try:
                plain, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._stranger("unknown", f"no connection can be accepted now: {error.strerror}")
                self._pause_for(DESCRIPTORS_PAUSE_S)
                return
            self._admit(plain, str(address[0]), f"{address[0]}:{address[1]}")

    def _make_room(self) -> bool:
        """End the oldest unproved connection if it had its time; else accept nothing until it has."""
        oldest = next(iter(self._newcomers))
        if (age_s := oldest.age_s) < CROWDED_S:
            self._pause_for(CROWDED_S - age_s)
            return False
        self._end(oldest)
        return True

    def _make_room_for(self, address: str) -> bool:
        """Do the same for an address that has its share: many agents, and a stranger, may be behind it."""
        oldest = next((one for one in self._newcomers if one.address == address), None)
        if oldest is None or oldest.age_s < CROWDED_S:
            return False
        self._end(oldest)
        return self._unproved.enter(address)

    def _end(self, newcomer: _Newcomer) -> None:
        newcomer.gave_way = True
        newcomer.task.cancel()
        self._forget(newcomer)

    def _pause_for(self, seconds: float) -> None:
        self._suspend()
        self._pause = asyncio.get_running_loop().call_later(seconds, self._resume)

    def _admit(self, plain: socket.socket, address: str, peer: str) -> None:
        if not self._unproved.enter(address) and not self._make_room_for(address):
            self._stranger(peer, f"{UNPROVED_PER_ADDRESS_MAX} connections of its address have not proved themselves")
            plain.close()
            return
        plain.setblocking(False)
        newcomer = _Newcomer(plain, address, peer, self._patience)
        newcomer.task = asyncio.create_task(self._serve(newcomer))
        self._newcomers[newcomer] = None
        self._patience.start()
        self._tasks.add(newcomer.task)
        newcomer.task.add_done_callback(self._tasks.discard)

    def _forget(self, newcomer: _Newcomer) -> None:
        """Stop counting a connection as unproved."""
        if newcomer in self._newcomers:
            del self._newcomers[newcomer]
            self._unproved.leave(newcomer.address)
            if self._pause is not None and self._listeners:
                self._pause.cancel()
                self._resume()

    # --- one connection

    async def _serve(self, newcomer: _Newcomer) -> None:
        stream = FrameStream(HANDSHAKE_FRAME_BYTES_MAX, expects_preamble=True)
        self._streams.add(stream)
        try:
            connection = await self._prove(newcomer, stream)
            if self._passage is not None and newcomer.is_of_torch:
                self._forget(newcomer)
                if why_not := await self._passage.carry(newcomer.plain):
                    self._stranger(newcomer.peer, why_not)
            elif connection is None:
                await stream.leave()
            else:
                self._forget(newcomer)
                await self._handle(connection)
        finally:
            self._forget(newcomer)
            self._streams.discard(stream)
            stream.finish()
            if not newcomer.has_transport:
                newcomer.plain.close()

    async def _prove(self, newcomer: _Newcomer, stream: FrameStream) -> ServerConnection | None:
        """Return the connection once it has proved itself; None if it was turned away, has left, or is of torch."""
        try:
            async with asyncio.timeout(PROOF_TIMEOUT_S):
                if self._context is not None and not await self._begin_tls(newcomer, stream):
                    return None
                if self._context is None and not await self._begin_plain(newcomer, stream):
                    return None
                return await self._handshake(newcomer, stream)
        except TimeoutError:
            self._turn_away(newcomer, stream, "it did not prove itself in time", is_busy=True)
        except ForeignBytesError as error:
            self._turn_away(newcomer, stream, str(error), ANSWER)
        except WireError as error:
            self._turn_away(newcomer, stream, str(error))
        except asyncio.CancelledError:
            if not newcomer.gave_way:
                raise
            why = "it had not proved itself when others needed the place"
            self._turn_away(newcomer, stream, why, is_busy=True)
        return None

    async def _begin_tls(self, newcomer: _Newcomer, stream: FrameStream) -> bool:
        """Return whether there is a connection to go on with; not if the other side left without a word."""
        first = await _first_bytes(newcomer.plain)
        if not first:
            return False
        if not TLS_HANDSHAKE.startswith(first):
            with contextlib.suppress(OSError):
                newcomer.plain.send(ANSWER)
                newcomer.plain.recv(DISCARD_BYTES)  # bytes that were not read would turn the answer into a reset
            raise WireError(f"its first bytes are not TLS: {first!r}")
        await self._connect(newcomer, stream)
        return True

    async def _begin_plain(self, newcomer: _Newcomer, stream: FrameStream) -> bool:
        """Return whether there is a connection to go on with; not if it is for torch's store."""
        try:
            if self._passage is not None:
                newcomer.is_of_torch = await _first_bytes(newcomer.plain, len(VALIDATE)) == VALIDATE
        finally:
            if not newcomer.is_of_torch:
                await self._connect(newcomer, stream)  # waits for nothing, and is needed for any answer
        return not newcomer.is_of_torch

    async def _connect(self, newcomer: _Newcomer, stream: FrameStream) -> None:
        newcomer.has_transport = True
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: stream, newcomer.plain, ssl=self._context)
        except (ssl.SSLError, OSError) as error:
            reason = getattr(error, "reason", None) or error.strerror or str(error) or type(error).__name__
            raise WireError(f"no TLS connection was made, its certificate may not fit: {reason}") from error

    async def _handshake(self, newcomer: _Newcomer, stream: FrameStream) -> ServerConnection | None:
        handshake = ServerHandshake(self._token, ("agent", "watcher"), self._certificate)
        while handshake.keys is None:
            payload = await stream.read()
            if payload is None:
                if stream.is_silent:
                    return None  # a probe of whether the port is open
                raise WireError("it left before it proved itself")
            stream.write(handshake.receive(payload))
        stream.buffer.limit = REPORT_FRAME_BYTES_MAX
        return ServerConnection(stream, handshake.role, newcomer.peer, *handshake.seals())

    def _turn_away(
        self,
        newcomer: _Newcomer,
        stream: FrameStream,
        why: str,
        answer: bytes | None = None,
        *,
        is_busy: bool = False,
    ) -> None:
        self._stranger(newcomer.peer, printable(why))
        if answer is not None or stream.is_silent:
            stream.write_raw(answer or ANSWER)
        else:
            stream.write(encode(Refusal(printable(why), is_busy)))

    async def _handle(self, connection: ServerConnection) -> None:
        assert self._handler is not None
        try:
            await self._handler(connection)
        except WireError as error:
            self._stranger(connection.peer, printable(str(error)))
            connection.send(Refusal(printable(str(error))))


class _Newcomer:
    """A connection that has not proved itself yet."""

    task: asyncio.Task[None]

    def __init__(self, plain: socket.socket, address: str, peer: str, patience: _Patience) -> None:
        self.plain, self.address, self.peer = plain, address, peer
        self._patience, self._came_at = patience, patience.passed_s
        self.gave_way = False
        """Whether it was ended because others needed its place."""
        self.is_of_torch = False
        """Whether it began as a client of torch's store does."""
        self.has_transport = False
        """Whether asyncio closes the socket."""

    @property
    def age_s(self) -> float:
        """How long it has been there, and could have been heard."""
        return self._patience.passed_s - self._came_at


class _Patience:
    """A clock that goes by the rounds of the event loop, in each of which everything is read that has come: a process
    that is busy does not count its own slowness as the other side's. Else all agents of a large job, connecting at once
    to a busy master, would make each other give way without an end."""

    def __init__(self, is_wanted: Callable[[], bool]) -> None:
        self._is_wanted = is_wanted
        self._timer: asyncio.TimerHandle | None = None
        self.passed_s = 0.0

    def start(self) -> None:
        """Go on for as long as it is wanted."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PATIENCE_TICK_S, self._tick)

    def _tick(self) -> None:
        self.passed_s += PATIENCE_TICK_S
        self._timer = None
        if self._is_wanted():
            self.start()


async def _listen(host: str, port: int) -> list[socket.socket]:
    """Return listening sockets for all addresses of a host, on one port."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            listener = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
            listeners.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            shared_port = port or (listeners[0].getsockname()[1] if len(listeners) > 1 else 0)
            try:
                listener.bind((address[0], shared_port, *address[2:]))
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL or len(dict.fromkeys(found)) == 1:
                    raise
                listeners.remove(listener)  # a name of several addresses, of which this machine has not all
                listener.close()
                continue
            listener.listen(BACKLOG_CONNECTIONS)
        if not listeners:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


async def _first_bytes(plain: socket.socket, bytes_max: int = len(TLS_HANDSHAKE)) -> bytes:
    """Return the first bytes that a connection brings, without taking them out of it; none if it is closed."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(plain, lambda: None if readable.done() else readable.set_result(None))
    try:
        await readable
    finally:
        loop.remove_reader(plain)
    try:
        return plain.recv(bytes_max, socket.MSG_PEEK)
    except OSError:
        return b""
