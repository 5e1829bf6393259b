"""Streams this node's newest snapshots to its partners, for ever: the newest, and when it is there, the newest again.

It follows; nobody waits for it. A snapshot that is overwritten before its turn is not sent, and the next one is. Each
partner has a line and a thread of its own, so that a slow one keeps no other one waiting. A partner that cannot be
reached, or does not want an image, is tried again: when there is something new, or after a while.

What "safe" means: a step is safe on a partner once the image of it, of every seat here, is sealed there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import structlog

from holdfast.agent.replicas.blocks import pack
from holdfast.agent.replicas.bulk import BulkClient
from holdfast.core.orders import Peer
from holdfast.errors import ReplicaError, WireError
from holdfast.wire.bulk import Label
from holdfast.wire.tls import Tls

RETRY_FIRST_S = 0.1
RETRY_MAX_S = 5.0
"""A partner that is being replaced is away for as long; the master names another one when it is gone."""

TRIES_BEFORE_SAID = 3

log = structlog.get_logger("agent")


class Image(Protocol):
    """A sealed snapshot of one seat."""

    @property
    def seat(self) -> int: ...
    @property
    def part(self) -> int: ...
    @property
    def shards(self) -> int: ...
    @property
    def shares(self) -> int: ...
    @property
    def view(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def checksums(self) -> list[int] | None: ...
    @property
    def path(self) -> Path: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def first_step(self) -> int: ...
    @property
    def whole(self) -> int:
        """The last step that its rank knows to be whole everywhere; -1: none."""

    def pinned(self) -> AbstractContextManager[memoryview | None]:
        """Its bytes, which stay as they are meanwhile; None if it was overwritten before. For any thread."""


class Images(Protocol):
    """Where this node's snapshots are."""

    def seats(self) -> Iterable[int]:
        """Those that have any."""

    def newest(self, seat: int) -> Image | None: ...

    def all(self) -> Iterable[Image]:
        """Of all seats. For any thread."""

    def at(self, seat: int, view: int, step: int) -> Image | None:
        """The one of this step, if it is still there. For any thread."""

    @property
    def sealed_count(self) -> int:
        """How many were sealed so far, of all seats."""

    async def changed(self, sealed_count: int) -> None:
        """Until more than so many were."""


Safe = Callable[[str, int, int, int], None]
"""(where, seat, view, step) is sealed there: on a partner, or as parity in a group. Called on the event loop."""


class Replicator:
    """One for the life of an agent."""

    def __init__(
        self,
        node_id: str,
        images: Images,
        *,
        token: str,
        tls: Tls | None,
        on_safe: Safe = lambda partner, seat, view, step: None,
    ) -> None:
        self._node_id, self._images, self._on_safe = node_id, images, on_safe
        self._token, self._tls = token, tls
        self._followers: dict[Peer, _Follower] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self.is_closed = False

    def follow(self, partners: Iterable[Peer]) -> None:
        """To whom images go from now on. Whoever stays goes on undisturbed."""
        wanted = set(partners)
        for peer in [peer for peer in self._followers if peer not in wanted]:
            self._end(self._followers.pop(peer))
        for peer in wanted - self._followers.keys():
            client = BulkClient(peer.address, peer.bulk_port, token=self._token, tls=self._tls)
            self._followers[peer] = _Follower(self._node_id, peer, client, self._images, self._on_safe)

    @property
    def partners(self) -> int:
        """How many there are."""
        return len(self._followers)

    def safe_age(self, seat: int) -> tuple[int, int] | None:
        """(view, step) of the newest image of a seat that is sealed on all partners; None if there is none."""
        ages = [follower.there.get(seat) for follower in self._followers.values()]
        return min((age for age in ages if age is not None), default=None) if None not in ages else None

    def forget_after(self, step: int) -> None:
        """What partners have of later steps says nothing of those to come."""
        for follower in self._followers.values():
            follower.forget_after(step)

    async def close(self) -> None:
        """Nothing is under way on return."""
        self.follow(())
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _end(self, follower: _Follower) -> None:
        task = asyncio.create_task(follower.close())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


class Complaint:
    """Trouble that is said once for each kind (what changes from try to try is the step), and not if it is over in a
    moment: when a view begins, one node hears of it before another."""

    def __init__(self) -> None:
        self._kind, self._times = "", 0

    def say(self, trouble: str, relief: str) -> None:
        """No trouble is the end of it."""
        kind = trouble.rpartition(": ")[2]
        was_said = self._times >= TRIES_BEFORE_SAID
        self._times = self._times + 1 if kind == self._kind else 1
        self._kind = kind
        if trouble and self._times == TRIES_BEFORE_SAID:
            log.warning(trouble)
        elif not trouble and was_said and self._times == 1:
            log.info(relief)


class _Follower:
    """One partner."""

    def __init__(self, node_id: str, peer: Peer, client: BulkClient, images: Images, on_safe: Safe) -> None:
        self._node_id, self._peer, self._client, self._images = node_id, peer, client, images
        self._on_safe = on_safe
        self.there: dict[int, tuple[int, int]] = {}
        """By seat: the age of the newest image that is sealed there."""
        self._complaint = Complaint()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"replicate-{peer.node_id}")
        self._task = asyncio.create_task(self._run())

    def forget_after(self, step: int) -> None:
        self.there = {seat: age for seat, age in self.there.items() if age[1] <= step}

    async def close(self) -> None:
        self._task.cancel()
        self._client.close()  # frees the thread, wherever it is
        await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown)
        self._client.hang_up()

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
        """Send whatever is newer than what is there. False if that did not work."""
        is_through = True
        for seat in self._images.seats():
            image = self._images.newest(seat)
            if image is None or (image.view, image.step) == self.there.get(seat):
                continue
            try:
                is_there = await asyncio.get_running_loop().run_in_executor(self._thread, self._send, image)
            except (WireError, ReplicaError, OSError) as error:
                self._say(f"step {image.step} of local rank {seat} is not copied to {self._peer.node_id}: {error}")
                return False
            if not is_there:
                is_through = False  # it was overwritten: what is in its place, or was before, comes next
            elif self._images.at(seat, image.view, image.step) is not None:  # else the job has gone back
                self.there[seat] = (image.view, image.step)
                self._on_safe(self._peer.node_id, seat, image.view, image.step)
        self._say("")
        return is_through

    def _send(self, image: Image) -> bool:
        """In the thread. False if it was overwritten before."""
        with image.pinned() as content:
            if content is None:
                return False
            self._client.put(label_of(self._node_id, image), content, image.whole)
            return True

    def _say(self, trouble: str) -> None:
        self._complaint.say(trouble, f"snapshots are copied to {self._peer.node_id} again")


def label_of(node_id: str, image: Image) -> Label:
    """As it is known elsewhere."""
    return Label(
        node_id=node_id,
        seat=image.seat,
        part=image.part,
        shards=image.shards,
        shares=image.shares,
        view=image.view,
        step=image.step,
        size_bytes=image.size_bytes,
        seed=image.seed,
        first_step=image.first_step,
        checksums=pack(image.checksums) if image.checksums is not None else b"",
    )
