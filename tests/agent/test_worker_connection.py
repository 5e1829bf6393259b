"""The workers' socket: those we started are heard, anybody else is hung up on, and neither can do harm."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.agent.worker_connection import WorkerConnection, WorkerServer
from holdfast.wire.launch_messages import FrameReader, encode, socket_address
from holdfast.wire.worker_messages import Enrol, FromWorker, Revoke, ToWorker, ViewJoinedMessage
from support.processes import environment
from support.strangers import as_stranger


class Listener:
    """Knows one worker."""

    def __init__(self) -> None:
        self.connection: WorkerConnection | None = None
        self.messages: list[FromWorker] = []
        self.lost = asyncio.Event()

    def enrolled(self, worker: str, pid: int, connection: WorkerConnection, repairs: bool) -> bool:
        if worker != "right" or self.connection is not None:
            return False
        self.connection = connection
        return True

    def script_failed(self, worker: str, pid: int) -> None: ...

    def received(self, worker: str, message: FromWorker) -> None:
        self.messages.append(message)

    def connection_lost(self, worker: str) -> None:
        self.lost.set()


def with_server(test: Callable[[WorkerServer, Listener], Awaitable[None]]) -> None:
    async def run() -> None:
        listener = Listener()
        server = WorkerServer(listener)
        await server.start()
        try:
            await test(server, listener)
        finally:
            await server.close()

    asyncio.run(run())


async def speak(server: WorkerServer, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_unix_connection(socket_address(server.name))
    writer.write(data)
    await writer.drain()
    return reader, writer


async def is_hung_up_on(server: WorkerServer, data: bytes) -> bool:
    reader, writer = await speak(server, data)
    try:
        async with asyncio.timeout(10):
            return await reader.read() == b""
    except ConnectionResetError:
        return True
    finally:
        writer.close()


def test_messages_pass_in_both_directions(tmp_path: Path) -> None:
    async def test(server: WorkerServer, listener: Listener) -> None:
        # In one write, and the last one cut in two.
        frames = encode(Enrol("right", 7)) + encode(ViewJoinedMessage(1, 2)) + encode(ViewJoinedMessage(2, 3))
        reader, writer = await speak(server, frames[:-3])
        writer.write(frames[-3:])
        while len(listener.messages) < 2:
            await asyncio.sleep(0.001)
        assert listener.messages == [ViewJoinedMessage(1, 2), ViewJoinedMessage(2, 3)]
        assert listener.connection is not None
        listener.connection.send(Revoke(1, "because"))
        told = FrameReader(msgspec.msgpack.Decoder(ToWorker))
        told.feed(await reader.read(1_000))
        assert [message for message, _ in told.frames()] == [Revoke(1, "because")]
        writer.close()
        await listener.lost.wait()
        listener.connection.send(Revoke(2, "to nobody"))

    with_server(test)


@pytest.mark.parametrize(
    "data",
    [
        encode(Enrol("wrong", 7)),
        encode(ViewJoinedMessage(1, 2)),
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!IB", 2**31, 0),
        struct.pack("!IB", 3, 0) + b"abc",
        struct.pack("!IB", 3, 200) + encode(Enrol("right", 7))[5:8],
    ],
)
def test_strangers_are_hung_up_on(data: bytes) -> None:
    async def test(server: WorkerServer, listener: Listener) -> None:
        assert await is_hung_up_on(server, data)
        assert listener.connection is None and not listener.messages
        await speak_well(server, listener)

    with_server(test)


async def speak_well(server: WorkerServer, listener: Listener) -> None:
    _, writer = await speak(server, encode(Enrol("right", 7)))
    while listener.connection is None:
        await asyncio.sleep(0.001)
    writer.close()


def test_a_nonce_is_good_for_one_line(tmp_path: Path) -> None:
    async def test(server: WorkerServer, listener: Listener) -> None:
        _, writer = await speak(server, encode(Enrol("right", 7)))
        while listener.connection is None:
            await asyncio.sleep(0.001)
        assert await is_hung_up_on(server, encode(Enrol("right", 8)))
        writer.write(encode(ViewJoinedMessage(1, 2)))
        while not listener.messages:
            await asyncio.sleep(0.001)
        writer.close()

    with_server(test)


def test_a_worker_that_talks_nonsense_later_loses_its_line(tmp_path: Path) -> None:
    async def test(server: WorkerServer, listener: Listener) -> None:
        _, writer = await speak(server, encode(Enrol("right", 7)))
        while listener.connection is None:
            await asyncio.sleep(0.001)
        writer.write(struct.pack("!IB", 3, 0) + b"abc")
        await asyncio.wait_for(listener.lost.wait(), 10)
        writer.close()

    with_server(test)


def test_a_worker_that_does_not_read_is_given_up(tmp_path: Path) -> None:
    async def test(server: WorkerServer, listener: Listener) -> None:
        with socket.socket(socket.AF_UNIX) as deaf:
            deaf.connect(socket_address(server.name))
            deaf.sendall(encode(Enrol("right", 7)))
            while listener.connection is None:
                await asyncio.sleep(0.001)
            for number in range(1_000):
                listener.connection.send(Revoke(number, "x" * 10_000))
            await asyncio.wait_for(listener.lost.wait(), 10)

    with_server(test)


def test_strangers_at_the_socket_have_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    async def test(server: WorkerServer, listener: Listener) -> None:
        for _ in range(30):
            assert await is_hung_up_on(server, b"A" * 100)

    with_server(test)
    lines = [record.getMessage() for record in caplog.records if "away" in record.getMessage()]
    assert len(lines) == 2
    assert lines[1].startswith("turned 29 more connections from user ")


FEW_DESCRIPTORS = """
import asyncio, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from agent.test_worker_connection import Listener
from holdfast.agent.worker_connection import WorkerServer
from holdfast.util.tasks import end_process_on_bugs

async def serve():
    end_process_on_bugs(asyncio.get_running_loop())
    listener = Listener()
    server = WorkerServer(listener)
    await server.start()
    print(server.name, flush=True)
    await asyncio.wait_for(listener.lost.wait(), 60)
    await server.close()

asyncio.run(serve())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_a_flood_of_another_user_takes_no_descriptors() -> None:
    command = [sys.executable, "-c", FEW_DESCRIPTORS]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(), text=True, **pipes) as process:
        assert process.stdout is not None
        address = socket_address(process.stdout.readline().strip())

        def flood() -> None:
            held = []
            for _ in range(300):
                held.append(socket.socket(socket.AF_UNIX))
                held[-1].connect(address)

        assert as_stranger(flood)
        with socket.socket(socket.AF_UNIX) as worker:
            worker.connect(address)
            worker.sendall(encode(Enrol("right", os.getpid())))
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in said and "descriptor" not in said, said
