"""The two buffers that this process may copy its state into: where the next copy goes, and what must stay.

The agent owns them (snapshots/slot_file.py). A worker reports how large its state is, is told where the buffers are,
and maps them.
"""

from __future__ import annotations

import mmap
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from holdfast.core.image_info import pack_version
from holdfast.snapshots.slot_file import (
    SLOTS,
    ImageLock,
    SlotPage,
    SlotRecord,
    SlotStatus,
    WantedSnapshot,
    map_image,
    populate,
)
from holdfast.state.copier import CopyWork
from holdfast.storage.image import ImageLayout
from holdfast.wire.worker_messages import AllocateBuffers, BuffersReady, SnapshotSealed


class SnapshotHost(Protocol):
    """The owner of the memory: the agent, or a stand-in for it in this process."""

    @property
    def buffers_ready(self) -> BuffersReady | None: ...

    def tell(self, message: AllocateBuffers | SnapshotSealed) -> None: ...


@dataclass
class SnapshotBuffer:
    """One of the two buffers, as this process has mapped it."""

    page: SlotPage
    number: int
    memory: mmap.mmap
    lock: ImageLock
    framed: ImageLayout | None = None
    """The layout whose frames are in it."""
    tensors: list[torch.Tensor] | None = None
    """The tensors that the two below are for: the state's list, which is the same object while only values change."""
    at_once: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    work: CopyWork | None = None

    @property
    def record(self) -> SlotRecord:
        """What the slot holds."""
        return self.page.record(self.number)

    def write(self, record: SlotRecord) -> None:
        """Replace the slot's record."""
        self.page.write(self.number, record)

    def close(self) -> None:
        """Unmap it."""
        self.work, self.at_once = None, ([], [])  # tensors that are views of the memory go first
        self.lock.close()
        try:
            self.memory.close()
        except BufferError:
            pass  # a view is still in use somewhere; the mapping goes with it


class SnapshotBuffers:
    """Both buffers, once the agent has allocated them."""

    def __init__(self, host: SnapshotHost) -> None:
        self._host = host
        self._slots: list[SnapshotBuffer] = []
        self._mapping: threading.Thread | None = None
        self.page: SlotPage | None = None
        self.requested_bytes = 0
        self.restored_step = -1
        """The step that all ranks have restored from their agents' memory, before the buffers are mapped: it is
        complete."""
        self.is_restored_intact = False
        """Whether every rank still has its image of that step."""
        self.agent_version = -1
        """The packed version of the complete step that ranks of this node which are gone knew of."""

    @property
    def size_bytes(self) -> int:
        """The size of the largest image that fits."""
        return len(self._slots[0].memory) if self._slots else 0

    @property
    def why(self) -> str:
        """Why there are no buffers, if the agent said so."""
        ready = self._host.buffers_ready
        return ready.why if ready is not None else ""

    def request(self, size_bytes: int, staging_bytes: int = 0) -> None:
        """Ask the agent for buffers of this size, unless it was asked for as much before. `staging_bytes`: what this
        process will allocate itself to copy from a device."""
        if size_bytes > self.requested_bytes:
            self.requested_bytes = size_bytes
            self._host.tell(AllocateBuffers(size_bytes, staging_bytes))

    def are_ready(self) -> bool:
        """Return whether the buffers are allocated and mapped. Mapping takes a while and is done in the background.
        Called while nothing is being copied."""
        ready = self._host.buffers_ready
        if ready is None or ready.why:
            return False
        if self._slots and ready.size_bytes == self.size_bytes:
            return True
        if self._mapping is None:
            self._mapping = threading.Thread(target=self._map, args=(ready,), name="holdfast-buffers", daemon=True)
            self._mapping.start()
        return False

    def lock_slot(self, view: int) -> SnapshotBuffer | None:
        """Return a slot that may be overwritten, locked."""
        slot = self.free_slot(view)
        return slot if slot is not None and slot.lock.acquire() else None

    def free_slot(self, view: int) -> SnapshotBuffer | None:
        """Return a slot that may be overwritten by the rule, and that no process reads."""
        complete = self.page.complete() if self.page is not None else None
        free = [
            (record.status is SlotStatus.SEALED, record.image.step, slot.number)
            for slot in self._slots
            if not ((record := slot.record).status is SlotStatus.SEALED and self._must_stay(record, complete, view))
        ]
        for _, _, number in sorted(free):
            if self._slots[number].lock.acquire():
                self._slots[number].lock.release()
                return self._slots[number]
        return None

    def complete_version(self) -> int:
        """Return the packed version of the newest step that is known to be complete, here or to the agent."""
        return max(self.page.complete_version() if self.page is not None else -1, self.agent_version)

    def is_copied(self, view: int, step: int) -> bool:
        """Return whether the other nodes that are to have an image, have it."""
        page = self.page
        return page is None or not page.get("partners") or page.get("copied") >= pack_version(view, step)

    def count(self, name: str) -> None:
        """Add one to a counter of the page."""
        if self.page is not None:
            self.page.count(name)

    def reset_schedule(self) -> None:
        """Have it computed again which tensors are copied when."""
        for slot in self._slots:
            slot.tensors = None

    def abandon(self) -> None:
        """Release the slot of a copy that was given up: what is in it is worth nothing."""
        for slot in self._slots:
            if slot.record.status is SlotStatus.WRITING:
                slot.lock.release()

    def discard_after(self, step: int) -> None:
        """Discard the images of later steps."""
        if self.page is not None:
            self.page.discard_after(step)

    def finish_mapping(self) -> None:
        """Wait until the buffers are mapped, if that has begun."""
        if (mapping := self._mapping) is not None:
            mapping.join()

    def close(self) -> None:
        """Unmap both."""
        slots, self._slots = self._slots, []
        for slot in slots:
            slot.close()

    def _must_stay(self, record: SlotRecord, complete: SlotRecord | None, view: int) -> bool:
        """Return whether an image must not be overwritten. These must stay:

        - the image of the last complete step;
        - while all ranks have restarted from that step and it is not copied to other nodes yet: also the one before it,
          since the last one was complete, but perhaps on these nodes alone;
        - an image of this view that is wanted as a checkpoint and whose upload has not begun, or that is still to be
          copied to other nodes. In another view neither is waited for: the worker that should have reported the image
          may be dead.
        """
        if record.is_image(complete) or (complete is not None and self._is_only_restored(complete)):
            return True
        image = record.image
        return image.view == view and (
            record.wanted is WantedSnapshot.YES or not self.is_copied(image.view, image.step)
        )

    def _is_only_restored(self, complete: SlotRecord) -> bool:
        """Return whether it is known to be complete only because all ranks have restored it."""
        is_restored = self.page is not None and bool(self.page.get("restored"))
        return is_restored and not self.is_copied(*complete.image.version)

    def _map(self, ready: BuffersReady) -> None:
        """Map one slot after the other: a copy that waits for memory uses the first while the second is mapped."""
        self.close()
        try:
            page = SlotPage.open(Path(ready.directory))
            if self.restored_step >= 0:
                page.put(complete=self.restored_step, restored=int(self.is_restored_intact))
                self.restored_step = -1
            self.page = page
            for number in range(SLOTS):
                memory = map_image(page.path(number), ready.size_bytes, is_writable=True)
                populate(memory)
                self._slots.append(SnapshotBuffer(page, number, memory, ImageLock(page.path(number), is_writable=True)))
        except (OSError, ValueError):
            return  # the agent is gone, or going
        self._mapping = None
