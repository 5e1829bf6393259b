"""The agent's part in storing the workers' state: memory for their snapshots, checkpoints made from them, the end.

a worker asks for memory       the store allocates it; the worker keeps it when its local rank changes
a snapshot is sealed           if it is wanted as a checkpoint, it is uploaded in the background
a worker asks for images       when all workers restart: their state is in this node's memory
the job ends                   uploads are waited for; a job that failed leaves its newest state on storage, with other
                               nodes' parts of it, or in memory where the upload fails
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from holdfast.core.durability import ImageReport, SnapshotStats, combine_stats
from holdfast.core.image_info import ImageInfo, Version, pack_version
from holdfast.core.orders import Serve
from holdfast.errors import HoldfastError
from holdfast.snapshots.checksummer import Checksummer
from holdfast.snapshots.directories import remove_orphans
from holdfast.snapshots.replication import Replication, ReplicationConfig
from holdfast.snapshots.replicator import NoImages
from holdfast.snapshots.slot_file import SlotImage, SlotPage
from holdfast.snapshots.snapshot_store import SnapshotStore
from holdfast.snapshots.uploader import CheckpointUploader
from holdfast.storage.checkpoint_catalogue import CheckpointCatalogue
from holdfast.storage.stores import open_store
from holdfast.util.logs import get_logger
from holdfast.util.tasks import TaskSet
from holdfast.wire.worker_messages import BuffersReady, CheckpointNotice, ImageList, SnapshotSealed, SnapshotSettings

COPIES_PATIENCE_S = 30.0
"""How long a snapshot waits for other nodes to have it before the next ones are taken without."""
WAIT_TOLD_EVERY_S = 10.0
"""How often an agent whose job is over says that it waits for storage."""
NO_VERSION = (-1, -1)
REPORT_EVERY_S = 1.0
"""How soon the master is told of a new snapshot. When a worker ends it is told at once."""

RESUME = "Start the job again with the same --rdzv-id and the same nodes to continue from it, or remove that directory"
COPY = (
    "It stays for an hour: copy its images, which are safetensors files, if you need them (a job with an --rdzv-id"
    " could continue from them)"
)

log = get_logger(__name__)


class SnapshotConfig(ReplicationConfig, Protocol):
    """The settings of an agent that its snapshots need (agent.config.AgentConfig)."""

    @property
    def snapshots(self) -> SnapshotSettings: ...
    @property
    def is_resumable(self) -> bool: ...
    @property
    def checkpoint_keep(self) -> str: ...


class SnapshotReports(Protocol):
    """What the master is told (agent.reports.Reports)."""

    def report_checkpoint(self, step: int, url: str) -> None: ...
    def report_images(self, images: tuple[ImageReport, ...], snapshot_stats: SnapshotStats) -> None: ...


class SnapshotWorker(Protocol):
    """A worker, as far as its snapshots are concerned (agent.worker_process.Worker)."""

    @property
    def local_rank(self) -> int | None: ...
    @property
    def ended(self) -> bool: ...
    @property
    def dismissed(self) -> bool: ...
    def send(self, message: BuffersReady | CheckpointNotice | ImageList) -> None: ...


class SnapshotManager:
    """The snapshots of one agent's workers."""

    def __init__(self, config: SnapshotConfig, reports: SnapshotReports) -> None:
        self._config, self._reports = config, reports
        self.replication: Replication | None = None
        """The replicas that this node holds, and that others hold of it; None in an agent that is no node of a job."""
        self._reported: tuple[ImageReport, ...] = ()
        self._report_timer: asyncio.TimerHandle | None = None
        self.is_on = config.snapshots.every >= 0 and bool(config.snapshot_dir)
        memory = Path(config.snapshot_dir or "/dev/shm")
        self.snapshot_store = SnapshotStore(memory, config.node_id, is_resumable=config.is_resumable)
        self.uploader = CheckpointUploader(self.snapshot_store, config.checkpoint_keep, reports.report_checkpoint)
        self.checksummer = Checksummer()
        self._owners: dict[int, SnapshotWorker] = {}
        """Which worker has which buffers."""
        self._view, self._entered_ns = 0, 0
        self._late: dict[int, Version | None] = {}
        """What other nodes had when they fell behind, by buffers. They are not waited for before they catch up."""
        self._tasks = TaskSet()
        self._rebuilding = asyncio.Lock()
        self._has_removed_orphans = False
        self._checkpoint_url = ""
        self._is_preserved = False
        """Whether the images in memory, other nodes' too, are to survive this agent."""

    def open(self, job_id: str, checkpoint_url: str, run: str = "") -> None:
        """Begin, once the job's name is known."""
        if self.is_on and not self.snapshot_store.is_open:
            self.snapshot_store.open(job_id)
        if self._config.snapshot_dir and not self._has_removed_orphans:
            self._has_removed_orphans = True
            remove_orphans(Path(self._config.snapshot_dir))  # not before: ours may be what an earlier agent has left
        self._checkpoint_url = checkpoint_url
        self.uploader.open(job_id, checkpoint_url, run)

    def replicate(self) -> Replication:
        """Begin to copy snapshots to other nodes, and to hold theirs."""
        images = self.snapshot_store if self.is_on else NoImages()
        self.replication = Replication(self._config, images, self._record_copy)
        return self.replication

    def _record_copy(self, where: str, local_rank: int, version: Version) -> None:
        log.debug("snapshot-copied", f"step {version[1]} of local rank {local_rank} is in {where} too")
        self._publish_copies()

    def serve(self, order: Serve) -> None:
        """Follow an order: another view, or a change of this one, perhaps with other partners."""
        if order.view != self._view:
            self._view, self._entered_ns = order.view, time.time_ns()
            self._late.clear()
        if self.replication is not None:
            self.replication.serve(order)
            self._publish_copies()

    def hold(self) -> None:
        """Copy nothing: this node is not in the view."""
        if self.replication is not None:
            self.replication.pause()
            self._publish_copies()

    def _publish_copies(self) -> None:
        """Write to the workers' pages which images other nodes have. A partner that falls behind is waited for during
        COPIES_PATIENCE_S: then snapshots are taken without it, until it has caught up."""
        if self.replication is None:
            return
        partners = self.replication.partners
        newest = {image.info.local_rank: image.info for image in reversed(self.snapshot_store.images())}
        for local_rank, page in self.snapshot_store.pages():
            safe, image = self.replication.safe_version(local_rank), newest.get(local_rank)
            is_behind = partners > 0 and image is not None and (safe is None or safe < image.version)
            since_ns = max(image.created_ns if image else 0, self._entered_ns)
            waited_s = (time.time_ns() - since_ns) / 1e9 if is_behind else 0.0
            is_late = waited_s > COPIES_PATIENCE_S or (is_behind and self._late.get(local_rank, NO_VERSION) == safe)
            if is_late and local_rank not in self._late:
                has = f"step {safe[1]}" if safe else "nothing"
                log.warning(
                    "replication-late",
                    f"other nodes have {has} of local rank {local_rank} and got no more for {waited_s:.0f} s: snapshots"
                    " are taken without copies until they catch up",
                )
            if is_late:
                self._late[local_rank] = safe
            else:
                self._late.pop(local_rank, None)
            page.put(partners=0 if is_late else partners, copied=pack_version(*safe) if safe else -1)
            if waited_s:
                self._report_soon()  # and test again

    def allocate(self, worker: SnapshotWorker, size_bytes: int, staging_bytes: int = 0) -> None:
        """Allocate buffers for a worker with a local rank, and send it where they are."""
        if worker.local_rank is not None:
            number = self._buffers_for(worker, worker.local_rank)
            self._tasks.start(self._allocate(worker, number, size_bytes, staging_bytes))

    def _stats(self, page: SlotPage) -> SnapshotStats:
        every, cost_ns, step_ns, *counts = map(page.get, ("every", "cost_ns", "step_ns", "taken", "skipped", "spoiled"))
        return SnapshotStats(every, self._config.snapshots.every > 0, step_ns / 1e9, cost_ns / 1e9, *counts)

    def _buffers_for(self, worker: SnapshotWorker, local_rank: int) -> int:
        """Return the number of the buffers that the worker has; else of those of its local rank, or the first that no
        worker has: one whose local rank became lower still has the buffers of its old one."""
        self._owners = {number: one for number, one in self._owners.items() if not (one.ended or one.dismissed)}
        if (number := self._buffers_of(worker)) is None:
            number = next(n for n in (local_rank, *range(len(self._owners) + 1)) if n not in self._owners)
            self._owners[number] = worker
        return number

    def _buffers_of(self, worker: SnapshotWorker) -> int | None:
        return next((number for number, owner in self._owners.items() if owner is worker), None)

    async def _allocate(self, worker: SnapshotWorker, number: int, size_bytes: int, staging_bytes: int) -> None:
        ready = await self.snapshot_store.allocate(number, size_bytes, staging_bytes)
        self._publish_copies()
        worker.send(ready)

    def sealed(self, worker: SnapshotWorker, message: SnapshotSealed) -> None:
        """Use a snapshot that is complete: upload it if it is wanted, replicate it, have its checksums computed."""
        if message.wanted and (number := self._buffers_of(worker)) is not None:

            def notify(why: str) -> None:
                if message.url:
                    worker.send(CheckpointNotice(message.step, why, message.created_ns))

            self.uploader.upload(number, message, notify)
        self.snapshot_store.record_sealed()
        if self.snapshot_store.directory is not None:
            self.checksummer.wake(self.snapshot_store.directory)
        self._report_soon()

    def _report_soon(self) -> None:
        if self._report_timer is None:
            self._report_timer = asyncio.get_running_loop().call_later(REPORT_EVERY_S, self.report)

    def discard_after(self, step: int) -> None:
        """Discard the images of later steps: all workers have restarted before this one."""
        self.snapshot_store.discard_after(step)
        if self.replication is not None:
            self.replication.discard_after(step)

    def report(self, again: bool = False) -> None:
        """Report to the master what is in memory, if that has changed; `again`: also if it has not, as another master
        may not know it."""
        if self._report_timer is not None:
            self._report_timer.cancel()
            self._report_timer = None
        self.snapshot_store.touch()
        self._publish_copies()
        rebuildable = self.replication.rebuildable() if self.replication is not None else []
        images = (
            *(_report(image.info) for image in self.snapshot_store.images()),
            *(_report(image.info, is_replica=True) for image in self._replicas()),
            *(_report(info, is_replica=True, pieces=nodes) for info, nodes in rebuildable),
        )
        if images != self._reported or (again and images):
            self._reported = images
            stats = combine_stats(self._stats(page) for _, page in self.snapshot_store.pages())
            self._reports.report_images(images, stats)

    def list_images(self, worker: SnapshotWorker, request: int) -> None:
        """Send a worker the images here that it can restore from: this node's own, and other nodes'."""
        self._tasks.start(self._list_images(worker, request))

    async def _list_images(self, worker: SnapshotWorker, request: int) -> None:
        if self.replication is not None:
            async with self._rebuilding:  # the node's workers ask at the same time: it is done once
                await self.replication.rebuild_lost()
        images = (*self.snapshot_store.images(), *self._replicas())
        worker.send(ImageList(request, tuple(image.stored for image in images)))

    def _replicas(self) -> list[SlotImage]:
        return self.replication.images() if self.replication is not None else []

    async def finish(self, is_success: bool, is_alone: bool) -> str:
        """Finish the uploads of a job that is over, without its workers. Return where its last state is; empty if there
        is none."""
        self.checksummer.close()
        reminder = self._tasks.start(self._tell_of_the_wait())
        try:
            if is_success:
                await self.uploader.drain()
            elif self.snapshot_store.is_open:
                await self.uploader.rescue(is_alone, self._rebuilt_replicas)
        finally:
            reminder.cancel()
        found = self.uploader.newest
        if self.uploader.lost < 0:
            self.snapshot_store.remove()
        else:
            self._is_preserved = True
            self.snapshot_store.preserve()
            log.warning(
                "upload-failed-images-preserved",
                f"step {self.uploader.lost} is not on storage: what this node has of it stays in memory, in"
                f" {self.snapshot_store.directory}. {RESUME if self._config.is_resumable else COPY}",
            )
        return found.url if found is not None else ""

    async def _tell_of_the_wait(self) -> None:
        """Say now and then that storage is waited for. What writes to a disk that does not answer cannot be ended."""
        began_at = time.monotonic()
        while True:
            await asyncio.sleep(WAIT_TOLD_EVERY_S)
            text = f"the last checkpoint is still being written after {time.monotonic() - began_at:.0f} s"
            log.warning("storage-slow", f"{text}: {self._checkpoint_url} is slow, or does not answer; waiting for it")

    async def _rebuilt_replicas(self) -> Sequence[SlotImage]:
        """Return other nodes' images that are here, with what can be rebuilt of lost nodes."""
        if self.replication is not None:
            await self.replication.rebuild_lost()
        return self._replicas()

    async def close(self) -> None:
        """End all work; the files stay if they are needed."""
        self.checksummer.close()
        if self._report_timer is not None:
            self._report_timer.cancel()
        await self._tasks.close()
        if self.replication is not None:
            await self.replication.close(is_preserved=self._is_preserved)
        await self.uploader.close()
        if not self.snapshot_store.images():
            self.snapshot_store.remove()  # there is nothing to come back for
        self.snapshot_store.close()


def _report(image: ImageInfo, is_replica: bool = False, pieces: int = 1) -> ImageReport:
    return ImageReport(image.step, image.part, image.shards, image.shares, image.view, is_replica, pieces)


async def find_last_checkpoint(url: str) -> str:
    """Return the newest checkpoint on storage, for the report of a failed job; empty if there is none, or storage is
    unreachable. It is found by its name alone: the next start reads and verifies it."""
    try:
        found = await asyncio.to_thread(lambda: CheckpointCatalogue(open_store(url)).latest(is_deep=False))
    except (HoldfastError, OSError):
        return ""
    return found.url if found is not None else ""
