"""Somebody who found the master's port: noise, half a request, HTTP, gRPC calls, a guess at the token."""

import asyncio
import contextlib
import os
import random
import socket
import sys

from holdfast.core.events import NodeGone
from holdfast.errors import WireError
from holdfast.wire.channel import METHOD, connect, grpc
from holdfast.wire.messages import Report, Watch

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


async def call(method: str, frames: list[bytes]) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{PORT}") as channel:
        stream = channel.stream_stream(method)()
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                for frame in frames:
                    await stream.write(frame)
                while await stream.read() is not grpc.aio.EOF:
                    pass
        stream.cancel()


async def guess(token: str) -> None:
    for role, message in (("agent", Report(1, 1, NodeGone(node_id="host", incarnation="x"))), ("watcher", Watch(0))):
        try:
            connection = await connect("127.0.0.1", PORT, token=token, role=role, tls=None, timeout_s=ANSWER_S)
            await connection.send(message)
            await connection.receive()
        except WireError:
            continue
        sys.exit("a wrong token was enough")


async def call_all() -> None:
    await call("/holdfast.Control/Shutdown", [b"now"])
    await call("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", [b""])
    for frames in ([], [b""], [b"\xc1"], [os.urandom(1_000)], [b"\x90"] * 10, [b"x" * 5_000_000]):
        await call(METHOD, frames)
    await guess("a token that is long enough, but wrong")


idle = [socket.create_connection(("127.0.0.1", PORT)) for _ in range(IDLE_CONNECTIONS)]
preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
for data in (b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", random.randbytes(100_000), b"\x16\x03\x01" + os.urandom(100)):
    say(data)
for data in (preface, preface + os.urandom(10_000), preface[:10]):
    say(data)
asyncio.run(call_all())
for connection in idle:
    connection.close()
