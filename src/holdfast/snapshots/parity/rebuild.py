"""Rebuilds a lost node's image from what the rest of its parity group has. Blocks: it is for threads.

Each survivor is asked for its parity and its own image of the same step. The result is verified against the checksums
that the lost node had sent to all members; then it is a replica like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from holdfast.core.image_info import BLOCK_BYTES, ImageInfo, Version
from holdfast.core.orders import Peer
from holdfast.errors import ReplicaError, WireError
from holdfast.snapshots.parity.arithmetic import rebuild
from holdfast.snapshots.replica_store import ReplicaStore
from holdfast.snapshots.slot_file import SlotImage
from holdfast.snapshots.transfer import BulkClient
from holdfast.util.blocks import checksum, span, unpack_checksums
from holdfast.wire.bulk_messages import ReadBlocks, ReplicaKind, StoredReplica
from holdfast.wire.tls import Tls

BLOCKS_CACHED_MAX = 2
"""A stride may lie across two blocks; see arithmetic.py."""


def rebuild_lost(
    lost: str, local_rank: int, survivors: Sequence[Peer], replicas: ReplicaStore, *, token: str, tls: Tls | None
) -> SlotImage:
    """Rebuild the images of a lost node's worker and store them here; return the newest. All of them are rebuilt, since
    other groups may not have everything of the newest step. Raises ReplicaError if there is none."""
    with ExitStack() as ends:
        clients = {peer.node_id: BulkClient(peer.address, peer.bulk_port, token=token, tls=tls) for peer in survivors}
        for client in clients.values():
            ends.callback(client.disconnect)
        rebuilt, why = None, "its parity group has none in common"
        for parities in _candidates(lost, local_rank, clients):
            try:
                rebuilt = _rebuild(lost, parities, clients, replicas)
            except ReplicaError as error:
                why = str(error)
    if rebuilt is None:
        raise ReplicaError(f"no image of {lost}, local rank {local_rank}, can be rebuilt: {why}")
    return rebuilt


def _candidates(lost: str, local_rank: int, clients: dict[str, BulkClient]) -> Iterator[dict[str, StoredReplica]]:
    """Yield the complete parities of one step, by node, the oldest first: an image older than one here is refused."""
    found: dict[Version, dict[str, StoredReplica]] = {}
    for node_id, client in clients.items():
        for one in client.inventory():
            if one.kind == "parity" and one.image.local_rank == local_rank and lost in one.group:
                found.setdefault(one.version, {})[node_id] = one
    for _, parities in sorted(found.items()):
        groups = {one.group for one in parities.values()}
        if len(groups) == 1 and parities.keys() == set(groups.pop()) - {lost}:
            yield parities


def _rebuild(
    lost: str, parities: dict[str, StoredReplica], clients: dict[str, BulkClient], replicas: ReplicaStore
) -> SlotImage:
    group = next(iter(parities.values())).group
    members = _members(parities)
    if lost not in members:
        raise ReplicaError(f"{lost} had no such worker")
    image = members[lost]
    index = {node_id: number for number, node_id in enumerate(group)}
    readers = {m: _Blocks(clients[m], members[m], "own") for m in parities if m in members}
    sink = replicas.adopt(image)
    if sink is not None:
        try:
            steps = rebuild(
                index[lost],
                len(group),
                image.size_bytes,
                {index[m]: members[m].size_bytes for m in readers},
                {index[m]: reader.read for m, reader in readers.items()},
                {index[m]: _Blocks(clients[m], parity.image, "parity").read for m, parity in parities.items()},
                sink.content,
            )
            for _ in steps:
                pass
            _verify(image, sink.content)
            sink.seal(image.checksums)
        finally:
            sink.close()
    return next(held for held in replicas.images() if held.info == image)


def _members(parities: dict[str, StoredReplica]) -> dict[str, ImageInfo]:
    """Return the images that the parities are of, by node; they must agree."""
    found: dict[str, ImageInfo] = {}
    for parity in parities.values():
        for image in parity.members:
            if found.setdefault(image.node_id, image) != image:
                raise ReplicaError(f"the parities are of different images of {image.node_id}")
    return found


def _verify(image: ImageInfo, content: memoryview) -> None:
    for number, expected in enumerate(unpack_checksums(image.checksums)):
        if checksum(content[span(number, len(content))]) != expected:
            raise ReplicaError(f"block {number} of the rebuilt image does not match its checksum")


class _Blocks:
    """Ranges of an image that another agent has, read by blocks."""

    def __init__(self, client: BulkClient, image: ImageInfo, kind: ReplicaKind) -> None:
        self._client, self._image, self._kind = client, image, kind
        self._cache: dict[int, memoryview] = {}

    def read(self, start: int, stop: int) -> memoryview:
        """Return a range; less than was asked for, where the image ends before."""
        size = self._image.size_bytes
        start, stop = min(start, size), min(stop, size)
        found = bytearray(stop - start)
        position = start
        while position < stop:
            number = position // BLOCK_BYTES
            where = span(number, size)
            end = min(where.stop, stop)
            block = self._block(number)
            found[position - start : end - start] = block[position - where.start : end - where.start]
            position = end
        return memoryview(found)

    def _block(self, number: int) -> memoryview:
        if number not in self._cache:
            while len(self._cache) >= BLOCKS_CACHED_MAX:
                del self._cache[min(self._cache)]
            self._cache[number] = self._fetch(number)
        return self._cache[number]

    def _fetch(self, number: int) -> memoryview:
        image = self._image
        where = span(number, image.size_bytes)
        block = memoryview(bytearray(where.stop - where.start))
        wanted = ReadBlocks(
            kind=self._kind,
            node_id=image.node_id,
            local_rank=image.local_rank,
            view=image.view,
            step=image.step,
            index=number,
        )
        try:
            self._client.read(wanted, block)
        except (WireError, OSError) as error:
            raise ReplicaError(f"{image.node_id} is unreachable: {error}") from error
        return block
