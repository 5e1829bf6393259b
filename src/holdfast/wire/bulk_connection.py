"""Connections between agents for images: frames (frames.py) on blocking sockets, with raw blocks between them.

    client -> server   the preamble and the handshake of every connection (auth.py), with the role `peer`
    afterwards         sealed frames (bulk_messages.py); after a `Block` come its raw bytes

Headers are sealed. Blocks are not, as a keyed digest costs more than the transfer: each carries its crc32c, in its
sealed header, and counts only once the receiver has verified it in the memory where it stays. So damage is always
noticed; against an attacker who changes bytes on the way there is TLS. Peers are addressed by numbers that
certificates seldom have, so the name in a certificate is not checked: the proof of the token is bound to it instead.

Everything here blocks: it is for threads. The whole handshake has a deadline, and a connection on which nothing moves
for `STALL_S` is given up.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from holdfast.errors import WireError
from holdfast.wire.auth import SEAL_BYTES, ClientHandshake, Refusal, Seal, ServerHandshake
from holdfast.wire.bulk_messages import BulkReply, BulkRequest
from holdfast.wire.frames import (
    ANSWER,
    HANDSHAKE_FRAME_BYTES_MAX,
    LENGTH,
    PREAMBLE,
    ForeignBytesError,
    check_length,
    check_preamble,
    decode,
    encode,
    frame_of,
)
from holdfast.wire.strangers import StrangerLog, UnprovedConnections, printable, unproved_max
from holdfast.wire.tls import TLS_HANDSHAKE, Tls

FRAME_BYTES_MAX = 64 * 2**20
"""Limit after the proof. An inventory has the checksums of all images of a node: for 100 GB, 50 kB."""
HANDSHAKE_S = 10.0
UNPROVED_MAX = 256
UNPROVED_PER_ADDRESS_MAX = 128
"""A partner opens one connection, or one for each of its workers."""
CROWDED_S = 0.25
"""When the places are taken, unproved connections that are older than this give way to new ones."""
STALL_S = 20.0
"""A machine that lost power says nothing; a busy one is not silent for so long."""

_requests: msgspec.msgpack.Decoder[BulkRequest] = msgspec.msgpack.Decoder(BulkRequest)
_replies: msgspec.msgpack.Decoder[BulkReply] = msgspec.msgpack.Decoder(BulkReply)
T = TypeVar("T")


class BulkConnection:
    """One end of a connection, after the proof."""

    def __init__(self, connection: socket.socket, seal: Seal, opener: Seal) -> None:
        self._connection, self._seal, self._opener = connection, seal, opener
        connection.settimeout(STALL_S)

    def send(self, message: object, block: memoryview | None = None) -> None:
        """Send one frame, and the raw bytes that belong to it."""
        self._connection.sendall(frame_of(self._seal.close(encode(message))))
        if block is not None:
            self._connection.sendall(block)

    def receive(self, decoder: msgspec.msgpack.Decoder[T]) -> T:
        """Return the next message. WireError if it is not one."""
        payload = _read_frame(self._connection, FRAME_BYTES_MAX + SEAL_BYTES)
        return decode(decoder, self._opener.open(payload))

    def receive_into(self, buffer: memoryview) -> None:
        """Fill the buffer with raw bytes."""
        _read_into(self._connection, buffer)

    def request(self) -> BulkRequest:
        """Return the next message of a client."""
        return self.receive(_requests)

    def reply(self) -> BulkReply:
        """Return the next message of a server."""
        return self.receive(_replies)

    def cut(self) -> None:
        """Wake the thread that is blocked here, from another one."""
        cut(self._connection)

    def close(self) -> None:
        """Close the socket."""
        self._connection.close()


def cut(connection: socket.socket) -> None:
    """Wake the thread that is blocked in a socket, connecting included. SSLSocket's own shutdown is not made for it."""
    try:
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:
        pass  # it is gone already


def connect(
    host: str, port: int, *, token: str, tls: Tls | None, trying: Callable[[socket.socket], None]
) -> BulkConnection:
    """Connect, and return when both sides are proved. WireError or OSError if that cannot be done. `trying` is called
    with the socket before, so that another thread may cut it short."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    plain = connection = socket.socket(family, kind, protocol)
    try:
        trying(plain)
        deadline = time.monotonic() + HANDSHAKE_S
        plain.settimeout(HANDSHAKE_S)
        plain.connect(target)
        certificate = b""
        if tls:
            connection = tls.client_context(check_hostname=False).wrap_socket(plain)
            certificate = connection.getpeercert(binary_form=True) or b""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handshake = ClientHandshake(token, "peer", "the other agent", certificate)
        connection.sendall(PREAMBLE + frame_of(handshake.first))
        while handshake.keys is None:
            answer = handshake.receive(_read_frame(connection, HANDSHAKE_FRAME_BYTES_MAX, deadline))
            if answer is not None:
                connection.sendall(frame_of(answer))
        return BulkConnection(connection, *handshake.seals())
    except BaseException:
        connection.close()
        raise


class UnprovedPeer:
    """A connection to a bulk port that has not proved itself yet."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.connection, self.peer, self.address = connection, peer, peer.rpartition(":")[0]
        self.came_at = time.monotonic()


class PeerAdmission:
    """The way into a bulk port: unproved connections have places of their own, and when those are taken the oldest one
    gives way, so that strangers shut out no peer."""

    def __init__(self, *, token: str, tls: Tls | None) -> None:
        self._token, self._tls, self._is_closing = token, tls, False
        self._strangers = StrangerLog("bulk")
        self._unproved = UnprovedConnections(unproved_max(UNPROVED_MAX), UNPROVED_PER_ADDRESS_MAX)
        self._lock = threading.Lock()
        self._waiting: dict[UnprovedPeer, None] = {}  # in the order in which they came

    def enter(self, connection: socket.socket, peer: str) -> UnprovedPeer | None:
        """Count a new connection as unproved; None if there is no place for it, which is logged."""
        newcomer = UnprovedPeer(connection, peer)
        with self._lock:
            if self._unproved.enter(newcomer.address) or self._make_room_for(newcomer.address):
                self._waiting[newcomer] = None
                return newcomer
        self.turned_away(peer, "too many connections have not proved themselves")
        return None

    def turned_away(self, peer: str, why: str) -> None:
        """Log that a connection was not accepted, or count it."""
        self._strangers.turned_away(peer, why)

    def welcome(self, newcomer: UnprovedPeer) -> BulkConnection | None:
        """Return the connection once it is proved; None if it was turned away, which is logged. It no longer counts as
        unproved afterwards."""

        def wrapped(connection: socket.socket) -> None:
            newcomer.connection = connection

        try:
            return welcome(newcomer.connection, token=self._token, tls=self._tls, wrapped=wrapped)
        except (WireError, OSError) as error:
            if not self._is_closing:
                self._strangers.turned_away(newcomer.peer, str(error) or type(error).__name__)
            return None
        finally:
            with self._lock:
                self._forget(newcomer)

    def close(self) -> None:
        """Log what was counted of strangers. Connections that end from now on are no strangers."""
        self._is_closing = True
        self._strangers.close()

    def _make_room_for(self, address: str) -> bool:
        """End the oldest unproved connection of this address, or of all if all places are taken, if it had its time."""
        for oldest in (self._oldest(address), self._oldest() if self._unproved.is_full else None):
            if oldest is not None and time.monotonic() - oldest.came_at >= CROWDED_S:
                self._forget(oldest)
                cut(oldest.connection)
                return self._unproved.enter(address)
        return False

    def _oldest(self, address: str | None = None) -> UnprovedPeer | None:
        return next((one for one in self._waiting if address in (None, one.address)), None)

    def _forget(self, newcomer: UnprovedPeer) -> None:
        if newcomer in self._waiting:
            del self._waiting[newcomer]
            self._unproved.leave(newcomer.address)


def welcome(
    plain: socket.socket,
    *,
    token: str,
    tls: Tls | None,
    wrapped: Callable[[socket.socket], None] = lambda connection: None,
) -> BulkConnection:
    """Return a connection whose client has proved itself. A stranger gets an answer, and WireError or OSError is
    raised, whose text may hold what the stranger sent. `wrapped` is called with the TLS socket that takes the place of
    the plain one."""
    deadline = time.monotonic() + HANDSHAKE_S
    plain.settimeout(HANDSHAKE_S)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection, certificate = plain, b""
    if tls:
        first = plain.recv(len(TLS_HANDSHAKE), socket.MSG_PEEK)
        if not TLS_HANDSHAKE.startswith(first):
            plain.sendall(ANSWER)
            plain.recv(HANDSHAKE_FRAME_BYTES_MAX)  # bytes that were not read would turn the answer into a reset
            raise WireError(f"its first bytes are not TLS: {first!r}")
        plain.settimeout(_left_s(deadline))
        context, certificate = tls.server_context(), tls.certificate()
        connection = context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        wrapped(connection)
    try:
        if isinstance(connection, ssl.SSLSocket):
            connection.do_handshake()
        return _prove(connection, ServerHandshake(token, ("peer",), certificate), deadline)
    except ForeignBytesError:
        connection.sendall(ANSWER)
        connection.close()
        raise
    except WireError as error:
        connection.sendall(frame_of(encode(Refusal(printable(str(error))))))
        connection.close()
        raise
    except BaseException:
        connection.close()
        raise


def _prove(connection: socket.socket, handshake: ServerHandshake, deadline: float) -> BulkConnection:
    received = b""
    while len(received) < len(PREAMBLE):
        connection.settimeout(_left_s(deadline))
        more = connection.recv(len(PREAMBLE) - len(received))
        if not more:
            raise ForeignBytesError(f"it ended the connection after {received!r}")
        received += more
        check_preamble(received)
    while handshake.keys is None:
        answer = handshake.receive(_read_frame(connection, HANDSHAKE_FRAME_BYTES_MAX, deadline))
        connection.sendall(frame_of(answer))
    return BulkConnection(connection, *handshake.seals())


def _read_frame(connection: socket.socket, limit: int, deadline: float | None = None) -> bytes:
    """Return the payload of the next frame; nothing longer than the limit is allocated."""
    header = bytearray(LENGTH.size)
    _read_into(connection, memoryview(header), deadline)
    length = LENGTH.unpack(header)[0]
    check_length(length, limit)
    payload = bytearray(length)
    _read_into(connection, memoryview(payload), deadline)
    return bytes(payload)


def _read_into(connection: socket.socket, buffer: memoryview, deadline: float | None = None) -> None:
    """Fill the buffer. With a deadline it is that of the whole, however slowly the bytes come."""
    while buffer:
        if deadline is not None:
            connection.settimeout(_left_s(deadline))
        count = connection.recv_into(buffer)
        if not count:
            raise WireError("the other side ended the connection")
        buffer = buffer[count:]


def _left_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("it did not prove itself in time")
    return left_s
