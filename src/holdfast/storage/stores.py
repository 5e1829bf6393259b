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
from holdfast.util.files import expand_home

Progress = Callable[[int, int], None]
"""A function that receives the bytes done and the bytes in all."""

RETRY_FOR_S = 600.0
"""How long an operation goes on trying against an unreachable store: most outages of object stores are over by
then, and training goes on."""

OBJECT_SCHEMES = frozenset({"s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl"})


class Store(Protocol):
    """A store of bytes by name."""

    @property
    def url(self) -> str:
        """Return the URL or path as a person would write it."""

    @property
    def local(self) -> Path | None:
        """Return the directory if the store is one: readers may map its files."""

    def put(
        self, name: str, blocks: Iterable[memoryview], size_bytes: int, on_progress: Progress | None = None
    ) -> None:
        """Write a complete file, durable when this returns; a file of that name is replaced atomically. Blocks have
        BLOCK_BYTES each, except the last, and can be iterated again for a second try."""

    def put_new(self, name: str, content: bytes) -> bool:
        """Create a small durable file with this content atomically; return False if that name exists. In a directory
        its folder must exist: MissingError if it was renamed or removed."""

    def replace(self, name: str, content: bytes, instead_of: bytes) -> bool:
        """Replace a small file that has the content `instead_of`; return False if it does not have it."""

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        """Return the bytes of a file from `start` on; fewer than `size` only at its end. Raise MissingError if it is
        not there."""

    def size(self, name: str) -> int:
        """Return the size of a file in bytes. Raise MissingError if it is not there."""

    def names(self, folder: str) -> dict[str, int]:
        """Return all files under a folder, by their full names, with their sizes. Empty if there is none."""

    def folders(self, folder: str = "") -> list[str]:
        """Return the names of the folders directly in a folder."""

    def modified_unix_s(self, folder: str) -> float:
        """Return when something under a folder was last written; 0 if there is nothing."""

    def delete(self, name: str) -> None:
        """Remove a file; nothing happens if it is not there."""


def open_store(url: str, retry_for_s: float = RETRY_FOR_S) -> Store:
    """Return the store that a URL or a path means; raise UsageError if it means none. No request is sent to the store
    yet."""
    scheme = _scheme(url)
    if scheme in ("", "file"):
        from holdfast.storage.directory import DirectoryStore

        return DirectoryStore(local_directory(url))
    if scheme in OBJECT_SCHEMES:
        from holdfast.storage.object_store import ObjectStore

        return ObjectStore(url, retry_for_s)
    from holdfast.storage.fsspec_store import FsspecStore

    return FsspecStore(url)


def check_url(url: str) -> None:
    """Raise UsageError if no store is known for a URL, or the package that reaches it is not installed. Nothing is
    connected to."""
    scheme = _scheme(url)
    if scheme in OBJECT_SCHEMES:
        from holdfast.storage.object_store import require_obstore

        require_obstore(url)
    elif is_remote(url):
        from holdfast.storage.fsspec_store import check_protocols

        check_protocols(url)


def is_remote(url: str) -> bool:
    """Return whether this is a URL of something other than a directory of this machine's file system."""
    return _scheme(url) not in ("", "file")


def _scheme(url: str) -> str:
    match = re.match(r"([a-zA-Z][a-zA-Z0-9+.-]*)(://|::)", url)
    return match[1].lower() if match else ""


def local_directory(url: str) -> Path:
    """Return the directory that a path or a file:// URL means; raise UsageError if it means none of this machine."""
    if not url:
        raise UsageError("checkpoints need a place: give a directory or a URL like s3://bucket/run")
    if not _scheme(url):
        return expand_home(url).absolute()
    try:
        parts = urlsplit(url)
    except ValueError as error:  # brackets that hold no address
        raise UsageError(f"{url!r:.80} is not a URL: {error}") from None
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise UsageError(f"{url} does not name a directory of this machine: file:///absolute/path does")
    return expand_home(unquote(parts.path))
