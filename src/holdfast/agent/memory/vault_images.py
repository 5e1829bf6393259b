"""The vault's images, as those who copy them to other nodes want to see them (replicator.Images)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.agent.memory.vault import Kept, Vault


class VaultImage:
    """A sealed image of one seat."""

    def __init__(self, vault: Vault, kept: Kept) -> None:
        self._vault, self._kept = vault, kept
        record = kept.record
        self.seat, self.part, self.shards, self.shares = kept.seat, record.part, record.shards, record.shares
        self.view, self.step, self.size_bytes = record.view, record.step, record.size_bytes
        self.seed, self.first_step = record.seed, record.first_step

    @property
    def checksums(self) -> list[int] | None:
        return self._vault.checksums(self._kept)

    @property
    def path(self) -> Path:
        return self._vault.path(self._kept)

    @property
    def whole(self) -> int:
        return self._vault.whole(self._kept.seat)

    @contextmanager
    def pinned(self) -> Iterator[memoryview | None]:
        with self._vault.reading(self._kept) as memory:
            if memory is None:
                yield None
                return
            with memoryview(memory) as content:
                yield content


class VaultImages:
    """All of them. `note` is called when one more was sealed."""

    def __init__(self, vault: Vault) -> None:
        self._vault = vault
        self.sealed_count = 0
        self._changed = asyncio.Event()

    def note(self) -> None:
        self.sealed_count += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def seats(self) -> Iterable[int]:
        return sorted({kept.seat for kept in self._vault.kept()})

    def newest(self, seat: int) -> VaultImage | None:
        """By step: a job that went back to a checkpoint overwrites what it had in memory soon enough."""
        found = next((kept for kept in self._vault.kept() if kept.seat == seat), None)
        return VaultImage(self._vault, found) if found else None

    def all(self) -> Iterable[VaultImage]:
        return [VaultImage(self._vault, kept) for kept in self._vault.kept()]

    def at(self, seat: int, view: int, step: int) -> VaultImage | None:
        wanted = (seat, view, step)
        found = (k for k in self._vault.kept() if (k.seat, k.record.view, k.record.step) == wanted)
        return next((VaultImage(self._vault, kept) for kept in found), None)

    async def changed(self, sealed_count: int) -> None:
        while self.sealed_count <= sealed_count:
            await self._changed.wait()
