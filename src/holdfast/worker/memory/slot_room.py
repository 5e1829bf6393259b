"""The slots that this process may copy its state into: where the next copy goes, and what has to stay.

The agent owns them (wire/slots.py). A worker says how large its state is, is told where the room is, and moves in.
"""

from __future__ import annotations

import mmap
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from holdfast.state.copier import Work
from holdfast.storage.image import Layout
from holdfast.wire.session import NeedRoom, Room, Sealed
from holdfast.wire.slots import SLOTS, ImageLock, Record, Seat, Status, Wanted, map_image, populate, word


class Keeper(Protocol):
    """Who owns the memory: the agent, at the other end of the line, or a stand-in."""

    @property
    def room(self) -> Room | None: ...

    def tell(self, message: NeedRoom | Sealed) -> None: ...


@dataclass
class Slot:
    """One of the two, as this process has it."""

    seat: Seat
    number: int
    memory: mmap.mmap
    lock: ImageLock
    framed: Layout | None = None
    """The layout whose frames are in it."""
    tensors: list[torch.Tensor] | None = None
    """Those that the two below are of: the state's list, which is the same object while nothing but values changes."""
    at_once: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    work: Work | None = None

    @property
    def record(self) -> Record:
        return self.seat.record(self.number)

    def note(self, record: Record) -> None:
        self.seat.write(self.number, record)

    def close(self) -> None:
        self.work, self.at_once = None, ([], [])  # tensors that are views of the memory go first
        self.lock.close()
        try:
            self.memory.close()
        except BufferError:
            pass  # a view is still alive somewhere; the mapping goes with it


class SlotRoom:
    """Both of them, once the agent has made them."""

    def __init__(self, line: Keeper) -> None:
        self._line = line
        self._slots: list[Slot] = []
        self._moving: threading.Thread | None = None
        self.seat: Seat | None = None
        self.asked_bytes = 0
        self.known_whole, self.is_known_intact = -1, False
        """The step that all ranks have started from, if it was in their agents' memory: it is whole. Whether every rank
        has its image still."""
        self.told_whole = -1
        """What ranks of this node that are gone knew, as a word."""

    @property
    def size_bytes(self) -> int:
        """Of the largest image that fits."""
        return len(self._slots[0].memory) if self._slots else 0

    @property
    def why(self) -> str:
        """Why there is no room, if the agent said so."""
        room = self._line.room
        return room.why if room is not None else ""

    def ask(self, size_bytes: int) -> None:
        if size_bytes > self.asked_bytes:
            self.asked_bytes = size_bytes
            self._line.tell(NeedRoom(size_bytes))

    def is_there(self) -> bool:
        """Whether the agent has made room, and we have moved in. Mapping it takes a while: nobody waits for that. Asked
        while nothing is being copied."""
        room = self._line.room
        if room is None or room.why:
            return False
        if self._slots and room.size_bytes == self.size_bytes:
            return True
        if self._moving is None:
            self._moving = threading.Thread(target=self._move_in, args=(room,), name="holdfast-room", daemon=True)
            self._moving.start()
        return False

    def take_slot(self, view: int) -> Slot | None:
        """One that may be overwritten, locked."""
        slot = self.free_slot(view)
        return slot if slot is not None and slot.lock.take() else None

    def free_slot(self, view: int) -> Slot | None:
        """One that may be overwritten by the rule, and that nobody reads."""
        whole = self.seat.whole() if self.seat is not None else None
        free = [
            (record.status is Status.SEALED, record.step, slot.number)
            for slot in self._slots
            if not ((record := slot.record).status is Status.SEALED and self._must_stay(record, whole, view))
        ]
        for _, _, number in sorted(free):
            if self._slots[number].lock.take():
                self._slots[number].lock.release()
                return self._slots[number]
        return None

    def whole_word(self) -> int:
        """The newest that we know of, or were told of."""
        return max(self.seat.whole_word() if self.seat is not None else -1, self.told_whole)

    def is_copied(self, view: int, step: int) -> bool:
        """Whether the other nodes that are to have it, have it."""
        return self.seat is None or not self.seat.get("partners") or self.seat.get("safe") >= word(view, step)

    def count(self, name: str) -> None:
        if self.seat is not None:
            self.seat.count(name)

    def forget_tensors(self) -> None:
        """What is copied when is to be settled anew."""
        for slot in self._slots:
            slot.tensors = None

    def abandon(self) -> None:
        """A copy was given up: what it had begun to write is worth nothing."""
        for slot in self._slots:
            if slot.record.status is Status.WRITING:
                slot.lock.release()

    def give_up(self, after: int) -> None:
        """The images of later steps."""
        if self.seat is not None:
            for slot, record in self.seat.sealed().items():
                if record.step > after:
                    self.seat.write(slot, record._replace(status=Status.EMPTY))

    def finish_moving(self) -> None:
        if (moving := self._moving) is not None:
            moving.join()

    def close(self) -> None:
        slots, self._slots = self._slots, []
        for slot in slots:
            slot.close()

    def _must_stay(self, record: Record, whole: Record | None, view: int) -> bool:
        """The last one that is whole; one that the agent was told to write to storage and has not begun with, or has
        still to copy to other nodes. Of another view: it may never have been told, as the one who should have is dead;
        nobody waits for that. But the one before the step that all have begun anew with stays until that one is copied:
        it was complete, but perhaps on these nodes alone."""
        if record.is_image(whole) or (whole is not None and self._is_recalled(whole)):
            return True
        return record.view == view and (record.wanted == Wanted.YES or not self.is_copied(record.view, record.step))

    def _is_recalled(self, whole: Record) -> bool:
        """Whether it is known to be whole by that alone."""
        return self.seat is not None and bool(self.seat.get("recalled")) and not self.is_copied(whole.view, whole.step)

    def _move_in(self, room: Room) -> None:
        """One slot after the other: a copy that waits for room goes into the first while the second is made."""
        self.close()
        try:
            seat = Seat.open(Path(room.directory))
            if self.known_whole >= 0:
                seat.put(whole=self.known_whole, recalled=int(self.is_known_intact))
                self.known_whole = -1
            self.seat = seat
            for number in range(SLOTS):
                memory = map_image(seat.path(number), room.size_bytes, is_writable=True)
                populate(memory)
                self._slots.append(Slot(seat, number, memory, ImageLock(seat.path(number), is_writable=True)))
        except (OSError, ValueError):
            return  # the agent is gone, or going
        self._moving = None
