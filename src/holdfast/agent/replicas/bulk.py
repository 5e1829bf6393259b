"""The agent's bulk port, and how another agent's is used. What is said there: wire/bulk.py.

Threads do it: one a connection, so that neither a checksum nor a copy ever keeps the event loop. A block is received
where it stays (shared memory), verified there, and asked for again if it is not what was sent. The sender keeps a few
blocks on the way while it waits for the receiver's word.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Protocol

import structlog

from holdfast.agent.replicas.blocks import block_count, checksum, pack, span, unpack
from holdfast.agent.store_ports import listen
from holdfast.errors import HoldfastError, ReplicaError, WireError
from holdfast.wire.bulk import (
    Again,
    Ask,
    Block,
    Contribute,
    Go,
    Inventory,
    Kept,
    Label,
    Line,
    Offer,
    Read,
    Refused,
    Sealed,
    Took,
    connect,
    cut,
    welcome,
)
from holdfast.wire.tls import Tls

CONNECTIONS_MAX = 256
"""A node holds for a handful of others, and each has one, or one a worker for parity; more are strangers."""
BLOCKS_UNDER_WAY_MAX = 4
RESENDS_MAX = 3
"""Of one block. What is damaged as often is damaged where it comes from."""
CLOSE_S = 5.0

log = structlog.get_logger("agent")


class Sink(Protocol):
    """Where the blocks of one image go."""

    @property
    def size_bytes(self) -> int: ...

    def buffer(self, index: int) -> memoryview:
        """As large as the block; may be asked for again."""

    def take(self, index: int) -> None:
        """What is in the buffer is verified."""

    def seal(self, checksums: bytes) -> None:
        """All blocks are in."""

    def abandon(self) -> None:
        """No more will come. Also called after `seal`, where it does nothing."""


class Keeper(Protocol):
    """Who decides what is kept here. Called from threads; ReplicaError is a refusal."""

    def offer(self, label: Label, whole: int) -> Sink | None:
        """None: it is here already. `whole`: see Offer."""

    def contribute(self, piece: Contribute) -> Sink | None: ...

    def inventory(self) -> tuple[Kept, ...]: ...

    def reading(self, wanted: Read) -> AbstractContextManager[memoryview]:
        """The whole of it, unchanged meanwhile."""


class BulkServer:
    """Listens; `port` is known from the start."""

    def __init__(self, address: str, *, token: str, tls: Tls | None, keeper: Keeper) -> None:
        self._token, self._tls, self._keeper = token, tls, keeper
        self._listener = listen(address)
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._lines: dict[threading.Thread, socket.socket | Line] = {}
        self._closing = False
        self._accepting = threading.Thread(target=self._accept, name="bulk", daemon=True)

    def start(self) -> None:
        self._accepting.start()

    def close(self) -> None:
        """End all connections. Threads that are in the middle of something find their lines cut."""
        self._closing = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._accepting.is_alive():
            self._accepting.join(CLOSE_S)
        self._listener.close()
        with self._lock:
            lines = dict(self._lines)
        for line in lines.values():
            _cut(line)
        for thread in lines:
            thread.join(CLOSE_S)

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if not self._closing:
                    log.warning(f"the bulk port cannot accept: {error.strerror}")
                    threading.Event().wait(0.1)  # out of descriptors, most likely: there is no event for one
                continue
            self._let_in(connection, f"{address[0]}:{address[1]}")

    def _let_in(self, connection: socket.socket, peer: str) -> None:
        thread = threading.Thread(target=self._serve, args=(connection, peer), name=f"bulk-{peer}", daemon=True)
        with self._lock:
            is_full = len(self._lines) >= CONNECTIONS_MAX
            if not is_full:
                self._lines[thread] = connection
        if is_full:
            log.warning(f"turned away {peer}: {CONNECTIONS_MAX} connections are open")
            connection.close()
        else:
            thread.start()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        line: Line | None = None
        try:
            line = welcome(connection, token=self._token, tls=self._tls)
            with self._lock:
                self._lines[threading.current_thread()] = line
            while not self._closing:
                self._answer(line)
        except (WireError, OSError) as error:
            self._say(peer, error, was_let_in=line is not None)
        finally:
            if line:
                line.close()
            connection.close()
            with self._lock:
                del self._lines[threading.current_thread()]

    def _say(self, peer: str, error: Exception, *, was_let_in: bool) -> None:
        if self._closing:
            return
        if was_let_in:
            log.debug(f"the bulk connection from {peer} ended: {error}")
        else:
            log.warning(f"turned away a stranger at the bulk port, {peer}: {error}")

    def _answer(self, line: Line) -> None:
        request = line.request()
        try:
            match request:
                case Offer(label=label, whole=whole):
                    _take_in(line, self._keeper.offer(label, whole), label.checksums)
                case Contribute():
                    _take_in(line, self._keeper.contribute(request), b"")
                case Ask():
                    line.send(Inventory(self._keeper.inventory()))
                case Read(index=index):
                    with self._keeper.reading(request) as content:
                        _give(line, content, index)
                case Block():
                    raise WireError("a block came that nobody asked for")
        except ReplicaError as error:
            line.send(Refused(str(error)))


def _give(line: Line, content: memoryview, index: int) -> None:
    if index >= block_count(len(content)):
        raise ReplicaError(f"it has no block {index}")
    block = content[span(index, len(content))]
    line.send(Block(index, len(block), checksum(block)), block)


def _take_in(line: Line, sink: Sink | None, checksums: bytes) -> None:
    """Until all blocks are in and right."""
    if sink is None:
        line.send(Sealed())
        return
    try:
        line.send(Go())
        known = unpack(checksums)
        taken: dict[int, int] = {}
        while len(taken) < block_count(sink.size_bytes):
            block = line.request()
            if not isinstance(block, Block):
                raise WireError("another message came in the middle of an image")
            taken |= _receive(line, sink, block, known)
        sink.seal(pack([taken[index] for index in range(len(taken))]))
        line.send(Sealed())
    finally:
        sink.abandon()


def _receive(line: Line, sink: Sink, block: Block, known: tuple[int, ...]) -> dict[int, int]:
    """One block; nothing if it is not right."""
    index = block.index
    if index >= block_count(sink.size_bytes):
        raise WireError(f"block {index} is beyond the image")
    buffer = sink.buffer(index)
    if len(buffer) != block.size_bytes:
        raise WireError(f"block {index} has {block.size_bytes} bytes, not {len(buffer)}")
    line.receive_into(buffer)
    found = checksum(buffer)
    if found != block.checksum or (known and found != known[index]):
        line.send(Again(index))
        return {}
    sink.take(index)
    line.send(Took(index))
    return {index: found}


class BulkClient:
    """A line to another agent's bulk port; made when it is needed, made again after it broke. For one thread at a time,
    but for `close`."""

    def __init__(self, host: str, port: int, *, token: str, tls: Tls | None) -> None:
        self._host, self._port, self._token, self._tls = host, port, token, tls
        self._line: Line | None = None
        self._lock = threading.Lock()
        self._socket: socket.socket | Line | None = None
        self._closed = False
        self.blocks_again = 0
        """How many had to be sent or read again."""

    def put(self, label: Label, image: memoryview, whole: int = -1) -> None:
        """Until it is sealed there. ReplicaError if they do not want it, WireError or OSError if the line broke."""
        self._converse(lambda line: self._put(line, Offer(label, whole), image, label.checksums))

    def contribute(self, piece: Contribute, content: memoryview) -> None:
        """The same for a piece of a group's parity."""
        self._converse(lambda line: self._put(line, piece, content, b""))

    def inventory(self) -> tuple[Kept, ...]:
        """What they have."""
        found: list[Kept] = []
        self._converse(lambda line: found.extend(_inventory(line)))
        return tuple(found)

    def read(self, wanted: Read, buffer: memoryview) -> None:
        """One block of what they have."""
        self._converse(lambda line: self._read(line, wanted, buffer))

    def close(self) -> None:
        """From any thread: whoever is in the middle of something gets an error."""
        self._closed = True
        with self._lock:
            if self._socket:
                _cut(self._socket)

    def _converse(self, talk: Callable[[Line], None]) -> None:
        """On the line there is; if that one turns out to be dead (idle for too long), once more on a new one."""
        line, is_old = self._line, self._line is not None
        for is_last in (False, True) if is_old else (True,):
            try:
                if self._closed:
                    raise WireError("the line is closed")
                line = line or self._connect()
                talk(line)
                return
            except (WireError, OSError):
                self.hang_up()
                line = None
                if is_last or self._closed:
                    raise
            except ReplicaError:
                self.hang_up()  # blocks may be under way that they do not expect
                raise

    def _connect(self) -> Line:
        line = connect(self._host, self._port, token=self._token, tls=self._tls, trying=self._watch)
        self._line = line
        self._watch(line)
        return line

    def _watch(self, line: socket.socket | Line | None) -> None:
        """What `close` has to cut; at once, if it came meanwhile."""
        with self._lock:
            self._socket = line
            if self._closed and line:
                _cut(line)

    def hang_up(self) -> None:
        """When no thread uses it any more."""
        self._watch(None)
        if self._line:
            self._line.close()
            self._line = None

    def _put(self, line: Line, offer: Offer | Contribute, content: memoryview, checksums: bytes) -> None:
        line.send(offer)
        reply = line.reply()
        if isinstance(reply, Go):
            _Sending(line, content, unpack(checksums)).run(self)
        elif not isinstance(reply, Sealed):
            raise _refusal(reply)

    def _read(self, line: Line, wanted: Read, buffer: memoryview) -> None:
        for _ in range(RESENDS_MAX + 1):
            line.send(wanted)
            reply = line.reply()
            if not isinstance(reply, Block):
                raise _refusal(reply)
            if reply.size_bytes != len(buffer):
                raise WireError(f"block {reply.index} has {reply.size_bytes} bytes, not {len(buffer)}")
            line.receive_into(buffer)
            if checksum(buffer) == reply.checksum:
                return
            self.blocks_again += 1
        raise WireError(f"block {wanted.index} came damaged {RESENDS_MAX + 1} times")


def _inventory(line: Line) -> tuple[Kept, ...]:
    line.send(Ask())
    reply = line.reply()
    if not isinstance(reply, Inventory):
        raise _refusal(reply)
    return reply.kept


class _Sending:
    """One image on its way."""

    def __init__(self, line: Line, content: memoryview, known: tuple[int, ...]) -> None:
        self._line, self._content, self._known = line, content, known
        self._to_send = deque(range(block_count(len(content))))
        self._under_way = 0
        self._again: Counter[int] = Counter()

    def run(self, client: BulkClient) -> None:
        while self._to_send or self._under_way:
            while self._to_send and self._under_way < BLOCKS_UNDER_WAY_MAX:
                self._send(self._to_send.popleft())
            client.blocks_again += self._hear()
        reply = self._line.reply()
        if not isinstance(reply, Sealed):
            raise _refusal(reply)

    def _send(self, index: int) -> None:
        block = self._content[span(index, len(self._content))]
        number = self._known[index] if self._known else checksum(block)
        self._line.send(Block(index, len(block), number), block)
        self._under_way += 1

    def _hear(self) -> bool:
        """One word of the receiver's; whether a block must go again."""
        reply = self._line.reply()
        match reply:
            case Took():
                self._under_way -= 1
                return False
            case Again(index=index):
                self._under_way -= 1
                self._again[index] += 1
                if self._again[index] > RESENDS_MAX:
                    raise ReplicaError(f"block {index} is not what its checksum says: it is damaged here")
                self._to_send.append(index)
                return True
        raise _refusal(reply)


def _refusal(reply: object) -> HoldfastError:
    if isinstance(reply, Refused):
        return ReplicaError(reply.why)
    return WireError(f"an unexpected {type(reply).__name__}")


def _cut(line: socket.socket | Line) -> None:
    if isinstance(line, Line):
        line.cut()
    else:
        cut(line)
