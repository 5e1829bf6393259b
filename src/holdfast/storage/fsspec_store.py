"""Whatever else fsspec knows: hdfs://, sftp://, memory://, …

How good the promises are depends on the file system. A file counts only once its note or manifest names it, so a slow
or torn write is never taken for a complete one. Publishing is by exclusive create where the file system has it (local,
memory, s3fs); elsewhere by looking before writing: then two attempts at the same step that end within the same moment
may both believe to have won, and the manifest of the later one stands. Both are complete. A manifest may be seen before
all of it is written: then it does not have its digest, and is skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from holdfast.errors import CheckpointError, MissingError, StorageError, UsageError
from holdfast.storage.stores import Progress

NO_EXCLUSIVE_CREATE = (NotImplementedError, TypeError, ValueError)


class FsspecStore:
    """Files under a URL of fsspec."""

    local = None

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._files, root = _open(url)
        self._root = root.rstrip("/")

    @property
    def url(self) -> str:
        return self._url

    def put(
        self, name: str, blocks: Iterable[memoryview], size_bytes: int, on_progress: Progress | None = None
    ) -> None:
        path, done = self._path(name), 0
        with self._translated_errors(f"{self._url}/{name} cannot be written"):
            self._make_parent(path)
            with self._files.open(path, "wb") as file:
                for block in blocks:
                    file.write(block)
                    done += len(block)
                    if on_progress is not None:
                        on_progress(done, size_bytes)

    def put_new(self, name: str, content: bytes) -> bool:
        path = self._path(name)
        with self._translated_errors(f"{self._url}/{name} cannot be written"):
            self._make_parent(path)
            try:
                self._create(path, content)
            except FileExistsError:
                return False
        return True

    def replace(self, name: str, content: bytes, instead_of: bytes) -> bool:
        if self.read(name) != instead_of:
            return False
        with self._translated_errors(f"{self._url}/{name} cannot be written"):
            self._files.pipe_file(self._path(name), content)
        return True

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        with self._translated_errors(f"{self._url}/{name} cannot be read"):
            self._files.invalidate_cache()
            end = None if size is None else start + size
            return bytes(self._files.cat_file(self._path(name), start=start or None, end=end))

    def size(self, name: str) -> int:
        with self._translated_errors(f"{self._url}/{name} cannot be read"):
            self._files.invalidate_cache()
            return int(self._files.info(self._path(name))["size"])

    def names(self, folder: str) -> dict[str, int]:
        return {name: int(found["size"]) for name, found in self._find(folder)}

    def folders(self, folder: str = "") -> list[str]:
        with self._translated_errors(f"{self._url}/{folder} cannot be listed"):
            self._files.invalidate_cache()
            try:
                found = self._files.ls(self._path(folder), detail=True)
            except FileNotFoundError:
                return []
        return sorted(item["name"].rstrip("/").rpartition("/")[2] for item in found if item["type"] == "directory")

    def modified_unix_s(self, folder: str) -> float:
        return max((_modified(found) for _, found in self._find(folder)), default=0.0)

    def delete(self, name: str) -> None:
        with self._translated_errors(f"{self._url}/{name} cannot be removed"):
            try:
                self._files.rm_file(self._path(name))
            except FileNotFoundError:
                pass

    def _create(self, path: str, content: bytes) -> None:
        """Create a file exclusively by the file system's own operation; fsspec's general one only checks before it
        writes."""
        if _has_own_create(self._files):
            return self._files.pipe_file(path, content, mode="create")  # type: ignore[no-any-return]
        try:
            with self._files.open(path, "xb") as file:
                file.write(content)
        except NO_EXCLUSIVE_CREATE:
            self._files.pipe_file(path, content, mode="create")

    def _find(self, folder: str) -> list[tuple[str, Any]]:
        with self._translated_errors(f"{self._url}/{folder} cannot be listed"):
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
    def _translated_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise MissingError(f"{what}: it is not there") from None
        except (IsADirectoryError, NotADirectoryError) as error:
            raise CheckpointError(f"{what}: {error.strerror or error}") from error
        except OSError as error:
            raise StorageError(f"{what}: {error.strerror or error}") from error


def check_protocols(url: str) -> None:
    """Raise UsageError if fsspec does not know the URL's protocols, or cannot import what they need. Nothing is
    connected to."""
    fsspec = _module(url)
    with _said_of(url):
        for link in url.split("::"):
            if protocol := fsspec.core.split_protocol(link)[0] or ("" if "/" in link else link):  # "": a local path
                fsspec.get_filesystem_class(protocol)


def _open(url: str) -> tuple[Any, str]:
    fsspec = _module(url)
    with _said_of(url):
        files, root = fsspec.core.url_to_fs(url)
    return files, str(root)


def _module(url: str) -> Any:
    try:
        import fsspec.core
    except ImportError:
        raise UsageError(f"{url} needs the package fsspec: pip install fsspec") from None
    return fsspec


@contextmanager
def _said_of(url: str) -> Iterator[None]:
    """Raise UsageError for whatever a file system of others raises about this URL."""
    try:
        yield
    except Exception as error:
        known = "a directory, file://, s3://, gs://, az://"
        text = f"no store is known for {url:.200} ({error!s:.200}): it may be {known}, or what fsspec knows"
        raise UsageError(text) from None


def _has_own_create(files: Any) -> bool:
    from fsspec.spec import AbstractFileSystem

    return hasattr(type(files), "_pipe_file") or type(files).pipe_file is not AbstractFileSystem.pipe_file


def _modified(info: Any) -> float:
    """Return when a file was last written. Every file system has its own key for it; one without any is never taken for
    old."""
    for key in ("mtime", "modified", "LastModified", "last_modified", "created"):
        match info.get(key):
            case datetime() as moment:
                return moment.timestamp()
            case int() | float() as seconds:
                return float(seconds)
    return float("inf")
