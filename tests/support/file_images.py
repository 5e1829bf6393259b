"""A node's snapshots for tests: plain files, sealed by the test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.core.image_info import ImageInfo
from support.slot_records import checksums_of


class FileImage:
    def __init__(self, path: Path, info: ImageInfo, checksums: bytes, complete_step: int) -> None:
        self.path, self.info, self.checksums, self.complete_step = path, info, checksums, complete_step
        self.readers = 0

    @contextlib.contextmanager
    def reading(self) -> Iterator[memoryview | None]:
        if not self.path.exists():
            yield None
            return
        self.readers += 1
        try:
            yield memoryview(self.path.read_bytes())
        finally:
            self.readers -= 1


class FileImages:
    """Two images for each local rank; those that are being read stay."""

    def __init__(self, root: Path, first_part: int = 0) -> None:
        self._root, self._first_part = root, first_part
        self._images: dict[int, list[FileImage]] = {}
        self.sealed_count = 0
        self._sealed = asyncio.Event()

    def seal(
        self, step: int, content: bytes, local_rank: int = 0, view: int = 1, *, checked: bool = True, complete: int = -1
    ) -> FileImage:
        """`complete`: the step of which the image stays, as in a worker's slots."""
        path = self._root / f"rank-{local_rank}" / f"view-{view}-step-{step}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        part = self._first_part + local_rank
        info = ImageInfo(step, part, 4, 1, view, size_bytes=len(content), seed=7, local_rank=local_rank)
        image = FileImage(path, info, checksums_of(content) if checked else b"", complete)
        images = self._images.setdefault(local_rank, [])
        spared = next((old for old in images if old.info.step == complete), images[-1] if images else None)
        for old in [old for old in images if old is not spared and not old.readers]:
            images.remove(old)
            old.path.unlink()
        images.append(image)
        self.sealed_count += 1
        self._sealed.set()
        self._sealed = asyncio.Event()
        return image

    def images(self) -> Sequence[FileImage]:
        return [image for images in self._images.values() for image in reversed(images)]

    async def changed(self, sealed_count: int) -> None:
        while self.sealed_count <= sealed_count:
            await self._sealed.wait()
