"""The views' rendezvous stores, kept by a process that has torch (worker/birth/storekeeper.py), seen from the agent.

The keeper is started with the first store. If it dies, its stores are gone with all that was in them: that is told
through `lost()`, the views on them need new ones, and the next `open` starts another keeper.
"""

from __future__ import annotations

import asyncio
import signal
import socket

import msgspec

from holdfast.agent.birth.child import Child
from holdfast.agent.birth.nursery import Nursery
from holdfast.agent.local_link import Link
from holdfast.errors import LaunchError
from holdfast.wire.local import (
    CloseStore,
    KeeperReply,
    KeeperRequest,
    KeepStores,
    OpenStore,
    StoreClosed,
    StoreFailed,
    StoreOpened,
)

OPEN_ATTEMPTS_MAX = 2


class Keeper:
    """One life of the store keeper."""

    def __init__(self, child: Child, connection: socket.socket) -> None:
        self.child = child
        self.views: set[int] = set()
        self._waiting: dict[int, asyncio.Future[KeeperReply | None]] = {}
        self._link: Link[KeeperReply] = Link(connection, msgspec.msgpack.Decoder(KeeperReply), self._replied)

    async def ask(self, request: KeeperRequest, descriptors: tuple[int, ...] = ()) -> KeeperReply | None:
        """None if the keeper died before it answered."""
        reply: asyncio.Future[KeeperReply | None] = asyncio.get_running_loop().create_future()
        self._waiting[request.view] = reply
        try:
            await self._link.send(request, descriptors)
        except ConnectionError:
            await self.child.wait()
        return await reply

    def close(self) -> None:
        """At its end: whoever waits for an answer is told that there will be none."""
        self._link.close()
        for reply in self._waiting.values():
            reply.set_result(None)

    def _replied(self, reply: KeeperReply) -> None:
        if isinstance(reply, StoreOpened):
            self.views.add(reply.view)
        elif isinstance(reply, StoreClosed):
            self.views.discard(reply.view)
        self._waiting.pop(reply.view).set_result(reply)


class Stores:
    def __init__(self, nursery: Nursery) -> None:
        self._nursery = nursery
        self._keeper: Keeper | None = None
        self._asking = asyncio.Lock()  # one request at a time: they take a millisecond, and views are rare
        self._lost_views: set[int] = set()
        self._loss = asyncio.Event()

    @property
    def keeper_pid(self) -> int:
        """0 while there is none."""
        return 0 if self._keeper is None else self._keeper.child.pid

    async def open(self, view: int, host: str, listener: socket.socket) -> None:
        """Takes the socket over and closes it here, whatever comes."""
        with listener:
            async with self._asking:
                request = OpenStore(view, host, listener.getsockname()[1])
                for _ in range(OPEN_ATTEMPTS_MAX):
                    keeper = await self._living_keeper()
                    reply = await keeper.ask(request, (listener.fileno(),))
                    if isinstance(reply, StoreFailed):
                        raise LaunchError(reply.reason)
                    if reply is not None:
                        return
        raise LaunchError(f"the store keeper died {OPEN_ATTEMPTS_MAX} times while it opened the store of view {view}")

    async def close_view(self, view: int) -> None:
        """Its port is free on return. A store that is not there, or no longer, is closed already."""
        async with self._asking:
            if self._keeper is not None and view in self._keeper.views:
                await self._keeper.ask(CloseStore(view))

    async def lost(self) -> frozenset[int]:
        """Waits for a keeper's death that took stores along; the views that had them."""
        await self._loss.wait()
        views = frozenset(self._lost_views)
        self._lost_views.clear()
        self._loss.clear()
        return views

    async def end(self) -> None:
        if (keeper := self._keeper) is not None:
            keeper.views.clear()  # meant, so not lost
            keeper.child.signal(signal.SIGKILL)
            await keeper.child.wait()

    async def _living_keeper(self) -> Keeper:
        if self._keeper is None:
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    request = KeepStores(self._nursery.next_request_id())
                    child = await self._nursery.launch(request, [theirs.fileno(), 2])
            except BaseException:
                ours.close()
                raise
            self._keeper = Keeper(child, ours)
            child.on_end(self._keeper_ended)
        return self._keeper

    def _keeper_ended(self, child: Child) -> None:
        keeper, self._keeper = self._keeper, None
        assert keeper is not None and keeper.child is child
        keeper.close()
        if keeper.views:
            self._lost_views |= keeper.views
            self._loss.set()
