"""The progress record: one page of shared memory a worker, written by the worker, read by its agent at any time.

It outlives the worker, so that a dead one still tells how far it came. Every field is one aligned 8-byte word, which is
written in one go: a reader may see two fields of different moments, never half a number. `applied_step` is the one that
matters to correctness: it is set after the barrier, before the update, and says that the step will not be undone.

Behind the fields is a ring of entries, one for each step and source of data: what was handed out in it, for the sample
audit. An entry is written before the barrier, and marked when it is known what became of the step.
Its number stands before and behind it, and is put there last: a reader that finds two different numbers has found
half an entry.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

PROGRESS_VARIABLE = "HOLDFAST_PROGRESS"
"""Where a worker finds its record."""
FIELDS_BYTES = 4_096
RING_ENTRIES = 512
MAGIC = 0x484F4C4446535431
FIELDS = (
    *(
        "magic",
        "pid",
        "view",
        "step",
        "phase",
        "collectives",
        "applied_step",
        "paused",
        "moved_ns",
        "audited",
        "own_ns",
    ),
    *("waits", "open", "reading", "made", "last_ns", "total", "loss_bits", "has_loss", "device", "retries"),
)
"""`audited` counts the entries of the ring that were ever written. `own_ns` is how long the last step took before its
first collective, and so without waiting for others. `waits` is above 0 while the worker waits for other ranks or for
a view, `open` counts operations that others have to complete (worker/collectives/waits.py), `reading` is 1 while the
worker fetches a batch. `made` counts the steps whose time is known, from one beginning to the next, and `last_ns` is
the time of the last of them. `total` is how many steps there are to be, 0 if that is not known; `loss_bits` is what the
script logged as its loss last, if `has_loss` is 1. `device` is 1 while the host stands still and its device has
not done what it was told (worker/device_watch.py). `retries` counts the collectives that were run again below a step
(worker/collectives/collective_retries.py)."""
_WORD = struct.Struct("=q")
_NUMBER = struct.Struct("=d")
_ENTRY = struct.Struct("=q7q16sqq")
"""Its number; the entry; its mark; its number again."""
_MARK_AT = _ENTRY.size - 2 * _WORD.size
PAGE_BYTES = FIELDS_BYTES + RING_ENTRIES * _ENTRY.size
_OFFSETS = {name: index * _WORD.size for index, name in enumerate(FIELDS)}


class WorkerPhase(IntEnum):
    """Where in a step a worker is, in the order in which a step goes."""

    STARTING = 0
    PARKED = 1
    BETWEEN = 2
    """Two steps."""
    BODY = 3
    BARRIER = 4
    UPDATE = 5
    HOLDING = 6
    """Waiting for a view."""
    JOINING = 7
    ENDED = 8


class ProgressMark(IntEnum):
    """What became of the step of an entry."""

    OPEN = 0
    """It waits at the barrier; of a dead worker: not known here."""
    COMMITTED = 1
    VOID = 2
    """It was repeated."""


class SampleEntry(NamedTuple):
    """What one rank was handed of one source in one step."""

    view: int
    rank: int
    world_size: int
    source: int
    job_step: int
    """The step of the job."""
    step: int
    """That of the source, by which its plan counts."""
    samples: int
    total: bytes
    """The sum of the samples' digests: data/sample_digest.py."""


class PageReading(NamedTuple):
    """An entry as it was read. Without one: the number is of one that was overwritten, or is half written."""

    number: int
    entry: SampleEntry | None
    mark: int


class ProgressPage:
    """A mapped record. Fields are read and written as attributes of these names: see FIELDS."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @classmethod
    def in_memory(cls) -> tuple[ProgressPage, int]:
        """An empty record without a file, and the descriptor to close when no process is to open it any more. The
        worker
        finds it under /proc/<agent>/fd, so nothing stays behind, however the agent ends. Its size is sealed: a worker
        that cut it short would otherwise take its reader down."""
        descriptor = os.memfd_create("holdfast-progress", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, PAGE_BYTES)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            page = cls(mmap.mmap(descriptor, PAGE_BYTES))
        except OSError:
            os.close(descriptor)
            raise
        page.set(magic=MAGIC, applied_step=-1, step=-1, moved_ns=time.monotonic_ns())
        return page, descriptor

    @classmethod
    def private(cls) -> ProgressPage:
        """Return a record that is not read, for a worker without an agent."""
        page = cls(mmap.mmap(-1, PAGE_BYTES))
        page.set(magic=MAGIC, applied_step=-1, step=-1, moved_ns=time.monotonic_ns())
        return page

    @classmethod
    def open(cls, path: Path) -> ProgressPage:
        """The worker's side. Raises OSError or ValueError where there is no such record."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            page = cls(mmap.mmap(descriptor, PAGE_BYTES))
        finally:
            os.close(descriptor)
        if page.get("magic") != MAGIC:
            raise ValueError(f"{path} is not a progress record")
        return page

    def get(self, field: str) -> int:
        return int(_WORD.unpack_from(self._memory, _OFFSETS[field])[0])

    def set(self, **fields: int) -> None:
        """In the order given."""
        for field, number in fields.items():
            _WORD.pack_into(self._memory, _OFFSETS[field], number)

    def set_loss(self, loss: float) -> None:
        """Show what the script has logged as its loss."""
        self.set(loss_bits=_WORD.unpack(_NUMBER.pack(loss))[0], has_loss=1)

    def loss(self) -> float | None:
        """Return what the script logged as its loss last; None if it has not."""
        return float(_NUMBER.unpack(_WORD.pack(self.get("loss_bits")))[0]) if self.get("has_loss") else None

    def move(self, **fields: int) -> None:
        """Set, and say that something moved."""
        self.set(**fields)
        _WORD.pack_into(self._memory, _OFFSETS["moved_ns"], time.monotonic_ns())

    # --- the ring

    def add_entry(self, entry: SampleEntry) -> int:
        """Write one more entry to the ring. Return its number, counted from 1."""
        number = self.get("audited") + 1
        at = _assignment(number)
        _WORD.pack_into(self._memory, at, 0)
        _ENTRY.pack_into(self._memory, at, 0, *entry, ProgressMark.OPEN, number)
        _WORD.pack_into(self._memory, at, number)
        self.set(audited=number)
        return number

    def mark(self, number: int, mark: ProgressMark) -> None:
        """Say what became of an entry's step. One that is overwritten is let be."""
        at = _assignment(number)
        if _WORD.unpack_from(self._memory, at)[0] == number:
            _WORD.pack_into(self._memory, at + _MARK_AT, mark)

    def read(self, number: int) -> PageReading:
        """One entry. Another process may be writing meanwhile."""
        at = _assignment(number)
        before, *words, mark, behind = _ENTRY.unpack_from(self._memory, at)
        again = _WORD.unpack_from(self._memory, at)[0]
        is_whole = before == behind == again == number
        return PageReading(number, SampleEntry(*words) if is_whole else None, mark)

    def close(self) -> None:
        self._memory.close()


def _assignment(number: int) -> int:
    return FIELDS_BYTES + (number - 1) % RING_ENTRIES * _ENTRY.size
