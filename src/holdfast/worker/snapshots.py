"""Copies of the state in the agent's memory, made while the training goes on: they outlive this worker.

All ranks copy the state before the same steps, as they agree at each commit, in numbers that travel with it:

    has         whether this rank's image of the last one is whole; if all say so, it is whole everywhere
    can         whether this rank has a slot to write into; all must
    every       how many steps apart copies should be, by what they cost here; the largest counts
    wanted      whether the next one is to become a checkpoint; one rank's wish is enough
    whole       the last step that this rank knows to be whole everywhere: one that died before it heard of it, or was
                replaced, learns it from the others before it overwrites anything

A copy of the state before step n begins when step n does, after what a forward changes was copied at once. The update
of step n waits for it (`join`), and the commit of step n tells the others. So two slots are enough, by the rule of the
slots (wire/slots.py): the last step that is whole everywhere is in one of them until a later one is.

Each rank's image has its share of the state: what several ranks hold alike is written once. Another view changes who
has what; images of the old cut stay until one of the new cut is whole everywhere.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from holdfast.core.interval import advise
from holdfast.errors import StateError
from holdfast.state.copier import Copier, Copy, Task, Work
from holdfast.state.optimizers import parameters_of
from holdfast.state.parts import PartPlan, views
from holdfast.state.roll import Roll
from holdfast.state.sharded import local_of
from holdfast.state.tracked import Tracked
from holdfast.state.tree import Flat
from holdfast.storage.image import Layout
from holdfast.wire.session import NeedRoom, Room, Sealed
from holdfast.wire.session import Snapshots as Settings
from holdfast.wire.slots import SLOTS, ImageLock, Record, Seat, Status, Wanted, map_image, populate

SHARED, AT_ONCE = -1, -2
"""Who owns a tensor that no optimizer does: any update may be followed by a change of it, or anything at all."""
SMOOTHING = 0.2
"""Of the newest measurement, in the running means of costs."""
PATIENCE_S = 600.0
"""How long a copy that must be made may wait for a slot whose state is still being written to storage."""
NO_WORDS = (0, 0, 0, 0, -1)
"""Of a rank whose node keeps no snapshots: it has none and can make none, so nobody does. As many as the others say."""
STEP_BITS = 40
STEP_MAX = 2**STEP_BITS - 1
"""Of a step, in a word that has its view too."""


Describe = Callable[[], tuple[dict[str, float], dict[str, str]]]
"""Metrics, and whatever else a checkpoint's manifest should say."""


class Keeper(Protocol):
    """Who owns the memory: the agent, at the other end of the line, or a stand-in."""

    @property
    def room(self) -> Room | None: ...

    def tell(self, message: NeedRoom | Sealed) -> None: ...


class Cut(NamedTuple):
    """How the state is cut, and which part of it is ours."""

    shards: int
    shares: int
    part: int

    @property
    def share(self) -> int:
        return self.part // self.shards


@dataclass
class _Slot:
    """One of the two, as this process has it."""

    memory: mmap.mmap
    lock: ImageLock
    framed: Layout | None = None
    """The layout whose frames are in it."""
    tensors: list[torch.Tensor] | None = None
    """Those that the two below are of: the state's list, which is the same object while nothing but values changes."""
    at_once: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    work: Work | None = None

    def close(self) -> None:
        self.work, self.at_once = None, ([], [])  # tensors that are views of the memory go first
        self.lock.close()
        try:
            self.memory.close()
        except BufferError:
            pass  # a view is still alive somewhere; the mapping goes with it


class Snapshots:
    """One worker's copies."""

    def __init__(
        self, line: Keeper, tracked: Tracked, settings: Settings, describe: Describe = lambda: ({}, {})
    ) -> None:
        self._line, self._tracked, self._settings, self._describe = line, tracked, settings, describe
        self._roll = Roll(tracked)
        self._copier = Copier()
        self._seat: Seat | None = None
        self._slots: list[_Slot] = []
        self._asked_bytes = 0
        self._cut = Cut(1, 1, 0)
        self._view = self._seed = self._first_step = self._nodes = 0
        self._copy: Copy | None = None
        self._planned: PartPlan | None = None
        self._is_next = self._is_wanted_next = False
        """What was agreed for the step that begins now."""
        self._is_owed = False
        """Whether a checkpoint was due and could not be made: the next step makes it."""
        self.known_whole = -1
        """The step that all ranks have started from, if it was in their agents' memory: it is whole."""
        self._last = -1
        """The step of the last copy that all were to make in this view, whether this rank could or not."""
        self._moving: threading.Thread | None = None
        self._copies_shared_at_once = False
        self._stall_s = self._step_s = self._spent_s = 0.0
        self._is_usual = True
        """Whether the copy under way is like the next ones: not the first of a new plan."""
        self._began_at = 0.0
        self._checkpointed_at = time.monotonic()

    # --- views

    def enter(self, cut: Cut, view: int, seed: int, first_step: int, nodes: int) -> None:
        """Another view. What is being copied belongs to the old one."""
        self._abandon()
        self._is_next = self._is_wanted_next = False
        self._cut, self._view, self._seed, self._first_step, self._nodes = cut, view, seed, first_step, nodes
        self._planned, self._last = None, -1

    # --- what travels with a commit

    def words(self, step: int) -> tuple[int, int, int, int, int]:
        """Of the step that is being committed. The largest of each counts, so what must be the lowest is negative."""
        after = step + 1
        wanted = self._is_owed or self._wants_checkpoint(after)
        can = self._room_is_there() and self._free_slot() is not None
        return -int(self._has_last()), -int(can), self._interval(), int(wanted), self._whole_word()

    def agreed(self, step: int, words: Sequence[int]) -> None:
        """The commit is through."""
        has, can, every, wanted, whole = -words[0], -words[1], *words[2:]
        if self._seat is not None:
            whole = max(whole, self._whole_word())  # we may have moved in since, and know better
            if has or whole >= 0:
                self._seat.put(whole=self._last if has else whole & STEP_MAX)
            self._seat.put(every=every, cost_ns=int(1e9 * self._stall_s), step_ns=int(1e9 * self._step_s))
            if wanted and not can and not self._is_owed:
                self._seat.count("skipped")
        self._is_owed = bool(wanted) and not can
        due = self._last < 0 or step + 1 - self._last >= every or bool(wanted)
        self._is_next = bool(can) and due
        self._is_wanted_next = self._is_next and bool(wanted)
        if self._is_wanted_next:
            self._checkpointed_at = time.monotonic()

    def _wants_checkpoint(self, step: int) -> bool:
        settings = self._settings
        if settings.checkpoint_every_steps and step % settings.checkpoint_every_steps == 0:
            return True
        waited_s = time.monotonic() - self._checkpointed_at
        return bool(settings.checkpoint_every_s) and waited_s >= settings.checkpoint_every_s

    def _interval(self) -> int:
        if self._settings.every > 0:
            return self._settings.every
        return advise(self._step_s, self._stall_s, self._nodes).every

    def _has_last(self) -> bool:
        """Whether the last copy that all were to make in this view is whole here."""
        if self._seat is None or self._last < 0:
            return False
        return self._is_copied(self._last) and any(
            r.step == self._last and r.view == self._view for r in self._seat.sealed().values()
        )

    def _is_copied(self, step: int) -> bool:
        """Whether the other nodes that are to have it, have it."""
        return self._seat is None or not self._seat.get("partners") or self._seat.get("safe") >= step

    # --- a step

    def begin(self, step: int) -> None:
        """The step begins: copy the state before it, if that was agreed."""
        now = time.monotonic()
        if self._began_at:
            self._step_s = _mean(self._step_s, now - self._began_at)
            if not self._asked_bytes:  # not before the first update: it makes most of an optimizer's state
                self._ask_for_room(self._plan()[0].layout.size_bytes)
        self._began_at = now
        if not self._is_next:
            return
        self._spent_s, self._last, self._is_usual = 0.0, step, True
        try:
            self._begin_copy(step)
        except StateError:
            self._count("spoiled")  # something that cannot be kept: the next view, or a checkpoint, will say so
        self._spent_s += time.monotonic() - now

    def join(self, optimizer: Any) -> None:
        """An update is about to change the tensors of an optimizer, and what follows it may change others."""
        if self._copy is None:
            return
        began_at = time.monotonic()
        owners = list(self._tracked.optimizers().values())
        self._copy.join(next((i for i, one in enumerate(owners) if one is optimizer), None))
        self._copy.join(SHARED)
        self._spent_s += time.monotonic() - began_at
        if self._copy.is_over:
            self._note_end()

    def poll(self) -> None:
        """The body is through."""
        if self._copy is not None and self._copy.is_over:
            self._note_end()

    def take_last(self, step: int) -> None:
        """Behind the last step: the final state is to become a checkpoint, if checkpoints are made at all."""
        if self._settings.checkpoint_at_end and self._settings.every >= 0:
            self.take(step)
            self.join(None)

    def take(self, step: int) -> str:
        """Begin to copy the state as it is now, which is to become a checkpoint. Waits until there is a slot to copy
        into. Why it cannot be done, or nothing."""
        self.join(None)
        self._ask_for_room(self._plan()[0].layout.size_bytes)
        self._last, self._is_wanted_next = step, True
        give_up_at = time.monotonic() + PATIENCE_S
        while not (self._room_is_there() and self._room_is_enough() and self._free_slot() is not None):
            room = self._line.room
            if room is not None and room.why:
                return room.why
            if time.monotonic() > give_up_at:
                return f"both of the last two states are still being written after {PATIENCE_S:.0f} s"
            time.sleep(0.005)  # for room, or for a slot that is being read: no event reaches this thread
        self._begin_copy(step)
        return ""

    def close(self) -> None:
        self._abandon()
        self._copier.close()
        for slot in self._slots:
            slot.close()
        self._slots = []

    # --- a copy

    def _begin_copy(self, step: int) -> None:
        planned, flat = self._plan()
        size_bytes = planned.layout.size_bytes
        if self._seat is None or size_bytes > len(self._slots[0].memory):
            self._ask_for_room(size_bytes)
            return
        number = self._free_slot()
        if number is None or not self._slots[number].lock.take():
            self._count("skipped")
            return
        slot = self._slots[number]
        record = Record(
            Status.WRITING,
            step,
            self._view,
            self._cut.part,
            self._cut.shards,
            self._cut.shares,
            size_bytes,
            self._seed,
            self._first_step,
            Wanted.YES if self._is_wanted_next else Wanted.NO,
            time.time_ns(),
        )
        self._seat.write(number, record)
        metrics, notes = self._describe() if self._is_wanted_next else ({}, {})
        told = Sealed(step, self._is_wanted_next, metrics, notes)
        work = self._prepare(slot, planned, flat)
        self._copy = self._copier.start(work, lambda spoiled: self._sealed(number, record, told, spoiled))

    def _plan(self) -> tuple[PartPlan, Flat]:
        """Where everything goes, as the state is now."""
        flat = self._roll.state()
        if self._planned is None or not self._planned.fits(flat):
            about = {"part": str(self._cut.part), "shards": str(self._cut.shards), "shares": str(self._cut.shares)}
            self._planned = PartPlan(flat, self._cut.shares, self._cut.share, about)
        return self._planned, flat

    def _prepare(self, slot: _Slot, planned: PartPlan, flat: Flat) -> Work:
        """Copy what a forward changes, now; what is left is for the thread."""
        layout = planned.layout
        with memoryview(slot.memory) as memory:
            if slot.framed is not layout:
                layout.frame(memory)
                slot.framed, slot.work = layout, None
            layout.put_skeleton(memory, flat.skeleton)
        if slot.tensors is not flat.tensors or slot.work is None:
            slot.tensors, self._is_usual = flat.tensors, False
            slot.at_once, slot.work = self._share_out(views(layout, slot.memory), planned.tensors(flat))
        targets, sources = slot.at_once
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)
        return slot.work

    def _share_out(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> tuple[tuple[list[torch.Tensor], list[torch.Tensor]], Work]:
        """What is to be copied at once, and what can wait until an update."""
        owners = self._owners()
        tasks = [
            Task(target, source, owners.get(source.untyped_storage().data_ptr(), AT_ONCE))
            for target, source in zip(targets, sources, strict=True)
        ]
        at_once = [task for task in tasks if task.owner == AT_ONCE]
        later = Work(task for task in tasks if task.owner != AT_ONCE)
        return ([task.target for task in at_once], [task.source for task in at_once]), later

    def _owners(self) -> dict[int, int]:
        """Memory that stands still until an update → whose update."""
        found: dict[int, int] = {}
        if not self._copies_shared_at_once:
            found |= {_memory_of(item): SHARED for item in self._tracked.parameters()}
        for number, optimizer in enumerate(self._tracked.optimizers().values()):
            for parameter in parameters_of(optimizer):
                found[_memory_of(parameter)] = number
                for value in optimizer.state.get(parameter, {}).values():
                    if isinstance(value, torch.Tensor):
                        found[_memory_of(value)] = number
        return found

    def _sealed(self, number: int, record: Record, told: Sealed, spoiled: bool) -> None:
        """By whichever thread copied the last piece."""
        assert self._seat is not None
        status = Status.EMPTY if spoiled else Status.SEALED
        self._seat.write(number, record._replace(status=status))
        self._slots[number].lock.release()
        if spoiled:
            self._copies_shared_at_once = True
            for slot in self._slots:
                slot.tensors = None
            self._seat.count("spoiled")
        else:
            self._seat.count("taken")
            self._line.tell(told)

    def _note_end(self) -> None:
        self._copy = None
        if self._is_usual:
            self._stall_s = _mean(self._stall_s, self._spent_s)

    def _abandon(self) -> None:
        if self._copy is None:
            return
        copy, self._copy = self._copy, None
        if not copy.is_over:
            copy.abandon()
            for number, slot in enumerate(self._slots):
                if self._seat is not None and self._seat.record(number).status is Status.WRITING:
                    slot.lock.release()

    # --- slots

    def _free_slot(self) -> int | None:
        """One that may be overwritten by the rule, and that nobody reads."""
        if self._seat is None or self._copy is not None:
            return None
        records = [self._seat.record(number) for number in range(len(self._slots))]
        whole = self._whole()
        free = [
            (record.status is Status.SEALED, record.step, number)
            for number, record in enumerate(records)
            if not (record.status is Status.SEALED and (record == whole or self._is_awaited(record)))
        ]
        for _, _, number in sorted(free):
            if self._slots[number].lock.take():
                self._slots[number].lock.release()
                return number
        return None

    def _whole(self) -> Record | None:
        """The image of the last step that is known to be whole everywhere. Of two of that step, the later: the other is
        of a history that was gone back from."""
        if self._seat is None:
            return None
        step = self._seat.get("whole")
        found = [record for record in self._seat.sealed().values() if record.step == step]
        return max(found, key=lambda record: (record.view, record.created_ns), default=None)

    def _whole_word(self) -> int:
        """Its step, behind its view: one of a later view counts, even if its step is lower."""
        record = self._whole()
        return -1 if record is None else record.view << STEP_BITS | record.step

    def _is_awaited(self, record: Record) -> bool:
        """Whether the agent was told to write it to storage and has not begun, or has still to copy it to other nodes.
        Of another view: it may never have been told, as the one who should have is dead; nobody waits for that."""
        return record.view == self._view and (record.wanted == Wanted.YES or not self._is_copied(record.step))

    def _room_is_there(self) -> bool:
        """Whether the agent has made room, and we have moved in. Mapping it takes a while: nobody waits for that."""
        room = self._line.room
        if room is None or room.why:
            return False
        if self._slots and room.size_bytes == len(self._slots[0].memory):
            return True
        if self._moving is None and self._copy is None:
            self._moving = threading.Thread(target=self._move_in, args=(room,), name="holdfast-room", daemon=True)
            self._moving.start()
        return False

    def _room_is_enough(self) -> bool:
        return self._planned is None or self._planned.layout.size_bytes <= len(self._slots[0].memory)

    def _move_in(self, room: Room) -> None:
        old, self._slots = self._slots, []
        for slot in old:
            slot.close()
        slots: list[_Slot] = []
        try:
            seat = Seat.open(Path(room.directory))
            for number in range(SLOTS):
                memory = map_image(seat.path(number), room.size_bytes, is_writable=True)
                populate(memory)
                slots.append(_Slot(memory, ImageLock(seat.path(number), is_writable=True)))
        except (OSError, ValueError):
            return  # the agent is gone, or going
        if self.known_whole >= 0:
            seat.put(whole=self.known_whole)
            self.known_whole = -1
        self._seat, self._slots, self._moving = seat, slots, None

    def _ask_for_room(self, size_bytes: int) -> None:
        if size_bytes > self._asked_bytes:
            self._asked_bytes = size_bytes
            self._line.tell(NeedRoom(size_bytes))

    def _count(self, name: str) -> None:
        if self._seat is not None:
            self._seat.count(name)


def _memory_of(tensor: torch.Tensor) -> int:
    return local_of(tensor).untyped_storage().data_ptr()


def _mean(old: float, new: float) -> float:
    return new if not old else (1.0 - SMOOTHING) * old + SMOOTHING * new
