"""A real master on loopback, and an agent that says what the test wants it to say.

The master is a process of its own, ended by SIGKILL: that is how masters go, and the kernel tells its peers.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from holdfast.core import events as e
from holdfast.core.settings import Settings
from holdfast.wire.control import ClientConnection, Tls, connect
from holdfast.wire.control_messages import Acknowledge, EventReport
from support.scenario import hello, incarnation_of

TOKEN = "the-secret-of-this-test"
SILENCE_TIMEOUT_S = "60"  # nobody is lost because the machine is busy
SETTINGS = Settings(nodes_min=1, nodes_max=1, restarts_max=3)


class LiveMaster:
    """One job's master; it can be killed and started again on the same port."""

    def __init__(self, state_dir: Path, job_id: str = "demo", tls: Tls | None = None) -> None:
        self.path = state_dir / "jobs" / job_id / "journal.sqlite"
        self._arguments = ["--state-dir", str(state_dir), "--job-id", job_id, "--max-restarts", "3"]
        self._arguments += ["--silence-timeout", SILENCE_TIMEOUT_S]
        self._arguments += ["--tls-cert", tls.cert, "--tls-key", tls.key] if tls else []
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self, token: str = TOKEN) -> LiveMaster:
        """Returns when it listens."""
        ready_read, ready_write = os.pipe()
        where = ["--port", str(self.port), "--ready-fd", str(ready_write)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "holdfast", "master", *self._arguments, *where],
            env=os.environ | {"HOLDFAST_TOKEN": token},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(ready_write,),
        )
        os.close(ready_write)
        with os.fdopen(ready_read) as ready:
            self.port = int(await asyncio.to_thread(ready.readline))
        return self

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    async def __aenter__(self) -> LiveMaster:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        self.kill()


class LiveAgent:
    """Node `a` with one worker."""

    def __init__(self, line: ClientConnection) -> None:
        self._line, self._number = line, 0

    @classmethod
    async def join(cls, master: LiveMaster, store_port: int = 29_001) -> LiveAgent:
        line = await connect("127.0.0.1", master.port, token=TOKEN, role="agent", tls=None, timeout_s=10)
        agent = cls(line)
        await agent.report(hello("a", SETTINGS, store_port, workers=1))
        return agent

    async def report(self, event: e.Event) -> None:
        """Returns when the journal has it."""
        self._number += 1
        await self._line.send(EventReport(self._number, 0, event))
        while await self._line.receive() != Acknowledge(self._number):
            pass

    async def started(self, view: int) -> None:
        await self.report(e.WorkersStarted(node_id="a", incarnation=incarnation_of("a"), view=view, pids=(4_000,)))

    async def succeeded(self, view: int) -> None:
        await self.report(e.WorkerSucceeded(node_id="a", incarnation=incarnation_of("a"), view=view, local_rank=0))

    async def close(self) -> None:
        await self._line.close()
