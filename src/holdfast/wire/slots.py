"""Two images of a worker's state in memory that its agent owns, so that they outlive the worker: a seat's slots.

    <vault>/seat-3/control     one page: what each slot holds, and how far the copying of states has come
                   image-0     the state before some step, as the very file a checkpoint has (storage/image.py)
                   image-1     that of another one
                   sums-0      the checksums of the blocks of image-0, once somebody has read it
                   sums-1

A slot is EMPTY → WRITING → SEALED(step). A worker that dies while it writes leaves WRITING behind, which nobody reads.
A record carries a checksum of itself: one that was torn counts as EMPTY.

The rule of the slots: the image of the last step that is known to be whole on *every* rank is not overwritten. Ranks
learn of it at each commit (`whole`), so at every moment there is a step that all can restore, without a barrier of its
own. Where images are copied to other nodes, a step is whole when the copies are: so there is one that all can restore
after the loss of a node, too. A job that begins anew with a step that was complete, but not copied yet, keeps both that
and the one before until it is. A rank that leaves may have heard of a step that the others have not heard of, and may
have overwritten the one before it: what its page says is told to those who stay (`Place.whole`).

Who reads an image (the agent that persists or replicates it, a worker that restores from it) holds a shared lock on its
file, who writes it an exclusive one. A worker waits for no lock: if its slot is being read it leaves a snapshot out. A
reader waits for the moment in which a worker looks whether the slot is free. The kernel takes the locks back from
whoever dies. Several may read at once; only who brings an image to storage marks it TAKEN, so one that is wanted stays
until then, whoever else reads it, and one that is to be copied to other nodes stays until `safe` says that it is. (A
lock belongs to an open file, which a forked process shares: a data loader's process, which may outlive its worker for a
while, lets go of it at once.)
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import struct
import sys
import time
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

SLOTS = 2
PAGE_BYTES = 4_096
MAGIC = 0x484F4C44534C4F54
COUNTERS = (
    *("magic", "whole", "recalled", "every", "cost_ns", "step_ns", "taken", "skipped", "spoiled"),
    *("partners", "safe"),  # by the agent
)
"""`whole`: the last step known to be whole on every rank. `recalled`: 1 if that is what all have begun anew with, other
nodes having it or not. `every`: a snapshot each so many steps. `cost_ns`: what one keeps the training waiting.
`step_ns`: of a step. How many were taken, left out as no slot was free, and given up as the state changed under the
copy. To how many nodes images are copied, and the newest that all of them have, as a word."""
_WORD = struct.Struct("=q")
_WORDS = struct.Struct("=11q")
_RECORD = struct.Struct("=11qI4x")
_RECORDS_AT = 1_024
_AT = {name: index * _WORD.size for index, name in enumerate(COUNTERS)}
MADV_POPULATE_WRITE = 23
STEP_BITS = 40
STEP_MAX = 2**STEP_BITS - 1
"""Of a step, in a word that has its view too."""
LOOK_PATIENCE_S = 1.0
"""For a worker to look at a slot: it takes microseconds, but it may lose its processor meanwhile."""


class Status(IntEnum):
    EMPTY = 0
    WRITING = 1
    SEALED = 2


class Wanted(IntEnum):
    """Whether an image is to become a checkpoint. One that is, is not overwritten before the agent has begun to read
    it: a step may be over sooner than a message is heard."""

    NO = 0
    YES = 1
    TAKEN = 2


class Record(NamedTuple):
    """What a slot holds."""

    status: Status
    step: int = -1
    """The next one to run: as many are done."""
    view: int = 0
    part: int = 0
    shards: int = 1
    shares: int = 1
    """Into how many the state is cut, and each shard of it; `part` is one of shards × shares."""
    size_bytes: int = 0
    seed: int = 0
    first_step: int = 0
    wanted: int = Wanted.NO
    created_ns: int = 0

    @property
    def parts(self) -> int:
        """Into how many the whole state is cut."""
        return self.shards * self.shares

    def is_image(self, other: Record | None) -> bool:
        """Whether both are of one image. What is wanted of it may have changed meanwhile."""
        return other is not None and self._replace(wanted=Wanted.NO) == other._replace(wanted=Wanted.NO)


EMPTY = Record(Status.EMPTY)


class Seat:
    """The slots of one seat, as worker and agent see them."""

    def __init__(self, directory: Path, page: mmap.mmap) -> None:
        self.directory, self._page = directory, page

    @classmethod
    def create(cls, directory: Path) -> Seat:
        """By the agent. One that is there already is kept, with what it holds."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(directory / "control", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, PAGE_BYTES)
            seat = cls(directory, mmap.mmap(descriptor, PAGE_BYTES))
        finally:
            os.close(descriptor)
        if seat.get("magic") != MAGIC:
            seat.put(whole=-1, magic=MAGIC)
        return seat

    @classmethod
    def open(cls, directory: Path) -> Seat:
        """By a worker. Raises OSError or ValueError if it is not there, or not what it should be."""
        descriptor = os.open(directory / "control", os.O_RDWR | os.O_CLOEXEC)
        try:
            seat = cls(directory, mmap.mmap(descriptor, PAGE_BYTES))
        finally:
            os.close(descriptor)
        if seat.get("magic") != MAGIC:
            raise ValueError(f"{directory / 'control'} is not a page of slots")
        return seat

    def close(self) -> None:
        self._page.close()

    def path(self, slot: int) -> Path:
        return self.directory / f"image-{slot}"

    def get(self, name: str) -> int:
        value: int = _WORD.unpack_from(self._page, _AT[name])[0]
        return value

    def put(self, **values: int) -> None:
        for name, value in values.items():
            _WORD.pack_into(self._page, _AT[name], value)

    def count(self, name: str) -> None:
        self.put(**{name: self.get(name) + 1})

    def record(self, slot: int) -> Record:
        """What the slot holds; EMPTY if its record is torn."""
        packed = bytes(self._page[(at := _record_at(slot)) : at + _RECORD.size])
        *values, checksum = _RECORD.unpack(packed)
        if checksum != zlib.crc32(packed[: _WORDS.size]) or not 0 <= values[0] <= 2:
            return EMPTY
        return Record(Status(values[0]), *values[1:])

    def write(self, slot: int, record: Record) -> None:
        packed = _WORDS.pack(*record)
        at = _record_at(slot)
        self._page[at : at + _RECORD.size] = packed + struct.pack("=I4x", zlib.crc32(packed))

    def sealed(self) -> dict[int, Record]:
        """The slots that hold a whole image."""
        found = {slot: self.record(slot) for slot in range(SLOTS)}
        return {slot: record for slot, record in found.items() if record.status is Status.SEALED}

    def note_checksums(self, slot: int, record: Record, checksums: Sequence[int]) -> None:
        """Of the blocks of an image, as they were read. They outlive the agent, as the image does."""
        packed = _WORD.pack(record.created_ns) + struct.pack(f"={len(checksums)}I", *checksums)
        temporary = self.directory / f"sums-{slot}.{secrets.token_hex(8)}"  # several may have read it at once
        temporary.write_bytes(packed + struct.pack("=I", zlib.crc32(packed)))
        temporary.rename(self.directory / f"sums-{slot}")

    def checksums(self, slot: int, record: Record) -> list[int] | None:
        """Of this very image's blocks, if they are known."""
        try:
            packed = (self.directory / f"sums-{slot}").read_bytes()
        except OSError:
            return None
        count = (len(packed) - _WORD.size) // 4 - 1
        if count < 0 or len(packed) % 4 or zlib.crc32(packed[:-4]) != int.from_bytes(packed[-4:], sys.byteorder):
            return None
        created_ns, *checksums = struct.unpack(f"=q{count}I", packed[:-4])
        return checksums if created_ns == record.created_ns else None

    def whole(self) -> Record | None:
        """The image of the last step that is known to be whole everywhere. Of two of that step, the later: the other is
        of a history that was gone back from."""
        step = self.get("whole")
        found = [record for record in self.sealed().values() if record.step == step]
        return max(found, key=lambda record: (record.view, record.created_ns), default=None)

    def whole_word(self) -> int:
        """Its step, behind its view: one of a later view counts, even if its step is lower. -1: none."""
        record = self.whole()
        return -1 if record is None else word(record.view, record.step)

    def room_bytes(self) -> int:
        """How large an image may be."""
        try:
            return min(self.path(slot).stat().st_size for slot in range(SLOTS))
        except OSError:
            return 0


def word(view: int, step: int) -> int:
    """Of an image: the later one is larger."""
    return view << STEP_BITS | step


def _record_at(slot: int) -> int:
    return _RECORDS_AT + slot * 256


def map_image(path: Path, size_bytes: int, *, is_writable: bool) -> mmap.mmap:
    """A stretch of memory that is the image."""
    descriptor = os.open(path, (os.O_RDWR if is_writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0))
    finally:
        os.close(descriptor)


def populate(memory: mmap.mmap) -> None:
    """Have all pages of writable memory in place, so that the first copy does not wait for them: they are eight times
    slower. By the C library's own call, as Python's would keep every other thread waiting."""
    first_byte = ctypes.c_char.from_buffer(memory)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise(ctypes.c_void_p(ctypes.addressof(first_byte)), ctypes.c_size_t(len(memory)), MADV_POPULATE_WRITE)
    finally:
        del first_byte  # an older kernel does not know it: then the first copy is slow, that is all


class ImageLock:
    """An open image file with a lock on it, or none."""

    def __init__(self, path: Path, *, is_writable: bool) -> None:
        self._descriptor = os.open(path, (os.O_RDWR if is_writable else os.O_RDONLY) | os.O_CLOEXEC)
        self._kind = fcntl.LOCK_EX if is_writable else fcntl.LOCK_SH
        _open_locks.add(self)

    def take(self) -> bool:
        """False: somebody else has it."""
        try:
            fcntl.flock(self._descriptor, self._kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        if self in _open_locks:
            _open_locks.discard(self)
            os.close(self._descriptor)


_open_locks: weakref.WeakSet[ImageLock] = weakref.WeakSet()


def _let_go() -> None:
    for lock in list(_open_locks):
        lock.close()


os.register_at_fork(after_in_child=_let_go)


def _take_shared(lock: ImageLock, seat: Seat, slot: int, expected: Record) -> bool:
    """False: the slot does not hold the expected image any more, or is about to hold another."""
    give_up_at = time.monotonic() + LOOK_PATIENCE_S
    while not (is_ours := lock.take()) and seat.record(slot).is_image(expected) and time.monotonic() < give_up_at:
        time.sleep(0.001)  # a worker looks whether the slot is free, or begins to write: then its record changes
    return is_ours and seat.record(slot).is_image(expected)


@contextmanager
def reading(seat: Seat, slot: int, expected: Record) -> Iterator[mmap.mmap | None]:
    """The image of a slot, which stays as it is meanwhile. None: it is not the expected one any more."""
    lock = ImageLock(seat.path(slot), is_writable=False)
    try:
        if not _take_shared(lock, seat, slot, expected):
            yield None
            return
        memory = map_image(seat.path(slot), expected.size_bytes, is_writable=False)
        try:
            yield memory
        finally:
            memory.close()
    finally:
        lock.close()
