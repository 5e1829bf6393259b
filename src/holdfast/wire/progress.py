"""The progress record: one page of shared memory a worker, written by the worker, read by its agent at any time.

It outlives the worker, so that a dead one still tells how far it came. Every field is one aligned 8-byte word, which is
written in one go: a reader may see two fields of different moments, never half a number. `begun` is the one that
matters to correctness: it is set after the barrier, before the update, and says that the step will not be undone.

Behind the fields is a ring of entries, one for each step and source of data: what was handed out in it (ledger.py of
core, agent and worker). An entry is written before the barrier, and marked when it is known what became of the step.
Its number stands before and behind it, and is put there last: whoever finds two numbers has found half an entry.
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

FIELDS_BYTES = 4_096
RING_ENTRIES = 512
MAGIC = 0x484F4C4446535431
FIELDS = ("magic", "pid", "view", "step", "phase", "collectives", "begun", "paused", "moved_ns", "witnessed", "own_ns")
"""`witnessed` counts the entries of the ring that were ever written. `own_ns` is how long the last step took before its
first collective, and so without waiting for others."""
_WORD = struct.Struct("=q")
_ENTRY = struct.Struct("=q7q16sqq")
"""Its number; the entry; its mark; its number again."""
_MARK_AT = _ENTRY.size - 2 * _WORD.size
PAGE_BYTES = FIELDS_BYTES + RING_ENTRIES * _ENTRY.size
_OFFSETS = {name: index * _WORD.size for index, name in enumerate(FIELDS)}


class Phase(IntEnum):
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


class Mark(IntEnum):
    """What became of the step of an entry."""

    OPEN = 0
    """It waits at the barrier; of a dead worker: nobody here knows."""
    COMMITTED = 1
    VOID = 2
    """It was repeated."""


class Entry(NamedTuple):
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
    """The sum of the samples' digests: data/ledger.py."""


class Found(NamedTuple):
    """An entry as it was read. Without one: the number is of one that was overwritten, or is half written."""

    number: int
    entry: Entry | None
    mark: int


class ProgressPage:
    """A mapped record. Fields are read and written as attributes of these names: see FIELDS."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @classmethod
    def in_memory(cls) -> tuple[ProgressPage, int]:
        """An empty record without a file, and the descriptor to close when nobody is to open it any more. The worker
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
        page.set(magic=MAGIC, begun=-1, step=-1, moved_ns=time.monotonic_ns())
        return page, descriptor

    @classmethod
    def private(cls) -> ProgressPage:
        """A record that nobody reads, for a worker without an agent."""
        page = cls(mmap.mmap(-1, PAGE_BYTES))
        page.set(magic=MAGIC, begun=-1, step=-1, moved_ns=time.monotonic_ns())
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

    def move(self, **fields: int) -> None:
        """Set, and say that something moved."""
        self.set(**fields)
        _WORD.pack_into(self._memory, _OFFSETS["moved_ns"], time.monotonic_ns())

    # --- the ring

    def witness(self, entry: Entry) -> int:
        """Write one more entry; its number, counted from 1."""
        number = self.get("witnessed") + 1
        at = _place(number)
        _WORD.pack_into(self._memory, at, 0)
        _ENTRY.pack_into(self._memory, at, 0, *entry, Mark.OPEN, number)
        _WORD.pack_into(self._memory, at, number)
        self.set(witnessed=number)
        return number

    def mark(self, number: int, mark: Mark) -> None:
        """Say what became of an entry's step. One that is overwritten is let be."""
        at = _place(number)
        if _WORD.unpack_from(self._memory, at)[0] == number:
            _WORD.pack_into(self._memory, at + _MARK_AT, mark)

    def read(self, number: int) -> Found:
        """One entry. Another process may be writing meanwhile."""
        at = _place(number)
        before, *words, mark, behind = _ENTRY.unpack_from(self._memory, at)
        again = _WORD.unpack_from(self._memory, at)[0]
        is_whole = before == behind == again == number
        return Found(number, Entry(*words) if is_whole else None, mark)

    def close(self) -> None:
        self._memory.close()


def _place(number: int) -> int:
    return FIELDS_BYTES + (number - 1) % RING_ENTRIES * _ENTRY.size
