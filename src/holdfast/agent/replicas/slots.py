"""Two files for one image: while one is written, the other is whole.

    slot-N.image    the bytes, as they are; nothing else
    slot-N.head     what is in it: WRITING or SEALED, and the label; with its own checksum, replaced by a rename

The order of changes. Before the first byte of an image changes, its head says WRITING; after the last byte is verified,
its head says SEALED. A process that dies in between leaves a slot that is taken for empty. One of the two stays as it
is (`expendable`). Memory files do not outlive the machine, so nothing is synced.

Memory is allocated before it is mapped: where there is none, that is an error, and not a signal that ends the agent.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, Literal, Protocol, TypeVar

import msgspec
import structlog
from crc32c import crc32c

from holdfast.errors import ReplicaError
from holdfast.wire.cgroups import memory_headroom

SLOTS = 2
RESERVE_BYTES = 64 * 2**20
"""Of the file system: what others on this machine need (data loaders, progress pages) is small, but must be had."""
HEAD_BYTES_MAX = 16 * 2**20

log = structlog.get_logger("agent")

_HEAD = struct.Struct("!8sII")
_MAGIC = b"HFSLOT1\n"

State = Literal["writing", "sealed"]


class Aged(Protocol):
    """What is in a slot: later is larger."""

    @property
    def age(self) -> tuple[int, int]: ...
    @property
    def step(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...


LabelT = TypeVar("LabelT", bound=Aged)


class Head(msgspec.Struct, Generic[LabelT], frozen=True):
    """What a head says."""

    state: State
    label: LabelT


class Slot(Generic[LabelT]):
    """One of the two."""

    def __init__(self, directory: Path, number: int, kind: type[Head[LabelT]]) -> None:
        self.path = directory / f"slot-{number}.image"
        self._head_path = directory / f"slot-{number}.head"
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._kind = kind
        self.head = self._read_head()
        self.writer: object = None
        """Who writes into it now."""
        self.growing = threading.Lock()
        """Held while its file is made or changes its size: who has mapped one must not find it shorter."""
        self.pins = 0
        """How many read it now."""
        self._mapped: mmap.mmap | None = None
        """Kept from image to image: to map the same pages anew takes as long as to fill them."""

    @property
    def sealed(self) -> LabelT | None:
        """The label of the whole image that is in it."""
        return self.head.label if self.head and self.head.state == "sealed" else None

    def say(self, state: State, label: LabelT) -> None:
        """Change the head."""
        body = msgspec.msgpack.encode(Head(state, label))
        self._head_path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._head_path.with_suffix(".head.new")
        fresh.write_bytes(_HEAD.pack(_MAGIC, len(body), int(crc32c(body))) + body)
        fresh.replace(self._head_path)
        self.head = Head(state, label)

    def allocate(self, size_bytes: int) -> None:
        """Memory for an image of this size; a ReplicaError if there is none."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            found = os.fstat(descriptor)
            had = found.st_blocks * 512
            if found.st_size == size_bytes <= had:
                return
            self._mapped = None
            if size_bytes - had > free_bytes(self.path.parent) - RESERVE_BYTES:
                raise ReplicaError(lack_of_room(self.path.parent, size_bytes - had))
            os.ftruncate(descriptor, size_bytes)
            os.posix_fallocate(descriptor, 0, size_bytes)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise ReplicaError(f"{self.path}: {error.strerror}") from error
            raise ReplicaError(lack_of_room(self.path.parent, size_bytes)) from error
        finally:
            os.close(descriptor)

    def readable(self) -> mmap.mmap:
        """Its bytes."""
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def writable(self) -> mmap.mmap:
        """The same, to be written; not to be closed."""
        if self._mapped is None:
            with self.path.open("r+b") as file:
                self._mapped = mmap.mmap(file.fileno(), 0)
        return self._mapped

    def empty(self) -> None:
        """Give its memory back, at once or when nobody writes into it any more."""
        self.head = self._mapped = None
        for path in (self._head_path, self.path):
            path.unlink(missing_ok=True)

    def _read_head(self) -> Head[LabelT] | None:
        """None if there is none, or none that can be read: then nothing is in the slot."""
        try:
            content = self._head_path.read_bytes()
            magic, length, number = _HEAD.unpack_from(content)
            body = content[_HEAD.size :]
            if magic != _MAGIC or length != len(body) or number != int(crc32c(body)) or length > HEAD_BYTES_MAX:
                return None
            return self._decoder.decode(body)
        except (OSError, struct.error, msgspec.MsgspecError):
            return None


def open_slots(directory: Path, kind: type[Head[LabelT]]) -> list[Slot[LabelT]]:
    """The two of a directory, as they were left."""
    slots = [Slot(directory, number, kind) for number in range(SLOTS)]
    for slot in slots:
        if slot.sealed and not (slot.path.exists() and slot.path.stat().st_size == slot.sealed.size_bytes):
            log.warning(f"{slot.path} is not as long as its head says: taken for empty")
            slot.empty()
    return slots


def expendable(slots: list[Slot[LabelT]], whole: int) -> Slot[LabelT]:
    """The one to overwrite: what is being written first, then what is not sealed, then the older. But not what is of
    the step that is whole everywhere, as with the rank's own slots (wire/slots.py): of two, the later."""

    def age(slot: Slot[LabelT]) -> tuple[int, int]:
        return slot.sealed.age if slot.sealed else (-1, -1)

    spared = max((slot for slot in slots if slot.sealed and slot.sealed.step == whole), key=age, default=None)
    found = min((slot for slot in slots if slot is not spared), key=lambda slot: (not slot.writer, age(slot)))
    if found.pins:
        raise ReplicaError("the image that would make room for it is being read")
    return found


@contextmanager
def reading(slots: list[Slot[LabelT]], age: tuple[int, int], lock: threading.RLock) -> Iterator[memoryview]:
    """The bytes of what is of this age; they stay as they are meanwhile."""
    with lock:
        slot = next((slot for slot in slots if slot.sealed and slot.sealed.age == age), None)
        if slot is None:
            raise ReplicaError(f"step {age[1]} of view {age[0]} is not here")
        slot.pins += 1
        mapped = slot.readable()
    try:
        with memoryview(mapped) as content:
            yield content
    finally:
        try:
            mapped.close()
        except BufferError:
            pass  # somebody has kept a view: it closes with the last one
        with lock:
            slot.pins -= 1


def free_bytes(directory: Path) -> int:
    """What the file system has left, and memory has for it."""
    found = os.statvfs(directory)
    return min(found.f_bavail * found.f_frsize, memory_headroom().free_bytes)


def lack_of_room(directory: Path, needed: int) -> str:
    """The sentence."""
    left = max(free_bytes(directory) - RESERVE_BYTES, 0)
    return (
        f"no room for {needed / 2**20:.0f} MiB more under {directory}, where {left / 2**20:.0f} MiB are left: give this"
        " node more shared memory, or lower --replicas"
    )
