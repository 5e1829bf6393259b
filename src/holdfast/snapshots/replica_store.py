"""The images that an agent holds for other nodes, so that these images survive their nodes.

    <root>/<node>/rank-K/                  two slots for each local rank of that node (slot_file.py)

An agent accepts images of the nodes that the master has assigned to it (`assign`), and of no others; but what is here
of others stays until it is dropped, or until its memory is needed for an assigned node. Of each rank the two newest
images are held, or the newest and the last that is complete on all ranks (`OfferImage.complete_step`). An image that is
older than the newest one here is refused.

Every method may be called from any thread.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from holdfast.core.image_info import ImageInfo, Version
from holdfast.errors import ReplicaError
from holdfast.snapshots.directories import directory_name
from holdfast.snapshots.slot_file import (
    EMPTY,
    SLOTS,
    ImageLock,
    SlotImage,
    SlotPage,
    SlotRecord,
    SlotStatus,
    find_ranks,
    headroom,
    rank_directory,
)
from holdfast.util.blocks import block_count, span
from holdfast.util.logs import get_logger
from holdfast.wire.bulk_messages import StoredReplica

RESERVE_BYTES = 64 * 2**20
"""What replicas leave free: what others on this machine need of it (data loaders, progress pages) is small, but must be
there."""

log = get_logger(__name__)
_decoder = msgspec.msgpack.Decoder(StoredReplica)

RemoteRank = tuple[str, int]
"""A node's id, and a local rank on it."""


class ReplicaSlot:
    """One slot that threads of this agent write: with a replica, or with parity."""

    def __init__(self, page: SlotPage, number: int) -> None:
        self.page, self.number, self.path = page, number, page.path(number)
        self.sealed = self._read(SlotStatus.SEALED)
        """What complete image is in it."""
        self.writer: object = None
        """Who writes into it now."""
        self.resizing = threading.Lock()
        """Held while its file is made or changes its size: a thread that has mapped it must not find it shorter."""
        self._lock: ImageLock | None = None
        self._mapped: mmap.mmap | None = None
        """Kept from image to image: to map the same pages again takes as long as to fill them."""

    @property
    def version(self) -> Version:
        """The version of the complete image in it; (-1, -1): there is none."""
        return self.sealed.version if self.sealed else (-1, -1)

    @property
    def image(self) -> SlotImage | None:
        """The complete image in it, to be read."""
        if self.sealed is None:
            return None
        return SlotImage(self.page, self.number, self.page.record(self.number), self.sealed.image, is_replica=True)

    def begin(self, replica: StoredReplica) -> None:
        """Lock the slot and record that it is being written. Raises ReplicaError if its image is being read."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch(mode=0o600)
        lock = ImageLock(self.path, is_writable=True)
        if not lock.acquire():
            lock.close()
            raise ReplicaError("the image that would have to be overwritten is being read")
        self._lock, self.sealed = lock, None
        self._write(SlotStatus.WRITING, replica)

    def seal(self, replica: StoredReplica) -> None:
        """Record that all of it is there and verified."""
        self._write(SlotStatus.SEALED, replica)
        self.sealed = replica

    def end(self) -> None:
        """End the writing, whether it is sealed or not."""
        self.writer = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def allocate(self, size_bytes: int) -> None:
        """Allocate memory for an image of this size before it is mapped: where there is none, that is a ReplicaError
        and not a signal that ends the agent."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            found = os.fstat(descriptor)
            had = found.st_blocks * 512
            if found.st_size == size_bytes <= had:
                return
            self._mapped = None
            if size_bytes - had > headroom(self.path.parent, RESERVE_BYTES, RESERVE_BYTES).free_bytes:
                raise ReplicaError(_shortage(self.path.parent, size_bytes - had))
            os.ftruncate(descriptor, size_bytes)
            os.posix_fallocate(descriptor, 0, size_bytes)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise ReplicaError(f"{self.path}: {error.strerror}") from error
            raise ReplicaError(_shortage(self.path.parent, size_bytes)) from error
        finally:
            os.close(descriptor)

    def writable(self) -> mmap.mmap:
        """Return its memory, to be written; not to be closed."""
        if self._mapped is None:
            with self.path.open("r+b") as file:
                self._mapped = mmap.mmap(file.fileno(), 0)
        return self._mapped

    def empty(self) -> None:
        """Give its memory back, now or when no thread writes into it any more."""
        self.sealed = self._mapped = None
        self.page.write(self.number, EMPTY)
        self.path.unlink(missing_ok=True)
        self.end()

    def described(self) -> StoredReplica | None:
        """Return what is in it, complete or not."""
        return self.sealed or self._read(SlotStatus.WRITING)

    def _write(self, status: SlotStatus, replica: StoredReplica) -> None:
        if status is SlotStatus.SEALED:  # what says that it is complete comes last
            self.page.write_details(self.number, replica.image, msgspec.msgpack.encode(replica))
        self.page.write(self.number, SlotRecord(status, replica.image))
        if status is SlotStatus.WRITING:
            self.page.write_details(self.number, replica.image, msgspec.msgpack.encode(replica))

    def _read(self, status: SlotStatus) -> StoredReplica | None:
        """Return what is in it, with this status; None also if what describes it is damaged."""
        record = self.page.record(self.number)
        details = self.page.details(self.number, record.image) if record.status is status else None
        try:
            found = _decoder.decode(details) if details is not None else None
        except msgspec.MsgspecError:
            return None
        return found if found is not None and found.version == record.image.version else None


def open_slots(directory: Path) -> list[ReplicaSlot]:
    """Return the two slots of a directory, as they were left."""
    page = SlotPage.create(directory)
    slots = [ReplicaSlot(page, number) for number in range(SLOTS)]
    for slot in slots:
        size_bytes = slot.path.stat().st_size if slot.path.exists() else 0
        if slot.sealed and size_bytes != slot.sealed.image.size_bytes:
            log.warning(
                "replica-truncated",
                f"{slot.path} is discarded: it has {size_bytes} bytes, not {slot.sealed.image.size_bytes}",
            )
            slot.empty()
    return slots


def choose_slot(slots: Sequence[ReplicaSlot], complete_step: int) -> ReplicaSlot:
    """Return the slot to overwrite: one that is being written first, then one that is not sealed, then the older. By
    the rule of the slots (slot_file.py) that is not the image of the last complete step; of two, the later stays."""
    sealed = (slot for slot in slots if slot.sealed and slot.sealed.image.step == complete_step)
    spared = max(sealed, key=lambda slot: slot.version, default=None)
    return min((slot for slot in slots if slot is not spared), key=lambda slot: (not slot.writer, slot.version))


@contextmanager
def reading(slots: Sequence[ReplicaSlot], version: Version, lock: threading.RLock) -> Iterator[memoryview]:
    """Give the bytes of the image of this version, which do not change until the end. Raises ReplicaError if there is
    none."""
    with lock:
        image = next((slot.image for slot in slots if slot.sealed and slot.version == version), None)
    if image is not None:
        with image.reading() as content:
            if content is not None:
                yield content
                return
    raise ReplicaError(f"this node has no image of step {version[1]} of view {version[0]}")


def _shortage(directory: Path, needed: int) -> str:
    left = headroom(directory, RESERVE_BYTES, RESERVE_BYTES).free_bytes
    return (
        f"no room for {needed / 2**20:.0f} MiB more under {directory}, where {left / 2**20:.0f} MiB are left: give this"
        " node more shared memory, or lower --replicas"
    )


class ReplicaStore:
    """The replicas of one agent; it finds what an earlier agent left in the same directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.RLock()
        self._assigned: dict[str, int] = {}
        self._ranks: dict[RemoteRank, list[ReplicaSlot]] = {}
        self._find()

    def assign(self, nodes: Mapping[str, int]) -> None:
        """Accept images of these nodes from now on: how many workers each has, by node id."""
        with self._lock:
            self._assigned = dict(nodes)

    def offer(self, image: ImageInfo, complete_step: int = -1) -> IncomingReplica | None:
        """Return where an image is to be written; None if it is here already. Raises ReplicaError, with the reason, if
        it is not accepted."""
        with self._lock:
            self._check(image)
        return self.adopt(image, complete_step)

    def adopt(self, image: ImageInfo, complete_step: int = -1) -> IncomingReplica | None:
        """Do the same for an image that this agent itself has found or rebuilt, assigned or not."""
        with self._lock:
            slots = self._slots((image.node_id, image.local_rank))
            held = [slot.sealed.image for slot in slots if slot.sealed]
            if any(_is_same(image, known) for known in held):
                return None
            if any(image.version < known.version for known in held):
                raise ReplicaError(f"step {image.step} of view {image.view} is older than what is here")
            slot = choose_slot(slots, complete_step)
            was_taken = slot.writer is not None  # by a connection that is broken and has not noticed yet
            slot.writer = writer = object()
        with slot.resizing:
            return self._begin(slot, image, writer, was_taken)

    def _begin(self, slot: ReplicaSlot, image: ImageInfo, writer: object, was_taken: bool) -> IncomingReplica:
        """Prepare the slot. Not under the store's lock: to allocate memory for a large file takes a while."""
        try:
            with self._lock:
                if slot.writer is not writer:
                    raise ReplicaError("a newer connection sends this image")
                if was_taken:
                    slot.empty()  # what the other one still writes goes to a file without a name
                    slot.writer = writer
                slot.begin(StoredReplica(kind="replica", image=image))
            self._allocate(slot, image.size_bytes)
            return IncomingReplica(slot, image, writer, self._lock)
        except BaseException:
            with self._lock:
                if slot.writer is writer:
                    slot.end()
            raise

    def images(self) -> list[SlotImage]:
        """Return all complete images here."""
        with self._lock:
            slots = [slot for slots in self._ranks.values() for slot in slots]
            return [image for slot in slots if (image := slot.image) is not None]

    @contextmanager
    def reading(self, node_id: str, local_rank: int, view: int, step: int) -> Iterator[memoryview]:
        """Give the bytes of one of them, which do not change until the end."""
        with self._lock:
            slots = self._ranks.get((node_id, local_rank), [])
        with reading(slots, (view, step), self._lock) as content:
            yield content

    def drop(self, node_id: str) -> None:
        """Discard the images of a node."""
        with self._lock:
            for rank in [rank for rank in self._ranks if rank[0] == node_id]:
                for slot in self._ranks.pop(rank):
                    slot.empty()
            shutil.rmtree(self.root / directory_name(node_id), ignore_errors=True)

    def discard_after(self, step: int) -> None:
        """Discard the images of later steps: the job has restarted before this one, and they are of an undone history.
        One that is being read stays."""
        with self._lock:
            for slot in (slot for slots in self._ranks.values() for slot in slots):
                if slot.sealed is not None and slot.sealed.image.step > step and slot.writer is None:
                    lock = ImageLock(slot.path, is_writable=True)
                    if lock.acquire():
                        slot.empty()
                    lock.close()

    def clear(self) -> None:
        """Discard everything: the job is over."""
        with self._lock:
            self._assigned, self._ranks = {}, {}
            shutil.rmtree(self.root, ignore_errors=True)

    def _find(self) -> None:
        for directory in (path for node in self.root.glob("*") for path in find_ranks(node).values()):
            slots = open_slots(directory)
            found = [known.image for slot in slots if (known := slot.described()) is not None]
            if not found:
                shutil.rmtree(directory, ignore_errors=True)
                continue
            self._ranks[found[0].node_id, found[0].local_rank] = slots

    def _check(self, image: ImageInfo) -> None:
        workers = self._assigned.get(image.node_id)
        if workers is None:
            raise ReplicaError(f"no images of {image.node_id} are assigned to this node")
        if image.local_rank >= workers:
            raise ReplicaError(f"{image.node_id} has {workers} workers, and this is number {image.local_rank}")
        if image.size_bytes < 1:
            raise ReplicaError("the image is empty")
        if len(image.checksums) not in (0, 4 * block_count(image.size_bytes)):
            raise ReplicaError("the number of checksums is not the number of blocks")

    def _slots(self, rank: RemoteRank) -> list[ReplicaSlot]:
        if rank not in self._ranks:
            self._ranks[rank] = open_slots(rank_directory(self.root / directory_name(rank[0]), rank[1]))
        return self._ranks[rank]

    def _allocate(self, slot: ReplicaSlot, size_bytes: int) -> None:
        try:
            slot.allocate(size_bytes)
        except ReplicaError:
            if not self._evict():
                raise
            slot.allocate(size_bytes)

    def _evict(self) -> bool:
        """Drop the images of nodes that are not assigned; return whether there were any."""
        with self._lock:
            others = sorted({node_id for node_id, _ in self._ranks} - self._assigned.keys())
            for node_id in others:
                log.warning(
                    "replicas-evicted",
                    f"evicted the images of {node_id}, which is not assigned to this node any more: their memory is"
                    " needed",
                )
                self.drop(node_id)
            return bool(others)


class IncomingReplica:
    """An image on its way into a slot (transfer.BlockSink)."""

    def __init__(self, slot: ReplicaSlot, image: ImageInfo, writer: object, lock: threading.RLock) -> None:
        self._slot, self._image, self._writer, self._lock = slot, image, writer, lock
        self._bytes = memoryview(slot.writable())
        self._is_over = False

    @property
    def size_bytes(self) -> int:
        """The size of the image."""
        return self._image.size_bytes

    @property
    def content(self) -> memoryview:
        """The memory of the whole image."""
        return self._bytes

    def buffer(self, index: int) -> memoryview:
        """Return the memory in which the block stays."""
        return self._bytes[span(index, self.size_bytes)]

    def accept(self, index: int) -> None:
        """Do nothing: the block is where it stays."""

    def seal(self, checksums: bytes) -> None:
        """Seal the slot: all blocks are verified."""
        with self._lock:
            if self._slot.writer is not self._writer:
                raise ReplicaError("it was dropped while it came in, or a newer connection sends it")
            image = msgspec.structs.replace(self._image, checksums=checksums)
            self._slot.seal(StoredReplica(kind="replica", image=image))

    def close(self) -> None:
        """End the transfer. A slot that is not sealed counts as empty."""
        if self._is_over:
            return
        self._is_over = True
        self._bytes.release()
        with self._lock:
            if self._slot.writer is self._writer:
                self._slot.end()


def _is_same(image: ImageInfo, known: ImageInfo) -> bool:
    """Return whether this very image is held. Without checksums one attempt at a step cannot be told from another, but
    a step of a view has one outcome."""
    if image.checksums and image.checksums != known.checksums:
        return False
    one, other = (msgspec.structs.replace(info, checksums=b"", created_ns=0) for info in (image, known))
    return one == other
