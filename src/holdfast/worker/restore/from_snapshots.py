"""Restores the state from the agents' memory when all workers restart.

Every worker asks its own agent for images: those of its node's workers, and replicas of other nodes. Then, together:

    1  each worker offers the images it can read; those of one node are divided among its workers (one gather)
    2  the newest step is chosen of which all parts are on offer, copied in one view
    3  a part that a worker needs and its own node has not is sent to it by the worker that offers it: first the
       checksums of its blocks, where they are known, then the part. The receiver verifies it
    4  each worker loads its own shard, if the state is split as before, or what it needs of all parts

If one of them cannot load what it got, none uses it: the step before it is the next best, in memory or on storage
(restore_source.py).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from holdfast.core.image_info import ImageInfo, StateKey
from holdfast.core.shard_map import ShardMap
from holdfast.errors import CheckpointError, StateError
from holdfast.snapshots.slot_file import ImageLock, SlotPage, SlotStatus
from holdfast.state.partition import FilePart, MemoryPart, PartSource, load_parts
from holdfast.state.tracked import Tracked
from holdfast.util.blocks import block_count, unpack_checksums
from holdfast.util.logs import get_logger
from holdfast.wire.worker_messages import StoredImage
from holdfast.worker.collectives.small_collectives import SmallCollectives

OFFERS_MAX = 64
"""Images that one worker may offer."""
OFFER_INTEGERS = 9
_TAG = 9_201

log = get_logger(__name__)


class SnapshotChoice(NamedTuple):
    """The state that is restored, and which rank sends each of its parts."""

    key: StateKey
    seed: int
    first_step: int
    servers: dict[int, tuple[int, int]]
    """By part: the rank, and the size in bytes."""
    at_home: set[int]
    """The parts that are on the node that made them, and not only replicas of a lost node."""

    @property
    def is_intact(self) -> bool:
        """Whether all parts are on the nodes that made them."""
        return self.at_home == self.servers.keys()

    @property
    def step(self) -> int:
        """The next step to run."""
        return self.key.step


class SnapshotRestore:
    """The images in the nodes' memory, as all ranks know them. Each of its methods is called by all ranks at once."""

    def __init__(
        self,
        images: Iterable[StoredImage],
        local_rank: int,
        local_world_size: int,
        shard_map: ShardMap,
        tracked: Tracked,
        talk: SmallCollectives,
    ) -> None:
        """`images`: those that this node has. `shard_map`: how the tracked objects are cut."""
        self._mine = sorted(images, key=lambda one: one.path)
        self._shard_map, self._tracked, self._talk = shard_map, tracked, talk
        offered = [one for index, one in enumerate(self._mine) if index % local_world_size == local_rank]
        self._rows = [_decode_offers(row) for row in talk.gather(_encode_offers(offered[:OFFERS_MAX]))]
        self._refused: dict[StateKey, str] = {}

    @property
    def has_some(self) -> bool:
        """Whether there is a complete state that no rank has refused yet."""
        return choose(self._rows, 0, self._refused) is not None

    def load(self, at_least: int) -> SnapshotChoice | None:
        """Load the newest state, from the one before this step on, that every rank can load. After a None the objects
        may hold a mixture, if some were refused, and must be loaded from another source."""
        while (choice := choose(self._rows, at_least, self._refused)) is not None:
            problem = _load(choice, self._mine, self._shard_map, self._tracked, self._talk)
            if not self._talk.agree((int(bool(problem)),))[0]:
                return choice
            self._refused[choice.key] = problem or "another rank cannot load it"
            log.warning(
                "snapshot-unusable",
                f"step {choice.step} in memory cannot be restored: {self._refused[choice.key]}; trying an earlier one",
            )
        return None

    def raise_refused(self) -> None:
        """Raise CheckpointError if there were some that could not be loaded."""
        if self._refused:
            reasons = (f"step {key.step} in memory: {why}" for key, why in self._refused.items())
            raise CheckpointError("; ".join(reasons))


def choose(
    rows: Sequence[Sequence[StoredImage]], at_least: int, refused: Collection[StateKey] = ()
) -> SnapshotChoice | None:
    """Return the newest state, from step `at_least` on, of which every part is on offer; of two of one step, that of
    the later view. The result is the same on every rank."""
    found: dict[StateKey, SnapshotChoice] = {}
    for rank, row in enumerate(rows):
        for offer in row:
            info = offer.info
            known = found.setdefault(info.state, SnapshotChoice(info.state, info.seed, info.first_step, {}, set()))
            known.servers.setdefault(info.part, (rank, info.size_bytes))
            if not offer.is_replica:
                known.at_home.add(info.part)
    complete = [
        one
        for key, one in found.items()
        if len(one.servers) == key.parts and key.step >= at_least and key not in refused
    ]
    return max(complete, key=lambda one: one.key, default=None)


def _load(
    choice: SnapshotChoice, mine: Sequence[StoredImage], shard_map: ShardMap, tracked: Tracked, talk: SmallCollectives
) -> str:
    """Load a state; return why this rank cannot, or nothing."""
    key, problem = choice.key, ""
    here = {one.info.part: one for one in mine if one.info.state == key}
    shard = shard_map.shard_of(talk.rank) if key.shards == shard_map.shards else None
    needed = _needed(choice, shard)
    with ExitStack() as stack:
        served: dict[int, ServedPart] = {}
        try:
            for part, image in here.items():
                is_served = choice.servers[part][0] == talk.rank and talk.size > 1
                if part in needed or is_served:
                    _lock(image, stack)
                if is_served:
                    served[part] = _served(image)
        except (CheckpointError, OSError) as error:
            problem = str(error)
        if talk.agree((int(bool(problem)),))[0]:  # before a rank waits for a part that will not come
            return problem or "another rank cannot read what it has of it"
        received = _exchange(choice, [part for part in needed if part not in here], served, talk)
        try:
            sources: dict[int, PartSource] = {
                part: MemoryPart(memoryview(memory), checksums, f"part {part} from rank {choice.servers[part][0]}")
                for part, (memory, checksums) in received.items()
            }
            for part in (part for part in needed if part in here):
                info = here[part].info
                checksums = unpack_checksums(info.checksums) or None
                sources[part] = stack.enter_context(FilePart(Path(here[part].path), checksums, info.size_bytes))
            load_parts(sources, key.shards, key.shares, tracked, shard=shard)
        except (CheckpointError, StateError) as error:
            problem = str(error)
    return problem


def _needed(choice: SnapshotChoice, shard: int | None) -> list[int]:
    """Return the parts of our shard; all of them if the state is cut otherwise than ours."""
    parts = sorted(choice.servers)
    return parts if shard is None else [part for part in parts if part % choice.key.shards == shard]


class ServedPart(NamedTuple):
    """A part that other ranks may need, and the checksums of its blocks where they are known."""

    memory: mmap.mmap
    checksums: list[int] | None


def _exchange(
    choice: SnapshotChoice, missing: Sequence[int], ours: Mapping[int, ServedPart], talk: SmallCollectives
) -> dict[int, ServedPart]:
    """Receive the parts that we need and that are not on our node, and send those that others need."""
    rows = talk.gather([int(part in missing) for part in sorted(choice.servers)])
    sent: list[Any] = []
    received: dict[int, ServedPart] = {}
    for index, part in enumerate(sorted(choice.servers)):
        server, size_bytes = choice.servers[part]
        receivers = [rank for rank, row in enumerate(rows) if row[index]]
        if server == talk.rank and receivers:
            sent += _send(ours[part], receivers)
        elif part in missing:
            received[part] = _receive(server, size_bytes)
    for sending, _ in sent:
        sending.wait()
    return received


def _send(part: ServedPart, receivers: Sequence[int]) -> list[tuple[Any, torch.Tensor]]:
    """Begin to send a part; return the transfers, and the tensors that must last until they are over."""
    blocks = block_count(len(part.memory))
    header = [1, *part.checksums] if part.checksums else [0] * (1 + blocks)
    tensors = torch.tensor(header, device="cpu"), torch.frombuffer(part.memory, dtype=torch.uint8)
    return [(dist.isend(tensor, rank, tag=_TAG), tensor) for rank in receivers for tensor in tensors]


def _receive(server: int, size_bytes: int) -> ServedPart:
    header = torch.empty(1 + block_count(size_bytes), dtype=torch.int64, device="cpu")
    dist.recv(header, server, tag=_TAG)
    memory = mmap.mmap(-1, size_bytes)
    dist.recv(torch.frombuffer(memory, dtype=torch.uint8), server, tag=_TAG)
    is_known, *checksums = header.tolist()
    return ServedPart(memory, checksums if is_known else None)


def _lock(image: StoredImage, stack: ExitStack) -> None:
    """Lock an image until the stack is left: no process overwrites it before."""
    path = Path(image.path)
    lock = ImageLock(path, is_writable=False)
    stack.callback(lock.close)
    if not lock.acquire() or not _is_still(image.info, path):
        raise CheckpointError(f"{path} is being overwritten")


def _served(image: StoredImage) -> ServedPart:
    """Return an image to send from: as a private mapping, since torch sends from writable memory only."""
    checksums, blocks = unpack_checksums(image.info.checksums), block_count(image.info.size_bytes)
    if checksums and len(checksums) != blocks:
        raise CheckpointError(f"{image.path} has {blocks} blocks, its checksums are of {len(checksums)}")
    descriptor = os.open(image.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        memory = mmap.mmap(descriptor, image.info.size_bytes, flags=mmap.MAP_PRIVATE, prot=protection)
    except ValueError as error:  # the file is shorter than that
        raise CheckpointError(f"{image.path} cannot be read: {error}") from None
    finally:
        os.close(descriptor)
    return ServedPart(memory, list(checksums) or None)


def _is_still(image: ImageInfo, path: Path) -> bool:
    """Return whether a slot holds what the agent listed. A worker of an agent that was killed may have lived on for a
    moment, and written to it."""
    page = SlotPage.open(path.parent)
    try:
        record = page.record(int(path.name.removeprefix("image-")))
    finally:
        page.close()
    is_sealed = record.status is SlotStatus.SEALED
    return is_sealed and (record.image.state, record.image.part) == (image.state, image.part)


def _encode_offers(offered: Sequence[StoredImage]) -> list[int]:
    """Return the images as integers for a gather. Steps are counted from one, so that zero is nothing."""
    integers = [
        integer
        for one in offered
        for integer in (
            *(one.info.step + 1, one.info.part, one.info.shards, one.info.shares, one.info.view),
            *(one.info.size_bytes, one.info.seed, one.info.first_step, int(one.is_replica)),
        )
    ]
    return integers + [0] * (OFFER_INTEGERS * OFFERS_MAX - len(integers))


def _decode_offers(row: Sequence[int]) -> list[StoredImage]:
    found: list[StoredImage] = []
    for at in range(0, len(row), OFFER_INTEGERS):
        step, part, shards, shares, view, size_bytes, seed, first_step, is_replica = row[at : at + OFFER_INTEGERS]
        if step:
            info = ImageInfo(
                *(step - 1, part, shards, shares, view), size_bytes=size_bytes, seed=seed, first_step=first_step
            )
            found.append(StoredImage(path="", info=info, is_replica=bool(is_replica)))
    return found
