"""Sends this node's newest snapshots to its partners: the newest, and when it is there, the newest again.

No worker waits for it. A snapshot that is overwritten before its turn is not sent, and the next one is. Each partner
has a connection and a thread of its own, so that a slow one does not delay the others. A partner that is unreachable,
or refuses an image, is tried again: when there is something new, or after a while.

A step is safe on a partner once the image of it, of every worker here, is sealed there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from holdfast.core.image_info import ImageInfo, Version
from holdfast.core.orders import Peer
from holdfast.errors import ReplicaError, WireError
from holdfast.snapshots.transfer import BulkClient
from holdfast.util.logs import get_logger
from holdfast.util.tasks import TaskSet
from holdfast.wire.tls import Tls

RETRY_FIRST_S = 0.1
RETRY_MAX_S = 5.0
"""A partner that is being replaced is away for as long; the master names another one when it is lost."""
TRIES_BEFORE_WARNING = 3

log = get_logger(__name__)


class ReadableImage(Protocol):
    """A complete snapshot of a worker (slot_file.SlotImage)."""

    @property
    def info(self) -> ImageInfo: ...
    @property
    def checksums(self) -> bytes: ...
    @property
    def complete_step(self) -> int: ...
    def reading(self) -> AbstractContextManager[memoryview | None]: ...


class ImageSource(Protocol):
    """This node's snapshots (snapshot_store.SnapshotStore)."""

    def images(self) -> Sequence[ReadableImage]:
        """Return the complete images of all workers, the newest first. For any thread."""

    @property
    def sealed_count(self) -> int:
        """How many images were sealed so far."""

    async def changed(self, sealed_count: int) -> None:
        """Wait until more than so many were sealed."""


class NoImages:
    """The images of a node that takes no snapshots."""

    sealed_count = 0

    def images(self) -> Sequence[ReadableImage]:
        """Return none."""
        return ()

    async def changed(self, sealed_count: int) -> None:
        """Wait until cancelled."""
        await asyncio.Event().wait()


def find_newest(source: ImageSource) -> dict[int, ReadableImage]:
    """Return the image of the latest step of each worker, by local rank: a job that went back to a checkpoint discards
    later ones."""
    return {image.info.local_rank: image for image in reversed(source.images())}


def find_image(source: ImageSource, local_rank: int, version: Version) -> ReadableImage | None:
    """Return the image of a worker with this version, if it is still there."""
    found = (image for image in source.images() if image.info.local_rank == local_rank)
    return next((image for image in found if image.info.version == version), None)


def describe_for_peers(node_id: str, image: ReadableImage) -> ImageInfo:
    """Return what other nodes have to know of an image of this node."""
    return msgspec.structs.replace(image.info, node_id=node_id, checksums=image.checksums)


OnSafe = Callable[[str, int, Version], None]
"""Called on the event loop when an image is sealed elsewhere: (where, local rank, version). `where` is a partner, or
the parity of a group."""


class Replicator:
    """The copies of one agent's snapshots on its partners."""

    def __init__(
        self,
        node_id: str,
        images: ImageSource,
        *,
        token: str,
        tls: Tls | None,
        on_safe: OnSafe = lambda where, local_rank, version: None,
    ) -> None:
        self._node_id, self._images, self._on_safe = node_id, images, on_safe
        self._token, self._tls = token, tls
        self._followers: dict[Peer, _Follower] = {}
        self._ending = TaskSet()

    def follow(self, partners: Iterable[Peer]) -> None:
        """Send images to these partners from now on. Those that stay are not disturbed."""
        wanted = set(partners)
        for peer in [peer for peer in self._followers if peer not in wanted]:
            self._ending.start(self._followers.pop(peer).close())
        for peer in wanted - self._followers.keys():
            client = BulkClient(peer.address, peer.bulk_port, token=self._token, tls=self._tls)
            self._followers[peer] = _Follower(self._node_id, peer, client, self._images, self._on_safe)

    @property
    def partners(self) -> int:
        """How many partners there are."""
        return len(self._followers)

    def safe_version(self, local_rank: int) -> Version | None:
        """Return the version of the newest image of a worker that is sealed on all partners; None if there is none."""
        versions = [follower.sealed.get(local_rank) for follower in self._followers.values()]
        return min((one for one in versions if one is not None), default=None) if None not in versions else None

    def discard_after(self, step: int) -> None:
        """Forget which later steps partners have: they are of an undone history."""
        for follower in self._followers.values():
            follower.discard_after(step)

    async def close(self) -> None:
        """End all transfers."""
        self.follow(())
        await self._ending.drain()


class RepeatedProblem:
    """A problem that is logged once for each kind (what changes from try to try is the step), and not at all if it is
    over in a moment: when a view begins, one node hears of it before another."""

    def __init__(self, event: str) -> None:
        self._event, self._kind, self._times = event, "", 0

    def report(self, problem: str, recovery: str) -> None:
        """Record what the last try came to; an empty `problem` is a success."""
        kind = problem.rpartition(": ")[2]
        was_logged = self._times >= TRIES_BEFORE_WARNING
        self._times = self._times + 1 if kind == self._kind else 1
        self._kind = kind
        if problem and self._times == TRIES_BEFORE_WARNING:
            log.warning(f"{self._event}-failing", f"{problem}; retrying")
        elif not problem and was_logged and self._times == 1:
            log.info(f"{self._event}-recovered", recovery)


class _Follower:
    """The copies on one partner."""

    def __init__(self, node_id: str, peer: Peer, client: BulkClient, images: ImageSource, on_safe: OnSafe) -> None:
        self._node_id, self._peer, self._client, self._images = node_id, peer, client, images
        self._on_safe = on_safe
        self.sealed: dict[int, Version] = {}
        """The version of the newest image that is sealed there, by local rank."""
        self._problem = RepeatedProblem("replication")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"replicate-{peer.node_id}")
        self._task = asyncio.create_task(self._run())

    def discard_after(self, step: int) -> None:
        self.sealed = {local_rank: version for local_rank, version in self.sealed.items() if version[1] <= step}

    async def close(self) -> None:
        self._task.cancel()
        self._client.close()  # frees the thread, wherever it is
        await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown)
        self._client.disconnect()

    async def _run(self) -> None:
        retry_s = RETRY_FIRST_S
        while True:
            seen = self._images.sealed_count
            if await self._catch_up():
                retry_s = RETRY_FIRST_S
                await self._images.changed(seen)
                continue
            await asyncio.sleep(RETRY_FIRST_S)  # there is no event for a partner that is back
            try:
                async with asyncio.timeout(retry_s):
                    await self._images.changed(seen)
            except TimeoutError:
                retry_s = min(retry_s * 2, RETRY_MAX_S)

    async def _catch_up(self) -> bool:
        """Send whatever is newer than what is there. Return False if that did not work."""
        is_through = True
        for local_rank in sorted(find_newest(self._images)):
            image = find_newest(self._images).get(local_rank)  # another one may have been sealed since
            if image is None or (version := image.info.version) == self.sealed.get(local_rank):
                continue
            try:
                is_there = await asyncio.get_running_loop().run_in_executor(self._thread, self._send, image)
            except (WireError, ReplicaError, OSError) as error:
                what = f"step {version[1]} of local rank {local_rank}"
                self._report(f"{what} cannot be copied to {self._peer.node_id}: {error}")
                return False
            if not is_there:
                is_through = False  # it was overwritten: what replaced it, or was there before, comes next
            elif find_image(self._images, local_rank, version) is not None:  # else the job has gone back
                self.sealed[local_rank] = version
                self._on_safe(self._peer.node_id, local_rank, version)
        self._report("")
        return is_through

    def _send(self, image: ReadableImage) -> bool:
        """Send an image, in the thread. Return False if it was overwritten before."""
        with image.reading() as content:
            if content is None:
                return False
            self._client.put(describe_for_peers(self._node_id, image), content, image.complete_step)
            return True

    def _report(self, problem: str) -> None:
        self._problem.report(problem, f"snapshots are copied to {self._peer.node_id} again")
