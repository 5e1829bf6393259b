"""This node's memory of its workers' states: two images a seat (wire/slots.py), which outlive the workers.

    <root>/<job>/<node>/owner       locked by the agent that lives
                        seat-0/     control, image-0, image-1, and their checksums
                        seat-1/     …

The files have names, so that an agent that was killed and started again for the same job finds them. They are removed
when the job is over, and when nobody has owned them for an hour.

Room is made before a worker may use it: two images of what it asks for, with every page in place, if there is so much
memory. If there is not, the worker is told why, and trains without snapshots.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from holdfast.agent.memory.directories import node_dir
from holdfast.wire.cgroups import Headroom, memory_headroom
from holdfast.wire.session import HeldImage, Room
from holdfast.wire.slots import SLOTS, Record, Seat, Status, Wanted, map_image, populate, reading

ROOM_STEP_BYTES = 4_096
ORPHAN_AFTER_S = 3_600.0
MEMORY_SPARED_BYTES = 256 * 2**20
"""Of what the machine, or our cgroup, has free; never given to images."""

log = structlog.get_logger("agent")


@dataclass(frozen=True)
class Kept:
    """A whole image of one seat."""

    seat: int
    slot: int
    record: Record


class Vault:
    """One for the life of an agent; `open` it when the job's name is known."""

    def __init__(self, root: Path, node_id: str) -> None:
        self._root, self._node_id = root, node_id
        self._directory: Path | None = None
        self._owner: int | None = None
        self._seats: dict[int, Seat] = {}
        self._granting = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        return self._directory is not None

    @property
    def directory(self) -> Path | None:
        """Where its seats are, while it is open."""
        return self._directory

    def open(self, job_id: str) -> None:
        """Take over what an earlier life of this node has left of this job."""
        directory = node_dir(self._root, job_id, self._node_id)
        if directory == self._directory:
            return
        self.close()
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._owner = _lock(directory / "owner")
        except OSError as error:
            log.warning(f"no memory for snapshots at {directory}: {error.strerror or error}")
            return
        if self._owner is None:
            log.warning(f"{directory} belongs to another agent that lives: this one keeps no snapshots")
            return
        self._directory = directory
        for found in sorted(directory.glob("seat-*")):
            self._seats[int(found.name.removeprefix("seat-"))] = Seat.create(found)

    def note_life(self) -> None:
        """It is in use: what nobody has used for long is cleared away when its owner is dead."""
        if self._owner is not None:
            os.utime(self._owner)

    async def grant(self, seat: int, size_bytes: int) -> Room:
        """Room for two images of a seat, or why there is none."""
        if self._directory is None:
            return Room(directory="", size_bytes=0, why="this agent has no place for snapshots")
        async with self._granting:
            directory = self._directory / f"seat-{seat}"
            try:
                return await asyncio.to_thread(self._make_room, seat, directory, size_bytes)
            except OSError as error:
                why = f"no room for snapshots in {directory}: {error.strerror or error}"
                log.warning(why)
                return Room(directory="", size_bytes=0, why=why)

    def _make_room(self, number: int, directory: Path, size_bytes: int) -> Room:
        size_bytes = -(-size_bytes // ROOM_STEP_BYTES) * ROOM_STEP_BYTES
        seat = self._seats.get(number) or Seat.create(directory)
        if (has_bytes := seat.room_bytes()) < size_bytes:
            if why := _shortage(directory, SLOTS * (size_bytes - has_bytes)):
                log.warning(why)
                return Room(directory="", size_bytes=0, why=why)
            for slot in range(SLOTS):
                _extend(seat.path(slot), size_bytes)
            log.info(f"local rank {number} has room for snapshots: {SLOTS} × {size_bytes / 2**20:.0f} MiB")
        self._seats[number] = seat
        return Room(directory=str(directory), size_bytes=max(size_bytes, has_bytes))

    # --- what is in it

    def kept(self) -> list[Kept]:
        """The whole images of all seats, the newest first."""
        found = [Kept(seat, slot, r) for seat, page in self._seats.items() for slot, r in page.sealed().items()]
        return sorted(found, key=lambda one: -one.record.step)

    def whole(self, seat: int) -> int:
        """The last step that the worker of a seat knew to be whole everywhere; -1: none."""
        return self._seats[seat].get("whole")

    def whole_word(self) -> int:
        """The last step that any of them, dead or alive, knew to be whole everywhere (`Seat.whole_word`)."""
        return max((seat.whole_word() for seat in self._seats.values()), default=-1)

    def seats(self) -> list[tuple[int, Seat]]:
        """All that have room here, by number."""
        return sorted(self._seats.items())

    @contextmanager
    def reading(self, kept: Kept) -> Iterator[mmap.mmap | None]:
        """Its bytes, which stay as they are meanwhile; None if it was overwritten. Others may read it at once."""
        with reading(self._seats[kept.seat], kept.slot, kept.record) as memory:
            yield memory

    @contextmanager
    def taking(self, kept: Kept) -> Iterator[mmap.mmap | None]:
        """The same for who brings it to storage: from now on it is not wanted any more, whatever comes of that."""
        with self.reading(kept) as memory:
            if memory is not None and kept.record.wanted == Wanted.YES:
                self._seats[kept.seat].write(kept.slot, kept.record._replace(wanted=Wanted.TAKEN))
            yield memory

    def note_checksums(self, kept: Kept, checksums: Sequence[int]) -> None:
        """Of an image that was read for storage or for another node."""
        self._seats[kept.seat].note_checksums(kept.slot, kept.record, checksums)

    def checksums(self, kept: Kept) -> list[int] | None:
        """Of its blocks, if they are known."""
        return self._seats[kept.seat].checksums(kept.slot, kept.record)

    def path(self, kept: Kept) -> Path:
        return self._seats[kept.seat].path(kept.slot)

    def held(self) -> tuple[HeldImage, ...]:
        """What workers may restore from."""
        return tuple(self._held(kept) for kept in self.kept())

    def _held(self, kept: Kept) -> HeldImage:
        record = kept.record
        return HeldImage(
            path=str(self.path(kept)),
            step=record.step,
            part=record.part,
            shards=record.shards,
            shares=record.shares,
            size_bytes=record.size_bytes,
            seed=record.seed,
            first_step=record.first_step,
            view=record.view,
            checksums=tuple(self.checksums(kept) or ()),
        )

    def forget_after(self, step: int) -> None:
        """The job has begun anew before this step: images of later ones are of a history that is no more."""
        for seat in self._seats.values():
            for slot, record in seat.sealed().items():
                if record.step > step:
                    seat.write(slot, record._replace(status=Status.EMPTY))
            if seat.get("whole") > step:
                seat.put(whole=-1)

    # --- the end

    def remove(self) -> None:
        """The job is over, and what was worth keeping is on storage."""
        if (directory := self._directory) is not None:
            shutil.rmtree(directory, ignore_errors=True)  # while it is ours: the next owner finds nothing, or all
        self.close()
        if directory is not None:
            _remove_empty(directory.parent, self._root)

    def close(self) -> None:
        """Let go of it; the files stay."""
        for seat in self._seats.values():
            seat.close()
        self._seats.clear()
        if self._owner is not None:
            os.close(self._owner)
        self._owner = self._directory = None


def clear_orphans(root: Path) -> None:
    """Remove what agents that are dead for long have left behind: memory is too dear to keep it for ever."""
    for directory in root.glob("*/*"):
        try:
            if time.time() - (directory / "owner").stat().st_mtime < ORPHAN_AFTER_S:
                continue
            owner = _lock(directory / "owner")
        except OSError:
            continue
        if owner is not None:
            log.info(f"removing snapshots that nobody has owned for an hour: {directory}")
            shutil.rmtree(directory, ignore_errors=True)
            os.close(owner)
            _remove_empty(directory.parent, root)


def _lock(path: Path) -> int | None:
    """The descriptor that holds the lock; None if somebody else does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    os.utime(path)
    return descriptor


def _extend(path: Path, size_bytes: int) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    finally:
        os.close(descriptor)
    memory = map_image(path, size_bytes, is_writable=True)
    populate(memory)
    memory.close()


def _shortage(directory: Path, needed_bytes: int) -> str:
    """Why so much more cannot be had; empty if it can."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    space = os.statvfs(directory)
    memory = memory_headroom()
    free = min(
        Headroom(space.f_bavail * space.f_frsize, "in that file system"),
        memory._replace(free_bytes=memory.free_bytes - MEMORY_SPARED_BYTES),
    )
    if needed_bytes <= free.free_bytes:
        return ""
    return (
        f"snapshots need {needed_bytes / 2**20:.0f} MiB more in {directory}, {max(free.free_bytes, 0) / 2**20:.0f} MiB"
        f" are free {free.where}: give the node more memory, or turn them off (--snapshots off)"
    )


def _remove_empty(directory: Path, root: Path) -> None:
    try:
        directory.rmdir()
        root.rmdir()
    except OSError:
        pass  # others live there
