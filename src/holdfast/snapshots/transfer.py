"""Images between agents: the server at an agent's bulk port, and its client. The messages: wire/bulk_messages.py.

Each connection has a thread of its own, so that neither a checksum nor a copy ever blocks the event loop. A block is
received where it stays (shared memory), verified there, and requested again if it is not what was sent. The sender
keeps a few blocks in flight while it waits for the receiver's answers.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Protocol

from holdfast.core.image_info import ImageInfo
from holdfast.errors import HoldfastError, ReplicaError, WireError
from holdfast.util.blocks import block_count, checksum, pack_checksums, span, unpack_checksums
from holdfast.util.logs import get_logger
from holdfast.util.network import listen
from holdfast.wire.bulk_connection import BulkConnection, PeerAdmission, UnprovedPeer, connect, cut
from holdfast.wire.bulk_messages import (
    Block,
    BlockReceived,
    Contribute,
    Inventory,
    LinkProbed,
    ListReplicas,
    OfferImage,
    ProbeLink,
    ReadBlocks,
    ReplicaSealed,
    ResendBlock,
    SendBlocks,
    StoredReplica,
    TransferRefused,
)
from holdfast.wire.tls import Tls

CONNECTIONS_MAX = 256
"""A node holds images of a handful of others, and each has one connection, or for parity one for each worker."""
BLOCKS_IN_FLIGHT_MAX = 4
RESENDS_MAX = 3
"""How often one block is sent again. A block that is damaged more often is damaged where it comes from."""
CLOSE_S = 5.0

log = get_logger(__name__)


class BlockSink(Protocol):
    """Where the blocks of one image go."""

    @property
    def size_bytes(self) -> int: ...

    def buffer(self, index: int) -> memoryview:
        """Return memory as large as the block; may be called again."""

    def accept(self, index: int) -> None:
        """Use what is in the buffer, which is verified."""

    def seal(self, checksums: bytes) -> None:
        """Record that all blocks are in."""

    def close(self) -> None:
        """End the transfer. Also called after `seal`, where it does nothing."""


class ReplicaReceiver(Protocol):
    """What decides which images are held here. Called from threads; a ReplicaError is a refusal."""

    def offer(self, image: ImageInfo, complete_step: int) -> BlockSink | None:
        """Return where an image goes; None: it is here already. `complete_step`: see OfferImage."""

    def contribute(self, contribution: Contribute) -> BlockSink | None:
        """Do the same for a piece of a group's parity."""

    def inventory(self) -> tuple[StoredReplica, ...]:
        """Return all images here."""

    def reading(self, wanted: ReadBlocks) -> AbstractContextManager[memoryview]:
        """Give the bytes of an image, which do not change until the end."""


class BulkServer:
    """The server; `port` is known from the start."""

    def __init__(self, address: str, *, token: str, tls: Tls | None, receiver: ReplicaReceiver) -> None:
        self._receiver = receiver
        self._admission = PeerAdmission(token=token, tls=tls)
        self._listener = listen(address)
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, socket.socket | BulkConnection] = {}
        self._closing = False
        self._accepting = threading.Thread(target=self._accept, name="bulk", daemon=True)

    def start(self) -> None:
        """Begin to accept connections."""
        self._accepting.start()

    def close(self) -> None:
        """End all connections. Threads that use one get an error."""
        self._closing = True
        self._admission.close()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._accepting.is_alive():
            self._accepting.join(CLOSE_S)
        self._listener.close()
        with self._lock:
            connections = dict(self._connections)
        for connection in connections.values():
            _cut(connection)
        for thread in connections:
            thread.join(CLOSE_S)

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if not self._closing:
                    self._admission.turned_away("unknown", f"no connection can be accepted now: {error.strerror}")
                    threading.Event().wait(0.1)  # out of descriptors, most likely: there is no event for one
                continue
            self._admit(connection, f"{address[0]}:{address[1]}")

    def _admit(self, connection: socket.socket, peer: str) -> None:
        with self._lock:
            proved = sum(isinstance(one, BulkConnection) for one in self._connections.values())
            newcomer = self._admission.enter(connection, peer) if proved < CONNECTIONS_MAX else None
            if newcomer is not None:
                thread = threading.Thread(target=self._serve, args=(newcomer,), name=f"bulk-{peer}", daemon=True)
                self._connections[thread] = connection
        if newcomer is not None:
            thread.start()
        else:
            connection.close()

    def _serve(self, newcomer: UnprovedPeer) -> None:
        plain, peer = newcomer.connection, newcomer.peer
        connection: BulkConnection | None = None
        try:
            connection = self._admission.welcome(newcomer)
            if connection is None:
                return
            with self._lock:
                self._connections[threading.current_thread()] = connection
            while not self._closing:
                self._answer(connection)
        except (WireError, OSError) as error:
            if not self._closing:
                log.debug("bulk-connection-ended", f"the bulk connection from {peer} ended: {error}")
        finally:
            if connection:
                connection.close()
            plain.close()
            with self._lock:
                del self._connections[threading.current_thread()]

    def _answer(self, connection: BulkConnection) -> None:
        request = connection.request()
        try:
            match request:
                case OfferImage(image=image, complete_step=complete_step):
                    _receive(connection, self._receiver.offer(image, complete_step), image.checksums)
                case Contribute():
                    _receive(connection, self._receiver.contribute(request), b"")
                case ListReplicas():
                    connection.send(Inventory(self._receiver.inventory()))
                case ReadBlocks(index=index):
                    with self._receiver.reading(request) as content:
                        _send_block(connection, content, index)
                case ProbeLink(size_bytes=size_bytes):
                    connection.receive_into(memoryview(bytearray(size_bytes)))
                    connection.send(LinkProbed())
                case Block():
                    raise WireError("a block came that was not requested")
        except ReplicaError as error:
            connection.send(TransferRefused(str(error)))


def _send_block(connection: BulkConnection, content: memoryview, index: int) -> None:
    if index >= block_count(len(content)):
        raise ReplicaError(f"the image has no block {index}")
    block = content[span(index, len(content))]
    connection.send(Block(index, len(block), checksum(block)), block)


def _receive(connection: BulkConnection, sink: BlockSink | None, checksums: bytes) -> None:
    """Receive blocks until all are in and right."""
    if sink is None:
        connection.send(ReplicaSealed())
        return
    try:
        connection.send(SendBlocks())
        known = unpack_checksums(checksums)
        received: dict[int, int] = {}
        while len(received) < block_count(sink.size_bytes):
            block = connection.request()
            if not isinstance(block, Block):
                raise WireError("another message came in the middle of an image")
            received |= _receive_block(connection, sink, block, known)
        sink.seal(pack_checksums([received[index] for index in range(len(received))]))
        connection.send(ReplicaSealed())
    finally:
        sink.close()


def _receive_block(connection: BulkConnection, sink: BlockSink, block: Block, known: tuple[int, ...]) -> dict[int, int]:
    """Receive one block; return its checksum by its index, nothing if it is not right."""
    index = block.index
    if index >= block_count(sink.size_bytes):
        raise WireError(f"block {index} is beyond the image")
    buffer = sink.buffer(index)
    if len(buffer) != block.size_bytes:
        raise WireError(f"block {index} has {block.size_bytes} bytes, not {len(buffer)}")
    connection.receive_into(buffer)
    found = checksum(buffer)
    if found != block.checksum or (known and found != known[index]):
        connection.send(ResendBlock(index))
        return {}
    sink.accept(index)
    connection.send(BlockReceived(index))
    return {index: found}


class BulkClient:
    """A connection to another agent's bulk port; made when it is needed, and again after it broke. For one thread at a
    time, except `close`."""

    def __init__(self, host: str, port: int, *, token: str, tls: Tls | None) -> None:
        self._host, self._port, self._token, self._tls = host, port, token, tls
        self._connection: BulkConnection | None = None
        self._lock = threading.Lock()
        self._socket: socket.socket | BulkConnection | None = None
        self._closed = False
        self.resent_blocks = 0
        """How many blocks had to be sent or read again."""

    def put(self, image: ImageInfo, content: memoryview, complete_step: int = -1) -> None:
        """Send an image and wait until it is sealed there. Raises ReplicaError if it is refused, WireError or OSError
        if the connection broke."""
        self._exchange(
            lambda connection: self._put(connection, OfferImage(image, complete_step), content, image.checksums)
        )

    def contribute(self, contribution: Contribute, content: memoryview) -> None:
        """Do the same for a piece of a group's parity."""
        self._exchange(lambda connection: self._put(connection, contribution, content, b""))

    def inventory(self) -> tuple[StoredReplica, ...]:
        """Return what images the other agent has."""
        found: list[StoredReplica] = []
        self._exchange(lambda connection: found.extend(_inventory(connection)))
        return tuple(found)

    def read(self, wanted: ReadBlocks, buffer: memoryview) -> None:
        """Read one block of what the other agent has."""
        self._exchange(lambda connection: self._read(connection, wanted, buffer))

    def close(self) -> None:
        """End the connection, from any thread: a thread that uses it gets an error."""
        self._closed = True
        with self._lock:
            if self._socket:
                _cut(self._socket)

    def _exchange(self, talk: Callable[[BulkConnection], None]) -> None:
        """Use the connection there is; if that one turns out to be dead (idle for too long), once more on a new one."""
        connection, is_old = self._connection, self._connection is not None
        for is_last in (False, True) if is_old else (True,):
            try:
                if self._closed:
                    raise WireError("the connection is closed")
                connection = connection or self._connect()
                talk(connection)
                return
            except (WireError, OSError):
                self.disconnect()
                connection = None
                if is_last or self._closed:
                    raise
            except ReplicaError:
                self.disconnect()  # blocks may be in flight that the other agent does not expect
                raise

    def _connect(self) -> BulkConnection:
        connection = connect(self._host, self._port, token=self._token, tls=self._tls, trying=self._watch)
        self._connection = connection
        self._watch(connection)
        return connection

    def _watch(self, connection: socket.socket | BulkConnection | None) -> None:
        """Record what `close` has to end, and end it at once if `close` was called before."""
        with self._lock:
            self._socket = connection
            if self._closed and connection:
                _cut(connection)

    def disconnect(self) -> None:
        """Close the connection, when no thread uses it any more."""
        self._watch(None)
        if self._connection:
            self._connection.close()
            self._connection = None

    def _put(
        self, connection: BulkConnection, offer: OfferImage | Contribute, content: memoryview, checksums: bytes
    ) -> None:
        connection.send(offer)
        reply = connection.reply()
        if isinstance(reply, SendBlocks):
            _Sending(connection, content, unpack_checksums(checksums)).run(self)
        elif not isinstance(reply, ReplicaSealed):
            raise _refusal(reply)

    def _read(self, connection: BulkConnection, wanted: ReadBlocks, buffer: memoryview) -> None:
        for _ in range(RESENDS_MAX + 1):
            connection.send(wanted)
            reply = connection.reply()
            if not isinstance(reply, Block):
                raise _refusal(reply)
            if reply.size_bytes != len(buffer):
                raise WireError(f"block {reply.index} has {reply.size_bytes} bytes, not {len(buffer)}")
            connection.receive_into(buffer)
            if checksum(buffer) == reply.checksum:
                return
            self.resent_blocks += 1
        raise WireError(f"block {wanted.index} came damaged {RESENDS_MAX + 1} times")


def _inventory(connection: BulkConnection) -> tuple[StoredReplica, ...]:
    connection.send(ListReplicas())
    reply = connection.reply()
    if not isinstance(reply, Inventory):
        raise _refusal(reply)
    return reply.replicas


class _Sending:
    """An image that is being sent."""

    def __init__(self, connection: BulkConnection, content: memoryview, known: tuple[int, ...]) -> None:
        self._connection, self._content, self._known = connection, content, known
        self._to_send = deque(range(block_count(len(content))))
        self._in_flight = 0
        self._resent: Counter[int] = Counter()

    def run(self, client: BulkClient) -> None:
        while self._to_send or self._in_flight:
            while self._to_send and self._in_flight < BLOCKS_IN_FLIGHT_MAX:
                self._send(self._to_send.popleft())
            client.resent_blocks += self._read_answer()
        reply = self._connection.reply()
        if not isinstance(reply, ReplicaSealed):
            raise _refusal(reply)

    def _send(self, index: int) -> None:
        block = self._content[span(index, len(self._content))]
        number = self._known[index] if self._known else checksum(block)
        self._connection.send(Block(index, len(block), number), block)
        self._in_flight += 1

    def _read_answer(self) -> bool:
        """Read one answer of the receiver; return whether a block must be sent again."""
        reply = self._connection.reply()
        match reply:
            case BlockReceived():
                self._in_flight -= 1
                return False
            case ResendBlock(index=index):
                self._in_flight -= 1
                self._resent[index] += 1
                if self._resent[index] > RESENDS_MAX:
                    raise ReplicaError(f"block {index} does not match its checksum: the image is corrupt here")
                self._to_send.append(index)
                return True
        raise _refusal(reply)


def _refusal(reply: object) -> HoldfastError:
    if isinstance(reply, TransferRefused):
        return ReplicaError(reply.why)
    return WireError(f"an unexpected {type(reply).__name__}")


def _cut(connection: socket.socket | BulkConnection) -> None:
    if isinstance(connection, BulkConnection):
        connection.cut()
    else:
        cut(connection)
