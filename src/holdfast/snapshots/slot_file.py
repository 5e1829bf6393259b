"""Two images of a rank's state in shared memory: while one is written, the other is complete.

    <directory>/rank-3/control     one page: what each slot holds, and how far snapshots have come
                       image-0     the state before some step, as the very file that a checkpoint has (storage/image.py)
                       image-1     the state before another step
                       details-0   what the page has no room for: the checksums of image-0's blocks, for other nodes'
                       details-1   images also whose they are

The same files hold a node's own snapshots (a worker writes them, its agent reads them), the replicas that the node
holds for other nodes, and the parity of its group (the agent does both). They are memory files: they survive every
process, and not the machine, so nothing is synced.

A slot is EMPTY → WRITING → SEALED. Before the first byte of an image changes, its record says WRITING; after the last
byte is there, it says SEALED. A process that dies in between leaves WRITING behind, which no process reads. A record
carries a checksum of itself: a torn one counts as EMPTY.

The rule of the slots: the image of the last step that is known to be complete on *every* rank is not overwritten.
Ranks learn which step that is at each commit (`complete`), so at every moment there is a step that all of them can
restore, without a barrier of its own. Where images are copied to other nodes, a step is complete when its copies are:
so after the loss of a node, too, there is a step that all can restore. A job that restarts from a step that was
complete, but not copied yet, keeps that step and the one before it until it is copied. A rank that leaves may know of a
complete step that the others have not heard of, and may have overwritten the one before it: its agent tells those who
stay (`Assignment.complete_version`). An agent that holds replicas or parity follows the same rule: the sender says
which step its rank knows to be complete (`OfferImage.complete_step`).

Locks. A reader of an image (the agent that uploads or replicates it, a worker that restores from it) holds a shared
lock on its file, a writer an exclusive one. A worker waits for no lock: if its slot is being read it skips a snapshot.
A reader waits for the moment in which a worker tests whether the slot is free. The kernel releases the locks of a
process that dies. Several processes may read at once; only the uploader marks an image as UPLOADING. So an image that
is wanted as a checkpoint stays until its upload has begun, whichever other process reads it, and one that is to be
copied to other nodes stays until `copied` says that it is. (A lock belongs to an open file, which a forked process
shares: a data loader's process, which may outlive its worker for a while, closes it at once.)
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import struct
import time
import weakref
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import msgspec

from holdfast.core.image_info import ImageInfo, pack_version
from holdfast.util.blocks import pack_checksums
from holdfast.util.cgroups import Headroom, memory_headroom
from holdfast.util.files import allocate
from holdfast.util.logs import get_logger
from holdfast.wire.worker_messages import StoredImage

SLOTS = 2
PAGE_BYTES = 4_096
MAGIC = 0x484F4C44534C4F54
COUNTERS = (
    *("magic", "complete", "restored", "every", "cost_ns", "step_ns", "taken", "skipped", "spoiled"),
    *("partners", "copied"),  # written by the agent
)
"""`complete`: the last step known to be complete on every rank. `restored`: 1 if that is known only because all ranks
have restored it, whether other nodes have it or not. `every`: a snapshot is taken each so many steps. `cost_ns`: how
long one keeps the training waiting. `step_ns`: how long a step takes. `taken`, `skipped`, `spoiled`: how many were
taken, skipped because no slot was free, and given up because the state changed during the copy. `partners`: to how many
nodes images are copied. `copied`: the packed version of the newest image that all of them have."""
_INTEGER = struct.Struct("=q")
_FIELDS = struct.Struct("=11q")
_RECORD = struct.Struct("=11qI4x")
_RECORDS_START = 1_024
_OFFSETS = {name: index * _INTEGER.size for index, name in enumerate(COUNTERS)}
MADV_POPULATE_WRITE = 23
LOCK_PATIENCE_S = 1.0
"""How long a reader waits for a worker that tests its slot: that takes microseconds, but the worker may lose its
processor in between."""
RANK_PREFIX = "rank-"

log = get_logger(__name__)


class SlotStatus(IntEnum):
    """What may be done with the content of a slot."""

    EMPTY = 0
    WRITING = 1
    SEALED = 2


class WantedSnapshot(IntEnum):
    """Whether an image is to become a checkpoint. One that is, is not overwritten before its upload has begun: a step
    may be over before the agent has read the message about it."""

    NO = 0
    YES = 1
    UPLOADING = 2


class SlotRecord(NamedTuple):
    """What a slot holds."""

    status: SlotStatus
    image: ImageInfo
    wanted: WantedSnapshot = WantedSnapshot.NO

    def is_image(self, other: SlotRecord | None) -> bool:
        """Return whether both are about one image. Whether it is wanted may have changed in between."""
        return other is not None and (self.status, self.image) == (other.status, other.image)


EMPTY = SlotRecord(SlotStatus.EMPTY, ImageInfo(-1, 0, 1, 1))


class SlotPage:
    """The slots of one rank, as every process sees them."""

    def __init__(self, directory: Path, page: mmap.mmap) -> None:
        self.directory, self._page = directory, page

    @classmethod
    def create(cls, directory: Path) -> SlotPage:
        """Return the page of a directory, which the agent owns. A page that is there stays, with what it holds."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        page = cls._map(directory, os.O_CREAT)
        if page.get("magic") != MAGIC:
            page.put(complete=-1, magic=MAGIC)
        return page

    @classmethod
    def open(cls, directory: Path) -> SlotPage:
        """Return the page that an agent has created. Raises OSError or ValueError if there is none."""
        page = cls._map(directory)
        if page.get("magic") != MAGIC:
            raise ValueError(f"{directory / 'control'} is not a page of slots")
        return page

    @classmethod
    def _map(cls, directory: Path, flags: int = 0) -> SlotPage:
        descriptor = os.open(directory / "control", os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
        try:
            if flags:
                allocate(descriptor, PAGE_BYTES)  # a page that cannot be had is an error now, and not a signal later
            elif not _is_all_there(descriptor, PAGE_BYTES):
                raise ValueError(f"{directory / 'control'} has no memory behind it")
            return cls(directory, mmap.mmap(descriptor, PAGE_BYTES))
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Unmap the page. The files stay."""
        self._page.close()

    def path(self, slot: int) -> Path:
        """Return the image file of a slot."""
        return self.directory / f"image-{slot}"

    # --- counters

    def get(self, name: str) -> int:
        """Return one of COUNTERS."""
        value: int = _INTEGER.unpack_from(self._page, _OFFSETS[name])[0]
        return value

    def put(self, **values: int) -> None:
        """Set some of COUNTERS."""
        for name, value in values.items():
            _INTEGER.pack_into(self._page, _OFFSETS[name], value)

    def count(self, name: str) -> None:
        """Add one to one of COUNTERS."""
        self.put(**{name: self.get(name) + 1})

    # --- records

    def record(self, slot: int) -> SlotRecord:
        """Return what the slot holds; EMPTY if its record is torn."""
        packed = bytes(self._page[(at := _record_at(slot)) : at + _RECORD.size])
        status, *values, checksum = _RECORD.unpack(packed)
        if checksum != zlib.crc32(packed[: _FIELDS.size]) or not 0 <= status <= 2 or not 0 <= values[8] <= 2:
            return EMPTY
        step, view, part, shards, shares, size_bytes, seed, first_step, wanted, created_ns = values
        image = ImageInfo(
            *(step, part, shards, shares, view),
            size_bytes=size_bytes,
            seed=seed,
            first_step=first_step,
            created_ns=created_ns,
        )
        return SlotRecord(SlotStatus(status), image, WantedSnapshot(wanted))

    def write(self, slot: int, record: SlotRecord) -> None:
        """Replace the record of a slot."""
        status, image, wanted = record
        packed = _FIELDS.pack(
            *(status, image.step, image.view, image.part, image.shards, image.shares, image.size_bytes),
            *(image.seed, image.first_step, wanted, image.created_ns),
        )
        at = _record_at(slot)
        self._page[at : at + _RECORD.size] = packed + struct.pack("=I4x", zlib.crc32(packed))

    def sealed(self) -> dict[int, SlotRecord]:
        """Return the records of the slots that hold a complete image."""
        found = {slot: self.record(slot) for slot in range(SLOTS)}
        return {slot: record for slot, record in found.items() if record.status is SlotStatus.SEALED}

    def discard_after(self, step: int) -> None:
        """Empty the slots that hold images of later steps."""
        for slot, record in self.sealed().items():
            if record.image.step > step:
                self.write(slot, record._replace(status=SlotStatus.EMPTY))

    def complete(self) -> SlotRecord | None:
        """Return the image of the last step that is known to be complete on all ranks. Of two images of that step it is
        the later: the other is of a history that was undone."""
        step = self.get("complete")
        found = [record for record in self.sealed().values() if record.image.step == step]
        return max(found, key=lambda record: (record.image.view, record.image.created_ns), default=None)

    def complete_version(self) -> int:
        """Return the packed version of that image; -1: there is none."""
        record = self.complete()
        return -1 if record is None else pack_version(*record.image.version)

    # --- what the page has no room for

    def write_details(self, slot: int, image: ImageInfo, details: bytes) -> None:
        """Store what is known of an image besides its record. Like the image it survives the agent."""
        packed = _INTEGER.pack(image.created_ns) + details
        temporary = self.directory / f"details-{slot}.{secrets.token_hex(8)}"  # several may have read it at once
        temporary.write_bytes(packed + struct.pack("=I", zlib.crc32(packed)))
        temporary.rename(self.directory / f"details-{slot}")

    def details(self, slot: int, image: ImageInfo) -> bytes | None:
        """Return what was stored of this very image; None if there is nothing, or it is damaged."""
        try:
            packed = (self.directory / f"details-{slot}").read_bytes()
            (created_ns,), (checksum,) = _INTEGER.unpack_from(packed), struct.unpack("=I", packed[-4:])
        except (OSError, struct.error):
            return None
        is_right = checksum == zlib.crc32(packed[:-4]) and created_ns == image.created_ns
        return packed[_INTEGER.size : -4] if is_right else None

    def capacity_bytes(self) -> int:
        """Return how large an image may be."""
        try:
            return min(self.path(slot).stat().st_size for slot in range(SLOTS))
        except OSError:
            return 0


def _record_at(slot: int) -> int:
    return _RECORDS_START + slot * 256


def rank_directory(root: Path, local_rank: int) -> Path:
    """Return where the slots of one rank are."""
    return root / f"{RANK_PREFIX}{local_rank}"


def find_ranks(root: Path) -> dict[int, Path]:
    """Return the directories of slots below a directory, by local rank."""
    found = root.glob(f"{RANK_PREFIX}*")
    return {int(number): path for path in sorted(found) if (number := path.name[len(RANK_PREFIX) :]).isdecimal()}


# --- one image


@dataclass(frozen=True)
class SlotImage:
    """A complete image in a slot, to be read: one of this node's own, or one that it holds for another node."""

    page: SlotPage = field(compare=False)
    slot: int
    record: SlotRecord
    info: ImageInfo
    """The record's, and whose it is."""
    is_replica: bool = False

    @property
    def path(self) -> Path:
        """The file that is the image."""
        return self.page.path(self.slot)

    @property
    def checksums(self) -> bytes:
        """The packed checksums of its blocks; empty if they are not known."""
        return self.info.checksums or self.page.details(self.slot, self.record.image) or b""

    @property
    def complete_step(self) -> int:
        """The last step that its rank knows to be complete on all ranks; -1: none."""
        return self.page.get("complete")

    @property
    def stored(self) -> StoredImage:
        """The image as a worker gets it, to restore from."""
        info = msgspec.structs.replace(self.info, checksums=self.checksums)
        return StoredImage(path=str(self.path), info=info, is_replica=self.is_replica)

    @contextmanager
    def reading(self) -> Iterator[memoryview | None]:
        """Give its bytes, which do not change until the end; None if it was overwritten before. For any thread."""
        try:
            lock = ImageLock(self.path, is_writable=False)
        except OSError:  # a replica whose memory was given back
            yield None
            return
        try:
            if not self._lock_shared(lock):
                yield None
                return
            try:
                memory = map_image(self.path, self.record.image.size_bytes, is_writable=False)
            except (OSError, ValueError) as error:
                log.warning("snapshot-unreadable", f"an image of step {self.record.image.step} is not used: {error}")
                yield None
                return
            try:
                with memoryview(memory) as content:
                    yield content
            finally:
                try:
                    memory.close()
                except BufferError:
                    pass  # a view of it is still in use, and closes it
        finally:
            lock.close()

    @contextmanager
    def claimed(self) -> Iterator[memoryview | None]:
        """Give its bytes for an upload: from now on it is not wanted any more, whatever becomes of the upload."""
        with self.reading() as content:
            if content is not None and self.record.wanted is WantedSnapshot.YES:
                self.page.write(self.slot, self.record._replace(wanted=WantedSnapshot.UPLOADING))
            yield content

    def record_checksums(self, checksums: Iterable[int]) -> None:
        """Store the checksums of its blocks, as they were read."""
        if not self.is_replica:  # those of a replica came with it
            self.page.write_details(self.slot, self.record.image, pack_checksums(checksums))

    def _lock_shared(self, lock: ImageLock) -> bool:
        """Return False if the slot does not hold this image any more, or is about to hold another."""
        give_up_at = time.monotonic() + LOCK_PATIENCE_S
        while not (is_ours := lock.acquire()) and self._is_there() and time.monotonic() < give_up_at:
            time.sleep(0.001)  # a worker tests whether the slot is free, or begins to write: then its record changes
        return is_ours and self._is_there()

    def _is_there(self) -> bool:
        return self.page.record(self.slot).is_image(self.record)


def newest_first(images: Iterable[SlotImage]) -> list[SlotImage]:
    """Return images by step, the latest first."""
    return sorted(images, key=lambda image: -image.info.step)


# --- memory


def map_image(path: Path, size_bytes: int, *, is_writable: bool) -> mmap.mmap:
    """Return the memory that is the image. Raise ValueError if the file is shorter, or has holes: to read what is not
    there would end the process by a signal."""
    descriptor = os.open(path, (os.O_RDWR if is_writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        has_bytes = os.fstat(descriptor).st_size
        if not 0 < size_bytes <= has_bytes or not (is_writable or _is_all_there(descriptor, size_bytes)):
            raise ValueError(f"{path} has {has_bytes} bytes, not {size_bytes}, or has holes")
        return mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0))
    finally:
        os.close(descriptor)


def _is_all_there(descriptor: int, size_bytes: int) -> bool:
    """Return whether a file has this size, and no holes. A file system that packs files has fewer blocks than bytes, so
    few blocks are only a reason to look."""
    found = os.fstat(descriptor)
    if found.st_size < size_bytes:
        return False
    return found.st_blocks * 512 >= size_bytes or os.lseek(descriptor, 0, os.SEEK_HOLE) >= size_bytes


def populate(memory: mmap.mmap) -> None:
    """Allocate all pages of writable memory now: a first copy into pages that are not there is eight times slower. This
    calls the C library directly, because Python's own call would keep every other thread waiting."""
    first_byte = ctypes.c_char.from_buffer(memory)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise(ctypes.c_void_p(ctypes.addressof(first_byte)), ctypes.c_size_t(len(memory)), MADV_POPULATE_WRITE)
    finally:
        del first_byte  # an older kernel does not have the call: then the first copy is slow, and nothing else


def headroom(directory: Path, file_reserve_bytes: int, memory_reserve_bytes: int) -> Headroom:
    """Return how much larger images may become: what the file system and the machine's memory have left, less what
    others need of either."""
    space, memory = os.statvfs(directory), memory_headroom()
    return min(
        Headroom(max(space.f_bavail * space.f_frsize - file_reserve_bytes, 0), "in that file system"),
        memory._replace(free_bytes=max(memory.free_bytes - memory_reserve_bytes, 0)),
    )


class ImageLock:
    """An open image file with a lock on it, or none."""

    def __init__(self, path: Path, *, is_writable: bool) -> None:
        self._descriptor = os.open(path, (os.O_RDWR if is_writable else os.O_RDONLY) | os.O_CLOEXEC)
        self._kind = fcntl.LOCK_EX if is_writable else fcntl.LOCK_SH
        _open_locks.add(self)

    def acquire(self) -> bool:
        """Take the lock; return False if another process has it."""
        try:
            fcntl.flock(self._descriptor, self._kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Give the lock back; the file stays open."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file, and with it the lock."""
        if self in _open_locks:
            _open_locks.discard(self)
            os.close(self._descriptor)


_open_locks: weakref.WeakSet[ImageLock] = weakref.WeakSet()


def _close_locks() -> None:
    for lock in list(_open_locks):
        lock.close()


os.register_at_fork(after_in_child=_close_locks)
