"""From memory to storage: snapshots become checkpoints, in the background, without the workers' help.

Each agent writes the parts of its own workers and then tries to publish; the last one finds all parts there and
succeeds (storage/checkpoint_writer.py). No agent waits for another, and none coordinates them: the attempt's name
follows from the job, its run, the view and the step. An image is read where it is, under a lock that keeps its worker
from overwriting it; a worker that needs the slot skips a snapshot.

When the job ends before its state is on storage (`rescue`), the newest complete state is written. With several nodes no
agent knows which of the two steps in memory is complete, so the later one is tried first and then the other. An agent
that has written its parts does not wait for the slowest node, and removes nothing: the last one publishes. Parts that
are missing by then are of lost nodes: a node that holds replicas of them writes those.

An attempt of which a part could not be written here will never be complete: it is removed, as it may be what fills the
disk. An attempt that other nodes do not complete is left to the next one that prunes.

The same uploader runs in an agent's event loop, and without an agent in a thread of the training process
(worker/snapshot/in_process_host.py). There `nonce` names the attempts.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from holdfast.core.image_info import is_complete, pack_version
from holdfast.errors import CheckpointError, HoldfastError
from holdfast.snapshots.slot_file import SlotImage
from holdfast.storage.checkpoint_catalogue import CheckpointCatalogue, FoundCheckpoint
from holdfast.storage.checkpoint_writer import CheckpointWriter
from holdfast.storage.manifest import CheckpointInfo, finite, versions
from holdfast.storage.retention import parse_policy
from holdfast.storage.stores import Store, open_store
from holdfast.util.logs import get_logger
from holdfast.util.tasks import TaskSet
from holdfast.wire.worker_messages import SnapshotSealed

WRITERS = 2
"""Parts at a time: enough to fill a disk or a link, few enough to leave the processors to the training."""
RETRY_S_MIN, RETRY_S_MAX = 0.05, 2.0
"""Between two tests whether the parts of other nodes are there."""
UNPUBLISHED_MAX_S = 600.0
"""An attempt whose other parts are not there by then is given up."""
RESCUE_WAIT_S = 5.0
"""How long other nodes have to write their parts, at the end of a job, once ours are written."""
RESCUE_RETRY_S = 0.2
"""Between two tests, then."""
PROGRESS_EVERY_S = 10.0
"""Between two messages about a part that is being written; for one that takes less time there is none."""

log = get_logger(__name__)

Published = Callable[[int, str], None]
"""Called with the step and the URL of a checkpoint that is complete."""
Notify = Callable[[str], None]
"""Called when an upload is over, with the reason why it failed, or nothing."""
Replicas = Callable[[], Awaitable[Sequence[SlotImage]]]
"""Returns other nodes' images that are held here, or can be rebuilt."""


class UploadSource(Protocol):
    """The images of the workers (snapshot_store.SnapshotStore)."""

    def images(self) -> Sequence[SlotImage]: ...
    def complete_version(self) -> int: ...


class UploadKey(NamedTuple):
    """The name of an attempt. All agents of a job compute the same."""

    url: str
    view: int
    step: int


async def no_replicas() -> Sequence[SlotImage]:
    """Return no images."""
    return ()


def _ignore(why: str) -> None:
    """Do nothing: the warning in the log is enough."""


class CheckpointUploader:
    """The uploads of one process."""

    def __init__(
        self,
        source: UploadSource,
        keep: str,
        published: Published,
        *,
        writers: int = WRITERS,
        stores_checksums: bool = True,
    ) -> None:
        """`stores_checksums`: whether those of the blocks stay with the images, for a restore."""
        self._source, self._keep, self._published = source, keep, published
        self._stores_checksums = stores_checksums
        self._url = self._job_id = self._run = ""
        self.nonce = ""
        """The name of all attempts; empty: it follows from job, run and view."""
        self._stores: dict[str, Store] = {}
        self._threads = ThreadPoolExecutor(writers, "holdfast-upload")
        self._tasks = TaskSet()
        self._attempts: dict[UploadKey, CheckpointWriter] = {}
        self._opening = threading.Lock()
        self._users: dict[UploadKey, int] = {}
        """How many of our parts are on their way to storage."""
        self._unwritten: dict[UploadKey, int] = {}
        """How many of them are still to be written."""
        self._took_s: dict[UploadKey, float] = {}
        """How long one of them took: those of other nodes may take as long."""
        self._failed: dict[UploadKey, str] = {}
        """Attempts of which a part could not be written here, and why."""
        self._ending_wait_s: float | None = None
        """How long to wait for other nodes' parts, once the job is over."""
        self._changed = asyncio.Event()
        """Set, and replaced, when another part of ours is written or the job is over."""
        self._lost = -1
        """The latest step of which a part could not be written here, or that was complete and is not on storage."""
        self._publishing: dict[UploadKey, asyncio.Task[str]] = {}
        self.newest: FoundCheckpoint | None = None
        """The newest checkpoint that this agent knows to be complete."""

    def open(self, job_id: str, url: str, run: str = "") -> None:
        """Set where checkpoints go, once that is known, and of which job they are."""
        self._job_id, self._url, self._run = job_id, url, run

    def upload(self, local_rank: int, message: SnapshotSealed, notify: Notify = _ignore) -> None:
        """Write a worker's image to storage, as part of a checkpoint."""
        wanted = (local_rank, message.step)
        found = [one for one in self._source.images() if (one.info.local_rank, one.info.step) == wanted]
        image = next((one for one in found if message.created_ns in (0, one.info.created_ns)), None)
        if image is None:
            notify(f"the copy of step {message.step} was overwritten before it was read")
        else:
            self._tasks.start(self._upload(image, message, notify))

    async def drain(self, others_wait_s: float | None = None) -> None:
        """Wait until everything that was begun is written, and for so long for the parts of other nodes; None: for
        RESCUE_WAIT_S."""
        others_wait_s = RESCUE_WAIT_S if others_wait_s is None else others_wait_s
        self._ending_wait_s = others_wait_s
        self._wake()
        await self._tasks.drain()
        self._ending_wait_s = others_wait_s if others_wait_s else None

    @property
    def lost(self) -> int:
        """A step that could not be uploaded, nor a later one; -1: none."""
        return self._lost if self.newest is None or self.newest.step < self._lost else -1

    async def rescue(self, is_alone: bool, replicas: Replicas = no_replicas) -> FoundCheckpoint | None:
        """Write the newest complete state to storage: the job is over. What is there already need not be written.
        `is_alone`: no other node has a part of it. `replicas` is called only if our own images are not enough."""
        await self.drain()
        ours, theirs = list(self._source.images()), None
        if ours and self._run and self._url:
            await self._in_thread(self._find_dump)
        # The latest step first, whatever its view: the state with the most work in it.
        versions_here = sorted({image.info.version for image in ours}, key=lambda v: (v[1], v[0]), reverse=True)
        for version in versions_here:
            if self._is_stored(version[1]):
                break
            mine = [image for image in ours if image.info.version == version]
            if not is_alone or _are_complete(mine):
                await self._upload_all(mine)
            if self._is_stored(version[1]) or self._lost >= version[1]:
                continue
            theirs = list(await replicas()) if theirs is None else theirs
            both = [*mine, *(image for image in theirs if image.info.version == version)]
            if len(both) > len(mine) and (not is_alone or _are_complete(both)):
                await self._upload_all(both)
        self._record_unsaved(ours, theirs or [])
        return self.newest

    def _find_dump(self) -> None:
        """Learn what workers of this run have written by themselves, which are reported to no one."""
        try:
            found = CheckpointCatalogue(self._store(self._url)).latest(is_deep=False)
        except Exception as error:  # as below: what is in memory is written, or kept
            log.debug("dump-not-found", f"checkpoints could not be looked for: {_describe(error)}")
            return
        if found is not None and found.about.run == self._run and not self._is_stored(found.step):
            self.newest = found

    def _is_stored(self, step: int) -> bool:
        return self.newest is not None and self.newest.step >= step

    async def _upload_all(self, images: Sequence[SlotImage]) -> None:
        await asyncio.gather(*(self._upload(image, SnapshotSealed(image.info.step, True), _ignore) for image in images))

    def _record_unsaved(self, ours: Sequence[SlotImage], theirs: Sequence[SlotImage]) -> None:
        """Record which step should be on storage now: what is complete here, or was known to be complete on all
        ranks."""
        complete = self._source.complete_version()
        for image in ours:
            here = [one for one in (*ours, *theirs) if one.info.version == image.info.version]
            if pack_version(*image.info.version) == complete or _are_complete(here):
                self._lost = max(self._lost, image.info.step)

    async def close(self) -> None:
        """Give up what is not written yet."""
        for task in self._publishing.values():
            task.cancel()
        await self._tasks.close()
        await asyncio.gather(*self._publishing.values(), return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- one image

    async def _upload(self, image: SlotImage, message: SnapshotSealed, notify: Notify) -> None:
        key = UploadKey(message.url or self._url, *image.info.version)
        self._users[key] = self._users.get(key, 0) + 1
        try:
            problem = await self._write_and_publish(key, image, message)
        except Exception as error:  # the outermost point: a user's file system may raise anything, and a worker waits
            problem = self._fail(key, f"the checkpoint of step {key.step} is not published: {_describe(error)}")
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                await self._end(key)
        notify(problem)

    async def _write_and_publish(self, key: UploadKey, image: SlotImage, message: SnapshotSealed) -> str:
        """Return why it has not become a checkpoint, or nothing."""
        self._unwritten[key] = self._unwritten.get(key, 0) + 1
        problem: str = await self._in_thread(self._write, key, image, message)
        self._unwritten[key] -= 1
        self._wake()
        if problem:
            return self._fail(key, problem)
        publishing = self._publishing.get(key)
        if publishing is None or publishing.done():
            publishing = self._publishing[key] = asyncio.create_task(self._publish(key, message.keep))
        return await publishing

    def _fail(self, key: UploadKey, problem: str) -> str:
        log.warning("checkpoint-failed", problem)
        self._failed[key] = problem
        self._lost = max(self._lost, key.step)
        return problem

    async def _end(self, key: UploadKey) -> None:
        """End an attempt at which this process does not work any more."""
        for known in (self._users, self._unwritten, self._took_s, self._publishing):
            known.pop(key, None)
        await self._in_thread(self._abandon if self._failed.pop(key, "") else self._release, key)

    def _write(self, key: UploadKey, image: SlotImage, message: SnapshotSealed) -> str:
        """Write a part, in a thread. Return why that failed, or nothing."""
        began_at, info = time.monotonic(), image.info
        try:
            with image.claimed() as content:
                if content is None:
                    raise CheckpointError(f"the copy of step {info.step} was overwritten before it was read")
                part = self._attempt(key, image, message).write_part(info.part, content, _UploadProgress(image))
        except Exception as error:  # as above
            return f"part {info.part} of the checkpoint of step {info.step} is not written: {_describe(error)}"
        if self._stores_checksums:
            with suppress(OSError):  # then a restore cannot verify the image: the part is written
                image.record_checksums(part.checksum_list())
        self._took_s[key] = took_s = time.monotonic() - began_at
        log.debug(
            "part-written",
            f"part {part.number} of step {info.step}: {part.size_bytes / 2**20:.0f} MiB in {took_s:.2f} s",
        )
        return ""

    def _attempt(self, key: UploadKey, image: SlotImage, message: SnapshotSealed) -> CheckpointWriter:
        with self._opening:
            if key not in self._attempts:
                self._attempts[key] = self._begin(key, image, message)
            return self._attempts[key]

    def _begin(self, key: UploadKey, image: SlotImage, message: SnapshotSealed) -> CheckpointWriter:
        info = image.info
        about = CheckpointInfo(
            step=info.step,
            world_size=info.parts,
            shards=info.shards,
            shares=info.shares,
            view=info.view,
            seed=info.seed,
            created_unix_s=info.created_ns / 1e9 or time.time(),
            job_id=self._job_id,
            run=self._run,
            versions=versions(),
            metrics=finite(message.metrics),
            notes=dict(message.notes),
        )
        run = f"-{self._run}" if self._run else ""
        return CheckpointWriter(
            self._store(key.url), about, self.nonce or f"{_file_name(self._job_id)}{run}-v{info.view}"
        )

    def _store(self, url: str) -> Store:
        if url not in self._stores:
            self._stores[url] = open_store(url)
        return self._stores[url]

    # --- all parts

    async def _publish(self, key: UploadKey, keep: str = "") -> str:
        """Publish as soon as the parts of other nodes are there; nothing announces those, so it tests again and again.
        Return why that failed, or nothing."""
        give_up_at, wait_s = time.monotonic() + UNPUBLISHED_MAX_S, RETRY_S_MIN
        while True:
            if key in self._failed:
                return self._failed[key]
            changed = self._changed  # before the test: what is written during it counts
            try:
                found = await self._in_thread(self._attempts[key].publish)
            except (HoldfastError, OSError) as error:
                log.warning("checkpoint-failed", f"the checkpoint of step {key.step} is not published: {error}")
                self._lost = max(self._lost, key.step)
                return str(error)
            if found is not None:
                self._record_published(key, found)
                await self._in_thread(self._prune, key, keep or self._keep)
                return ""
            if self._ending_wait_s is not None and not self._unwritten[key]:
                if not self._ending_wait_s:
                    return ""  # the last rank to get here publishes
                wait_for_s = max(self._ending_wait_s, self._took_s.get(key, 0.0))
                give_up_at = min(give_up_at, time.monotonic() + wait_for_s)
            is_late = self.newest is not None and self.newest.step > key.step
            if time.monotonic() >= give_up_at or is_late:
                return (
                    f"step {key.step} is not complete: parts of other ranks are missing; do all of them save this step,"
                    " to storage that they share?"
                )
            await self._pause(changed, wait_s)
            wait_s = min(wait_s * 2.0, RETRY_S_MAX)

    async def _pause(self, changed: asyncio.Event, wait_s: float) -> None:
        """Wait for a while, or until something changes; shorter once the job is over."""
        try:
            limit_s = min(wait_s, RESCUE_RETRY_S) if self._ending_wait_s is not None else wait_s
            await asyncio.wait_for(changed.wait(), limit_s)
        except TimeoutError:
            pass

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _record_published(self, key: UploadKey, found: FoundCheckpoint) -> None:
        log.info("checkpoint-published", f"checkpoint of step {found.step} is complete: {found.url}")
        is_same_run = bool(self._run) and found.about.run == self._run  # its workers have written it, as a dump
        is_ours = found.manifest.nonce == self.nonce if self.nonce else found.about.job_id == self._job_id
        if not is_ours and not is_same_run:
            log.warning("checkpoint-exists", exists_sentence(found.url, "" if self.nonce else found.about.job_id))
        if key.url == self._url and (self.newest is None or found.step > self.newest.step):
            self.newest = found
            self._published(found.step, found.url)

    def _prune(self, key: UploadKey, keep: str) -> None:
        try:
            pruned = CheckpointCatalogue(self._store(key.url)).prune(parse_policy(keep), trusted=[key.step])
        except Exception as error:  # as above: the checkpoint is there all the same
            log.warning("prune-failed", f"old checkpoints could not be removed: {_describe(error)}")
        else:
            for step in pruned.removed:
                log.debug("checkpoint-removed", f"removed the checkpoint of step {step}, as --checkpoint-keep says")

    def _release(self, key: UploadKey) -> None:
        if (attempt := self._attempts.pop(key, None)) is not None:
            attempt.close()

    def _abandon(self, key: UploadKey) -> None:
        attempt = self._attempts.pop(key, None)
        try:
            if attempt is not None:
                attempt.abandon()
        except Exception as error:  # as above
            log.warning(
                "abandoned-attempt-left",
                f"an unfinished checkpoint of step {key.step} could not be removed: {_describe(error)}",
            )

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


class _UploadProgress:
    """Logs now and then how much of a part is written (storage.stores.Progress)."""

    def __init__(self, image: SlotImage) -> None:
        self._info = image.info
        self._began_at = self._logged_at = time.monotonic()

    def __call__(self, done_bytes: int, all_bytes: int) -> None:
        now = time.monotonic()
        if now - self._logged_at < PROGRESS_EVERY_S or done_bytes >= all_bytes:
            return
        self._logged_at = now
        rate = done_bytes / 1e6 / (now - self._began_at)
        log.info(
            "upload-progress",
            f"part {self._info.part} of the checkpoint of step {self._info.step}: {100 * done_bytes // all_bytes} %"
            f" of {all_bytes / 1e6:.0f} MB are written, {rate:.1f} MB/s",
        )


def _are_complete(images: Sequence[SlotImage]) -> bool:
    """Return whether they are all parts of their state."""
    return is_complete({image.info.part: image.info.parts for image in images})


def _describe(error: Exception) -> str:
    """Return an error in words: ours are sentences, others need their name."""
    return str(error) if isinstance(error, HoldfastError | OSError) else f"{type(error).__name__}: {error}"


def _file_name(job_id: str) -> str:
    """Return a job's name as part of a file's."""
    letters = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in job_id)
    return letters.strip("-")[:80] or "job"


def exists_sentence(url: str, job_id: str) -> str:
    """Return what becomes of a checkpoint where there is one of another run. `job_id`: of that one, if it is known."""
    other = f"job {job_id}" if job_id else "another run"
    return f"{url} was there already, of {other}: that one stays, and this run's is discarded"
