"""What a store can do, and which one a URL means.

A store holds bytes by names like `step-120/part-0.safetensors`. Its refusals are sentences: MissingError where a name
is not there, StorageError where the store is full, away or will not have us, CheckpointError where one file is bad.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from holdfast.errors import UsageError
from holdfast.storage.image import BLOCK_BYTES

__all__ = ["BLOCK_BYTES", "PATIENCE_S", "Progress", "Store", "is_remote", "open_store"]

Progress = Callable[[int, int], None]
"""Told bytes done and bytes in all."""

PATIENCE_S = 600.0
"""How long an operation goes on trying against a store that is away: most outages of object stores are over by then,
and training goes on meanwhile."""

OBJECT_SCHEMES = frozenset({"s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl"})


class Store(Protocol):
    """Bytes by name."""

    @property
    def url(self) -> str:
        """As a person would write it."""

    @property
    def local(self) -> Path | None:
        """The directory, if it is one: readers may then map its files."""

    def put(
        self, name: str, pieces: Iterable[memoryview], size_bytes: int, on_progress: Progress | None = None
    ) -> None:
        """Write a whole file, durable when this returns; what was there of that name is replaced in one move. Pieces
        have BLOCK_BYTES each, but for the last, and can be iterated over again for a second try."""

    def put_new(self, name: str, content: bytes) -> bool:
        """Create a small file with this content in one move, durable; False if something of the name is there. In a
        directory its folder must be there: MissingError if it was renamed or removed."""

    def replace(self, name: str, content: bytes, instead_of: bytes) -> bool:
        """Put a small file in the place of one that has the content `instead_of`; False if it has not."""

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        """The bytes of a file, from `start` on; fewer than `size` only at its end. MissingError if it is not there."""

    def size(self, name: str) -> int:
        """Of a file, in bytes. MissingError if it is not there."""

    def names(self, folder: str) -> dict[str, int]:
        """All files under a folder, by their full names, with their sizes. Empty if there is none."""

    def folders(self, folder: str = "") -> list[str]:
        """The names of the folders directly in a folder."""

    def modified_unix_s(self, folder: str) -> float:
        """When something under a folder was last written; 0 if there is nothing."""

    def delete(self, name: str) -> None:
        """Remove a file; nothing happens if it is not there."""


def open_store(url: str, patience_s: float = PATIENCE_S) -> Store:
    """The store a URL or a path means. UsageError if it means none. Nothing is asked of the store yet."""
    scheme = _scheme(url)
    if scheme in ("", "file"):
        from holdfast.storage.directory import DirectoryStore

        return DirectoryStore(_directory(url))
    if scheme in OBJECT_SCHEMES:
        from holdfast.storage.object_store import ObjectStore

        return ObjectStore(url, patience_s)
    from holdfast.storage.filesystems import FilesystemStore

    return FilesystemStore(url)


def is_remote(url: str) -> bool:
    """Whether it is a URL of something other than a directory of this machine's file system."""
    return _scheme(url) not in ("", "file")


def _scheme(url: str) -> str:
    match = re.match(r"([a-zA-Z][a-zA-Z0-9+.-]*)(://|::)", url)
    return match[1].lower() if match else ""


def _directory(url: str) -> Path:
    if not url:
        raise UsageError("an empty name is no place for checkpoints: give a directory or a URL like s3://bucket/run")
    if not _scheme(url):
        return Path(url).expanduser().absolute()
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise UsageError(f"{url} names no directory of this machine: file:///absolute/path does")
    return Path(unquote(parts.path))
