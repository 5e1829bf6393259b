"""An agent's connection to the master, against a server that says what a test wants."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

import pytest

from holdfast.agent import uplink as uplink_module
from holdfast.agent.uplink import Uplink
from holdfast.core.events import Hello, JobSpec, NodeInfo
from holdfast.core.orders import Hold, Order
from holdfast.wire.control import Server, ServerConnection
from holdfast.wire.control_messages import Acknowledge, Command, Heartbeat

TOKEN = "t" * 32
STARTED_S, TOLD_S = 0.02, 0.2


class Speaker:
    """An agent that does nothing."""

    def hello(self) -> Hello:
        info = NodeInfo(host="a", address="127.0.0.1", machine_id="m", boot_id="b", pid=1, workers=1)
        spec = JobSpec(run_id="", nodes_min=1, nodes_max=1, restarts_max=0)
        return Hello(node_id="a", incarnation="a.1", info=info, spec=spec, store_port=0)

    def obey(self, order: Order) -> None:
        pass

    def read_stacks(self, request: int) -> None:
        pass


async def heartbeats(count: int, told_s: float, *, keeps_master: bool) -> list[float]:
    """Return when so many heartbeats came in after the order."""
    came_at: list[float] = []
    enough = asyncio.Event()

    async def serve(connection: ServerConnection) -> None:
        await connection.receive()
        connection.send(Command(1, Hold(job_id="job", why="a test"), told_s))
        while (message := await connection.receive()) is not None:
            if isinstance(message, Heartbeat):
                came_at.append(time.monotonic())
                connection.send(Acknowledge(0))
            if len(came_at) == count:
                enough.set()

    server = Server("127.0.0.1", 0, token=TOKEN, tls=None, stranger=lambda peer, why: None)
    port = await server.start(serve)
    uplink = Uplink(
        Speaker(),
        lambda: ("127.0.0.1", port),
        token=TOKEN,
        tls=None,
        heartbeat_interval_s=STARTED_S,
        silence_timeout_s=30.0,
        keeps_master=lambda: keeps_master,
    )
    running = asyncio.create_task(uplink.run())
    try:
        async with asyncio.timeout(60.0):
            await enough.wait()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(0.0)
    return came_at


def test_an_agent_sends_no_more_heartbeats_than_it_is_told_to() -> None:
    came_at = asyncio.run(heartbeats(4, TOLD_S, keeps_master=False))[1:]  # the first was due before the order
    assert all(later - earlier > TOLD_S * 0.9 for earlier, later in pairwise(came_at))


@pytest.mark.parametrize(("told_s", "keeps_master"), [(0.0, False), (10.0, True)])
def test_one_that_keeps_the_master_or_is_told_nothing_goes_on_as_it_was_started(
    told_s: float, keeps_master: bool
) -> None:
    came_at = asyncio.run(heartbeats(3, told_s, keeps_master=keeps_master))
    assert min(later - earlier for earlier, later in pairwise(came_at)) < 10.0


def test_an_agent_that_is_turned_away_leaves_a_busy_master_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens, and ends each connection at once."""
    monkeypatch.setattr(uplink_module, "RETRY_MAX_S", 0.02)
    came_at: list[float] = []

    async def scenario() -> None:
        enough = asyncio.Event()

        async def turn_away(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            came_at.append(time.monotonic())
            writer.close()
            if len(came_at) == 8:
                enough.set()

        server = await asyncio.start_server(turn_away, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        uplink = Uplink(
            Speaker(),
            lambda: ("127.0.0.1", port),
            token=TOKEN,
            tls=None,
            heartbeat_interval_s=1.0,
            silence_timeout_s=30.0,
        )
        running = asyncio.create_task(uplink.run())
        async with asyncio.timeout(60.0):
            await enough.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        server.close()
        await server.wait_closed()

    asyncio.run(scenario())
    assert came_at[-1] - came_at[-2] > 0.01 * 1.5**6, "each pause is longer than the one before"
