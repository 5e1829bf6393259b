"""A lost node's image, made again from what the rest of its parity group has. Blocks: it is for threads.

Asked of each survivor: its parity, and its own image, of the same step. What comes out is verified against the
checksums that the lost node had given to everybody; then it is an image like any other that is held for somebody.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from holdfast.agent.replicas.blocks import checksum, span, unpack
from holdfast.agent.replicas.bulk import BulkClient
from holdfast.agent.replicas.guests import Guests, Held
from holdfast.agent.replicas.parity import rebuild
from holdfast.core.orders import Peer
from holdfast.errors import ReplicaError, WireError
from holdfast.wire.bulk import BLOCK_BYTES, Kept, Label, Read
from holdfast.wire.tls import Tls

BLOCKS_CACHED_MAX = 2
"""A stride may lie across two blocks."""


def rebuild_lost(
    lost: str, seat: int, survivors: Sequence[Peer], guests: Guests, *, token: str, tls: Tls | None
) -> Held:
    """The images of the lost node's seat that can be made, now held here; the newest of them. ReplicaError if none can.
    All of them: of the newest step other groups may not have everything."""
    with ExitStack() as ends:
        clients = {peer.node_id: BulkClient(peer.address, peer.bulk_port, token=token, tls=tls) for peer in survivors}
        for client in clients.values():
            ends.callback(client.hang_up)
        made, why = None, "its parity group has none in common"
        for parities in _candidates(lost, seat, clients):
            try:
                made = _rebuild(lost, parities, clients, guests)
            except ReplicaError as error:
                why = str(error)
    if made is None:
        raise ReplicaError(f"no image of {lost}, local rank {seat}, can be made again: {why}")
    return made


def _candidates(lost: str, seat: int, clients: dict[str, BulkClient]) -> Iterator[dict[str, Kept]]:
    """Parities of one step, complete, the oldest first: of what is held the newer may not come first."""
    found: dict[tuple[int, int], dict[str, Kept]] = {}
    for node_id, client in clients.items():
        for kept in client.inventory():
            if kept.kind == "parity" and kept.label.seat == seat and lost in kept.group:
                found.setdefault(kept.label.age, {})[node_id] = kept
    for _, parities in sorted(found.items()):
        groups = {kept.group for kept in parities.values()}
        if len(groups) == 1 and parities.keys() == set(groups.pop()) - {lost}:
            yield parities


def _rebuild(lost: str, parities: dict[str, Kept], clients: dict[str, BulkClient], guests: Guests) -> Held:
    group = next(iter(parities.values())).group
    labels = _labels(parities)
    if lost not in labels:
        raise ReplicaError(f"{lost} had no such worker")
    label = labels[lost]
    index = {node_id: number for number, node_id in enumerate(group)}
    readers = {m: _Blocks(clients[m], labels[m], "own") for m in parities if m in labels}
    sink = guests.adopt(label)
    if sink is not None:
        try:
            steps = rebuild(
                index[lost],
                len(group),
                label.size_bytes,
                {index[m]: labels[m].size_bytes for m in readers},
                {index[m]: reader.read for m, reader in readers.items()},
                {index[m]: _Blocks(clients[m], kept.label, "parity").read for m, kept in parities.items()},
                sink.content,
            )
            for _ in steps:
                pass
            _verify(label, sink.content)
            sink.seal(label.checksums)
        finally:
            sink.abandon()
    return next(held for held in guests.held() if held.label == label)


def _labels(parities: dict[str, Kept]) -> dict[str, Label]:
    """The images that the parities are of; they must agree."""
    found: dict[str, Label] = {}
    for kept in parities.values():
        for label in kept.members:
            if found.setdefault(label.node_id, label) != label:
                raise ReplicaError(f"the parities are of different images of {label.node_id}")
    return found


def _verify(label: Label, content: memoryview) -> None:
    for number, expected in enumerate(unpack(label.checksums)):
        if checksum(content[span(number, len(content))]) != expected:
            raise ReplicaError(f"block {number} of what was made again is not what it was")


class _Blocks:
    """Ranges of what another agent has, fetched by blocks."""

    def __init__(self, client: BulkClient, label: Label, kind: str) -> None:
        self._client, self._label, self._kind = client, label, kind
        self._cache: dict[int, memoryview] = {}

    def read(self, start: int, stop: int) -> memoryview:
        """Less than asked for, where it ends before."""
        size = self._label.size_bytes
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
        label = self._label
        where = span(number, label.size_bytes)
        block = memoryview(bytearray(where.stop - where.start))
        wanted = Read(
            kind="own" if self._kind == "own" else "parity",
            node_id=label.node_id,
            seat=label.seat,
            view=label.view,
            step=label.step,
            index=number,
        )
        try:
            self._client.read(wanted, block)
        except (WireError, OSError) as error:
            raise ReplicaError(f"{label.node_id} cannot be asked: {error}") from error
        return block
