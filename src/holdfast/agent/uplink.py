"""The agent's connection to the master: made again whenever it breaks, for as long as the agent lives.

Reports wait in an outbox until the master acknowledges them, so none is lost when it dies. Each connection begins with
a Hello that says what the agent is doing; the master answers with its standing order.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from holdfast.core.events import Event, Hello
from holdfast.core.orders import Exit, Order
from holdfast.errors import AuthenticationError, HoldfastError, WireError
from holdfast.util.logs import get_logger
from holdfast.wire.control import ClientConnection, connect
from holdfast.wire.control_messages import (
    Acknowledge,
    Command,
    EventReport,
    Farewell,
    Heartbeat,
    NodeStacks,
    OperatorAnswer,
    Page,
    ReadStacks,
)
from holdfast.wire.frame_stream import until_first_ends
from holdfast.wire.tls import Tls

OUTBOX_REPORTS_MAX = 100_000
"""There are some reports for each worker and view; beyond this the agent repeats itself endlessly."""
CONNECT_TIMEOUT_FIRST_S = 3.0
CONNECT_TIMEOUT_MAX_S = 10.0
"""The timeout doubles when it runs out: a busy master answers all agents, if they do not start over too early."""
RETRY_FIRST_S = 0.01
RETRY_MAX_S = 0.2
"""For a local or rack-wide connection; a restarted master is back in a third of a second."""
RETRY_BUSY_MAX_S = 4.0
"""For a master that listens and ends the connection before it has proved itself: it has more agents than it can answer,
and thousands that try again every moment would keep it from answering any."""

log = get_logger(__name__)


class UplinkSender(Protocol):
    """The agent, as the uplink sees it."""

    def hello(self) -> Hello: ...

    def obey(self, order: Order) -> None: ...

    def read_stacks(self, request: int) -> None: ...


class Uplink:
    """One agent's connection to the master."""

    def __init__(
        self,
        speaker: UplinkSender,
        address: Callable[[], tuple[str, int]],
        *,
        token: str,
        tls: Tls | None,
        heartbeat_interval_s: float,
        silence_timeout_s: float,
        keeps_master: Callable[[], bool] = lambda: False,
    ) -> None:
        """`keeps_master`: whether this agent's heartbeats show that the master lives, so that they stay as frequent as
        they are."""
        self._speaker, self._address = speaker, address
        self._token, self._tls = token, tls
        self._heartbeat_interval_s = heartbeat_interval_s
        self._silence_timeout_s = silence_timeout_s
        self._keeps_master = keeps_master
        self._told_interval_s = 0.0
        self._was_turned_away = False
        self._outbox: deque[EventReport] = deque()
        self._numbered = 0
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._farewell_sent = asyncio.Event()
        self._reconnect = False
        self._connection: ClientConnection | None = None
        self.term = 0
        self.messages_heard = 0
        """How many messages have come from masters so far: a master that is well answers each heartbeat."""
        self.unreachable_since: float | None = None
        """The time on the monotonic clock; None while connected, and before the first attempt."""
        self.is_started = False
        """Whether it connects, or tries to."""
        self.trouble = ""
        """Why the last attempt to connect failed."""

    def report(self, event: Event) -> None:
        """Send an event to the master, now or when it is back."""
        assert len(self._outbox) < OUTBOX_REPORTS_MAX, "too many reports wait for the master"
        self._numbered += 1
        self._outbox.append(EventReport(self._numbered, self.term, event))
        self._drained.clear()
        self._wake.set()

    async def send_stacks(self, stacks: NodeStacks) -> None:
        """Send stacks that the master has asked for; they are of no use to the next connection."""
        if (connection := self._connection) is not None:
            with contextlib.suppress(WireError, OSError):
                await connection.send(stacks)

    @property
    def waiting(self) -> int:
        """The number of reports that are not acknowledged."""
        return len(self._outbox)

    @property
    def unanswered(self) -> list[Event]:
        """The events that no master has acknowledged, the oldest first."""
        return [report.event for report in self._outbox]

    def forget_reports(self) -> None:
        """Drop all reports: for a new incarnation, the reports of the old one no longer matter."""
        self._outbox.clear()
        self._drained.set()

    def reconnect(self) -> None:
        """Begin a new connection, with a new Hello."""
        self._reconnect = True
        self._wake.set()

    async def farewell_sent(self, timeout_s: float) -> None:
        """Wait until the master was told that this agent knows of the end, on a connection that was still open. A
        master that has gone already does not need to know, so the wait has a limit."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._farewell_sent.wait()
        except TimeoutError:
            log.debug("farewell-not-sent", "the master is gone already")

    async def drained(self) -> None:
        """Wait until all that was reported is acknowledged."""
        await self._drained.wait()

    async def run(self) -> None:
        """Stay connected until cancelled; or, before any master was followed, raise an error that retrying cannot
        fix."""
        retry_s, timeout_s = RETRY_FIRST_S, CONNECT_TIMEOUT_FIRST_S
        self.unreachable_since, self.is_started = time.monotonic(), True
        while True:
            began_at = time.monotonic()
            heard = await self._connect_and_converse(timeout_s)
            if heard:
                timeout_s = CONNECT_TIMEOUT_FIRST_S
            elif time.monotonic() - began_at >= timeout_s:
                timeout_s = min(timeout_s * 2, CONNECT_TIMEOUT_MAX_S)
            longest_s = RETRY_BUSY_MAX_S if self._was_turned_away else RETRY_MAX_S
            retry_s = RETRY_FIRST_S if heard else min(retry_s * random.uniform(1.5, 2.5), longest_s)
            await asyncio.sleep(retry_s)  # the port may not be open yet; there is no event for that

    async def _connect_and_converse(self, timeout_s: float) -> bool:
        """Use one connection from its beginning to its end; return whether anything came from the master."""
        host, port = self._address()
        self._was_turned_away = False
        try:
            connection = self._connection = await connect(
                host, port, token=self._token, role="agent", tls=self._tls, timeout_s=timeout_s
            )
            await self._converse(connection)
        except (HoldfastError, OSError) as error:
            if not self.term and (isinstance(error, AuthenticationError) or not isinstance(error, WireError)):
                raise  # with this token, certificate or address the node cannot take part; one that does goes on
            self._was_turned_away = not isinstance(error.__cause__, OSError)  # else nothing listens there
            self.trouble = f"{host}:{port}: {error}"
            log.debug("master-unreachable", f"no connection to the master: {self.trouble}")
        finally:
            heard = self.unreachable_since is None
            if heard:
                self.unreachable_since = time.monotonic()
            if self._connection is not None:
                connection, self._connection = self._connection, None
                await connection.close()
        return heard

    async def _converse(self, connection: ClientConnection) -> None:
        self._reconnect, self._told_interval_s = False, 0.0
        await connection.send(EventReport(0, self.term, self._speaker.hello(), sent_at=time.time()))
        await until_first_ends(self._receive_all(connection), self._send_all(connection))

    async def _receive_all(self, connection: ClientConnection) -> None:
        while True:
            try:
                async with asyncio.timeout(self._answer_timeout_s):
                    message = await connection.receive()
            except TimeoutError:
                raise WireError(f"nothing heard for {self._answer_timeout_s:.1f} s") from None
            self.unreachable_since, self.trouble = None, ""
            self.messages_heard += 1
            match message:
                case Acknowledge(number=number):
                    self._acknowledge(number)
                case Command(term=term, order=order, heartbeat_interval_s=interval_s):
                    self._fence(term)
                    self._told_interval_s = interval_s
                    self._speaker.obey(order)
                    if isinstance(order, Exit):  # answered on its own connection, however many there are in the end
                        await connection.send(Farewell())
                        self._farewell_sent.set()
                case ReadStacks(request=request):
                    self._speaker.read_stacks(request)
                case Page() | OperatorAnswer() | NodeStacks():
                    raise WireError("the master sent to an agent what is for watchers and operators")

    @property
    def _interval_s(self) -> float:
        return self._heartbeat_interval_s if self._keeps_master() else self._longest_interval_s

    @property
    def _longest_interval_s(self) -> float:
        return max(self._heartbeat_interval_s, self._told_interval_s)

    @property
    def _answer_timeout_s(self) -> float:
        """How long the master, which answers each heartbeat, may be unheard."""
        return self._silence_timeout_s + self._longest_interval_s - self._heartbeat_interval_s

    def _fence(self, term: int) -> None:
        if term < self.term:
            raise WireError(f"an order of term {term} came after term {self.term}: its master is out of date")
        self.term = term

    def _acknowledge(self, number: int) -> None:
        while self._outbox and self._outbox[0].number <= number:
            self._outbox.popleft()
        if not self._outbox:
            self._drained.set()

    async def _send_all(self, connection: ClientConnection) -> None:
        sent = 0
        beat_at = time.monotonic() + self._interval_s
        while not self._reconnect:
            self._wake.clear()
            for report in [report for report in self._outbox if report.number > sent]:
                await connection.send(replace(report, sent_at=time.time()))
                sent = report.number
            if time.monotonic() >= beat_at:
                await connection.send(Heartbeat(self.term))
                beat_at = time.monotonic() + self._interval_s
            try:
                async with asyncio.timeout(max(beat_at - time.monotonic(), 0.0)):
                    await self._wake.wait()
            except TimeoutError:
                pass
