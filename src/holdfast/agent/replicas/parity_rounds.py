"""Rounds of parity: the members of a group contribute their images of one step to each other, then of the next.

A round needs the same step of everybody, so somebody must name it: the first member that has the seat. It contributes
its newest image; the others hear of the step by that, and contribute theirs of the same step.

The order of changes. Parity is worth nothing without the images that it is of. The last step whose parity is sealed on
all members of all groups is whole everywhere, as the workers know from each other: its images stay in their slots, and
its parity in one of two here (`Offer.whole`), until a later step is. So while there is parity, snapshots can be taken
no faster than rounds go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from holdfast.agent.replicas.blocks import checksums_of
from holdfast.agent.replicas.bulk import BulkClient
from holdfast.agent.replicas.parity import piece
from holdfast.agent.replicas.parity_store import Age, ParityStore
from holdfast.agent.replicas.replicator import RETRY_FIRST_S, RETRY_MAX_S, Complaint, Image, Images, Safe, label_of
from holdfast.core.orders import Peer
from holdfast.errors import ReplicaError, WireError
from holdfast.wire.bulk import Contribute, Label
from holdfast.wire.tls import Tls


class ParityRounds:
    """This node's part in one group, for as long as it is in it."""

    def __init__(
        self,
        node_id: str,
        group: Sequence[Peer],
        images: Images,
        store: ParityStore,
        *,
        token: str,
        tls: Tls | None,
        on_safe: Safe = lambda group, seat, view, step: None,
    ) -> None:
        self.group = tuple(group)
        seats = next(peer.workers for peer in group if peer.node_id == node_id)
        self.seats = [
            SeatRounds(node_id, self.group, seat, images, store, token, tls, on_safe) for seat in range(seats)
        ]

    def nudge(self) -> None:
        """Somebody's contribution has begun. On the event loop."""
        for seat in self.seats:
            seat.news.set()

    def forget_after(self, step: int) -> None:
        """What was sealed of later steps says nothing of those to come."""
        for seat in self.seats:
            if seat.sealed is not None and seat.sealed[1] > step:
                seat.sealed = None
            seat.news.set()

    async def close(self) -> None:
        """Nothing is under way on return."""
        await asyncio.gather(*(seat.close() for seat in self.seats))


class SeatRounds:
    """The rounds of one seat."""

    def __init__(
        self,
        node_id: str,
        group: tuple[Peer, ...],
        seat: int,
        images: Images,
        store: ParityStore,
        token: str,
        tls: Tls | None,
        on_safe: Safe,
    ) -> None:
        self._on_safe = on_safe
        self._node_id, self._group, self._seat, self._images, self._store = node_id, group, seat, images, store
        self._names = tuple(peer.node_id for peer in group)
        self._leader = next(peer.node_id for peer in group if peer.workers > seat)
        self._clients = {
            peer.node_id: BulkClient(peer.address, peer.bulk_port, token=token, tls=tls)
            for peer in group
            if peer.node_id != node_id
        }
        self._threads = ThreadPoolExecutor(len(group), thread_name_prefix=f"parity-{seat}")
        self.sealed: Age | None = None
        """The newest step whose parity is sealed on all members."""
        self._complaint = Complaint()
        self.news = asyncio.Event()
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._watch())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for client in self._clients.values():
            client.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown)
        for client in self._clients.values():
            client.hang_up()

    async def _watch(self) -> None:
        while True:
            seen = self._images.sealed_count
            self.news.set()
            await self._images.changed(seen)

    async def _run(self) -> None:
        retry_s = RETRY_FIRST_S
        while True:
            self.news.clear()
            image = self._next()
            if image is None or await self._round(image):
                retry_s = RETRY_FIRST_S
                if image is None:
                    await self.news.wait()
                continue
            try:
                async with asyncio.timeout(retry_s):
                    await self.news.wait()
            except TimeoutError:
                retry_s = min(retry_s * 2, RETRY_MAX_S)

    def _next(self) -> Image | None:
        """The image of the next round, if there is one to be had."""
        if self._leader == self._node_id:
            image = self._images.newest(self._seat)
        else:
            age = self._store.announced(self._seat, self._leader)
            image = self._images.at(self._seat, *age) if age else None
        return image if image and (self.sealed is None or (image.view, image.step) > self.sealed) else None

    async def _round(self, image: Image) -> bool:
        """Whether it came to its end."""
        with image.pinned() as content:
            if content is None:
                return True  # there is a newer one
            try:
                await self._contribute(image, content)
            except (WireError, ReplicaError, OSError) as error:
                self._say(f"no parity of step {image.step}, local rank {self._seat}: {error}")
                return False
        if self._images.at(self._seat, image.view, image.step) is None:
            return True  # the job has gone back behind it meanwhile
        self.sealed = (image.view, image.step)
        self._on_safe("parity of " + ", ".join(self._names), self._seat, image.view, image.step)
        self._say("")
        return True

    async def _contribute(self, image: Image, content: memoryview) -> None:
        """To all others, at once; and until our own part of the parity is sealed as well."""
        loop = asyncio.get_running_loop()
        label = label_of(self._node_id, image)
        if not label.checksums:
            checksums = await loop.run_in_executor(self._threads, checksums_of, content)
            label = msgspec.structs.replace(label, checksums=checksums)
        send = partial(self._send, label, image.whole, content)
        sends = [loop.run_in_executor(self._threads, send, name) for name in self._clients]
        outcomes = await asyncio.gather(*sends, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        waits = self._store.contributors(self._seat)
        age = (image.view, image.step)
        if waits and not await loop.run_in_executor(self._threads, self._store.await_sealed, self._seat, age):
            raise ReplicaError("others of the parity group have not contributed yet")

    def _send(self, label: Label, whole: int, content: memoryview, name: str) -> None:
        """In a thread."""
        members = len(self._names)
        where = piece(len(content), members, self._names.index(self._node_id), self._names.index(name))
        offered = Contribute(label=label, group=self._names, size_bytes=where.stop - where.start, whole=whole)
        self._clients[name].contribute(offered, content[where])

    def _say(self, trouble: str) -> None:
        self._complaint.say(trouble, f"parity of local rank {self._seat} is kept again")
