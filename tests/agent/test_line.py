"""The workers' socket: those we started are heard, anybody else is hung up on, and neither can do harm."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from holdfast.agent.line import Line, LineServer
from holdfast.wire.local import FrameReader, encode, socket_address
from holdfast.wire.session import Enrol, FromWorker, Joined, Revoke, ToWorker


class Ear:
    """Knows one worker."""

    def __init__(self) -> None:
        self.line: Line | None = None
        self.messages: list[FromWorker] = []
        self.lost = asyncio.Event()

    def enrolled(self, worker: str, pid: int, line: Line, repairs: bool) -> bool:
        if worker != "right" or self.line is not None:
            return False
        self.line = line
        return True

    def heard(self, worker: str, message: FromWorker) -> None:
        self.messages.append(message)

    def line_lost(self, worker: str) -> None:
        self.lost.set()


def with_server(test: Callable[[LineServer, Ear], Awaitable[None]]) -> None:
    async def run() -> None:
        ear = Ear()
        server = LineServer(ear)
        await server.start()
        try:
            await test(server, ear)
        finally:
            await server.close()

    asyncio.run(run())


async def speak(server: LineServer, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_unix_connection(socket_address(server.name))
    writer.write(data)
    await writer.drain()
    return reader, writer


async def is_hung_up_on(server: LineServer, data: bytes) -> bool:
    reader, writer = await speak(server, data)
    try:
        async with asyncio.timeout(10):
            return await reader.read() == b""
    except ConnectionResetError:
        return True
    finally:
        writer.close()


def test_a_worker_is_heard_and_told(tmp_path: Path) -> None:
    async def test(server: LineServer, ear: Ear) -> None:
        # In one write, and the last one cut in two.
        frames = encode(Enrol("right", 7)) + encode(Joined(1, 2)) + encode(Joined(2, 3))
        reader, writer = await speak(server, frames[:-3])
        writer.write(frames[-3:])
        while len(ear.messages) < 2:
            await asyncio.sleep(0.001)
        assert ear.messages == [Joined(1, 2), Joined(2, 3)]
        assert ear.line is not None
        ear.line.send(Revoke(1, "because"))
        told = FrameReader(msgspec.msgpack.Decoder(ToWorker))
        told.feed(await reader.read(1_000))
        assert [message for message, _ in told.frames()] == [Revoke(1, "because")]
        writer.close()
        await ear.lost.wait()
        ear.line.send(Revoke(2, "to nobody"))

    with_server(test)


@pytest.mark.parametrize(
    "data",
    [
        encode(Enrol("wrong", 7)),
        encode(Joined(1, 2)),
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!IB", 2**31, 0),
        struct.pack("!IB", 3, 0) + b"abc",
        struct.pack("!IB", 3, 200) + encode(Enrol("right", 7))[5:8],
    ],
)
def test_strangers_are_hung_up_on(data: bytes) -> None:
    async def test(server: LineServer, ear: Ear) -> None:
        assert await is_hung_up_on(server, data)
        assert ear.line is None and not ear.messages
        await speak_well(server, ear)

    with_server(test)


async def speak_well(server: LineServer, ear: Ear) -> None:
    _, writer = await speak(server, encode(Enrol("right", 7)))
    while ear.line is None:
        await asyncio.sleep(0.001)
    writer.close()


def test_a_nonce_is_good_for_one_line(tmp_path: Path) -> None:
    async def test(server: LineServer, ear: Ear) -> None:
        _, writer = await speak(server, encode(Enrol("right", 7)))
        while ear.line is None:
            await asyncio.sleep(0.001)
        assert await is_hung_up_on(server, encode(Enrol("right", 8)))
        writer.write(encode(Joined(1, 2)))
        while not ear.messages:
            await asyncio.sleep(0.001)
        writer.close()

    with_server(test)


def test_a_worker_that_talks_nonsense_later_loses_its_line(tmp_path: Path) -> None:
    async def test(server: LineServer, ear: Ear) -> None:
        _, writer = await speak(server, encode(Enrol("right", 7)))
        while ear.line is None:
            await asyncio.sleep(0.001)
        writer.write(struct.pack("!IB", 3, 0) + b"abc")
        await asyncio.wait_for(ear.lost.wait(), 10)
        writer.close()

    with_server(test)


def test_a_worker_that_does_not_read_is_given_up(tmp_path: Path) -> None:
    async def test(server: LineServer, ear: Ear) -> None:
        with socket.socket(socket.AF_UNIX) as deaf:
            deaf.connect(socket_address(server.name))
            deaf.sendall(encode(Enrol("right", 7)))
            while ear.line is None:
                await asyncio.sleep(0.001)
            for number in range(1_000):
                ear.line.send(Revoke(number, "x" * 10_000))
            await asyncio.wait_for(ear.lost.wait(), 10)

    with_server(test)
