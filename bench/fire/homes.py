"""Where the ranks' seats are: all on one node, or each on a node of its own, with copies on the next one."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.agent.memory.directories import node_dir
from holdfast.agent.memory.vault import Vault
from holdfast.agent.replicas.guests import Guests
from holdfast.wire.session import HeldImage, Room
from holdfast.wire.slots import Seat

JOB = "campaign"


class Homes:
    """`are_apart`: a node a seat."""

    def __init__(self, root: Path, seats: int, are_apart: bool) -> None:
        self._root, self._seats, self._are_apart = root, seats, are_apart

    def node(self, rank: int) -> str:
        return f"node-{rank}" if self._are_apart else "node-0"

    def number(self, rank: int) -> int:
        """Of its seat on that node."""
        return 0 if self._are_apart else rank

    def seat(self, rank: int) -> Seat:
        return Seat.open(self._seat_directory(rank))

    def grant(self, rank: int, size_bytes: int) -> Room:
        with self._vault(self.node(rank)) as vault:
            return asyncio.run(vault.grant(self.number(rank), size_bytes))

    def held(self) -> list[HeldImage]:
        """All that is in any node's memory."""
        found: list[HeldImage] = []
        for node in self._nodes():
            with self._vault(node) as vault:
                found += vault.held()
            found += [guest.image for guest in self._guests(node).held()]
        return found

    def begin_from(self, step: int) -> None:
        """As agents do when all workers begin anew."""
        for node in self._nodes():
            with self._vault(node) as vault:
                vault.forget_after(step)
            self._guests(node).forget_after(step)

    def lose(self, rank: int) -> None:
        """All that its node had; of several on one node, what it had itself."""
        shutil.rmtree(node_dir(self._root, JOB, self.node(rank)) if self._are_apart else self._seat_directory(rank))

    @contextmanager
    def _vault(self, node: str) -> Iterator[Vault]:
        vault = Vault(self._root, node)
        vault.open(JOB)
        try:
            yield vault
        finally:
            vault.close()

    def _guests(self, node: str) -> Guests:
        return Guests(node_dir(self._root, JOB, node) / "guests")

    def _nodes(self) -> list[str]:
        return sorted({self.node(rank) for rank in range(self._seats)})

    def _seat_directory(self, rank: int) -> Path:
        return node_dir(self._root, JOB, self.node(rank)) / f"seat-{self.number(rank)}"
