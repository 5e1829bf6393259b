"""Every block of every part read and compared with its checksum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from threading import Lock

from msgspec import Struct

from holdfast.errors import CheckpointError, StorageError
from holdfast.storage.manifest import STOCK, PartInfo
from holdfast.storage.stores import Progress, Store
from holdfast.util.blocks import BLOCK_BYTES, block_size, checksum

READERS_LOCAL = 2
READERS_REMOTE = 8


class VerifyFinding(Struct, frozen=True, kw_only=True):
    """A defect of a file of a checkpoint."""

    file: str
    text: str
    matters: bool
    """Whether it cannot be loaded by us; else stock readers only are concerned."""


def inspect(
    store: Store, folder: str, parts: Sequence[PartInfo], on_progress: Progress | None = None
) -> list[VerifyFinding]:
    """Return what is wrong with the contents of parts. Each file is named once."""
    progress = _Progress(sum(part.size_bytes for part in parts), on_progress)
    threads = READERS_REMOTE if store.local is None else READERS_LOCAL

    def check(block: tuple[PartInfo, int]) -> tuple[PartInfo, str]:
        part, number = block
        defect = _defect(store, f"{folder}/{part.file}", part, number)
        progress.add(block_size(number, part.size_bytes))
        return part, defect

    with ThreadPoolExecutor(threads, thread_name_prefix="holdfast-verify") as pool:
        try:
            results = list(pool.map(check, _blocks(parts)))
        except BaseException:
            pool.shutdown(cancel_futures=True)  # a store that is away need not be asked for every block
            raise
    findings = [_length(store, folder, part) for part in parts]
    for part, group in groupby(results, key=lambda result: result[0]):
        findings += [_finding(store, folder, part, [defect for _, defect in group if defect])]
    return list({finding.file: finding for finding in reversed(findings) if finding is not None}.values())[::-1]


def _blocks(parts: Sequence[PartInfo]) -> Iterator[tuple[PartInfo, int]]:
    return ((part, number) for part in parts for number in range(part.blocks))


def _defect(store: Store, name: str, part: PartInfo, number: int) -> str:
    expected = block_size(number, part.size_bytes)
    try:
        block = store.read(name, number * BLOCK_BYTES, expected)
    except StorageError:
        raise
    except CheckpointError as error:
        return str(error)
    if len(block) != expected:
        return f"ends within block {number} of {part.blocks}"
    is_right = checksum(block) == part.checksum(number)
    return "" if is_right else f"has a wrong checksum in block {number} of {part.blocks}"


def _length(store: Store, folder: str, part: PartInfo) -> VerifyFinding | None:
    try:
        size = store.size(f"{folder}/{part.file}")
    except StorageError:
        raise
    except CheckpointError:
        return _finding(store, folder, part, ["is missing, or cannot be read"])
    text = f"has {size} bytes, its manifest says {part.size_bytes}"
    return None if size == part.size_bytes else _finding(store, folder, part, [text])


def _finding(store: Store, folder: str, part: PartInfo, defects: list[str]) -> VerifyFinding | None:
    if not defects:
        return None
    more = f" and {len(defects) - 1} more" if len(defects) > 1 else ""
    matters = part.number not in STOCK
    concerns = "" if matters else " (stock readers only: Holdfast does not read it)"
    text = f"{store.url}/{folder}/{part.file} {defects[0]}{more}: it is damaged{concerns}"
    return VerifyFinding(file=part.file, text=text, matters=matters)


class _Progress:
    def __init__(self, total: int, on_progress: Progress | None) -> None:
        self._total = total
        self._on_progress = on_progress
        self._done = 0
        self._lock = Lock()

    def add(self, size: int) -> None:
        with self._lock:
            self._done += size
            if self._on_progress is not None:
                self._on_progress(self._done, self._total)
