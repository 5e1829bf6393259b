"""The parity that this node keeps for its group: two slots a seat (slots.py), filled by what the others contribute.

    EMPTY -> WRITING(step): some have contributed          -> SEALED(step): all have
             a newer step is begun: this one is given up

Contributors may come in any order, break off and come again: a block is mixed in once, however often it comes. The last
word to a contributor, that all is sealed, is said when it is true of the whole group's: so who has heard it from all
others knows that its image is safe.

Everything here may be called from any thread.
"""

from __future__ import annotations

import mmap
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from holdfast.agent.replicas.blocks import block_count, span
from holdfast.agent.replicas.parity import piece, xor_into
from holdfast.agent.replicas.slots import Head, Slot, expendable, open_slots, reading
from holdfast.errors import ReplicaError
from holdfast.wire.bulk import BLOCK_BYTES, Contribute, Label

SEAL_WAIT_S = 10.0
"""For the others' contributions; who waited for longer is told so, and comes again."""

Age = tuple[int, int]


class ParityLabel(msgspec.Struct, frozen=True, kw_only=True):
    """Of what a parity is."""

    group: tuple[str, ...]
    seat: int
    view: int
    step: int
    size_bytes: int
    members: tuple[Label, ...]
    """The images that it is of."""

    @property
    def age(self) -> Age:
        return self.view, self.step


msgspec.msgpack.Decoder(Head[ParityLabel])
"""As in guests.py: not by two threads at once."""


class ParityStore:
    """One for the life of an agent; finds what an earlier life left."""

    def __init__(self, root: Path, node_id: str, announced: Callable[[], object] = lambda: None) -> None:
        self.root, self._node_id, self._announced = root, node_id, announced
        self._lock = threading.RLock()
        self._group: dict[str, int] = {}
        self._seats: dict[int, list[Slot[ParityLabel]]] = {}
        self._rounds: dict[int, _Round] = {}
        for directory in root.glob("seat-*"):
            self._seats[int(directory.name[5:])] = open_slots(directory, Head[ParityLabel])

    def join(self, group: Mapping[str, int]) -> None:
        """Whose parity is kept from now on, this node included, in the group's order: seats by node. What is sealed
        of another group stays until it is overwritten: it may be what the next view needs."""
        with self._lock:
            if list(group.items()) != list(self._group.items()):
                self._give_up_all("the group has changed")
                self._group = dict(group)

    def contribute(self, offered: Contribute) -> Contribution | None:
        """Where the piece goes; None if it is in already, and sealed."""
        label = offered.label
        with self._lock:
            self._check(offered)
            if any(label in known.members for known in self.sealed(label.seat)):
                return None
            current = self._round(label, offered.whole)
        return Contribution(current, label, offered.size_bytes)  # not under the lock: it may need memory

    def announced(self, seat: int, leader: str) -> Age | None:
        """The newest step that this member has contributed, or begun to; None if it has not."""
        with self._lock:
            ages = [m.age for known in self.sealed(seat) for m in known.members if m.node_id == leader]
            if (under_way := self._rounds.get(seat)) and leader in under_way.labels:
                ages.append(under_way.age)
            return max(ages, default=None)

    def sealed(self, seat: int) -> list[ParityLabel]:
        """What is whole here."""
        with self._lock:
            return [slot.sealed for slot in self._seats.get(seat, []) if slot.sealed]

    def inventory(self) -> list[ParityLabel]:
        """Of all seats."""
        with self._lock:
            return [known for seat in sorted(self._seats) for known in self.sealed(seat)]

    def await_sealed(self, seat: int, age: Age) -> bool:
        """Whether the parity of this step is sealed here, now or in a while. Blocks."""
        with self._lock:
            current = self._rounds.get(seat)
        if current and current.age == age:
            current.over.wait(SEAL_WAIT_S)
        return any(known.age == age for known in self.sealed(seat))

    def reading(self, seat: int, view: int, step: int) -> AbstractContextManager[memoryview]:
        """The bytes of one."""
        with self._lock:
            return reading(self._seats.get(seat, []), (view, step), self._lock)

    def clear(self) -> None:
        """The job is over."""
        with self._lock:
            self._give_up_all("the job is over")
            self._group, self._seats = {}, {}
            shutil.rmtree(self.root, ignore_errors=True)

    def contributors(self, seat: int) -> set[str]:
        """Whose images go into the parity of a seat here."""
        return {node_id for node_id, seats in self._group.items() if node_id != self._node_id and seat < seats}

    def _check(self, offered: Contribute) -> None:
        label = offered.label
        if offered.group != tuple(self._group):
            raise ReplicaError("this node is in another parity group, or does not know of it yet")
        if label.node_id not in self.contributors(label.seat):
            raise ReplicaError(f"{label.node_id} has no worker {label.seat} in this parity group")
        if len(label.checksums) != 4 * block_count(label.size_bytes):
            raise ReplicaError("without the checksums of all blocks an image could not be made again from parity")
        where = piece(label.size_bytes, len(self._group), *map(self._index, (label.node_id, self._node_id)))
        if offered.size_bytes != where.stop - where.start:
            raise ReplicaError(f"a piece of {offered.size_bytes} bytes is not the one for this node")

    def _index(self, node_id: str) -> int:
        return list(self._group).index(node_id)

    def _round(self, label: Label, whole: int) -> _Round:
        """The one of this step; begun now if it is newer than what there is."""
        current = self._rounds.get(label.seat)
        newest = max((known.age for known in self.sealed(label.seat)), default=(-1, -1))
        if label.age < max(newest, current.age if current else newest):
            raise ReplicaError(f"step {label.step} of view {label.view} is older than what is collected here")
        if current is None or current.age != label.age:
            if current:
                current.give_up("a newer step was begun")
            if label.seat not in self._seats:
                self._seats[label.seat] = open_slots(self.root / f"seat-{label.seat}", Head[ParityLabel])
            current = _Round(expendable(self._seats[label.seat], whole), self, label)
            self._rounds[label.seat] = current
        return current

    def _give_up_all(self, why: str) -> None:
        for current in self._rounds.values():
            current.give_up(why)
        self._rounds.clear()

    def was_announced(self) -> None:
        """Somebody's contribution to a step has begun."""
        self._announced()


class _Round:
    """The parity of one step in the making."""

    def __init__(self, slot: Slot[ParityLabel], store: ParityStore, first: Label) -> None:
        self._slot, self._store = slot, store
        self._lock = threading.RLock()
        self.group = tuple(store._group)
        self.seat, self.age = first.seat, first.age
        self.labels: dict[str, Label] = {}
        self._mixed: dict[str, set[int]] = {}
        self._begun: set[int] = set()
        """Blocks that something is in; in the others there may be bytes of a step before: warm memory is used again."""
        self._complete: set[str] = set()
        self._mapped: mmap.mmap | None = None
        self.over = threading.Event()
        self.failure = ""
        slot.writer = self
        slot.say("writing", self._label(1))

    def enter(self, label: Label, size_bytes: int) -> None:
        """A contributor begins, or begins again; there is room for its piece afterwards."""
        with self._lock:
            self._check_alive()
            known = self.labels.setdefault(label.node_id, label)
            if known != label:
                raise ReplicaError("it has contributed another image of this step")
            self._mixed.setdefault(label.node_id, set())
            if self._mapped is None or len(self._mapped) < size_bytes:
                self._slot.allocate(max(size_bytes, 1))
                self._mapped = self._slot.writable()
        self._store.was_announced()

    def mix(self, node_id: str, index: int, block: memoryview) -> None:
        """Once only."""
        with self._lock:
            self._check_alive()
            assert self._mapped is not None
            if index not in self._mixed[node_id]:
                with memoryview(self._mapped) as all_of_it:
                    self._mix_in(all_of_it[span(index, len(self._mapped))], index, block)
                self._mixed[node_id].add(index)

    def _mix_in(self, there: memoryview, index: int, block: memoryview) -> None:
        if index in self._begun:
            xor_into(there, block)
        else:
            there[: len(block)] = block
            there[len(block) :] = bytes(len(there) - len(block))
            self._begun.add(index)

    def complete(self, node_id: str) -> None:
        """All of a contributor's blocks are in. Returns when all of all are."""
        with self._lock:
            self._check_alive()
            self._complete.add(node_id)
            if self._complete >= self._store.contributors(self.seat):
                self._seal()
        if not self.over.wait(SEAL_WAIT_S):
            raise ReplicaError("others of the parity group have not contributed yet")
        if self.failure:
            raise ReplicaError(self.failure)

    def give_up(self, why: str) -> None:
        with self._lock:
            if not self.over.is_set():
                self.failure = why
                self._end()

    def _seal(self) -> None:
        assert self._mapped is not None
        size_bytes = len(self._mapped)
        self._end()
        self._slot.say("sealed", self._label(size_bytes))
        self.over.set()

    def _end(self) -> None:
        self._mapped = None
        self._slot.writer = None
        if self.failure:
            self.over.set()

    def _check_alive(self) -> None:
        if self.failure:
            raise ReplicaError(self.failure)
        if self.over.is_set():
            raise ReplicaError("this step is sealed already")

    def _label(self, size_bytes: int) -> ParityLabel:
        view, step = self.age
        members = tuple(self.labels.values())
        return ParityLabel(
            group=self.group, seat=self.seat, view=view, step=step, size_bytes=size_bytes, members=members
        )


class Contribution:
    """One piece on its way in (bulk.Sink). It is verified before it is mixed in: what is mixed cannot be taken back."""

    def __init__(self, to: _Round, label: Label, size_bytes: int) -> None:
        self._round, self._label, self.size_bytes = to, label, size_bytes
        self._block = bytearray(min(size_bytes, BLOCK_BYTES))
        to.enter(label, size_bytes)

    def buffer(self, index: int) -> memoryview:
        where = span(index, self.size_bytes)
        return memoryview(self._block)[: where.stop - where.start]

    def take(self, index: int) -> None:
        self._round.mix(self._label.node_id, index, self.buffer(index))

    def seal(self, checksums: bytes) -> None:
        self._round.complete(self._label.node_id)

    def abandon(self) -> None:
        """What is in stays in: it is not mixed in again."""
