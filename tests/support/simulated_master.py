"""Twins of a master's journal, transport and clock: no disk, no network, and time that jumps instead of passing."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import msgspec

from holdfast.core import events as e
from holdfast.core.events import Hello, JobSpec, NodeInfo
from holdfast.core.records import DurableRecord
from holdfast.core.settings import Settings
from holdfast.errors import JournalError, WireError
from holdfast.journal import JournalEntry
from holdfast.master.connections import MasterConnection
from holdfast.wire.auth import Role
from holdfast.wire.control_messages import EventReport, FromMaster, Heartbeat, ToMaster

START = 1_760_000_000.0


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when there is nothing else to do."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(0)
        if not found:
            assert timeout is not None, "everything waits, and nothing will ever happen"
            self._loop.now += timeout
        return found


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario in simulated time."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(scenario())


def clock() -> float:
    """Return the wall clock of the simulated loop."""
    return START + asyncio.get_event_loop().time()


class SimulatedJournal:
    """A journal in memory. `trace` is shared with the transport: the order of appends and of what is sent."""

    def __init__(self, trace: list[object] | None = None, records: Sequence[DurableRecord] = ()) -> None:
        self.trace = trace if trace is not None else []
        self.records = list(records)
        self.appends: list[list[DurableRecord]] = []
        self.fails = False

    def replay(self) -> list[JournalEntry]:
        return [JournalEntry(seq, record) for seq, record in enumerate(self.records, 1)]

    def append(self, records: Sequence[DurableRecord]) -> None:
        if self.fails:
            self.trace.append("failed append")
            raise JournalError("no space left on device")
        self.appends.append(list(records))
        self.records += records
        self.trace += records

    def page(self, after_seq: int, chars_max: int) -> list[str]:
        found: list[str] = []
        chars = 0
        for record in self.records[after_seq:]:
            line = msgspec.json.encode(record).decode()
            chars += len(line)
            if found and chars > chars_max:
                break
            found.append(line)
        return found

    def of(self, kind: type) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]


class SimulatedConnection:
    """One connection: what the master sends is in `sent`."""

    def __init__(self, role: Role, trace: list[object]) -> None:
        self.role = role
        self.sent: list[FromMaster] = []
        self.is_over = False
        self.error: WireError | None = None
        """With what the master ended it, if it did not like a message."""
        self._trace = trace
        self._incoming: asyncio.Queue[ToMaster | None] = asyncio.Queue()

    # --- the master's side

    def send(self, message: FromMaster) -> None:
        if not self.is_over:
            self.sent.append(message)
            self._trace.append(message)

    async def drain(self) -> None:
        await asyncio.sleep(0)
        if self.is_over:
            raise WireError("the connection is closed")

    async def receive(self) -> ToMaster | None:
        return None if self.is_over else await self._incoming.get()

    def finish(self) -> None:
        self.is_over = True
        self._incoming.put_nowait(None)

    abort = finish

    # --- the other side

    def say(self, message: ToMaster) -> None:
        self._incoming.put_nowait(message)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


class SimulatedTransport:
    """Connections without a network."""

    def __init__(self, trace: list[object] | None = None) -> None:
        self.trace = trace if trace is not None else []
        self._handler: Callable[[MasterConnection], Awaitable[None]] | None = None
        self._tasks: dict[SimulatedConnection, asyncio.Task[None]] = {}

    async def start(self, handler: Callable[[MasterConnection], Awaitable[None]]) -> int:
        self._handler = handler
        return 29_400

    async def stop(self, grace_s: float) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=grace_s)
        for connection, task in self._tasks.items():
            connection.finish()
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def connect(self, role: Role = "agent") -> SimulatedConnection:
        connection = SimulatedConnection(role, self.trace)
        self._tasks[connection] = asyncio.create_task(self._serve(connection))
        return connection

    async def _serve(self, connection: SimulatedConnection) -> None:
        assert self._handler is not None
        try:
            await self._handler(connection)
        except WireError as error:
            connection.error = error
        finally:
            connection.finish()


class SimulatedAgent:
    """One node on a connection of its own."""

    def __init__(self, transport: SimulatedTransport, settings: Settings, node_id: str) -> None:
        self._transport, self._settings = transport, settings
        self.node_id, self.incarnation = node_id, f"{node_id}.1"
        self._number = 0
        self.term = 0
        self.connection = transport.connect()
        self.report(self.hello())

    def hello(self) -> Hello:
        settings = self._settings
        return Hello(
            node_id=self.node_id,
            incarnation=self.incarnation,
            info=NodeInfo(host=self.node_id, address="10.0.0.1", machine_id="m", boot_id="b", pid=1, workers=1),
            spec=JobSpec(
                run_id="demo",
                nodes_min=settings.nodes_min,
                nodes_max=settings.nodes_max,
                restarts_max=settings.restarts_max,
            ),
            store_port=29_001,
            term=self.term,
        )

    def report(self, event: e.Event) -> None:
        self.connection.say(EventReport(self._number, self.term, event))
        self._number += 1

    def beat(self) -> None:
        self.connection.say(Heartbeat(self.term))

    def reconnect(self) -> None:
        self.connection = self._transport.connect()
        self.report(self.hello())

    def started(self, view: int) -> e.WorkersStarted:
        return e.WorkersStarted(node_id=self.node_id, incarnation=self.incarnation, view=view, pids=(1,))
