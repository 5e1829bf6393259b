"""A real master on loopback, and an agent that says what the test wants it to say."""

from __future__ import annotations

import asyncio
from pathlib import Path

from holdfast.core import events as e
from holdfast.core.settings import Settings
from holdfast.journal import SqliteJournal
from holdfast.master.master import Master
from holdfast.wire.channel import ClientConnection, Tls, connect
from holdfast.wire.messages import Acknowledge, Report
from observe.scenario import hello, life

TOKEN = "the-secret-of-this-test"
SETTINGS = Settings(nodes_min=1, nodes_max=1, restarts_max=3)


class LiveMaster:
    """One job's master; it can be stopped and started again on the same port."""

    def __init__(self, state_dir: Path, job_id: str = "demo", tls: Tls | None = None) -> None:
        self.path = state_dir / "jobs" / job_id / "journal.sqlite"
        self._job_id, self._tls = job_id, tls
        self.port = 0

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> LiveMaster:
        self._journal = SqliteJournal(self.path)
        listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        master = Master(self._journal, self._job_id, SETTINGS)
        self.task = asyncio.create_task(master.run("127.0.0.1", self.port, TOKEN, self._tls, listening.set_result))
        await asyncio.wait({self.task, listening}, return_when=asyncio.FIRST_COMPLETED)
        self.port = listening.result() if listening.done() else self.task.result() or 0
        return self

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})
        self._journal.close()

    async def __aenter__(self) -> LiveMaster:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


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
        await self._line.send(Report(self._number, 0, event))
        while await self._line.receive() != Acknowledge(self._number):
            pass

    async def started(self, view: int) -> None:
        await self.report(e.WorkersStarted(node_id="a", incarnation=life("a"), view=view, pids=(4_000,)))

    async def succeeded(self, view: int) -> None:
        await self.report(e.WorkerSucceeded(node_id="a", incarnation=life("a"), view=view, local_rank=0))

    async def close(self) -> None:
        await self._line.close()
