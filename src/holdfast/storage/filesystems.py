"""Whatever else fsspec knows: hdfs://, sftp://, memory://, …

How good the promises are depends on the file system. A file counts only once its note or manifest names it, so a slow
or torn write is never taken for a whole one. Publishing is by exclusive create where the file system has it (local,
memory, s3fs); elsewhere by looking before writing: then two attempts at the same step that end within the same moment
may both believe to have won, and the manifest of the later one stands. Both are whole. A manifest may be seen before
all of it is written: then it does not have its digest, and is passed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from holdfast.errors import MissingError, StorageError, UsageError
from holdfast.storage.stores import Progress

NO_EXCLUSIVE_CREATE = (NotImplementedError, TypeError, ValueError)


class FilesystemStore:
    """Files under a URL of fsspec's."""

    local = None

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._files, root = _open(url)
        self._root = root.rstrip("/")

    @property
    def url(self) -> str:
        return self._url

    def put(
        self, name: str, pieces: Iterable[memoryview], size_bytes: int, on_progress: Progress | None = None
    ) -> None:
        path, done = self._path(name), 0
        with self._sentences(f"{self._url}/{name} cannot be written"):
            self._make_parent(path)
            with self._files.open(path, "wb") as file:
                for piece in pieces:
                    file.write(piece)
                    done += len(piece)
                    if on_progress is not None:
                        on_progress(done, size_bytes)

    def put_new(self, name: str, content: bytes) -> bool:
        path = self._path(name)
        with self._sentences(f"{self._url}/{name} cannot be written"):
            self._make_parent(path)
            try:
                self._create(path, content)
            except FileExistsError:
                return False
        return True

    def replace(self, name: str, content: bytes, instead_of: bytes) -> bool:
        if self.read(name) != instead_of:
            return False
        with self._sentences(f"{self._url}/{name} cannot be written"):
            self._files.pipe_file(self._path(name), content)
        return True

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        with self._sentences(f"{self._url}/{name} cannot be read"):
            self._files.invalidate_cache()
            end = None if size is None else start + size
            return bytes(self._files.cat_file(self._path(name), start=start or None, end=end))

    def size(self, name: str) -> int:
        with self._sentences(f"{self._url}/{name} cannot be read"):
            self._files.invalidate_cache()
            return int(self._files.info(self._path(name))["size"])

    def names(self, folder: str) -> dict[str, int]:
        return {name: int(found["size"]) for name, found in self._find(folder)}

    def folders(self, folder: str = "") -> list[str]:
        with self._sentences(f"{self._url}/{folder} cannot be listed"):
            self._files.invalidate_cache()
            try:
                found = self._files.ls(self._path(folder), detail=True)
            except FileNotFoundError:
                return []
        return sorted(item["name"].rstrip("/").rpartition("/")[2] for item in found if item["type"] == "directory")

    def modified_unix_s(self, folder: str) -> float:
        return max((_modified(found) for _, found in self._find(folder)), default=0.0)

    def delete(self, name: str) -> None:
        with self._sentences(f"{self._url}/{name} cannot be removed"):
            try:
                self._files.rm_file(self._path(name))
            except FileNotFoundError:
                pass

    def _create(self, path: str, content: bytes) -> None:
        """By the file system's own way to create a file exclusively; fsspec's general one only looks before."""
        if _has_own_create(self._files):
            return self._files.pipe_file(path, content, mode="create")  # type: ignore[no-any-return]
        try:
            with self._files.open(path, "xb") as file:
                file.write(content)
        except NO_EXCLUSIVE_CREATE:
            self._files.pipe_file(path, content, mode="create")

    def _find(self, folder: str) -> list[tuple[str, Any]]:
        with self._sentences(f"{self._url}/{folder} cannot be listed"):
            self._files.invalidate_cache()
            try:
                found = self._files.find(self._path(folder), detail=True)
            except FileNotFoundError:
                return []
        return [(path[len(self._root) :].lstrip("/"), info) for path, info in found.items()]

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def _make_parent(self, path: str) -> None:
        self._files.makedirs(path.rpartition("/")[0] or "/", exist_ok=True)

    @contextmanager
    def _sentences(self, what: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise MissingError(f"{what}: it is not there") from None
        except OSError as error:
            raise StorageError(f"{what}: {error.strerror or error}") from error


def _open(url: str) -> tuple[Any, str]:
    scheme = url.partition(":")[0]
    try:
        import fsspec.core
    except ImportError:
        raise UsageError(f"{url} needs the package fsspec: pip install 'holdfast[fsspec]'") from None
    try:
        files, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        known = "a directory, file://, s3://, gs://, az://"
        text = f"no store is known for {scheme}:// ({error}): it may be {known}, or what fsspec knows"
        raise UsageError(text) from None
    return files, str(root)


def _has_own_create(files: Any) -> bool:
    from fsspec.spec import AbstractFileSystem

    return hasattr(type(files), "_pipe_file") or type(files).pipe_file is not AbstractFileSystem.pipe_file


def _modified(info: Any) -> float:
    """Every file system has its own word for it. One that has none is never taken for old."""
    for key in ("mtime", "modified", "LastModified", "last_modified", "created"):
        match info.get(key):
            case datetime() as moment:
                return moment.timestamp()
            case int() | float() as seconds:
                return float(seconds)
    return float("inf")
