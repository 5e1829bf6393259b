"""Probes of the link to another agent: a small transfer to its bulk port, and how long it took.

Whether the other machine can be reached is what its kernel says, not its agent: the kernel accepts a connection and
acknowledges bytes however busy the machine is, and even while the agent is stopped. So a busy node is never taken for
one behind a broken link.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
import termios
import time

import msgspec

from holdfast.errors import WireError
from holdfast.wire.auth import ClientHandshake
from holdfast.wire.bulk_messages import LinkProbed, ProbeLink
from holdfast.wire.frame_stream import FrameStream
from holdfast.wire.frames import HANDSHAKE_FRAME_BYTES_MAX, PREAMBLE, decode, encode
from holdfast.wire.tls import Tls

PROBE_BYTES = 64 * 1024
"""A millisecond where the link is good; of one that loses packets, some of so many have to be sent again. A kernel
takes them all before the agent reads any."""

_probed: msgspec.msgpack.Decoder[LinkProbed] = msgspec.msgpack.Decoder(LinkProbed)


async def probe_link(host: str, port: int, *, token: str, tls: Tls | None, timeout_s: float) -> float | None:
    """Return how long the transfer took, `timeout_s` if the agent has not answered by then; None if the machine cannot
    be reached. WireError if the agent refuses the connection."""
    try:
        family, kind, protocol, _, target = (await _resolve(host, port))[0]
        plain = socket.socket(family, kind, protocol)
    except OSError:
        return None
    plain.setblocking(False)
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().sock_connect(plain, target)
    except ConnectionRefusedError:
        plain.close()
        return timeout_s  # its kernel is there, its agent is not
    except OSError:  # also TimeoutError
        plain.close()
        return None
    return await _transfer(plain, token, tls, timeout_s)


async def _resolve(host: str, port: int) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return found  # type: ignore[return-value]


async def _transfer(plain: socket.socket, token: str, tls: Tls | None, timeout_s: float) -> float | None:
    stream = FrameStream(HANDSHAKE_FRAME_BYTES_MAX, expects_preamble=False)
    watched = os.dup(plain.fileno())  # asyncio closes its own when the connection ends
    try:
        async with asyncio.timeout(timeout_s):
            context = tls.client_context(check_hostname=False) if tls else None
            name = "" if context else None
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: stream, sock=plain, ssl=context, server_hostname=name)
            return await _exchange(stream, token)
    except TimeoutError:
        return None if _unacknowledged_bytes(watched) else timeout_s
    except OSError:
        return None if _unacknowledged_bytes(watched) else timeout_s  # it was ended in the middle
    finally:
        os.close(watched)
        stream.abort()
        plain.close()


async def _exchange(stream: FrameStream, token: str) -> float:
    handshake = ClientHandshake(token, "peer", "the other agent", stream.certificate)
    stream.write_raw(PREAMBLE)
    stream.write(handshake.first)
    while handshake.keys is None:
        if (answer := handshake.receive(await _read(stream))) is not None:
            stream.write(answer)
    seal, opener = handshake.seals()
    began_at = time.monotonic()
    stream.write(seal.close(encode(ProbeLink(PROBE_BYTES))))
    stream.write_raw(bytes(PROBE_BYTES))
    decode(_probed, opener.open(await _read(stream)))
    return time.monotonic() - began_at


async def _read(stream: FrameStream) -> bytes:
    payload = await stream.read()
    if payload is None:
        raise WireError("the other agent ended the connection")
    return payload


def _unacknowledged_bytes(descriptor: int) -> int:
    """Return how much of what was sent the other kernel has not acknowledged."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, b"\0" * 4))[0])
    except OSError:
        return 0
