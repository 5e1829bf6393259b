"""This node's images of its workers' states: two for each worker (slot_file.py), which survive the workers.

The files have names (directories.py), so that an agent that was killed and started again for the same job finds them.
They are removed when the job is over.

Memory is allocated before a worker may use it: two images of the size that it asks for, with every page in place, if
there is enough memory. If there is not, the worker gets the reason, and trains without snapshots.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import msgspec

from holdfast.snapshots.directories import OWNER, lock_owner, make_node_dir, node_dir, remove_empty, write_owner
from holdfast.snapshots.slot_file import (
    SLOTS,
    SlotImage,
    SlotPage,
    find_ranks,
    headroom,
    map_image,
    newest_first,
    populate,
    rank_directory,
)
from holdfast.util.files import allocate
from holdfast.util.logs import get_logger
from holdfast.wire.worker_messages import BuffersReady

SIZE_STEP_BYTES = 4_096
MEMORY_RESERVE_BYTES = 256 * 2**20
"""What images leave free of the memory of the machine, or of our cgroup."""

log = get_logger(__name__)


class SnapshotStore:
    """The images of one agent's workers; `open` it when the job's name is known."""

    def __init__(self, root: Path, node_id: str, *, is_resumable: bool = True) -> None:
        """`is_resumable`: whether a later start can have the same job and node ids."""
        self._root, self._node_id, self._is_resumable = root, node_id, is_resumable
        self._directory: Path | None = None
        self._owner: int | None = None
        self._pages: dict[int, SlotPage] = {}
        self._staging: dict[int, int] = {}
        """What workers allocate themselves to copy from a device, by local rank."""
        self._allocating = asyncio.Lock()
        self.sealed_count = 0
        """How many images were sealed so far, of all workers."""
        self._sealed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether images can be stored."""
        return self._directory is not None

    @property
    def directory(self) -> Path | None:
        """Where the images are, while it is open."""
        return self._directory

    def open(self, job_id: str) -> None:
        """Use the job's directory, with what an earlier agent of this node has left in it."""
        directory = node_dir(self._root, job_id, self._node_id)
        if directory == self._directory:
            return
        self.close()
        try:
            make_node_dir(self._root, job_id, self._node_id)
            self._owner = lock_owner(directory / OWNER)
            if self._owner is not None:
                write_owner(self._owner, is_resumable=self._is_resumable)
        except OSError as error:
            log.warning("snapshots-off", f"no snapshots: cannot write to {directory}: {error.strerror or error}")
            self.close()
            return
        if self._owner is None:
            log.warning("snapshots-off", f"no snapshots: another agent that is running owns {directory}")
            return
        self._directory = directory
        for local_rank, path in find_ranks(directory).items():
            try:
                self._pages[local_rank] = SlotPage.create(path)
            except OSError as error:
                log.warning("snapshot-unreadable", f"{path} is not used: {error.strerror or error}")

    def preserve(self) -> None:
        """Let the files stay for an hour after this agent has ended, though no later start can ask for them."""
        if self._owner is not None:
            write_owner(self._owner, is_resumable=True)  # empties the file, which needs no memory

    def touch(self) -> None:
        """Record that the files are in use: after a long time without, they are removed once their agent is dead."""
        if self._owner is not None:
            os.utime(self._owner)

    async def allocate(self, local_rank: int, size_bytes: int, staging_bytes: int = 0) -> BuffersReady:
        """Return two buffers for images of a worker, or why there are none. `staging_bytes`: what the worker will
        allocate itself for its first copy, from a device."""
        if self._directory is None:
            return BuffersReady(directory="", size_bytes=0, why="this agent has no place for snapshots")
        async with self._allocating:
            directory = rank_directory(self._directory, local_rank)
            self._staging[local_rank] = staging_bytes
            try:
                return await asyncio.to_thread(self._allocate, local_rank, directory, size_bytes)
            except OSError as error:
                return _refuse(f"no memory for snapshots in {directory}: {error.strerror or error}")

    def _allocate(self, local_rank: int, directory: Path, size_bytes: int) -> BuffersReady:
        size_bytes = -(-size_bytes // SIZE_STEP_BYTES) * SIZE_STEP_BYTES
        page = self._pages.get(local_rank) or SlotPage.create(directory)
        if (has_bytes := page.capacity_bytes()) < size_bytes:
            needed_bytes = SLOTS * (size_bytes - has_bytes)
            if why := _shortage(directory, needed_bytes, self._staging_to_come()):
                return _refuse(why)
            for slot in range(SLOTS):
                _extend(page.path(slot), size_bytes)
            log.info(
                "snapshot-memory-allocated",
                f"local rank {local_rank} has memory for snapshots: {SLOTS} × {size_bytes / 2**20:.0f} MiB",
            )
        self._pages[local_rank] = page
        return BuffersReady(directory=str(directory), size_bytes=max(size_bytes, has_bytes))

    def _staging_to_come(self) -> int:
        """Return what workers have said they will allocate themselves, and have not: they have made no image yet."""
        sealed = {local_rank for local_rank, page in self._pages.items() if page.sealed()}
        return sum(size for local_rank, size in self._staging.items() if local_rank not in sealed)

    # --- what is in it

    def images(self) -> list[SlotImage]:
        """Return the complete images of all workers, the newest first."""
        return newest_first(
            SlotImage(page, slot, record, msgspec.structs.replace(record.image, local_rank=local_rank))
            for local_rank, page in self._pages.items()
            for slot, record in page.sealed().items()
        )

    def complete_version(self) -> int:
        """Return the packed version of the last step that any of the workers, dead or alive, knew to be complete."""
        return max((page.complete_version() for page in self._pages.values()), default=-1)

    def pages(self) -> list[tuple[int, SlotPage]]:
        """Return all pages, by local rank."""
        return sorted(self._pages.items())

    def discard_after(self, step: int) -> None:
        """Discard the images of later steps: the job has restarted before this one, and they are of an undone
        history."""
        for page in self._pages.values():
            page.discard_after(step)
            if page.get("complete") > step:
                page.put(complete=-1)

    # --- for replication (replicator.ImageSource)

    def record_sealed(self) -> None:
        """Wake those who wait for another image."""
        self.sealed_count += 1
        self._sealed.set()
        self._sealed = asyncio.Event()

    async def changed(self, sealed_count: int) -> None:
        """Wait until more than so many images were sealed."""
        while self.sealed_count <= sealed_count:
            await self._sealed.wait()

    # --- the end

    def remove(self) -> None:
        """Remove all images: the job is over, and what is needed of them is on storage."""
        if (directory := self._directory) is not None:
            shutil.rmtree(directory, ignore_errors=True)  # while it is ours: the next owner finds nothing, or all
        self.close()
        if directory is not None:
            remove_empty(directory.parent, self._root)

    def close(self) -> None:
        """Release the directory; the files stay."""
        for page in self._pages.values():
            page.close()
        self._pages.clear()
        if self._owner is not None:
            os.close(self._owner)
        self._owner = self._directory = None


def _refuse(why: str) -> BuffersReady:
    log.warning("snapshot-memory-refused", why)
    return BuffersReady(directory="", size_bytes=0, why=why)


def _extend(path: Path, size_bytes: int) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        allocate(descriptor, size_bytes)
    finally:
        os.close(descriptor)
    memory = map_image(path, size_bytes, is_writable=True)
    populate(memory)
    memory.close()


def _shortage(directory: Path, needed_bytes: int, staging_bytes: int) -> str:
    """Return why so much more cannot be allocated; empty if it can."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    free = headroom(directory, 0, MEMORY_RESERVE_BYTES)
    if needed_bytes + staging_bytes <= free.free_bytes:
        return ""
    staging = f" and {staging_bytes / 2**20:.0f} MiB for copies from devices" if staging_bytes else ""
    return (
        f"snapshots need {needed_bytes / 2**20:.0f} MiB more in {directory}{staging}, {free.free_bytes / 2**20:.0f} MiB"
        f" are free {free.where}: give the node more memory, or turn snapshots off (--snapshots off)"
    )
