"""Rounds of parity: the members of a group contribute their images of one step to each other, then of the next.

A round needs the same step of all members, so one of them, the leader, chooses it: the first member that has a worker
of this local rank. It contributes its newest image; from that the others learn the step, and contribute theirs.

The order of changes. Parity is worth nothing without the images that it is of. The last step whose parity is sealed on
all members of all groups is complete on all ranks, as the workers know from each other: its images stay in their slots,
and its parity in one of two here (`Contribute.complete_step`), until a later step is. So while there is parity,
snapshots can be taken no faster than rounds go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from holdfast.core.image_info import ImageInfo, Version
from holdfast.core.orders import Peer
from holdfast.errors import ReplicaError, WireError
from holdfast.snapshots.parity.arithmetic import piece
from holdfast.snapshots.parity.parity_store import ParityStore
from holdfast.snapshots.replicator import (
    RETRY_FIRST_S,
    RETRY_MAX_S,
    ImageSource,
    OnSafe,
    ReadableImage,
    RepeatedProblem,
    describe_for_peers,
    find_image,
    find_newest,
)
from holdfast.snapshots.transfer import BulkClient
from holdfast.util.blocks import block_checksums, pack_checksums
from holdfast.wire.bulk_messages import Contribute
from holdfast.wire.tls import Tls


class ParityRounds:
    """This node's part in the rounds of one group, for as long as it is a member."""

    def __init__(
        self,
        node_id: str,
        group: Sequence[Peer],
        images: ImageSource,
        store: ParityStore,
        *,
        token: str,
        tls: Tls | None,
        on_safe: OnSafe = lambda where, local_rank, version: None,
    ) -> None:
        self.group = tuple(group)
        workers = next(peer.workers for peer in group if peer.node_id == node_id)
        self.ranks = [
            LocalRankRounds(node_id, self.group, rank, images, store, token, tls, on_safe) for rank in range(workers)
        ]

    def wake(self) -> None:
        """Begin rounds that another member has announced. On the event loop."""
        for rank in self.ranks:
            rank.changed.set()

    def discard_after(self, step: int) -> None:
        """Forget which later steps are sealed: they are of an undone history."""
        for rank in self.ranks:
            if rank.sealed is not None and rank.sealed[1] > step:
                rank.sealed = None
            rank.changed.set()

    async def close(self) -> None:
        """End all rounds."""
        await asyncio.gather(*(rank.close() for rank in self.ranks))


class LocalRankRounds:
    """The rounds of one local rank."""

    def __init__(
        self,
        node_id: str,
        group: tuple[Peer, ...],
        local_rank: int,
        images: ImageSource,
        store: ParityStore,
        token: str,
        tls: Tls | None,
        on_safe: OnSafe,
    ) -> None:
        self._on_safe = on_safe
        self._node_id, self._group, self._rank, self._images, self._store = node_id, group, local_rank, images, store
        self._names = tuple(peer.node_id for peer in group)
        self._leader = next(peer.node_id for peer in group if peer.workers > local_rank)
        self._clients = {
            peer.node_id: BulkClient(peer.address, peer.bulk_port, token=token, tls=tls)
            for peer in group
            if peer.node_id != node_id
        }
        self._threads = ThreadPoolExecutor(len(group), thread_name_prefix=f"parity-{local_rank}")
        self.sealed: Version | None = None
        """The newest version whose parity is sealed on all members."""
        self._problem = RepeatedProblem("parity")
        self.changed = asyncio.Event()
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._watch())]

    async def close(self) -> None:
        """End the round, and all threads."""
        for task in self._tasks:
            task.cancel()
        for client in self._clients.values():
            client.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown)
        for client in self._clients.values():
            client.disconnect()

    async def _watch(self) -> None:
        while True:
            seen = self._images.sealed_count
            self.changed.set()
            await self._images.changed(seen)

    async def _run(self) -> None:
        retry_s = RETRY_FIRST_S
        while True:
            self.changed.clear()
            image = self._next()
            if image is None or await self._round(image):
                retry_s = RETRY_FIRST_S
                if image is None:
                    await self.changed.wait()
                continue
            try:
                async with asyncio.timeout(retry_s):
                    await self.changed.wait()
            except TimeoutError:
                retry_s = min(retry_s * 2, RETRY_MAX_S)

    def _next(self) -> ReadableImage | None:
        """Return the image of the next round, if there is one."""
        image: ReadableImage | None = None
        if self._leader == self._node_id:
            image = find_newest(self._images).get(self._rank)
        elif version := self._store.announced(self._rank, self._leader):
            image = find_image(self._images, self._rank, version)
        return image if image and (self.sealed is None or image.info.version > self.sealed) else None

    async def _round(self, image: ReadableImage) -> bool:
        """Take part in one round. Return False if it failed."""
        version = image.info.version
        with image.reading() as content:
            if content is None:
                return True  # there is a newer one
            try:
                await self._contribute(image, content)
            except (WireError, ReplicaError, OSError) as error:
                self._report(f"no parity of step {version[1]}, local rank {self._rank}: {error}")
                return False
        if find_image(self._images, self._rank, version) is None:
            return True  # the job has gone back behind it in the meantime
        self.sealed = version
        self._on_safe("parity of " + ", ".join(self._names), self._rank, version)
        self._report("")
        return True

    async def _contribute(self, image: ReadableImage, content: memoryview) -> None:
        """Send its pieces to all other members at once, and wait until this node's own parity is sealed as well."""
        loop = asyncio.get_running_loop()
        info = describe_for_peers(self._node_id, image)
        if not info.checksums:
            checksums = await loop.run_in_executor(self._threads, block_checksums, content)
            info = msgspec.structs.replace(info, checksums=pack_checksums(checksums))
        send = partial(self._send, info, image.complete_step, content)
        sends = [loop.run_in_executor(self._threads, send, name) for name in self._clients]
        outcomes = await asyncio.gather(*sends, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        waits = self._store.contributors(self._rank)
        sealed = partial(self._store.await_sealed, self._rank, info.version)
        if waits and not await loop.run_in_executor(self._threads, sealed):
            raise ReplicaError("other members of the parity group have not contributed yet")

    def _send(self, info: ImageInfo, complete_step: int, content: memoryview, name: str) -> None:
        """Send one member its piece, in a thread."""
        members = len(self._names)
        where = piece(len(content), members, self._names.index(self._node_id), self._names.index(name))
        size_bytes = where.stop - where.start
        offered = Contribute(image=info, group=self._names, size_bytes=size_bytes, complete_step=complete_step)
        self._clients[name].contribute(offered, content[where])

    def _report(self, problem: str) -> None:
        self._problem.report(problem, f"parity of local rank {self._rank} is stored again")
