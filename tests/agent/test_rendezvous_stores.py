"""The ports of stores: a view's port is its own, and there is always another one to offer."""

import asyncio
import gc
import socket
from typing import Any

from holdfast.agent.launch.child import Child
from holdfast.agent.rendezvous_stores import RendezvousStores, StorePorts
from holdfast.errors import LaunchError


def reachable(port: int) -> Any:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_an_offered_port_accepts_connections_before_its_store_is_open() -> None:
    ports = StorePorts("127.0.0.1")
    port = ports.offer()
    assert ports.offer() == port and reachable(port)
    ports.close()
    assert not reachable(port)


def test_a_port_that_a_view_took_up_is_not_offered_again_though_the_view_was_skipped() -> None:
    ports = StorePorts("127.0.0.1")
    first = ports.offer()
    assert ports.reserve(5, first)
    second = ports.offer()
    assert second != first
    assert ports.reserve(6, second)
    listener = ports.claim(6)
    assert listener is not None and listener.getsockname()[1] == second
    assert not reachable(first), "the store of the skipped view will never be asked for"
    assert ports.claim(5) is None
    listener.close()
    ports.close()


def test_an_order_that_comes_again_promises_nothing_new() -> None:
    ports = StorePorts("127.0.0.1")
    port = ports.offer()
    assert ports.reserve(5, port)
    assert not ports.reserve(5, port)
    ports.close()


def test_a_store_that_fails_after_its_agent_has_stopped_waiting_leaves_no_traceback() -> None:
    complaints: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        is_closed = asyncio.Event()

        async def launch(request: object, descriptors: object) -> Child:
            await is_closed.wait()
            raise LaunchError("the launcher was closed while a process was being started")

        stores = RendezvousStores(launch)
        opening = asyncio.create_task(stores.open(1, "127.0.0.1", socket.create_server(("127.0.0.1", 0))))
        await asyncio.sleep(0.01)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        is_closed.set()
        while stores._unfinished:
            await asyncio.sleep(0)
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(run())
    gc.collect()
    assert complaints == []
