"""Somebody who found the master's port: noise, half a request, HTTP, wrong frames, a guess at the token."""

import asyncio
import contextlib
import os
import random
import socket
import sys

from holdfast.core.events import NodeLeft
from holdfast.errors import WireError
from holdfast.wire.control import connect
from holdfast.wire.control_messages import EventReport, Watch
from holdfast.wire.frames import LENGTH, PREAMBLE, frame_of

PORT = int(sys.argv[1])
IDLE_CONNECTIONS = 100
ANSWER_S = 1.0


def say(data: bytes) -> None:
    connection = socket.create_connection(("127.0.0.1", PORT), timeout=ANSWER_S)
    with connection, contextlib.suppress(OSError):  # a reset is an answer too
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65_536):
            pass


async def guess(token: str) -> None:
    for role, message in (
        ("agent", EventReport(1, 1, NodeLeft(node_id="host", incarnation="x"))),
        ("watcher", Watch(0)),
    ):
        try:
            connection = await connect("127.0.0.1", PORT, token=token, role=role, tls=None, timeout_s=ANSWER_S)
            await connection.send(message)
            await connection.receive()
        except WireError:
            continue
        sys.exit("a wrong token was enough")


idle = [socket.create_connection(("127.0.0.1", PORT)) for _ in range(IDLE_CONNECTIONS)]
http2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
for data in (b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", random.randbytes(100_000), b"\x16\x03\x01" + os.urandom(100)):
    say(data)
for data in (http2, http2 + os.urandom(10_000), http2[:10], PREAMBLE[:5], PREAMBLE, PREAMBLE + os.urandom(10_000)):
    say(data)
for frames in ([b""], [b"\xc1"], [os.urandom(1_000)], [b"\x90"] * 10, [b"\x91" * 4_000], [b"x" * 5_000_000]):
    say(PREAMBLE + b"".join(map(frame_of, frames)))
say(PREAMBLE + LENGTH.pack(2**32 - 1))
asyncio.run(guess("a token that is long enough, but wrong"))
for connection in idle:
    connection.close()
