"""Copies of the state in the agent's memory, made while the training goes on: they outlive this worker.

All ranks copy the state before the same steps, as they agree at each commit, in numbers that travel with it:

    has         whether this rank's image of the last one is whole; if all say so, it is whole everywhere
    can         whether this rank has a slot to write into; all must
    every       how many steps apart copies should be, by what they cost here; the largest counts
    wanted      whether the next one is to become a checkpoint; one rank's wish is enough
    whole       the last step that this rank knows to be whole everywhere: one that died before it heard of it, or was
                replaced, learns it from the others before it overwrites anything; and all learn what those knew who
                have left, from their agents, with their places in the next view

A copy of the state before step n begins when step n does, after what a forward changes was copied at once. The update
of step n waits for it (`join`), and the commit of step n tells the others. So two slots are enough, by the rule of the
slots (wire/slots.py): the last step that is whole everywhere is in one of them until a later one is.

Each rank's image has its share of the state: what several ranks hold alike is written once. Another view changes who
has what; images of the old cut stay until one of the new cut is whole everywhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from holdfast.core.interval import FAULTS_PER_NODE_DAY, advise
from holdfast.errors import StateError
from holdfast.state.copier import Copier, Copy, Task, Work
from holdfast.state.parts import PartPlan, views
from holdfast.state.roll import Roll
from holdfast.state.tracked import GRADIENTS, Tracked
from holdfast.state.tree import Flat, describe
from holdfast.wire.session import Sealed
from holdfast.wire.session import Snapshots as Settings
from holdfast.wire.slots import STEP_MAX, Record, Status, Wanted
from holdfast.worker.memory.owners import SHARED, Owners, memory_of
from holdfast.worker.memory.slot_room import Keeper, Slot, SlotRoom

SMOOTHING = 0.2
"""Of the newest measurement, in the running means of costs."""
PATIENCE_S = 600.0
"""How long a copy that must be made may wait for a slot whose state is still being written to storage."""
NO_WORDS = (0, 0, 0, 0, -1)
"""Of a rank whose node keeps no snapshots: it has none and can make none, so nobody does. As many as the others say."""

log = logging.getLogger(__name__)

Describe = Callable[[], tuple[dict[str, float], dict[str, str]]]
"""Metrics, and whatever else a checkpoint's manifest should say."""


class Cut(NamedTuple):
    """How the state is cut, and which part of it is ours."""

    shards: int
    shares: int
    part: int

    @property
    def share(self) -> int:
        return self.part // self.shards


class Snapshots:
    """One worker's copies."""

    def __init__(
        self, line: Keeper, tracked: Tracked, settings: Settings, describe: Describe = lambda: ({}, {})
    ) -> None:
        self._line, self._tracked, self._settings, self._describe = line, tracked, settings, describe
        self._roll, self._owners = Roll(tracked), Owners(tracked)
        self._copier = Copier()
        self._room = SlotRoom(line)
        self._cut = Cut(1, 1, 0)
        self._view = self._seed = self._first_step = self._nodes = 0
        self._copy: Copy | None = None
        self._planned: PartPlan | None = None
        self._is_next = self._is_wanted_next = False
        """What was agreed for the step that begins now."""
        self._is_owed = False
        """Whether a checkpoint was due and was not made, or spoiled: the next step makes it."""
        self._last = -1
        """The step of the last copy that all were to make in this view, whether this rank could or not."""
        self._has_warned = False
        self._taken = -1
        """The step that `take` took last."""
        self.lost: list[int] = []
        """Steps that `take` took, and that changed while they were copied."""
        self._stall_s = self._step_s = self._spent_s = 0.0
        self.faults_per_node_day = FAULTS_PER_NODE_DAY
        self._is_usual = True
        """Whether the copy under way is like the next ones: not the first of a new plan."""
        self._began_at = 0.0
        self._checkpointed_at = time.monotonic()

    # --- views

    def enter(self, cut: Cut, view: int, seed: int, first_step: int, nodes: int, told_whole: int = -1) -> None:
        """Another view. What is being copied belongs to the old one. `told_whole`: see `Place.whole`."""
        self._abandon()
        self._is_next = self._is_wanted_next = False
        self._cut, self._view, self._seed, self._first_step, self._nodes = cut, view, seed, first_step, nodes
        self._planned, self._last, self._room.told_whole = None, -1, told_whole

    def start_from(self, step: int, is_intact: bool = False) -> None:
        """All ranks have taken this step out of their agents' memory: it is whole. `is_intact`: and nothing of it is
        left only where it is held for another node."""
        self._room.known_whole, self._room.is_known_intact = step, is_intact

    # --- what travels with a commit

    def words(self, step: int) -> tuple[int, int, int, int, int]:
        """Of the step that is being committed. The largest of each counts, so what must be the lowest is negative."""
        after = step + 1
        wanted = self._is_owed or self._wants_checkpoint(after)
        can = self._may_copy()
        return -int(self._has_last()), -int(can), self._interval(), int(wanted), self._room.whole_word()

    def agreed(self, step: int, words: Sequence[int]) -> None:
        """The commit is through."""
        has, can, every, wanted, whole = -words[0], -words[1], *words[2:]
        if (seat := self._room.seat) is not None:
            whole = max(whole, self._room.whole_word())  # we may have moved in since, and know better
            if has or whole >= 0:
                seat.put(whole=self._last if has else whole & STEP_MAX)
            if has:
                seat.put(recalled=0)
            seat.put(every=every, cost_ns=int(1e9 * self._stall_s), step_ns=int(1e9 * self._step_s))
            if wanted and not can and not self._is_owed:
                seat.count("skipped")
        if wanted:
            self._is_owed = not can
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
        return advise(self._step_s, self._stall_s, self._nodes, self.faults_per_node_day).every

    def _has_last(self) -> bool:
        """Whether the last copy that all were to make in this view is whole here."""
        seat = self._room.seat
        if seat is None or self._last < 0:
            return False
        return self._room.is_copied(self._view, self._last) and any(
            r.step == self._last and r.view == self._view for r in seat.sealed().values()
        )

    def _may_copy(self) -> bool:
        return self._copy is None and self._room.is_there() and self._room.free_slot(self._view) is not None

    # --- a step

    def begin(self, step: int) -> None:
        """The step begins: copy the state before it, if that was agreed."""
        now = time.monotonic()
        if self._began_at:
            self._step_s = _mean(self._step_s, now - self._began_at)
            if not self._room.asked_bytes:  # not before the first update: it makes most of an optimizer's state
                self._room.ask(self._plan()[0].layout.size_bytes)
        self._began_at = now
        if not self._is_next:
            return
        self._spent_s, self._last, self._is_usual = 0.0, step, True
        try:
            self._begin_copy(step, *self._plan())
        except StateError as error:
            self._room.count("spoiled")
            self._is_owed |= self._is_wanted_next
            self._warn_once("step %d is in no snapshot: %s; as long as that is so there is none", step, error)
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
        self.poll()

    def finish(self) -> None:
        """Until the copy under way is over. `join` leaves to the thread what has to arrive from a device."""
        if self._copy is not None:
            self._copy.finish()
            self._note_end()

    def poll(self) -> None:
        """Perhaps it is over."""
        if self._copy is not None and self._copy.is_over:
            self._note_end()

    def take_last(self, step: int) -> None:
        """Behind the last step: the final state is to become a checkpoint, if checkpoints are made at all."""
        self.finish()
        if self._settings.checkpoint_at_end and self._settings.every >= 0:
            if why := self.take(step):
                log.warning("the final state, before step %d, is in no checkpoint: %s", step, why)
            self.finish()

    def take(self, step: int) -> str:
        """Begin to copy the state as it is now, which is to become a checkpoint. Waits until there is a slot to copy
        into. Why it cannot be done, or nothing."""
        self.finish()
        planned, flat = self._plan()
        size_bytes = planned.layout.size_bytes
        self._room.ask(size_bytes)
        self._last, self._is_wanted_next = step, True
        give_up_at = time.monotonic() + PATIENCE_S
        while not (self._may_copy() and self._room.size_bytes >= size_bytes):
            if why := self._room.why:
                return why
            if time.monotonic() > give_up_at:
                return f"both of the last two states are still being written after {PATIENCE_S:.0f} s"
            time.sleep(0.005)  # for room, or for a slot that is being read: nobody tells when a lock is let go
        self._taken = step
        self._begin_copy(step, planned, flat)
        return ""

    def foresee(self) -> None:
        """Have room made and move in, in the background: the first copy then waits for neither."""
        try:
            if not self._room.asked_bytes:
                self._room.ask(self._plan()[0].layout.size_bytes)
            if self._copy is None:
                self._room.is_there()
        except StateError:
            pass  # something that cannot be kept: the copy will say so

    def settle_last(self, agree: Callable[[Sequence[int]], Sequence[int]]) -> None:
        """For loops without commits, all ranks at once: if what `take` copied last is whole on each of them, it stays
        until a later one is."""
        (is_missing,) = agree((int(not self._has_last()),))
        if self._room.seat is not None and not is_missing:
            self._room.seat.put(whole=self._last, recalled=0)

    def distrust(self, after: int) -> None:
        """Give up the images of states later than the one before this step: nobody is to start from them."""
        self._abandon()
        self._room.give_up(after)

    def finish_moving(self) -> None:
        """For keepers that are about to take the room away."""
        self._room.finish_moving()

    def close(self) -> None:
        self._abandon()
        self._copier.close()
        self._room.close()

    # --- a copy

    def _begin_copy(self, step: int, planned: PartPlan, flat: Flat) -> None:
        size_bytes = planned.layout.size_bytes
        if size_bytes > self._room.size_bytes:
            self._room.ask(size_bytes)
            self._is_owed |= self._is_wanted_next
            return
        slot = self._room.take_slot(self._view)
        if slot is None:
            self._room.count("skipped")
            self._is_owed |= self._is_wanted_next
            return
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
        slot.note(record)
        metrics, notes = self._describe() if self._is_wanted_next else ({}, {})
        told = Sealed(step, self._is_wanted_next, metrics, notes, created_ns=record.created_ns)
        work = self._prepare(slot, planned, flat)
        self._copy = self._copier.start(work, lambda moved: self._sealed(slot, record, told, moved))

    def _plan(self) -> tuple[PartPlan, Flat]:
        """Where everything goes, as the state is now."""
        flat = self._roll.state()
        if self._planned is None or not self._planned.fits(flat):
            about = {"part": str(self._cut.part), "shards": str(self._cut.shards), "shares": str(self._cut.shares)}
            self._planned = PartPlan(flat, self._cut.shares, self._cut.share, about, self._of_one_rank(flat))
        return self._planned, flat

    def _of_one_rank(self, flat: Flat) -> frozenset[int]:
        """What the ranks may hold otherwise than each other: what a forward changes, and what is no model's."""
        alike = {memory_of(item) for item in self._tracked.parameters()}
        names = {GRADIENTS, *self._tracked.optimizers()}
        return frozenset(
            index
            for index, (spec, tensor) in enumerate(zip(describe(flat), flat.tensors, strict=True))
            if spec.path[0] not in names and tensor.untyped_storage().data_ptr() not in alike
        )

    def _prepare(self, slot: Slot, planned: PartPlan, flat: Flat) -> Work:
        """Copy what a forward changes, now; what is left is for the thread."""
        layout = planned.layout
        with memoryview(slot.memory) as memory:
            if slot.framed is not layout:
                layout.frame(memory)
                slot.framed, slot.work = layout, None
            layout.put_skeleton(memory, flat.skeleton)
        if slot.tensors is not flat.tensors or slot.work is None:
            slot.tensors, self._is_usual = flat.tensors, False
            slot.at_once, slot.work = self._owners.share_out(
                layout, views(layout, slot.memory), planned.tensors(flat)
            )
        targets, sources = slot.at_once
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)
        return slot.work

    def _sealed(self, slot: Slot, record: Record, told: Sealed, moved: Sequence[Task]) -> None:
        """By whichever thread copied the last piece."""
        slot.note(record._replace(status=Status.EMPTY if moved else Status.SEALED))
        slot.lock.release()
        if moved:
            self._note_spoiled(record, moved)
        else:
            self._room.count("taken")
            self._line.tell(told)

    def _note_spoiled(self, record: Record, moved: Sequence[Task]) -> None:
        """The next copies are others, and cost otherwise."""
        is_taken = record.step == self._taken
        self._owners.note_moved(moved, is_dear=is_taken)
        self._room.forget_tensors()
        self._room.count("spoiled")
        self._stall_s, self._is_usual = 0.0, False
        self._is_owed |= record.wanted == Wanted.YES
        if is_taken:
            self.lost.append(record.step)
            log.warning(
                "step %d is not saved: something else than an optimizer changed the parameters while they were copied"
                " (%s); from now on all is copied before save returns",
                record.step,
                moved[0].name,
            )
            return
        self._warn_once(
            "step %d is in no snapshot: %s was changed in the body of the step, not by its optimizer's update; from now"
            " on it is copied before the step, which keeps the training waiting; change it behind the update instead",
            record.step,
            moved[0].name,
        )

    def _warn_once(self, text: str, *details: object) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(text, *details)

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
            self._room.abandon()


def _mean(old: float, new: float) -> float:
    return new if not old else (1.0 - SMOOTHING) * old + SMOOTHING * new
