"""Images between agents: plain TCP (TLS where the job has it), made for large blocks.

    client -> server   MAGIC                      what begins otherwise is a stranger
    both               the mutual proof of the job's token, as in secure.py; the token does not travel
    afterwards         frames: length (4 bytes), seal (16), a small tagged struct; after a `Block` come its raw bytes

Headers are sealed. Blocks are not, as a keyed digest costs more than the transfer: each carries its crc32c, in its
sealed header, and counts only once the receiver has verified it in the memory where it stays. So damage is always
noticed; who must fear somebody on the line uses TLS.

With TLS the proof includes the server's certificate: a machine in the middle that has another one, from the same root,
proves nothing by passing our words on.

Everything here blocks: it is for threads. A connection on which nothing moves for `STALL_S` is given up.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
import struct
from collections.abc import Callable
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from holdfast.errors import AuthenticationError, WireError
from holdfast.wire.secure import (
    PROTOCOL_VERSION,
    SEAL_BYTES,
    Challenge,
    Opening,
    Response,
    Seal,
    check_opening,
    check_proof,
    derive,
    new_nonce,
)
from holdfast.wire.tls import Tls

MAGIC = b"HFBULK1\n"
ANSWER = b"holdfast: this port is for agents of a Holdfast job; what you sent is not their protocol\n"
BLOCK_BYTES = 8 * 2**20
"""As in images' checksums. Large enough that a header costs nothing, small enough to be sent again."""
IMAGE_BYTES_MAX = 2**40
FRAME_BYTES_MAX = 64 * 2**20
"""Of who has proved itself. An inventory has the checksums of all that is kept: for 100 GB, 50 kB."""
HANDSHAKE_FRAME_BYTES_MAX = 4_096
HANDSHAKE_S = 10.0
STALL_S = 20.0
"""A machine that lost power says nothing; a busy one is not silent for so long."""

_LENGTH = struct.Struct("!I")
_TLS_HANDSHAKE = b"\x16\x03"

Count = Annotated[int, Meta(ge=0, le=2**31)]
Name = Annotated[str, Meta(min_length=1, max_length=512)]
Size = Annotated[int, Meta(ge=1, le=IMAGE_BYTES_MAX)]
Step = Annotated[int, Meta(ge=-1, le=2**62)]


class Label(msgspec.Struct, frozen=True, kw_only=True):
    """Which image it is: what it needs to be known by for as long as it is kept."""

    node_id: Name
    seat: Count
    """The local rank on that node."""
    part: Count
    shards: Count
    shares: Count
    view: Count
    step: Step
    size_bytes: Size
    seed: int = 0
    first_step: int = 0
    checksums: bytes = b""
    """crc32c of each block, four bytes each, big-endian; empty while they are not known."""

    @property
    def age(self) -> tuple[int, int]:
        """Later is larger. A job that went back to a checkpoint has a newer view and an earlier step."""
        return self.view, self.step


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """Client: keep this image. The blocks follow once the server says Go."""

    label: Label
    whole: Step = -1
    """The step of which the image's rank knows that all ranks' images are whole, here and on their partners; -1: none.
    What is kept of it stays until a later one is."""


class Contribute(msgspec.Struct, frozen=True, tag="contribute", kw_only=True):
    """Client: take this piece of an image into the parity of its group. See agent/replicas/parity.py."""

    label: Label
    group: tuple[Name, ...]
    size_bytes: Count
    """Of the piece."""
    whole: Step = -1
    """As in Offer."""


class Block(msgspec.Struct, frozen=True, tag="block"):
    """Followed by as many raw bytes."""

    index: Count
    size_bytes: Annotated[int, Meta(ge=0, le=BLOCK_BYTES)]
    checksum: Annotated[int, Meta(ge=0, lt=2**32)]


class Go(msgspec.Struct, frozen=True, tag="go"):
    """Server: send."""


class Took(msgspec.Struct, frozen=True, tag="took"):
    """Server: the block is here, and is what was sent."""

    index: Count


class Again(msgspec.Struct, frozen=True, tag="again"):
    """Server: the block is not what was sent."""

    index: Count


class Sealed(msgspec.Struct, frozen=True, tag="sealed"):
    """Server: all of it is here, or was already."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Server: no, in a sentence."""

    why: str


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Client: what have you got?"""


class Kept(msgspec.Struct, frozen=True, kw_only=True, tag="kept"):
    """One thing that a node has: an image of its own, one of another node's, or the parity of its group."""

    kind: Literal["own", "guest", "parity"]
    label: Label
    """Of parity: its size; seat, view and step it is of."""
    group: tuple[Name, ...] = ()
    members: tuple[Label, ...] = ()
    """Of parity: the images that it is of."""


class Inventory(msgspec.Struct, frozen=True, tag="inventory"):
    """Server: this."""

    kept: tuple[Kept, ...]


class Read(msgspec.Struct, frozen=True, kw_only=True, tag="read"):
    """Client: give me one block of it."""

    kind: Literal["own", "guest", "parity"]
    node_id: Name
    seat: Count
    view: Count
    step: Annotated[int, Meta(ge=-1, le=2**62)]
    index: Count


ToKeeper = Offer | Contribute | Block | Ask | Read
FromKeeper = Go | Took | Again | Sealed | Refused | Inventory | Block

_encoder = msgspec.msgpack.Encoder()
_to_keeper: msgspec.msgpack.Decoder[ToKeeper] = msgspec.msgpack.Decoder(ToKeeper)
_from_keeper: msgspec.msgpack.Decoder[FromKeeper] = msgspec.msgpack.Decoder(FromKeeper)
T = TypeVar("T")


class Line:
    """One end of a connection, after the proof."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._seal: Seal | None = None
        self._opener: Seal | None = None

    def prove(self, seal: Seal, opener: Seal) -> None:
        """From now on frames are sealed and may be large."""
        self._seal, self._opener = seal, opener
        self._connection.settimeout(STALL_S)

    def send(self, message: object, block: memoryview | None = None) -> None:
        """One frame, and the raw bytes that belong to it."""
        payload = _encoder.encode(message)
        if self._seal:
            payload = self._seal.close(payload)
        self._connection.sendall(_LENGTH.pack(len(payload)) + payload)
        if block is not None:
            self._connection.sendall(block)

    def receive(self, decoder: msgspec.msgpack.Decoder[T]) -> T:
        """The next frame; WireError if it is not one."""
        limit = FRAME_BYTES_MAX + SEAL_BYTES if self._opener else HANDSHAKE_FRAME_BYTES_MAX
        length = _LENGTH.unpack(self._read(_LENGTH.size))[0]
        if length > limit:
            raise WireError(f"a frame of {length} bytes was announced; {limit} are allowed")
        payload = self._read(length)
        if self._opener:
            payload = self._opener.open(payload)
        try:
            return decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise WireError(f"a frame does not hold the expected message: {error}") from error

    def receive_into(self, buffer: memoryview) -> None:
        """Exactly as many raw bytes as the buffer has."""
        while buffer:
            count = self._connection.recv_into(buffer)
            if not count:
                raise WireError("the other side ended the connection")
            buffer = buffer[count:]

    def request(self) -> ToKeeper:
        """For the server."""
        return self.receive(_to_keeper)

    def reply(self) -> FromKeeper:
        """For the client."""
        return self.receive(_from_keeper)

    def cut(self) -> None:
        """Wake whoever is blocked here, from another thread."""
        cut(self._connection)

    def close(self) -> None:
        self._connection.close()

    def _read(self, count: int) -> bytes:
        content = bytearray(count)
        self.receive_into(memoryview(content))
        return bytes(content)


def cut(connection: socket.socket) -> None:
    """Wake whoever is blocked in it, connecting included. SSLSocket's own shutdown is not made for that."""
    try:
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:
        pass  # it is gone already


_opening = msgspec.msgpack.Decoder(Opening)
_challenge = msgspec.msgpack.Decoder(Challenge)
_response = msgspec.msgpack.Decoder(Response)


def connect(
    host: str, port: int, *, token: str, tls: Tls | None, trying: Callable[[socket.socket], None]
) -> Line:
    """Both sides proved. WireError or OSError if that cannot be done. `trying` is told of the socket before, so that
    another thread may cut it short."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    plain = connection = socket.socket(family, kind, protocol)
    try:
        trying(plain)
        plain.settimeout(HANDSHAKE_S)
        plain.connect(target)
        certificate = b""
        if tls:
            connection = _client_context(tls).wrap_socket(plain)
            certificate = connection.getpeercert(binary_form=True) or b""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(MAGIC)
        return _prove_as_client(connection, _secret(token, certificate))
    except BaseException:
        connection.close()
        raise


def welcome(plain: socket.socket, *, token: str, tls: Tls | None) -> Line:
    """The server's side of `connect`. Whoever is not one of us gets an answer and WireError is raised."""
    plain.settimeout(HANDSHAKE_S)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection, certificate = plain, b""
    if tls:
        first = plain.recv(2, socket.MSG_PEEK)
        if not _TLS_HANDSHAKE.startswith(first):
            plain.sendall(ANSWER)
            raise WireError(f"its first bytes are not TLS: {first!r}")
        connection = _server_context(tls).wrap_socket(plain, server_side=True)
        certificate = ssl.PEM_cert_to_DER_cert(_first_certificate(tls))
    try:
        _check_magic(connection)
        return _prove_as_server(connection, _secret(token, certificate))
    except BaseException:
        connection.close()
        raise


def _check_magic(connection: socket.socket) -> None:
    heard = b""
    while len(heard) < len(MAGIC):
        more = connection.recv(len(MAGIC) - len(heard))
        heard += more
        if not more or not MAGIC.startswith(heard):
            connection.sendall(ANSWER)
            raise WireError(f"its first bytes are not our protocol: {heard!r}")


def _prove_as_client(connection: socket.socket, secret: str) -> Line:
    line = Line(connection)
    nonce = new_nonce()
    line.send(Opening(version=PROTOCOL_VERSION, role="agent", nonce=nonce))
    challenge = line.receive(_challenge)
    keys = derive(secret, nonce, challenge.nonce)
    check_proof(challenge.proof, keys.server_proof, "the other agent")
    line.send(Response(proof=keys.client_proof))
    line.prove(Seal(keys.to_server), Seal(keys.to_client))
    if not isinstance(line.reply(), Go):
        raise AuthenticationError("the other agent did not let us in")
    return line


def _prove_as_server(connection: socket.socket, secret: str) -> Line:
    line = Line(connection)
    opening = line.receive(_opening)
    check_opening(opening)
    nonce = new_nonce()
    keys = derive(secret, opening.nonce, nonce)
    line.send(Challenge(nonce=nonce, proof=keys.server_proof))
    check_proof(line.receive(_response).proof, keys.client_proof, "the other agent")
    line.prove(Seal(keys.to_client), Seal(keys.to_server))
    line.send(Go())
    return line


def _secret(token: str, certificate: bytes) -> str:
    """Not the master's: a proof that is given here is good for nothing there."""
    return f"bulk/{hashlib.sha256(certificate).hexdigest() if certificate else ''}/{token}"


def _client_context(tls: Tls) -> ssl.SSLContext:
    """Peers are addressed by numbers that certificates seldom have: the proof of the token is bound to the certificate
    instead."""
    tls.read()  # for its sentence, if a file is missing
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(tls.ca or tls.cert)
    if tls.ca:
        context.load_cert_chain(tls.cert, tls.key)
    return context


def _server_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.cert, tls.key)
    if tls.ca:
        context.load_verify_locations(tls.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _first_certificate(tls: Tls) -> str:
    end = "-----END CERTIFICATE-----"
    text = tls.read()[0].decode()
    return text[text.index("-----BEGIN CERTIFICATE-----") : text.index(end) + len(end)]
