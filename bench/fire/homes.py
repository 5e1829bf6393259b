"""Where the ranks' slots are: all on one node, or each on a node of its own, with copies on the next one."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.snapshots.directories import node_dir
from holdfast.snapshots.replica_store import ReplicaStore
from holdfast.snapshots.slot_file import SlotPage
from holdfast.snapshots.snapshot_store import SnapshotStore
from holdfast.wire.worker_messages import BuffersReady, StoredImage

JOB = "campaign"


class Homes:
    """The nodes of the ranks. `are_apart`: each rank has a node of its own."""

    def __init__(self, root: Path, ranks: int, are_apart: bool) -> None:
        self._root, self._ranks, self._are_apart = root, ranks, are_apart

    def node(self, rank: int) -> str:
        return f"node-{rank}" if self._are_apart else "node-0"

    def number(self, rank: int) -> int:
        """Return its local rank on that node."""
        return 0 if self._are_apart else rank

    def page(self, rank: int) -> SlotPage:
        return SlotPage.open(self._rank_directory(rank))

    def allocate(self, rank: int, size_bytes: int) -> BuffersReady:
        with self._snapshot_store(self.node(rank)) as snapshot_store:
            return asyncio.run(snapshot_store.allocate(self.number(rank), size_bytes))

    def images(self) -> list[StoredImage]:
        """Return all images in any node's memory."""
        found: list[StoredImage] = []
        for node in self._nodes():
            with self._snapshot_store(node) as snapshot_store:
                found += [image.stored for image in snapshot_store.images()]
            found += [image.stored for image in self._replicas(node).images()]
        return found

    def discard_after(self, step: int) -> None:
        """Discard later steps, as agents do when all workers restart."""
        for node in self._nodes():
            with self._snapshot_store(node) as snapshot_store:
                snapshot_store.discard_after(step)
            self._replicas(node).discard_after(step)

    def lose(self, rank: int) -> None:
        """Remove all that its node had; of several on one node, what it had itself."""
        shutil.rmtree(node_dir(self._root, JOB, self.node(rank)) if self._are_apart else self._rank_directory(rank))

    @contextmanager
    def _snapshot_store(self, node: str) -> Iterator[SnapshotStore]:
        snapshot_store = SnapshotStore(self._root, node)
        snapshot_store.open(JOB)
        try:
            yield snapshot_store
        finally:
            snapshot_store.close()

    def _replicas(self, node: str) -> ReplicaStore:
        return ReplicaStore(node_dir(self._root, JOB, node) / "replicas")

    def _nodes(self) -> list[str]:
        return sorted({self.node(rank) for rank in range(self._ranks)})

    def _rank_directory(self, rank: int) -> Path:
        return node_dir(self._root, JOB, self.node(rank)) / f"rank-{self.number(rank)}"
