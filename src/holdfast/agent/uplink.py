"""The agent's connection to the master: made again whenever it breaks, for as long as the agent lives.

Reports wait in an outbox until the master acknowledges them, so none is lost when it dies. Each connection
begins with a Hello that says what the agent is doing; the master answers with its standing order.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import structlog

from holdfast.core.events import Event, Hello
from holdfast.core.orders import Order
from holdfast.errors import AuthenticationError, HoldfastError, WireError
from holdfast.wire.channel import ClientConnection, Tls, connect
from holdfast.wire.messages import Acknowledge, Command, Farewell, Heartbeat, Page, Report

OUTBOX_REPORTS_MAX = 100_000
"""Some reports a worker and view; beyond this the agent is talking in circles."""
CONNECT_TIMEOUT_FIRST_S = 3.0
CONNECT_TIMEOUT_MAX_S = 10.0
"""It doubles when it runs out: a busy master gets round to everybody, if they do not all begin again meanwhile."""
RETRY_FIRST_S = 0.01
RETRY_MAX_S = 0.2
"""Of a local or rack-wide connection; a restarted master is back in a third of a second."""

log = structlog.get_logger("agent")


class Speaker(Protocol):
    """Whom the link speaks for."""

    def hello(self) -> Hello: ...

    def obey(self, order: Order) -> None: ...


class Uplink:
    """One agent's line to the master."""

    def __init__(
        self,
        speaker: Speaker,
        address: Callable[[], tuple[str, int]],
        *,
        token: str,
        tls: Tls | None,
        heartbeat_interval_s: float,
        silence_timeout_s: float,
    ) -> None:
        self._speaker, self._address = speaker, address
        self._token, self._tls = token, tls
        self._heartbeat_interval_s = heartbeat_interval_s
        self._silence_timeout_s = silence_timeout_s
        self._outbox: deque[Report] = deque()
        self._numbered = 0
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._reconnect = False
        self._connection: ClientConnection | None = None
        self.term = 0
        self.unreachable_since: float | None = None
        """On the monotonic clock; None while connected, and before the first attempt."""
        self.trouble = ""
        """Why the last attempt to connect failed."""

    def report(self, event: Event) -> None:
        """Tell the master, now or when it is back."""
        assert len(self._outbox) < OUTBOX_REPORTS_MAX, "too many reports wait for the master"
        self._numbered += 1
        self._outbox.append(Report(self._numbered, self.term, event))
        self._drained.clear()
        self._wake.set()

    @property
    def waiting(self) -> int:
        """How many reports are not acknowledged."""
        return len(self._outbox)

    def forget_reports(self) -> None:
        """For a new life: what the old one had to say no longer matters."""
        self._outbox.clear()
        self._drained.set()

    def reconnect(self) -> None:
        """Introduce ourselves anew."""
        self._reconnect = True
        self._wake.set()

    async def say_farewell(self) -> None:
        """The last word on this connection, if there is one: the end of the job was heard."""
        if self._connection is not None:
            try:
                await self._connection.send(Farewell())
            except WireError as error:
                log.debug(f"the master is gone already: {error}")

    async def drained(self) -> None:
        """Until all that was reported is acknowledged."""
        await self._drained.wait()

    async def run(self) -> None:
        """Stay connected. Ends only by being cancelled, or, before any master was followed, by an error that trying
        again cannot mend."""
        retry_s, timeout_s = RETRY_FIRST_S, CONNECT_TIMEOUT_FIRST_S
        self.unreachable_since = time.monotonic()
        while True:
            began_at = time.monotonic()
            heard = await self._connect_and_converse(timeout_s)
            if heard:
                timeout_s = CONNECT_TIMEOUT_FIRST_S
            elif time.monotonic() - began_at >= timeout_s:
                timeout_s = min(timeout_s * 2, CONNECT_TIMEOUT_MAX_S)
            retry_s = RETRY_FIRST_S if heard else min(retry_s * 2, RETRY_MAX_S)
            await asyncio.sleep(retry_s)  # the port may not be open yet; there is no event for that

    async def _connect_and_converse(self, timeout_s: float) -> bool:
        """One connection, from beginning to end. Whether the master was heard on it."""
        host, port = self._address()
        try:
            connection = self._connection = await connect(
                host, port, token=self._token, role="agent", tls=self._tls, timeout_s=timeout_s
            )
            await self._converse(connection)
        except (HoldfastError, OSError) as error:
            if not self.term and (isinstance(error, AuthenticationError) or not isinstance(error, WireError)):
                raise  # with this token, certificate or address the node cannot take part; one that does goes on
            self.trouble = f"{host}:{port}: {error}"
            log.debug(f"no connection to the master: {self.trouble}")
        finally:
            heard = self.unreachable_since is None
            if heard:
                self.unreachable_since = time.monotonic()
            if self._connection is not None:
                connection, self._connection = self._connection, None
                await connection.close()
        return heard

    async def _converse(self, connection: ClientConnection) -> None:
        self._reconnect = False
        await connection.send(Report(0, self.term, self._speaker.hello()))
        tasks = [asyncio.create_task(self._hear(connection)), asyncio.create_task(self._speak(connection))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _hear(self, connection: ClientConnection) -> None:
        while True:
            try:
                async with asyncio.timeout(self._silence_timeout_s):
                    message = await connection.receive()
            except TimeoutError:
                raise WireError(f"nothing heard for {self._silence_timeout_s:.1f} s") from None
            self.unreachable_since, self.trouble = None, ""
            match message:
                case Acknowledge(number=number):
                    self._acknowledge(number)
                case Command(term=term, order=order):
                    self._fence(term)
                    self._speaker.obey(order)
                case Page():
                    raise WireError("the master sent a page to an agent")

    def _fence(self, term: int) -> None:
        if term < self.term:
            raise WireError(f"an order of term {term} came after term {self.term}: its master is out of date")
        self.term = term

    def _acknowledge(self, number: int) -> None:
        while self._outbox and self._outbox[0].number <= number:
            self._outbox.popleft()
        if not self._outbox:
            self._drained.set()

    async def _speak(self, connection: ClientConnection) -> None:
        sent = 0
        beat_at = time.monotonic() + self._heartbeat_interval_s
        while not self._reconnect:
            self._wake.clear()
            for report in [report for report in self._outbox if report.number > sent]:
                await connection.send(report)
                sent = report.number
            if time.monotonic() >= beat_at:
                await connection.send(Heartbeat(self.term))
                beat_at = time.monotonic() + self._heartbeat_interval_s
            try:
                async with asyncio.timeout(max(beat_at - time.monotonic(), 0.0)):
                    await self._wake.wait()
            except TimeoutError:
                pass
