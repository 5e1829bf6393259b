"""The views' rendezvous stores: their ports, bound ahead of time, and the process that has torch and hosts them
(worker/launch/store_host.py), seen from the agent.

A port is bound and listened on here, without torch, and offered to the master ahead of time. When a view uses it, the
socket goes to the store host; clients that were faster wait in its backlog. So the store of a view costs the recovery
no round trip, and each view has its own.

The host is started with the first store. If it dies, its stores are gone with all that was in them: `lost()` returns
their views, which need new stores, and the next `open` starts another host. One that does not answer is killed
(helper_watch.py).
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import msgspec

from holdfast.agent.helper_watch import Helper, kill_unless_answered
from holdfast.agent.launch.child import Child
from holdfast.agent.launch.fork_server_process import ForkServerLink
from holdfast.errors import LaunchError
from holdfast.util.network import listen
from holdfast.wire.launch_messages import (
    BecomeStoreHost,
    CloseStore,
    OpenStore,
    ServerRequest,
    StoreClosed,
    StoreFailed,
    StoreHostReply,
    StoreHostRequest,
    StoreOpened,
)

OPEN_ATTEMPTS_MAX = 2
ANSWER_LIMIT_S = 60.0
"""How long a request may take. Most take a millisecond; the first one of a cold host imports torch."""


class StorePorts:
    """One port on offer at a time, and those that views use but whose stores are not open yet."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._offered: socket.socket | None = None
        self._reserved: dict[int, socket.socket] = {}

    def offer(self) -> int:
        """Return a port of this node that no view uses."""
        if self._offered is None:
            self._offered = listen(self.address)
        return int(self._offered.getsockname()[1])

    def reserve(self, view: int, port: int) -> bool:
        """Record that a view uses the offered port, even if this agent never serves that view: another port must be
        offered. Return False if that was known."""
        if self._offered is None or self._offered.getsockname()[1] != port:
            return False
        self._reserved[view], self._offered = self._offered, None
        return True

    def claim(self, view: int) -> socket.socket | None:
        """Return the socket of a view's store, and close those of earlier views, which are not needed any more."""
        listener = self._reserved.pop(view, None)
        for earlier in [number for number in self._reserved if number < view]:
            self._reserved.pop(earlier).close()
        return listener

    def close(self) -> None:
        """Close all ports."""
        for listener in [self._offered, *self._reserved.values()]:
            if listener is not None:
                listener.close()
        self._offered = None
        self._reserved.clear()


class StoreHostClient:
    """The agent's connection to one process of the store host."""

    def __init__(self, child: Child, connection: socket.socket) -> None:
        self.child = child
        self.views: set[int] = set()
        self._waiting: dict[int, asyncio.Future[StoreHostReply | None]] = {}
        self._link: ForkServerLink[StoreHostReply] = ForkServerLink(
            connection, msgspec.msgpack.Decoder(StoreHostReply), self._replied
        )

    @property
    def helper(self) -> Helper:
        """The host as a process that is replaced when it hangs."""
        return Helper("the store host", self.child.pid, lambda: self.child.signal(signal.SIGKILL))

    async def ask(self, request: StoreHostRequest, descriptors: tuple[int, ...] = ()) -> StoreHostReply | None:
        """Send a request and wait for its reply; return None if the host died, or was killed because it did not
        answer."""
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[StoreHostReply | None] = loop.create_future()
        self._waiting[request.view] = reply
        watch = loop.create_task(kill_unless_answered(reply, self.helper, ANSWER_LIMIT_S))
        try:
            await self._link.send(request, descriptors)
        except ConnectionError:
            await self.child.wait()
        try:
            return await reply
        finally:
            watch.cancel()

    def close(self) -> None:
        """Close the connection to a host that has ended, and answer pending requests with None."""
        self._link.close()
        for reply in self._waiting.values():
            reply.set_result(None)

    def _replied(self, reply: StoreHostReply) -> None:
        if isinstance(reply, StoreOpened):
            self.views.add(reply.view)
        elif isinstance(reply, StoreClosed):
            self.views.discard(reply.view)
        self._waiting.pop(reply.view).set_result(reply)


class RendezvousStores:
    """The open stores of this node. `launch` starts a process through the fork server."""

    def __init__(self, launch: Callable[[ServerRequest, Sequence[int]], Awaitable[Child]]) -> None:
        self._launch = launch
        self._host: StoreHostClient | None = None
        self._asking = asyncio.Lock()  # one request at a time: they take a millisecond, and views are rare
        self._unfinished: set[asyncio.Task[None]] = set()
        self._lost_views: set[int] = set()
        self._loss = asyncio.Event()

    @property
    def host_pid(self) -> int:
        """The process id of the store host; 0 while there is none."""
        return 0 if self._host is None else self._host.child.pid

    @property
    def helper(self) -> Helper | None:
        """The store host as a process that is replaced when it hangs; None while there is none."""
        return None if self._host is None else self._host.helper

    async def open(self, view: int, host: str, listener: socket.socket) -> None:
        """Serve a view's store on a socket that is bound and listening, and close the agent's copy of it in any case.
        `host` is where workers look for the store; it is used in messages only. Raises LaunchError."""
        await self._to_its_end(self._open(view, host, listener))

    async def close(self, view: int) -> None:
        """Close a view's store; its port is free on return. A store that is not open is closed already."""
        await self._to_its_end(self._close(view))

    async def lost(self) -> frozenset[int]:
        """Wait until the store host dies with stores open; return the views that had them."""
        await self._loss.wait()
        views = frozenset(self._lost_views)
        self._lost_views.clear()
        self._loss.clear()
        return views

    async def end(self) -> None:
        """End the store host and wait for requests under way."""
        if (host := self._host) is not None:
            host.views.clear()  # intended, so not lost
            host.child.signal(signal.SIGKILL)
            await host.child.wait()
        await asyncio.gather(*self._unfinished, return_exceptions=True)

    async def _open(self, view: int, host: str, listener: socket.socket) -> None:
        with listener:
            async with self._asking:
                request = OpenStore(view, host, listener.getsockname()[1])
                for _ in range(OPEN_ATTEMPTS_MAX):
                    store_host = await self._living_host()
                    reply = await store_host.ask(request, (listener.fileno(),))
                    if isinstance(reply, StoreFailed):
                        raise LaunchError(reply.reason)
                    if reply is not None:
                        return
        raise LaunchError(f"the store host died {OPEN_ATTEMPTS_MAX} times while it opened the store of view {view}")

    async def _close(self, view: int) -> None:
        async with self._asking:
            if self._host is not None and view in self._host.views:
                await self._host.ask(CloseStore(view))

    async def _living_host(self) -> StoreHostClient:
        if self._host is None:
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    child = await self._launch(BecomeStoreHost(request_id=0), [theirs.fileno(), 2])
            except BaseException:
                ours.close()
                raise
            self._host = StoreHostClient(child, ours)
            child.on_end(self._host_ended)
        return self._host

    def _host_ended(self, child: Child) -> None:
        host, self._host = self._host, None
        assert host is not None and host.child is child
        host.close()
        if host.views:
            self._lost_views |= host.views
            self._loss.set()

    async def _to_its_end(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` so that a caller's cancellation neither cuts a frame in two nor leaves a socket open."""
        task = asyncio.get_running_loop().create_task(work)
        self._unfinished.add(task)
        task.add_done_callback(self._finished)
        await asyncio.shield(task)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._unfinished.discard(task)
        if not task.cancelled():
            task.exception()  # the caller gets it too; there is none if the agent is ending
