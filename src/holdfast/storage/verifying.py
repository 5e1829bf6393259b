"""Every block of every part read and compared with its checksum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from threading import Lock

from crc32c import crc32c
from msgspec import Struct

from holdfast.errors import CheckpointError, StorageError
from holdfast.storage.manifest import STOCK, Part
from holdfast.storage.stores import BLOCK_BYTES, Progress, Store

READERS_LOCAL = 2
READERS_REMOTE = 8


class Finding(Struct, frozen=True, kw_only=True):
    """Something that is wrong with a file of a checkpoint."""

    file: str
    text: str
    matters: bool
    """Whether it cannot be loaded by us; else stock readers only are concerned."""


def inspect(store: Store, folder: str, parts: Sequence[Part], on_progress: Progress | None = None) -> list[Finding]:
    """What is wrong with the contents of parts. Each file is named once."""
    progress = _Progress(sum(part.size_bytes for part in parts), on_progress)
    threads = READERS_REMOTE if store.local is None else READERS_LOCAL

    def look(block: tuple[Part, int]) -> tuple[Part, str]:
        part, number = block
        wrong = _wrong(store, f"{folder}/{part.file}", part, number)
        progress.add(min(BLOCK_BYTES, part.size_bytes - number * BLOCK_BYTES))
        return part, wrong

    with ThreadPoolExecutor(threads, thread_name_prefix="holdfast-verify") as pool:
        try:
            results = list(pool.map(look, _blocks(parts)))
        except BaseException:
            pool.shutdown(cancel_futures=True)  # a store that is away need not be asked for every block
            raise
    findings = [_length(store, folder, part) for part in parts]
    for part, group in groupby(results, key=lambda result: result[0]):
        findings += [_finding(store, folder, part, [wrong for _, wrong in group if wrong])]
    return list({finding.file: finding for finding in reversed(findings) if finding is not None}.values())[::-1]


def _blocks(parts: Sequence[Part]) -> Iterator[tuple[Part, int]]:
    return ((part, number) for part in parts for number in range(part.blocks))


def _wrong(store: Store, name: str, part: Part, number: int) -> str:
    expected = min(BLOCK_BYTES, part.size_bytes - number * BLOCK_BYTES)
    try:
        block = store.read(name, number * BLOCK_BYTES, expected)
    except StorageError:
        raise
    except CheckpointError as error:
        return str(error)
    if len(block) != expected:
        return f"ends within block {number} of {part.blocks}"
    actual = crc32c(block)
    return "" if actual == part.checksum(number) else f"has a wrong checksum in block {number} of {part.blocks}"


def _length(store: Store, folder: str, part: Part) -> Finding | None:
    try:
        size = store.size(f"{folder}/{part.file}")
    except StorageError:
        raise
    except CheckpointError:
        return _finding(store, folder, part, ["is missing, or cannot be read"])
    said = f"has {size} bytes, its manifest says {part.size_bytes}"
    return None if size == part.size_bytes else _finding(store, folder, part, [said])


def _finding(store: Store, folder: str, part: Part, wrongs: list[str]) -> Finding | None:
    if not wrongs:
        return None
    more = f" and {len(wrongs) - 1} more" if len(wrongs) > 1 else ""
    matters = part.number not in STOCK
    concerns = "" if matters else " (stock readers only: Holdfast does not read it)"
    text = f"{store.url}/{folder}/{part.file} {wrongs[0]}{more}: it is damaged{concerns}"
    return Finding(file=part.file, text=text, matters=matters)


class _Progress:
    def __init__(self, total: int, told: Progress | None) -> None:
        self._total = total
        self._told = told
        self._done = 0
        self._lock = Lock()

    def add(self, size: int) -> None:
        with self._lock:
            self._done += size
            if self._told is not None:
                self._told(self._done, self._total)
