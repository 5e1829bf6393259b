"""The shards of a stream: which files, in which order in which epoch, and how each is opened."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from holdfast.data.formats import Opener, Shard, format_of, opener, shards_of
from holdfast.data.order import Permutation, round_keys
from holdfast.errors import UsageError

SHARDS_MAX = 10_000_000
RECORDS_BITS = 40
"""A record's number within its shard has so many bits of its sample number."""
TURNS_CACHED_MAX = 4_096

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class ShardCatalogue:
    """The shards of a stream in the order of turns. A turn is one reading of one shard; turns count on from epoch to
    epoch."""

    def __init__(
        self, paths: Paths, format: str | Opener | None, split_bytes: int | None, seed: int, shuffle: bool
    ) -> None:
        self._shards: list[Shard] = []
        self._openers: list[Opener] = []
        for path in _listed(paths):
            self._add(path, format, split_bytes)
        if not 1 <= len(self._shards) <= SHARDS_MAX:
            raise UsageError(f"a stream of {len(self._shards):,} shards is not possible; give 1 to {SHARDS_MAX:,}")
        self._seed, self._shuffle = seed, shuffle
        self._number: Callable[[int], int] = lru_cache(TURNS_CACHED_MAX)(self._find_number)
        self.digest = _digest(self._shards)
        """A digest of the names and sizes of all shards."""

    def __len__(self) -> int:
        return len(self._shards)

    def _add(self, path: str, format: str | Opener | None, split_bytes: int | None) -> None:
        name = format if isinstance(format, str) else "" if format else format_of(path)
        parts = shards_of(path, name, split_bytes)
        self._shards += parts
        self._openers += [format if callable(format) else opener(name)] * len(parts)

    def epoch_of(self, turn: int) -> int:
        return turn // len(self._shards)

    def name_of(self, turn: int) -> str:
        """Return the shard's name for people and the journal."""
        return self._shards[self._number(turn)].name

    def sample_number(self, turn: int, record: int) -> int:
        """Return a number for a record that is the same in every epoch."""
        return (self._number(turn) << RECORDS_BITS) + record

    def open(self, turn: int, first: int) -> Iterator[Any]:
        """Return the records of a turn from this one on."""
        number = self._number(turn)
        return iter(self._openers[number](self._shards[number], first))

    def _find_number(self, turn: int) -> int:
        epoch, place = divmod(turn, len(self._shards))
        if not self._shuffle:
            return place
        keys = round_keys(self._seed, epoch, "streamed shards")
        return int(Permutation(len(self._shards), keys).apply(np.array([place], dtype=np.int64))[0])


def _listed(paths: Paths) -> list[str]:
    """Return the paths in a definite order."""
    if isinstance(paths, str | os.PathLike):
        found = sorted(glob.glob(os.fspath(paths), recursive=True))  # noqa: PTH207  # a pattern may be absolute
        if not found:
            raise UsageError(f"no file is called {os.fspath(paths)}")
        return found
    listed = [os.fspath(path) for path in paths]
    if len(set(listed)) < len(listed):
        raise UsageError("a shard is named twice: each is read once an epoch")
    return listed


def _digest(shards: Sequence[Shard]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for shard in shards:
        text = f"{shard.path}\0{shard.begin}\0{shard.end}\0{shard.size_bytes}\n"
        found.update(text.encode("utf-8", "surrogateescape"))
    return found.hexdigest()
