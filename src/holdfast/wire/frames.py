"""Frames: how messages are cut out of a stream of bytes, on control and bulk connections alike.

    client -> server   PREAMBLE, once                 a connection that begins otherwise is a stranger's
    both               length (4 bytes, big-endian) + payload

The length is compared with a limit before anything of that size is allocated. Before the proof of the token the limit
is a few kilobytes. A payload is msgpack, read by `decode`, which has one error for every kind of damage.
"""

from __future__ import annotations

import struct
from typing import TypeVar

import msgspec

from holdfast.errors import WireError

PREAMBLE = b"HFWIRE2\n"
ANSWER = b"holdfast: this port is for agents of a Holdfast job; what you sent is not their protocol\n"
"""The reply to whatever does not begin with the preamble."""
HANDSHAKE_FRAME_BYTES_MAX = 4_096
LENGTH = struct.Struct("!I")

_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")


class ForeignBytesError(WireError):
    """Bytes that are not this protocol at all: they are answered with `ANSWER` instead of a frame."""


def encode(message: object) -> bytes:
    """Return a message as the payload of a frame."""
    return _encoder.encode(message)


def decode(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    """Return the message in a payload. WireError if it holds none: truncated, of another type, not UTF-8, too deep."""
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"a message cannot be decoded: {error}") from error


def frame_of(payload: bytes) -> bytes:
    """Return the frame that carries a payload."""
    return LENGTH.pack(len(payload)) + payload


def check_length(length: int, limit: int) -> None:
    """Raise WireError if a frame is longer than is allowed."""
    if length > limit:
        raise WireError(f"a frame of {length} bytes was announced; {limit} are allowed")


def check_preamble(received: bytes) -> None:
    """Raise ForeignBytesError if a connection that begins with these bytes cannot be ours."""
    if not PREAMBLE.startswith(received[: len(PREAMBLE)]):
        raise ForeignBytesError(f"its first bytes are not our protocol: {received[:24]!r}")


class FrameBuffer:
    """Bytes that were received and not yet read as frames. `limit` may be raised at any time."""

    def __init__(self, limit: int, *, expects_preamble: bool) -> None:
        self.limit = limit
        self._expects_preamble = expects_preamble
        self._bytes = bytearray()

    def __len__(self) -> int:
        return len(self._bytes)

    def feed(self, data: bytes) -> None:
        """Add what was received."""
        self._bytes += data

    def starts_with(self, prefix: bytes) -> bool:
        """Return whether the unread bytes begin with these."""
        return self._bytes.startswith(prefix)

    def next(self) -> bytes | None:
        """Return the payload of the next frame; None while it is incomplete."""
        if self._expects_preamble and not self._read_preamble():
            return None
        content = self._bytes
        if len(content) < LENGTH.size:
            return None
        length = LENGTH.unpack_from(content)[0]
        check_length(length, self.limit)
        end = LENGTH.size + length
        if len(content) < end:
            return None
        payload = bytes(content[LENGTH.size : end])
        del content[:end]
        return payload

    def _read_preamble(self) -> bool:
        check_preamble(bytes(self._bytes[: len(PREAMBLE) * 3]))
        if len(self._bytes) < len(PREAMBLE):
            return False
        del self._bytes[: len(PREAMBLE)]
        self._expects_preamble = False
        return True
