"""One life of the fork server, seen from the agent: its process, its socket, and the end of what it wrote to stderr."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from holdfast.agent.birth.child import Child
from holdfast.agent.local_link import Link
from holdfast.wire.local import Mode, Ready

STDERR_LINES_MAX = 20
STDERR_READ_BYTES = 65_536
TITLE_ROOM_CHARS = 2_000


class ServerProcess:
    def __init__(self, mode: Mode, preload: Sequence[str], env: Mapping[str, str]) -> None:
        """Raises OSError if Python itself cannot be started."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Ready | None] = self._loop.create_future()
        self._stderr_lines: deque[bytes] = deque([b""], maxlen=STDERR_LINES_MAX)
        ours, theirs = socket.socketpair()
        self._stderr, stderr_of_server = os.pipe()
        os.set_blocking(self._stderr, False)
        try:
            pid = spawn(command(theirs.fileno(), mode, preload), env, theirs.fileno(), stderr_of_server)
        except OSError:
            ours.close()
            os.close(self._stderr)
            raise
        finally:
            theirs.close()
            os.close(stderr_of_server)
        self._loop.add_reader(self._stderr, self._read_stderr)
        self.link: Link[Ready] = Link(ours, msgspec.msgpack.Decoder(Ready), self._ready.set_result)
        self.child = Child(pid)
        self.child.on_end(self._ended)

    async def ready(self) -> Ready | None:
        """None if it died before."""
        return await asyncio.shield(self._ready)

    def last_words(self) -> str:
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


def command(descriptor: int, mode: Mode, preload: Sequence[str]) -> list[str]:
    # -u, because workers are forks of it and have to behave as under `python -u`.
    server = [sys.executable, "-u", "-m", "holdfast.worker.birth.forkserver", "--fd", str(descriptor), "--mode", mode]
    return [
        *server,
        *("--agent-pid", str(os.getpid())),
        *("--preload", ",".join(preload)),
        *("--title-room", " " * TITLE_ROOM_CHARS),
    ]


def spawn(arguments: Sequence[str], env: Mapping[str, str], passed: int, output: int) -> int:
    """In a session of its own, so that a terminal's Ctrl-C is the agent's business alone."""
    process = subprocess.Popen(
        arguments, env=env, pass_fds=[passed], stdout=output, stderr=output, start_new_session=True
    )
    process.returncode = 0  # as far as Popen is concerned: a Child reaps it
    return process.pid
