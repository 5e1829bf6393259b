"""A node's snapshots for tests: plain files, sealed by the test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from holdfast.agent.replicas.blocks import checksums_of, unpack


class FileImage:
    def __init__(self, images: FileImages, path: Path, seat: int, view: int, step: int, part: int) -> None:
        self.path, self.seat, self.view, self.step, self.part = path, seat, view, step, part
        self.shards, self.shares = 4, 1
        self.seed, self.first_step, self.whole = 7, 0, -1
        self.size_bytes = path.stat().st_size
        self.checksums: list[int] | None = None
        self.pins = 0
        self._images = images

    @contextlib.contextmanager
    def pinned(self) -> Iterator[memoryview | None]:
        if not self.path.exists():
            yield None
            return
        self.pins += 1
        try:
            yield memoryview(self.path.read_bytes())
        finally:
            self.pins -= 1


class FileImages:
    """Two images a seat; those that are pinned stay."""

    def __init__(self, root: Path, first_part: int = 0) -> None:
        self._root, self._first_part = root, first_part
        self._kept: dict[int, list[FileImage]] = {}
        self.sealed_count = 0
        self._sealed = asyncio.Event()

    def seal(
        self, step: int, content: bytes, seat: int = 0, view: int = 1, *, checked: bool = True, whole: int = -1
    ) -> FileImage:
        """`whole`: the step of which the image stays, as in a worker's slots."""
        path = self._root / f"seat-{seat}" / f"view-{view}-step-{step}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        image = FileImage(self, path, seat, view, step, self._first_part + seat)
        image.checksums = list(unpack(checksums_of(memoryview(content)))) if checked else None
        image.whole = whole
        kept = self._kept.setdefault(seat, [])
        spared = next((old for old in kept if old.step == whole), kept[-1] if kept else None)
        for old in [old for old in kept if old is not spared and not old.pins]:
            kept.remove(old)
            old.path.unlink()
        kept.append(image)
        self.sealed_count += 1
        self._sealed.set()
        self._sealed = asyncio.Event()
        return image

    def seats(self) -> Iterable[int]:
        return sorted(self._kept)

    def newest(self, seat: int) -> FileImage | None:
        return self._kept[seat][-1] if self._kept.get(seat) else None

    def all(self) -> Iterable[FileImage]:
        return [image for kept in self._kept.values() for image in kept]

    def at(self, seat: int, view: int, step: int) -> FileImage | None:
        return next((i for i in self._kept.get(seat, []) if (i.view, i.step) == (view, step)), None)

    async def changed(self, sealed_count: int) -> None:
        while self.sealed_count <= sealed_count:
            await self._sealed.wait()
