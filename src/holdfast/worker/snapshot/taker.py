"""Copies of the state in the agent's memory, made while the training goes on: they survive this worker.

All ranks copy the state before the same steps. They agree on that at each commit, by a vote of five numbers that
travels with it:

    has         whether this rank's image of the last snapshot is complete; if all vote so, the snapshot is complete
    can         whether this rank has a slot to write into; all must
    every       how many steps apart snapshots should be, by what they cost here; the largest counts
    wanted      whether the next one is to become a checkpoint; one rank's vote is enough
    complete    the version of the last step that this rank knows to be complete. A rank that was interrupted before it
                learned that, or that is new, learns it from the others before it overwrites anything. What ranks knew
                that have left, the others learn from their agents, with their assignments in the next view

A copy of the state before step n begins when step n does, after what a forward changes was copied at once. The update
of step n waits for it (`join`), and the commit of step n tells the others. So two slots are enough, by the rule of the
slots (snapshots/slot_file.py): the last complete step is in one of them until a later one is complete.

Each rank's image has its share of the state: what several ranks hold alike is written once, and what a rank has for
itself (state/per_rank_state.py) is in its own image. Another view changes which rank has what; images of the old
partition stay until one of the new partition is complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from holdfast.core.image_info import STEP_MAX, ImageInfo
from holdfast.core.snapshot_interval import FAULTS_PER_NODE_DAY, advise
from holdfast.errors import StateError
from holdfast.snapshots.slot_file import SlotRecord, SlotStatus, WantedSnapshot
from holdfast.state.cached_state import CachedState
from holdfast.state.copier import Copier, CopyTask, CopyWork, StateCopy
from holdfast.state.partition import PartPlan, views
from holdfast.state.per_rank_state import LOCAL
from holdfast.state.state_size import staging_bytes
from holdfast.state.tracked import GRADIENTS, Tracked
from holdfast.state.tree import FlatTree, describe
from holdfast.torch_compat import copy_all
from holdfast.util.logs import get_logger
from holdfast.wire.worker_messages import SnapshotSealed, SnapshotSettings
from holdfast.worker.snapshot.buffers import SnapshotBuffer, SnapshotBuffers, SnapshotHost
from holdfast.worker.snapshot.copy_schedule import SHARED, CopySchedule, memory_of
from holdfast.worker.snapshot.last_holder import save_every_share

SMOOTHING = 0.2
"""The weight of the newest measurement in the running means of costs."""
PATIENCE_S = 600.0
"""How long a copy that must be made may wait for a slot whose state is still being uploaded."""
NO_VOTE = (0, 0, 0, 0, -1)
"""The vote of a rank whose node takes no snapshots: it has none and can make none, so no rank does."""

log = get_logger(__name__)

Describe = Callable[[], tuple[dict[str, float], dict[str, str]]]
"""Returns metrics, and what else a checkpoint's manifest should say."""


class SnapshotTaker:
    """The snapshots of one worker."""

    def __init__(
        self, host: SnapshotHost, tracked: Tracked, settings: SnapshotSettings, describe: Describe = lambda: ({}, {})
    ) -> None:
        self._host, self._tracked, self._settings, self._describe = host, tracked, settings, describe
        self._cached_state, self._schedule = CachedState(tracked), CopySchedule(tracked)
        self._copier = Copier()
        self._buffers = SnapshotBuffers(host)
        self._image = ImageInfo(-1, 0, 1, 1)
        """What all images of this view have in common."""
        self._nodes = 0
        self._copy: StateCopy | None = None
        self._planned: PartPlan | None = None
        self._is_next = self._is_wanted_next = False
        """What was agreed on for the step that begins now."""
        self._is_owed = False
        """Whether a checkpoint was due and was not made, or spoiled: the next step makes it."""
        self._last = -1
        """The step of the last copy that all were to make in this view, whether this rank could or not."""
        self._has_warned = False
        self._taken = -1
        """The step that `take` copied last."""
        self.lost: list[int] = []
        """Steps that `take` copied, and that changed while they were copied."""
        self._stall_s = self._step_s = self._spent_s = self._busy_s = 0.0
        self._timed: tuple[StateCopy, float] | None = None
        """The last copy from a device, and what it kept the host waiting: the device's own wait is not known yet."""
        self.faults_per_node_day = FAULTS_PER_NODE_DAY
        self._is_usual = True
        """Whether the copy under way is like the next ones: not the first of a new plan."""
        self._began_at = 0.0
        self._checkpointed_at = time.monotonic()

    # --- views

    def enter(self, image: ImageInfo, nodes: int, complete_version: int = -1) -> None:
        """Enter another view. What is being copied belongs to the old one. `image`: what all images of this rank in the
        view have in common. `complete_version`: see `Assignment.complete_version`."""
        self._abandon()
        self._is_next = self._is_wanted_next = False
        self._image, self._nodes = image, nodes
        self._planned, self._last, self._buffers.agent_version = None, -1, complete_version

    def start_from(self, step: int, is_intact: bool = False) -> None:
        """Record that all ranks have restored this step from their agents' memory: it is complete. `is_intact`: no part
        of it is left only as a replica of another node."""
        self._buffers.restored_step, self._buffers.is_restored_intact = step, is_intact

    # --- the vote at a commit

    def vote(self, step: int) -> tuple[int, int, int, int, int]:
        """Return this rank's vote at the commit of a step. The largest of each number counts, so those of which the
        lowest must count are negative."""
        wanted = self._is_owed or self._wants_checkpoint(step + 1)
        can = self._may_copy()
        return -int(self._has_last()), -int(can), self._interval(), int(wanted), self._buffers.complete_version()

    def apply_vote(self, step: int, votes: Sequence[int]) -> None:
        """Follow the vote of all ranks: the step is committed."""
        has, can, every, wanted, complete = -votes[0], -votes[1], *votes[2:]
        if (page := self._buffers.page) is not None:
            complete = max(complete, self._buffers.complete_version())  # mapped since the vote, the page may know more
            if has or complete >= 0:
                page.put(complete=self._last if has else complete & STEP_MAX)
            if has:
                page.put(restored=0)
            page.put(every=every, cost_ns=int(1e9 * self._stall_s), step_ns=int(1e9 * self._step_s))
            if wanted and not can and not self._is_owed:
                page.count("skipped")
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
        return advise(self._step_s, self._stall_s, self._nodes, self.faults_per_node_day, self._busy_s).every

    def _has_last(self) -> bool:
        """Return whether the last copy that all were to make in this view is complete here."""
        page, last = self._buffers.page, (self._image.view, self._last)
        if page is None or self._last < 0:
            return False
        return self._buffers.is_copied(*last) and any(r.image.version == last for r in page.sealed().values())

    def _may_copy(self) -> bool:
        return (
            self._copy is None and self._buffers.are_ready() and self._buffers.free_slot(self._image.view) is not None
        )

    # --- a step

    def begin(self, step: int) -> None:
        """Copy the state before a step that begins, if that was agreed."""
        now = time.monotonic()
        self._measure_device()
        if self._began_at:
            self._step_s = _mean(self._step_s, now - self._began_at)
            if not self._buffers.requested_bytes:  # not before the first update: it makes most of an optimizer's state
                self._request(*self._plan())
        self._began_at = now
        if not self._is_next:
            return
        self._spent_s, self._last, self._is_usual = 0.0, step, True
        try:
            self._begin_copy(step, *self._plan())
        except StateError as error:
            self._buffers.count("spoiled")
            self._is_owed |= self._is_wanted_next
            self._warn_once(f"step {step} is in no snapshot: {error}; while that is so there are none")
        self._spent_s += time.monotonic() - now

    def join(self, optimizer: Any) -> None:
        """Wait for the copy of what an update is about to change, and of what may change after it."""
        if self._copy is None:
            return
        began_at = time.monotonic()
        owners = list(self._tracked.optimizers().values())
        self._copy.join(next((i for i, one in enumerate(owners) if one is optimizer), None))
        self._copy.join(SHARED)
        self._spent_s += time.monotonic() - began_at
        self.poll()

    def finish(self) -> None:
        """Wait until the current copy is over. `join` leaves to the thread what has to arrive from a device."""
        if self._copy is not None:
            self._copy.finish()
            self._end_copy()

    def poll(self) -> None:
        """End the current copy if all of it is there."""
        if self._copy is not None and self._copy.is_over:
            self._copy.check()
            self._end_copy()

    def take_last(self, step: int) -> None:
        """Copy the final state, which is to become a checkpoint if checkpoints are made at all."""
        self.finish()
        if self._settings.checkpoint_at_end and self._settings.every >= 0:
            if why := self.take(step):
                log.warning(
                    "final-checkpoint-failed", f"the final state, before step {step}, is in no checkpoint: {why}"
                )
            self.finish()

    def take(self, step: int) -> str:
        """Begin to copy the state as it is now, which is to become a checkpoint, once there is a slot to copy into.
        Return why that failed, or nothing."""
        self.finish()
        planned, flat = self._plan()
        size_bytes = planned.layout.size_bytes
        self._request(planned, flat)
        self._last, self._is_wanted_next = step, True
        give_up_at = time.monotonic() + PATIENCE_S
        while not (self._may_copy() and self._buffers.size_bytes >= size_bytes):
            if why := self._buffers.why:
                return why
            if time.monotonic() > give_up_at:
                return f"both of the last two states are still being written after {PATIENCE_S:.0f} s"
            time.sleep(0.005)  # for memory, or for a slot that is being read: there is no event for a lock
        self._taken = step
        self._begin_copy(step, planned, flat)
        return ""

    def save_alone(self, shares: int, view: int, step: int) -> None:
        """Write all shares of the state as it is now to the agent's memory: no other rank is left that has it. The
        ranks of the view that is about to be joined will be given ours."""
        self.finish()
        ready = self._host.buffers_ready
        if ready is None or ready.why:
            return  # not yet, or there is none, which was logged
        image = msgspec.structs.replace(self._image, step=step, view=view)
        try:
            flat = self._cached_state.state()
            why = save_every_share(Path(ready.directory), flat, shares, image, self._of_one_rank(flat))
        except (StateError, OSError, ValueError) as error:
            why = str(error)
        if why:
            log.warning(
                "only-copy-unsaved",
                f"the state before step {step} is in this process alone until another has it: {why}",
            )
        else:
            self._host.tell(SnapshotSealed(step, wanted=False, metrics={}, notes={}))

    def prepare_buffers(self) -> None:
        """Have buffers allocated and mapped, in the background: the first copy then waits for neither."""
        try:
            if not self._buffers.requested_bytes:
                self._request(*self._plan())
            if self._copy is None:
                self._buffers.are_ready()
        except StateError:
            pass  # something that cannot be copied: the copy will report it

    def agree_on_last(self, agree: Callable[[Sequence[int]], Sequence[int]]) -> None:
        """Agree with all ranks, in loops without commits, whether what `take` copied last is complete on each of them:
        then it stays until a later one is."""
        (is_missing,) = agree((int(not self._has_last()),))
        if self._buffers.page is not None and not is_missing:
            self._buffers.page.put(complete=self._last, restored=0)

    def discard_after(self, step: int) -> None:
        """Discard the images of states later than the one before this step: no rank is to restore them."""
        self._abandon()
        self._buffers.discard_after(step)

    def finish_mapping(self) -> None:
        """Wait until buffers are mapped, for a host that is about to take them away."""
        self._buffers.finish_mapping()

    def close(self) -> None:
        """Give up the current copy and unmap the buffers."""
        self._abandon()
        self._copier.close()
        self._buffers.close()

    # --- a copy

    def _request(self, planned: PartPlan, flat: FlatTree) -> None:
        self._buffers.request(planned.layout.size_bytes, staging_bytes(planned.tensors(flat)))

    def _begin_copy(self, step: int, planned: PartPlan, flat: FlatTree) -> None:
        size_bytes = planned.layout.size_bytes
        if size_bytes > self._buffers.size_bytes:
            self._request(planned, flat)
            self._is_owed |= self._is_wanted_next
            return
        slot = self._buffers.lock_slot(self._image.view)
        if slot is None:
            self._buffers.count("skipped")
            self._is_owed |= self._is_wanted_next
            return
        image = msgspec.structs.replace(self._image, step=step, size_bytes=size_bytes, created_ns=time.time_ns())
        wanted = WantedSnapshot.YES if self._is_wanted_next else WantedSnapshot.NO
        record = SlotRecord(SlotStatus.WRITING, image, wanted)
        slot.write(record)
        metrics, notes = self._describe() if self._is_wanted_next else ({}, {})
        message = SnapshotSealed(step, self._is_wanted_next, metrics, notes, created_ns=image.created_ns)
        work = self._prepare(slot, planned, flat)
        self._copy = self._copier.start(work, lambda changed: self._seal(slot, record, message, changed))

    def _plan(self) -> tuple[PartPlan, FlatTree]:
        """Return where everything goes, as the state is now."""
        flat = self._cached_state.state()
        if self._planned is None or not self._planned.fits(flat):
            image = self._image
            about = {"part": str(image.part), "shards": str(image.shards), "shares": str(image.shares)}
            share = image.part // image.shards
            self._planned = PartPlan(flat, image.shares, share, about, self._of_one_rank(flat))
        return self._planned, flat

    def _of_one_rank(self, flat: FlatTree) -> frozenset[int]:
        """Return the tensors that may differ between ranks: what a forward changes, and what is no model's."""
        alike = {memory_of(item) for item in self._tracked.parameters()}
        names = {GRADIENTS, LOCAL, *self._tracked.optimizers()}
        return frozenset(
            index
            for index, (spec, tensor) in enumerate(zip(describe(flat), flat.tensors, strict=True))
            if spec.path[0] not in names and tensor.untyped_storage().data_ptr() not in alike
        )

    def _prepare(self, slot: SnapshotBuffer, planned: PartPlan, flat: FlatTree) -> CopyWork:
        """Copy what a forward changes, now; return what is left for the thread."""
        layout = planned.layout
        with memoryview(slot.memory) as memory:
            if slot.framed is not layout:
                layout.frame(memory)
                slot.framed, slot.work = layout, None
            layout.put_skeleton(memory, flat.skeleton)
        if slot.tensors is not flat.tensors or slot.work is None:
            slot.tensors, self._is_usual = flat.tensors, False
            slot.at_once, slot.work = self._schedule.plan(layout, views(layout, slot.memory), planned.tensors(flat))
        targets, sources = slot.at_once
        if targets:
            with torch.no_grad():
                copy_all(targets, sources)
        return slot.work

    def _seal(
        self, slot: SnapshotBuffer, record: SlotRecord, message: SnapshotSealed, changed: Sequence[CopyTask]
    ) -> None:
        """Seal the slot, in the thread that copied the last tensor; empty it if something changed during the copy."""
        slot.write(record._replace(status=SlotStatus.EMPTY if changed else SlotStatus.SEALED))
        slot.lock.release()
        if changed:
            self._record_spoiled(record, changed)
        else:
            self._buffers.count("taken")
            self._host.tell(message)

    def _record_spoiled(self, record: SlotRecord, changed: Sequence[CopyTask]) -> None:
        """Change the schedule of the next copies, which cost more."""
        step, name = record.image.step, changed[0].name
        is_taken = step == self._taken
        self._schedule.record_changed(changed, is_last=is_taken)
        self._buffers.reset_schedule()
        self._buffers.count("spoiled")
        self._stall_s, self._is_usual = 0.0, False
        self._is_owed |= record.wanted is WantedSnapshot.YES
        if is_taken:
            self.lost.append(step)
            log.warning(
                "checkpoint-spoiled",
                f"step {step} is not saved: something else than an optimizer changed the parameters while they were"
                f" copied ({name}); from now on all is copied before save returns",
            )
            return
        self._warn_once(
            f"step {step} is in no snapshot: {name} was changed in the body of the step, not by its optimizer's update;"
            " from now on it is copied before the step, which keeps the training waiting; change it behind the update"
            " instead"
        )

    def _warn_once(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("snapshot-spoiled", text)

    def _end_copy(self) -> None:
        copy, self._copy = self._copy, None
        if self._is_usual and copy is not None:
            if copy.is_from_device:
                self._busy_s = _mean(self._busy_s, copy.duration_s)
                self._timed = (copy, self._spent_s)
            else:
                self._stall_s = _mean(self._stall_s, self._spent_s)

    def _measure_device(self) -> None:
        """Count what the last copy from a device cost, once the device has come past it: the host was not kept waiting,
        the update on the device was."""
        if self._timed is not None and (device_s := self._timed[0].device_wait_s()) is not None:
            self._stall_s = _mean(self._stall_s, self._timed[1] + device_s)
            self._timed = None

    def _abandon(self) -> None:
        if self._copy is None:
            return
        copy, self._copy = self._copy, None
        if not copy.is_over or copy.is_lost:
            copy.abandon()
            self._buffers.abandon()


def _mean(old: float, new: float) -> float:
    return new if not old else (1.0 - SMOOTHING) * old + SMOOTHING * new
