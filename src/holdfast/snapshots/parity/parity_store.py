"""The parity that this node stores for its group: two slots for each local rank (slot_file.py), filled by what the
other members contribute.

    EMPTY -> WRITING(step): some have contributed          -> SEALED(step): all have
             a newer step is begun: this one is given up

Members may contribute in any order, break off and begin again: a block is mixed in once, however often it is sent. A
contributor is told that all is sealed only when the contributions of the whole group are in. So a member that was told
so by all others knows that its image is safe.

Every method may be called from any thread.
"""

from __future__ import annotations

import mmap
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from holdfast.core.image_info import BLOCK_BYTES, ImageInfo, Version
from holdfast.errors import ReplicaError
from holdfast.snapshots.parity.arithmetic import piece, xor_into
from holdfast.snapshots.replica_store import ReplicaSlot, choose_slot, open_slots, reading
from holdfast.snapshots.slot_file import find_ranks, rank_directory
from holdfast.util.blocks import block_count, span
from holdfast.wire.bulk_messages import Contribute, StoredReplica

SEAL_WAIT_S = 10.0
"""How long a contributor waits for the others' contributions before it is refused, and begins again."""


class ParityStore:
    """The parity of one agent; it finds what an earlier agent left."""

    def __init__(self, root: Path, node_id: str, announced: Callable[[], object] = lambda: None) -> None:
        self.root, self.node_id, self._announced = root, node_id, announced
        self._lock = threading.RLock()
        self._group: dict[str, int] = {}
        self._rounds: dict[int, _Round] = {}
        self._ranks = {local_rank: open_slots(directory) for local_rank, directory in find_ranks(root).items()}

    def join(self, group: Mapping[str, int]) -> None:
        """Store the parity of this group from now on, this node included, in the group's order: how many workers each
        has. What is sealed of another group stays until it is overwritten: the next view may need it."""
        with self._lock:
            if list(group.items()) != list(self._group.items()):
                self._give_up_all("the group has changed")
                self._group = dict(group)

    def contribute(self, offered: Contribute) -> Contribution | None:
        """Return where the piece goes; None if it is in already, and sealed."""
        image = offered.image
        with self._lock:
            self._check(offered)
            if any(image in known.members for known in self.sealed(image.local_rank)):
                return None
            current = self._round(image, offered.complete_step)
        return Contribution(current, image, offered.size_bytes)  # not under the lock: it may need memory

    def announced(self, local_rank: int, leader: str) -> Version | None:
        """Return the newest version that this member has contributed, or begun to; None if it has not."""
        with self._lock:
            found = [m.version for known in self.sealed(local_rank) for m in known.members if m.node_id == leader]
            if (current := self._rounds.get(local_rank)) and leader in current.members:
                found.append(current.version)
            return max(found, default=None)

    def sealed(self, local_rank: int) -> list[StoredReplica]:
        """Return the complete parities of a local rank."""
        with self._lock:
            return [slot.sealed for slot in self._ranks.get(local_rank, []) if slot.sealed]

    def inventory(self) -> list[StoredReplica]:
        """Return the complete parities of all local ranks."""
        with self._lock:
            return [known for local_rank in sorted(self._ranks) for known in self.sealed(local_rank)]

    def await_sealed(self, local_rank: int, version: Version) -> bool:
        """Return whether the parity of this version is sealed here, now or within SEAL_WAIT_S."""
        with self._lock:
            current = self._rounds.get(local_rank)
        if current and current.version == version:
            current.over.wait(SEAL_WAIT_S)
        return any(known.version == version for known in self.sealed(local_rank))

    @contextmanager
    def reading(self, local_rank: int, view: int, step: int) -> Iterator[memoryview]:
        """Give the bytes of one, which do not change until the end."""
        with self._lock:
            slots = self._ranks.get(local_rank, [])
        with reading(slots, (view, step), self._lock) as content:
            yield content

    def clear(self) -> None:
        """Discard everything: the job is over."""
        with self._lock:
            self._give_up_all("the job is over")
            self._group, self._ranks = {}, {}
            shutil.rmtree(self.root, ignore_errors=True)

    def contributors(self, local_rank: int) -> set[str]:
        """Return whose images go into the parity of a local rank here."""
        return {node for node, workers in self._group.items() if node != self.node_id and local_rank < workers}

    def _check(self, offered: Contribute) -> None:
        image = offered.image
        if offered.group != tuple(self._group):
            raise ReplicaError("this node is in another parity group, or does not know of it yet")
        if image.node_id not in self.contributors(image.local_rank):
            raise ReplicaError(f"{image.node_id} has no worker {image.local_rank} in this parity group")
        if image.size_bytes < 1 or len(image.checksums) != 4 * block_count(image.size_bytes):
            raise ReplicaError("without the checksums of all blocks an image could not be rebuilt from parity")
        where = piece(image.size_bytes, len(self._group), *map(self._index, (image.node_id, self.node_id)))
        if offered.size_bytes != where.stop - where.start:
            raise ReplicaError(f"a piece of {offered.size_bytes} bytes is not the one for this node")

    def _index(self, node_id: str) -> int:
        return list(self._group).index(node_id)

    def _round(self, image: ImageInfo, complete_step: int) -> _Round:
        """Return the round of this version; begin it if it is newer than what there is."""
        rank = image.local_rank
        current = self._rounds.get(rank)
        newest = max((known.version for known in self.sealed(rank)), default=(-1, -1))
        if image.version < max(newest, current.version if current else newest):
            raise ReplicaError(f"step {image.step} of view {image.view} is older than what is collected here")
        if current is None or current.version != image.version:
            if current:
                current.give_up("a newer step was begun")
            if rank not in self._ranks:
                self._ranks[rank] = open_slots(rank_directory(self.root, rank))
            current = _Round(choose_slot(self._ranks[rank], complete_step), self, image)
            self._rounds[rank] = current
        return current

    def _give_up_all(self, why: str) -> None:
        for current in self._rounds.values():
            current.give_up(why)
        self._rounds.clear()

    def announce(self) -> None:
        """Report that a member's contribution to a step has begun."""
        self._announced()


class _Round:
    """The parity of one step in the making."""

    def __init__(self, slot: ReplicaSlot, store: ParityStore, first: ImageInfo) -> None:
        self._slot, self._store = slot, store
        self._lock = threading.RLock()
        self.group = tuple(store._group)
        self.local_rank, self.version = first.local_rank, first.version
        self.members: dict[str, ImageInfo] = {}
        self._mixed: dict[str, set[int]] = {}
        self._begun: set[int] = set()
        """Blocks that something is in; in the others there may be bytes of an earlier step: memory is used again."""
        self._complete: set[str] = set()
        self._mapped: mmap.mmap | None = None
        self.over = threading.Event()
        self.failure = ""
        slot.begin(self._described(1))
        slot.writer = self

    def enter(self, image: ImageInfo, size_bytes: int) -> None:
        """Begin a member's contribution, perhaps again, and allocate memory for its piece."""
        with self._lock:
            self._check_alive()
            if self.members.setdefault(image.node_id, image) != image:
                raise ReplicaError("it has contributed another image of this step")
            self._mixed.setdefault(image.node_id, set())
            if self._mapped is None or len(self._mapped) < size_bytes:
                self._slot.allocate(max(size_bytes, 1))
                self._mapped = self._slot.writable()
        self._store.announce()

    def mix(self, node_id: str, index: int, block: memoryview) -> None:
        """Mix a block into the parity, once only."""
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
        """Record that all blocks of a member are in; wait until those of all members are."""
        with self._lock:
            self._check_alive()
            self._complete.add(node_id)
            if self._complete >= self._store.contributors(self.local_rank):
                self._seal()
        if not self.over.wait(SEAL_WAIT_S):
            raise ReplicaError("others of the parity group have not contributed yet")
        if self.failure:
            raise ReplicaError(self.failure)

    def give_up(self, why: str) -> None:
        """End the round; its members get the reason."""
        with self._lock:
            if not self.over.is_set():
                self.failure = why
                self._end()

    def _seal(self) -> None:
        assert self._mapped is not None
        self._slot.seal(self._described(len(self._mapped)))
        self._end()
        self.over.set()

    def _end(self) -> None:
        self._mapped = None
        self._slot.end()
        if self.failure:
            self.over.set()

    def _check_alive(self) -> None:
        if self.failure:
            raise ReplicaError(self.failure)
        if self.over.is_set():
            raise ReplicaError("this step is sealed already")

    def _described(self, size_bytes: int) -> StoredReplica:
        view, step = self.version
        image = ImageInfo(
            *(step, 0, 0, 0, view), size_bytes=size_bytes, node_id=self._store.node_id, local_rank=self.local_rank
        )
        return StoredReplica(kind="parity", image=image, group=self.group, members=tuple(self.members.values()))


class Contribution:
    """One piece on its way in (transfer.BlockSink). It is verified before it is mixed in: what is mixed cannot be taken
    back."""

    def __init__(self, to: _Round, image: ImageInfo, size_bytes: int) -> None:
        self._round, self._image, self.size_bytes = to, image, size_bytes
        self._block = bytearray(min(size_bytes, BLOCK_BYTES))
        to.enter(image, size_bytes)

    def buffer(self, index: int) -> memoryview:
        """Return memory for the block."""
        where = span(index, self.size_bytes)
        return memoryview(self._block)[: where.stop - where.start]

    def accept(self, index: int) -> None:
        """Mix the block into the parity."""
        self._round.mix(self._image.node_id, index, self.buffer(index))

    def seal(self, checksums: bytes) -> None:
        """Wait until the parity is sealed."""
        self._round.complete(self._image.node_id)

    def close(self) -> None:
        """Do nothing: what is mixed in stays, and is not mixed in again."""
