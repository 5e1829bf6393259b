"""The fork server seen from the agent: its process, the socket to it, the pipe on which each launch reports, and the
end of what it wrote to stderr."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec

import holdfast
from holdfast.agent.launch.child import Child
from holdfast.errors import WireError
from holdfast.wire.launch_messages import (
    ForkServerReady,
    FrameReader,
    Message,
    Mode,
    PreloadPlan,
    Report,
    encode,
    send_part,
)

START_FILE = Path(holdfast.__file__).parent / "worker/launch/start_fork_server.py"
STDERR_LINES_MAX = 20
STDERR_READ_BYTES = 65_536
TITLE_CHARS_MAX = 2_000
PIPE_READ_BYTES = 65_536

MessageT = TypeVar("MessageT")


class ForkServerLink(Generic[MessageT]):
    """The agent's end of a socketpair to a process that it started. Each message is passed to `on_message` as it
    arrives."""

    def __init__(
        self,
        connection: socket.socket,
        decoder: msgspec.msgpack.Decoder[MessageT],
        on_message: Callable[[MessageT], None],
    ) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._reader = FrameReader(decoder)
        self._on_message = on_message
        self._sending = asyncio.Lock()  # a frame must not begin in the middle of another
        self._may_write = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection, self._receive)

    async def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message with descriptors. Raises ConnectionError if the other side is gone. Not to be cancelled: half
        a frame would garble the next one."""
        frame = memoryview(encode(message, len(descriptors)))
        async with self._sending:
            while frame:
                if self._connection.fileno() < 0:
                    raise BrokenPipeError("the connection was closed")
                try:
                    sent = send_part(self._connection, frame, descriptors)
                except BlockingIOError:
                    await self._writable()
                    continue
                frame, descriptors = frame[sent:], ()

    def close(self) -> None:
        """Close the socket. Senders that wait until they can write get a ConnectionError."""
        if self._connection.fileno() < 0:
            return
        self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)
        self._reader.close()
        self._connection.close()
        self._may_write.set()

    def _receive(self) -> None:
        try:
            alive = self._reader.receive(self._connection)
        except BlockingIOError:
            return
        except OSError:
            alive = False
        if not alive:
            self._loop.remove_reader(self._connection)  # its process's end is seen by its pidfd
        for message, _ in self._reader.frames():
            self._on_message(message)

    async def _writable(self) -> None:
        self._may_write.clear()
        self._loop.add_writer(self._connection, self._may_write.set)
        await self._may_write.wait()
        if self._connection.fileno() >= 0:
            self._loop.remove_writer(self._connection)


class ReportPipe:
    """The pipe on which one launch reports: a report, or the end of file when no process is left that could report."""

    def __init__(self, on_report: Callable[[Report], None]) -> None:
        self._on_report = on_report
        self._frames: FrameReader[Report] = FrameReader(msgspec.msgpack.Decoder(Report))
        self._loop = asyncio.get_running_loop()
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)
        self.outcome: asyncio.Future[Report | None] = self._loop.create_future()
        self._loop.add_reader(self._reading, self.poll)

    def poll(self) -> None:
        """Read a report if it is there. `on_report` is called before anything else runs, so that no child is
        unknown."""
        if self.outcome.done():
            return
        try:
            data = os.read(self._reading, PIPE_READ_BYTES)
        except BlockingIOError:
            return
        self._frames.feed(data)
        report = next(iter(self._frames.frames()), (None, []))[0]
        if data and report is None:
            raise WireError("a report came in pieces, though it is one write to a pipe")
        self._close_reading()
        if report is not None:
            self._on_report(report)
        self.outcome.set_result(report)

    def close_writing(self) -> None:
        """Close the agent's writing end, once the request is sent or cannot be: only the other side's copies count."""
        os.close(self.writing)
        self.poll()

    def _close_reading(self) -> None:
        self._loop.remove_reader(self._reading)
        os.close(self._reading)


class InheritedServer(NamedTuple):
    """A fork server that is a fork of the process which started this agent: what it forks has that one's memory. It is
    a child of the agent that is there already, and the only one of its kind."""

    pid: int
    descriptor: int
    """The agent's end of the socket to it."""


class ForkServerProcess:
    """One process of the fork server. Raises OSError if Python itself cannot be started."""

    def __init__(
        self, mode: Mode, plan: PreloadPlan, env: Mapping[str, str], inherited: InheritedServer | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[ForkServerReady | None] = self._loop.create_future()
        self._stderr_lines: deque[bytes] = deque([b""], maxlen=STDERR_LINES_MAX)
        self._stderr, stderr_of_server = os.pipe()
        os.set_blocking(self._stderr, False)
        if inherited is None:
            ours, pid = self._spawn(mode, plan, env, stderr_of_server)
        else:  # it writes to the stderr of the process it was forked from
            os.close(stderr_of_server)
            ours, pid = socket.socket(fileno=inherited.descriptor), inherited.pid
        self._loop.add_reader(self._stderr, self._read_stderr)
        self.link: ForkServerLink[ForkServerReady] = ForkServerLink(
            ours, msgspec.msgpack.Decoder(ForkServerReady), self._ready.set_result
        )
        self.child = Child(pid)
        self.child.on_end(self._ended)

    def _spawn(
        self, mode: Mode, plan: PreloadPlan, env: Mapping[str, str], stderr_of_server: int
    ) -> tuple[socket.socket, int]:
        """Start a fork server; return the agent's end of the socket to it, and its process id."""
        ours, theirs = socket.socketpair()
        try:
            pid = spawn(command(theirs.fileno(), mode, plan), env, theirs.fileno(), stderr_of_server)
        except OSError:
            ours.close()
            os.close(self._stderr)
            raise
        finally:
            theirs.close()
            os.close(stderr_of_server)
        return ours, pid

    async def ready(self) -> ForkServerReady | None:
        """Wait until it can fork; return None if it died before."""
        return await asyncio.shield(self._ready)

    def stderr_tail(self) -> str:
        """Return the last lines that it wrote to stderr."""
        return b"\n".join(self._stderr_lines).decode(errors="replace").strip()

    def _read_stderr(self) -> bool:
        try:
            data = os.read(self._stderr, STDERR_READ_BYTES)
        except BlockingIOError:
            return False
        first, *rest = data.split(b"\n")
        self._stderr_lines[-1] = (self._stderr_lines[-1] + first)[-STDERR_READ_BYTES:]
        self._stderr_lines.extend(rest)
        if not data:
            self._loop.remove_reader(self._stderr)
        return bool(data)

    def _ended(self, _: Child) -> None:
        while self._read_stderr():
            pass
        self._loop.remove_reader(self._stderr)
        os.close(self._stderr)
        self.link.close()
        if not self._ready.done():
            self._ready.set_result(None)


def command(descriptor: int, mode: Mode, plan: PreloadPlan) -> list[str]:
    """Return the command line of a fork server."""
    # -u, because workers are forks of it and have to behave as under `python -u`. No -P for the same reason.
    server = [sys.executable, "-u", str(START_FILE), "--fd", str(descriptor), "--mode", mode]
    return [
        *server,
        *("--agent-pid", str(os.getpid())),
        *("--preload", msgspec.json.encode(plan).decode()),
        *("--title-room", " " * TITLE_CHARS_MAX),
    ]


def spawn(arguments: Sequence[str], env: Mapping[str, str], passed: int, output: int) -> int:
    """Start a process in a session of its own, so that a terminal's Ctrl-C reaches the agent alone; return its id."""
    process = subprocess.Popen(
        arguments, env=env, pass_fds=[passed], stdout=output, stderr=output, start_new_session=True
    )
    process.returncode = 0  # as far as Popen is concerned: a Child reaps it
    return process.pid
