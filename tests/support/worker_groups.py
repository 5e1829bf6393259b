"""A worker group for tests: real processes of a fake worker, a real launcher, a real socket. The test is the master."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

from holdfast.agent.config import AgentConfig, Program
from holdfast.agent.forced_ends import kill_stopped
from holdfast.agent.hangs import HangWatch
from holdfast.agent.launch.launcher import Launcher
from holdfast.agent.out_of_memory import MemoryWatch
from holdfast.agent.reports import Reports
from holdfast.agent.worker_connection import WorkerServer
from holdfast.agent.worker_group import WorkerGroup
from holdfast.agent.worker_logs import LogPlan, WorkerLogs
from holdfast.core.events import Event, JobSpec, SessionInfo
from holdfast.core.orders import Serve
from support.nest import ENVIRONMENT, children, eventually_async

FAKE_WORKER = Path(__file__).with_name("fake_worker.py")
EventT = TypeVar("EventT")


def agent_config(directory: Path, **changes: Any) -> AgentConfig:
    known: dict[str, Any] = {
        "node_id": "node-0",
        "address": "127.0.0.1",
        "workers": 3,
        "role": "default",
        "requested_rank": None,
        "spec": JobSpec(run_id="", nodes_min=1, nodes_max=1, restarts_max=3),
        "program": Program(kind="script", argv=(str(FAKE_WORKER),), clean=True, python=sys.executable),
        "environment": {**ENVIRONMENT, "FAKE_DIR": str(directory)},
        "master_host": "127.0.0.1",
        "master_port": 1,
        "master": None,
        "token": "",
        "tls": None,
        "logs": LogPlan(run_dir=directory / "logs", redirects=3),
        "signals": (signal.SIGTERM,),
        "heartbeat_interval_s": 1.0,
        "silence_timeout_s": 5.0,
        "restart_grace_s": 10.0,
        "shutdown_timeout_s": 10.0,
        "join_timeout_s": 10.0,
        "checkpoint_dir": "/checkpoints",
        "replicas": 1,
    }
    return AgentConfig(**(known | changes))


def serve(view: int, **changes: Any) -> Serve:
    """An order for a job of one node with three workers."""
    workers = changes.get("workers", 3)
    known: dict[str, Any] = {
        "view": view,
        "job_id": "job",
        "group_rank": 0,
        "group_world_size": 1,
        "first_rank": 0,
        "world_size": workers,
        "role_first_rank": 0,
        "role_world_size": workers,
        "store_host": "127.0.0.1",
        "store_port": 1234,
        "store_here": False,
        "restart_count": 0,
        "restarts_max": 3,
        "workers": workers,
        "keeps_workers": False,
        "planned": False,
        "strategy": None,
        "replaced": (),
        "spares": 0,
        "session": None,
    }
    given = known | changes
    first_ranks = given.pop("first_ranks", None) or range(given["group_world_size"])
    ends = (*first_ranks[1:], given["world_size"])
    sizes = tuple((end - first, 1) for first, end in zip(first_ranks, ends, strict=True))
    return Serve(**given | {"node_sizes": sizes})


class WorkerGroupUnderTest:
    """A worker group and what it has reported."""

    def __init__(self, directory: Path, launcher: Launcher, **changes: Any) -> None:
        self.directory = directory
        self.events: list[Event] = []
        config = agent_config(directory, **changes)
        self.reports = Reports(config.node_id, lambda: "life", self.events.append)
        self.logs = WorkerLogs(config.logs)
        self.left = asyncio.Event()
        self.worker_group = WorkerGroup(config, self.reports, launcher, self.logs, MemoryWatch(), self.left.set)
        self.server = WorkerServer(self.worker_group)
        self.hangs = HangWatch(
            lambda: self.worker_group.ranked,
            self.reports,
            config.hang_timeout_s,
            lambda: self.worker_group.in_sessions,
            kill_stopped,
        )

    async def begin(self, **changes: Any) -> list[int]:
        """View 1, with everybody in it; their process ids."""
        await self.worker_group.serve(serve(1, **changes))
        await self.event("ViewJoined", view=1)
        return self.pids()

    def pids(self) -> list[int]:
        return [worker.pid for worker in self.worker_group.ranked]

    def messages_to(self, pid: int, kind: str = "") -> list[dict[str, Any]]:
        """Return the messages that a worker has got."""
        path = self.directory / f"{pid}.heard"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if not kind or line["type"] == kind]

    async def sent(self, pid: int, kind: str, **fields: Any) -> dict[str, Any]:
        """Wait until a worker has got such a message, and return it, or the assignment in it."""

        def found() -> dict[str, Any] | None:
            for message in self.messages_to(pid, kind):
                known = message.get("assignment") or message
                if all(known.get(name) == value for name, value in fields.items()):
                    return known
            return None

        return await self.until(found, f"{pid} gets {kind} {fields}")

    def do(self, pid: int, command: str) -> None:
        """Have a worker do something."""
        with (self.directory / f"{pid}.do").open("a") as file:
            file.write(f"{command}\n")

    def of(self, kind: str) -> list[Any]:
        return [event for event in self.events if type(event).__name__ == kind]

    async def event(self, kind: str, **fields: Any) -> Any:
        """Waits for an event like this."""

        def found() -> Any:
            matching = [e for e in self.of(kind) if all(getattr(e, name) == value for name, value in fields.items())]
            return matching[-1] if matching else None

        return await self.until(found, f"{kind} {fields}")

    async def until(self, condition: Callable[[], Any], what: str) -> Any:
        try:
            return await eventually_async(condition, what)
        except AssertionError as error:
            outputs = "\n".join(p.read_text() for p in (self.directory / "logs").rglob("stderr.log"))
            raise AssertionError(f"{error}; events: {self.events}; workers wrote: {outputs}") from None

    async def parked(self, count: int) -> None:
        await self.until(lambda: self.worker_group.parked == count, f"{count} spares are parked")


@contextlib.asynccontextmanager
async def worker_group(directory: Path, **changes: Any) -> AsyncIterator[WorkerGroupUnderTest]:
    """Nothing of it is left at the end."""
    before = children()
    launcher = await Launcher.start("cold", env=ENVIRONMENT)
    under_test = WorkerGroupUnderTest(directory, launcher, **changes)
    await under_test.server.start()
    under_test.worker_group.listen_at(under_test.server.name)
    try:
        yield under_test
    finally:
        await under_test.worker_group.close()
        await under_test.server.close()
        under_test.logs.close()
        await launcher.close()
    launcher.reap_orphans()
    assert children() <= before
    assert under_test.worker_group.is_empty


REPLICATED = SessionInfo()
