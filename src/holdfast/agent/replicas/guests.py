"""What an agent holds for other nodes: their images, so that these outlive them.

    <root>/<node>/seat-K/slot-0.image, .head, slot-1.image, .head          see slots.py

Held are images of nodes that the master has promised us as guests (`promise`); of others nothing is taken in, but what
is here of them stays until it is told to go, or until its memory is needed for what is promised. Of each seat the two
newest images are kept, or the newest and the last that is whole everywhere (`Offer.whole`). An image that is older than
the newest one here is not taken in.

Everything here may be called from any thread.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import structlog

from holdfast.agent.memory.directories import directory_name
from holdfast.agent.replicas.blocks import block_count, span, unpack
from holdfast.agent.replicas.slots import Head, Slot, expendable, open_slots, reading
from holdfast.errors import ReplicaError
from holdfast.wire.bulk import Label
from holdfast.wire.session import HeldImage

log = structlog.get_logger("agent")

Seat = tuple[str, int]
"""A node's id, and a local rank on it."""


msgspec.msgpack.Decoder(Head[Label])
"""msgspec looks at a type when it is first used, and two threads must not be the first."""


class Held(msgspec.Struct, frozen=True):
    """A whole image, and where it is. The file is the image."""

    label: Label
    path: Path

    @property
    def image(self) -> HeldImage:
        """As workers are told of it, to restore from."""
        label = self.label
        return HeldImage(
            path=str(self.path),
            step=label.step,
            part=label.part,
            shards=label.shards,
            shares=label.shares,
            size_bytes=label.size_bytes,
            seed=label.seed,
            first_step=label.first_step,
            view=label.view,
            checksums=tuple(unpack(label.checksums)),
            is_guest=True,
        )


class Guests:
    """One for the life of an agent; finds what an earlier life left in the same directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.RLock()
        self._promised: dict[str, int] = {}
        self._seats: dict[Seat, list[Slot[Label]]] = {}
        self._find()

    def promise(self, guests: Mapping[str, int]) -> None:
        """For whom images are held from now on: the number of seats by node."""
        with self._lock:
            self._promised = dict(guests)

    def offer(self, label: Label, whole: int = -1) -> Incoming | None:
        """Where the image goes; None if it is here already. ReplicaError: it is not wanted, in a sentence."""
        with self._lock:
            self._check(label)
        return self.adopt(label, whole)

    def adopt(self, label: Label, whole: int = -1) -> Incoming | None:
        """The same for an image that this agent itself has found or made again, promised or not."""
        with self._lock:
            slots = self._slots((label.node_id, label.seat))
            held = [slot.sealed for slot in slots if slot.sealed]
            if any(_same(label, known) for known in held):
                return None
            if any(label.age < known.age for known in held):
                raise ReplicaError(f"step {label.step} of view {label.view} is older than what is here")
            slot = expendable(slots, whole)
            was_taken = slot.writer is not None  # by a connection that is broken and does not know it yet
            slot.writer = writer = object()
        with slot.growing:
            return self._begin(slot, label, writer, was_taken)

    def _begin(self, slot: Slot[Label], label: Label, writer: object, was_taken: bool) -> Incoming:
        """Not under the guests' lock: memory for a large file takes a while."""
        try:
            with self._lock:
                if slot.writer is not writer:
                    raise ReplicaError("a newer connection took its place")
                if was_taken:
                    slot.empty()  # what the other one still writes goes to a file without a name
                slot.say("writing", label)
            self._allocate(slot, label.size_bytes)
            return Incoming(slot, label, writer, self._lock)
        except BaseException:
            with self._lock:
                slot.writer = None if slot.writer is writer else slot.writer
            raise

    def held(self) -> list[Held]:
        """All whole images here."""
        with self._lock:
            slots = [slot for slots in self._seats.values() for slot in slots]
            return [Held(slot.sealed, slot.path) for slot in slots if slot.sealed]

    def reading(self, node_id: str, seat: int, view: int, step: int) -> AbstractContextManager[memoryview]:
        """The bytes of one of them; they stay as they are meanwhile."""
        with self._lock:
            return reading(self._seats.get((node_id, seat), []), (view, step), self._lock)

    def drop(self, node_id: str) -> None:
        """The node is gone for good."""
        with self._lock:
            for seat in [seat for seat in self._seats if seat[0] == node_id]:
                for slot in self._seats.pop(seat):
                    slot.empty()
            shutil.rmtree(self.root / directory_name(node_id), ignore_errors=True)

    def forget_after(self, step: int) -> None:
        """The job has begun anew before this step: images of later ones are of a history that is no more."""
        with self._lock:
            for slot in (slot for slots in self._seats.values() for slot in slots):
                if slot.sealed is not None and slot.sealed.step > step and slot.writer is None and not slot.pins:
                    slot.empty()

    def clear(self) -> None:
        """The job is over."""
        with self._lock:
            self._promised, self._seats = {}, {}
            shutil.rmtree(self.root, ignore_errors=True)

    def _find(self) -> None:
        for directory in self.root.glob("*/seat-*"):
            slots = open_slots(directory, Head[Label])
            labels = [slot.head.label for slot in slots if slot.head]
            if not labels:
                shutil.rmtree(directory, ignore_errors=True)
                continue
            self._seats[labels[0].node_id, labels[0].seat] = slots

    def _check(self, label: Label) -> None:
        seats = self._promised.get(label.node_id)
        if seats is None:
            raise ReplicaError(f"this node was not told to hold anything for {label.node_id}")
        if label.seat >= seats:
            raise ReplicaError(f"{label.node_id} has {seats} workers, and this is number {label.seat}")
        if len(label.checksums) not in (0, 4 * block_count(label.size_bytes)):
            raise ReplicaError("there are not as many checksums as blocks")

    def _slots(self, seat: Seat) -> list[Slot[Label]]:
        if seat not in self._seats:
            directory = self.root / directory_name(seat[0]) / f"seat-{seat[1]}"
            self._seats[seat] = open_slots(directory, Head[Label])
        return self._seats[seat]

    def _allocate(self, slot: Slot[Label], size_bytes: int) -> None:
        try:
            slot.allocate(size_bytes)
        except ReplicaError:
            if not self._make_room():
                raise
            slot.allocate(size_bytes)

    def _make_room(self) -> bool:
        """At the cost of those whom nobody promised."""
        with self._lock:
            strangers = sorted({node_id for node_id, _ in self._seats} - self._promised.keys())
            for node_id in strangers:
                log.warning(f"dropping the images of {node_id}, which is no guest any more: their memory is needed")
                self.drop(node_id)
            return bool(strangers)


class Incoming:
    """An image on its way into a slot (bulk.Sink)."""

    def __init__(self, slot: Slot[Label], label: Label, writer: object, lock: threading.RLock) -> None:
        self._slot, self._label, self._writer, self._lock = slot, label, writer, lock
        self._bytes = memoryview(slot.writable())
        self._is_over = False

    @property
    def size_bytes(self) -> int:
        return self._label.size_bytes

    @property
    def content(self) -> memoryview:
        """All of it."""
        return self._bytes

    def buffer(self, index: int) -> memoryview:
        """The place itself."""
        return self._bytes[span(index, self.size_bytes)]

    def take(self, index: int) -> None:
        """It is where it stays."""

    def seal(self, checksums: bytes) -> None:
        """All blocks are verified."""
        with self._lock:
            if self._slot.head is None or self._slot.writer is not self._writer:
                raise ReplicaError("it was told to go while it came in")
            self._slot.say("sealed", msgspec.structs.replace(self._label, checksums=checksums))

    def abandon(self) -> None:
        """The end, good or not. A slot that is not sealed is as good as empty."""
        if self._is_over:
            return
        self._is_over = True
        self._bytes.release()
        with self._lock:
            if self._slot.writer is self._writer:
                self._slot.writer = None


def _same(label: Label, known: Label) -> bool:
    """Whether this very image is held. Without checksums nobody can tell one attempt at a step from another: but a step
    of a view has one outcome."""
    if label.checksums and label.checksums != known.checksums:
        return False
    return msgspec.structs.replace(label, checksums=b"") == msgspec.structs.replace(known, checksums=b"")
