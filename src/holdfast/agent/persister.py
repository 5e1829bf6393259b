"""From the node's memory to storage: snapshots become checkpoints, in the background, without the workers' help.

Each agent writes the parts of its own seats and then tries to publish; whoever comes last finds all parts there and
succeeds (storage/writing.py). No agent waits for another, and nobody coordinates: the attempt's name follows from the
job, the view and the step. An image is read where it lies, under a lock that keeps its worker from overwriting it; a
worker that would, leaves a snapshot out.

When the job ends without having got there (`rescue`), the newest state that is whole is written: with several nodes
nobody knows which of the two steps in memory that is, so the newer one is tried first and then the other.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog

from holdfast.agent.vault import Kept, Vault
from holdfast.errors import HoldfastError
from holdfast.storage.catalogue import Catalogue, Found
from holdfast.storage.manifest import About
from holdfast.storage.retention import parse_policy
from holdfast.storage.stores import Store, open_store
from holdfast.storage.writing import Writing
from holdfast.wire.session import Sealed

WRITERS = 2
"""Parts at a time: enough to fill a disk or a link, few enough to leave the processors to the training."""
RETRY_S_MIN, RETRY_S_MAX = 0.05, 2.0
"""Between two looks whether the other nodes' parts are there."""
UNPUBLISHED_MAX_S = 600.0
"""An attempt whose other parts have not come by then is given up."""
RESCUE_WAIT_S = 5.0
"""For other nodes to write their parts, at the end of a job, once ours are written."""

log = structlog.get_logger("agent")

Published = Callable[[int, str], None]
"""Told the step and the place of a checkpoint that is complete."""


class Persister:
    """One for the life of an agent."""

    def __init__(self, vault: Vault, keep: str, published: Published) -> None:
        self._vault, self._keep, self._published = vault, keep, published
        self._url = self._job_id = ""
        self._store: Store | None = None
        self._threads = ThreadPoolExecutor(WRITERS, "holdfast-persist")
        self._tasks: set[asyncio.Task[None]] = set()
        self._attempts: dict[tuple[int, int], Writing] = {}
        """By view and step."""
        self._publishing: set[tuple[int, int]] = set()
        self.newest: Found | None = None
        """The newest checkpoint that this agent knows to be complete."""

    def open(self, job_id: str, url: str) -> None:
        """Where checkpoints go, once it is known."""
        if (job_id, url) != (self._job_id, self._url):
            self._job_id, self._url, self._store = job_id, url, None

    def wanted(self, seat: int, message: Sealed) -> None:
        """A worker's image is to become part of a checkpoint."""
        for kept in self._vault.kept():
            if kept.seat == seat and kept.record.step == message.step:
                self._beside(self._persist(kept, message.metrics, message.notes))

    async def drain(self) -> None:
        """Until everything that was begun has come to an end."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def rescue(self, is_alone: bool) -> Found | None:
        """The job is over: bring the newest whole state to storage. What is there already need not be written.
        `is_alone`: no other node has a part of it."""
        await self.drain()
        for step in sorted({kept.record.step for kept in self._vault.kept()}, reverse=True):
            if self.newest is not None and self.newest.step >= step:
                break
            ours = [kept for kept in self._vault.kept() if kept.record.step == step]
            if is_alone and {kept.record.part for kept in ours} != set(range(ours[0].record.parts)):
                continue
            results = await asyncio.gather(*(self._in_thread(self._write, kept, {}, {}) for kept in ours))
            record = ours[0].record
            if all(results) and await self._until_published((record.view, step), RESCUE_WAIT_S):
                break
            await self._in_thread(self._abandon, (record.view, step))
        return self.newest

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- one image

    async def _persist(self, kept: Kept, metrics: Mapping[str, float], notes: Mapping[str, Any]) -> None:
        key = (kept.record.view, kept.record.step)
        if not await self._in_thread(self._write, kept, metrics, notes):
            return
        if key not in self._publishing:
            self._publishing.add(key)
            try:
                await self._until_published(key, UNPUBLISHED_MAX_S)
            finally:
                self._publishing.discard(key)

    def _write(self, kept: Kept, metrics: Mapping[str, float], notes: Mapping[str, Any]) -> bool:
        began_at = time.monotonic()
        try:
            attempt = self._attempt(kept, metrics, notes)
            with self._vault.reading(kept) as memory:
                if memory is None:
                    log.warning(f"the snapshot of step {kept.record.step} is gone before it was written to storage")
                    return False
                with memoryview(memory) as image:
                    part = attempt.write_part(kept.record.part, image)
        except (HoldfastError, OSError) as error:
            log.warning(f"part {kept.record.part} of the checkpoint of step {kept.record.step} is not written: {error}")
            return False
        self._vault.note_checksums(kept, [part.checksum(block) for block in range(part.blocks)])
        took_s = time.monotonic() - began_at
        log.debug(f"part {part.number} of step {kept.record.step}: {part.size_bytes / 2**20:.0f} MiB in {took_s:.2f} s")
        return True

    def _attempt(self, kept: Kept, metrics: Mapping[str, float], notes: Mapping[str, Any]) -> Writing:
        record = kept.record
        key = (record.view, record.step)
        if key not in self._attempts:
            about = About(
                step=record.step,
                world_size=record.parts,
                shards=record.shards,
                shares=record.shares,
                view=record.view,
                seed=record.seed,
                created_unix_s=record.created_ns / 1e9,
                job_id=self._job_id,
                versions={"holdfast": importlib.metadata.version("holdfast")},
                metrics=dict(metrics),
                notes=dict(notes),
            )
            self._attempts[key] = Writing(self._open_store(), about, f"{_plain(self._job_id)}-v{record.view}")
        return self._attempts[key]

    def _open_store(self) -> Store:
        if self._store is None:
            self._store = open_store(self._url)
        return self._store

    # --- all of them

    async def _until_published(self, key: tuple[int, int], patience_s: float) -> bool:
        """Whether all parts came. Looks again now and then, as other nodes' parts make no sound."""
        give_up_at, wait_s = time.monotonic() + patience_s, RETRY_S_MIN
        while True:
            try:
                found = await self._in_thread(self._attempts[key].publish)
            except (HoldfastError, OSError) as error:
                log.warning(f"the checkpoint of step {key[1]} is not published: {error}")
                return False
            if found is not None:
                self._note(found)
                await self._in_thread(self._prune)
                self._attempts.pop(key, None)
                return True
            if time.monotonic() >= give_up_at or (self.newest is not None and self.newest.step > key[1]):
                return False
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2.0, RETRY_S_MAX)

    def _note(self, found: Found) -> None:
        if self.newest is None or found.step > self.newest.step:
            self.newest = found
            log.info(f"checkpoint of step {found.step} is complete: {found.url}")
            self._published(found.step, found.url)

    def _prune(self) -> None:
        try:
            removed = Catalogue(self._open_store()).prune(parse_policy(self._keep))
        except (HoldfastError, OSError) as error:
            log.warning(f"old checkpoints stay: {error}")
        else:
            for step in removed.removed:
                log.debug(f"checkpoint of step {step} removed, as --checkpoint-keep says")

    def _abandon(self, key: tuple[int, int]) -> None:
        attempt = self._attempts.pop(key, None)
        try:
            if attempt is not None:
                attempt.abandon()
        except (HoldfastError, OSError) as error:
            log.warning(f"an unfinished checkpoint of step {key[1]} stays behind: {error}")

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)



def _plain(job_id: str) -> str:
    """A job's name as part of a file's."""
    letters = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in job_id)
    return letters.strip("-")[:80] or "job"
