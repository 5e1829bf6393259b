"""A directory: of this machine's disk, or shared by all nodes.

Every file appears under its name in one move and is on the disk by then: it is written under a temporary name,
synced, renamed, and its folder synced.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.errors import CheckpointError, MissingError, StorageError
from holdfast.storage import failpoints
from holdfast.storage.direct_io import read_block, write_file
from holdfast.storage.stores import Progress
from holdfast.util.files import open_regular, sync_directory

TEMPORARY_PREFIX = ".put-"
"""The prefix of files that are not complete yet."""
LEVELS_MAX = 4
"""How deep folders are looked into: ours have two levels."""

STORAGE_ERRORS = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
        *(errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EREMOTEIO),
    }
)
"""Errors of the file system; all others concern one file."""


class DirectoryStore:
    """Files under a directory, which is made when the first is written."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def url(self) -> str:
        return str(self._root)

    @property
    def local(self) -> Path:
        return self._root

    def put(
        self, name: str, blocks: Iterable[memoryview], size_bytes: int, on_progress: Progress | None = None
    ) -> None:
        target = self._root / name
        with translated_errors(f"{target} cannot be written"):
            make_directory(target.parent)
            temporary = target.with_name(_temporary_name())
            try:
                write_file(temporary, blocks, size_bytes, on_progress)
                failpoints.reach("part-written")
                temporary.rename(target)
            except BaseException:
                _discard(temporary)
                raise
            sync_directory(target.parent)

    def put_new(self, name: str, content: bytes) -> bool:
        target = self._root / name
        with translated_errors(f"{target} cannot be written"), self._small_file(content) as temporary:
            try:
                _link(temporary, target)
            except FileExistsError:
                return False
            sync_directory(target.parent)
        return True

    def replace(self, name: str, content: bytes, instead_of: bytes) -> bool:
        target = self._root / name
        if self.read(name) != instead_of:
            return False
        with translated_errors(f"{target} cannot be written"), self._small_file(content) as temporary:
            temporary.rename(target)
            sync_directory(target.parent)
        return True

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        path = self._root / name
        with translated_errors(f"{path} cannot be read", is_reading=True):
            descriptor = open_regular(path, self._root)
            try:
                size = os.fstat(descriptor).st_size - start if size is None else size
                return read_block(descriptor, start, max(size, 0))
            finally:
                os.close(descriptor)

    def size(self, name: str) -> int:
        path = self._root / name
        with translated_errors(f"{path} cannot be read", is_reading=True):
            descriptor = open_regular(path, self._root)
            try:
                return os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)

    def names(self, folder: str) -> dict[str, int]:
        return {name: status.st_size for name, status in self._walk(folder)}

    def folders(self, folder: str = "") -> list[str]:
        path = self._root / folder
        with translated_errors(f"{path} cannot be listed"):
            try:
                with os.scandir(path) as entries:
                    return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
            except FileNotFoundError:
                return []

    def modified_unix_s(self, folder: str) -> float:
        try:
            own = (self._root / folder).lstat().st_mtime
        except OSError:
            own = 0.0
        return max((status.st_mtime for _, status in self._walk(folder)), default=own)

    def delete(self, name: str) -> None:
        path = self._root / name
        with translated_errors(f"{path} cannot be removed"):
            path.unlink(missing_ok=True)

    def _walk(self, folder: str, levels: int = LEVELS_MAX) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the regular files below a folder. Links are not followed, and what is deeper than any file of ours, or
        may not be listed, is not there."""
        path = self._root / folder
        with translated_errors(f"{path} cannot be listed"):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    with os.scandir(descriptor) as scanned:
                        found = [(entry.name, _status(entry)) for entry in scanned]
                finally:
                    os.close(descriptor)
            except FileNotFoundError:
                return
            except OSError as error:
                if folder and error.errno in (errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM):
                    return  # what is wrong with one folder says nothing of the others
                raise
            for name, status in sorted(found):
                name = f"{folder}/{name}" if folder else name
                if status is not None and stat.S_ISDIR(status.st_mode) and levels > 1:
                    yield from self._walk(name, levels - 1)
                elif status is not None and stat.S_ISREG(status.st_mode):
                    yield name, status

    @contextmanager
    def _small_file(self, content: bytes) -> Iterator[Path]:
        """Write a complete and durable file in the root, so that a folder that is renamed at the same time does not
        take it along."""
        make_directory(self._root)
        temporary = self._root / _temporary_name()
        try:
            with temporary.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            yield temporary
        finally:
            _discard(temporary)


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat(follow_symlinks=False)
    except OSError:  # removed since
        return None


def _temporary_name() -> str:
    return f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"


def _link(temporary: Path, target: Path) -> None:
    """Give a file its name unless that name is taken. Where there are no hard links, check first and then rename."""
    try:
        os.link(temporary, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS):
            raise
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
        temporary.rename(target)


def _discard(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        pass  # it has a temporary name, and `prune` finds it


def make_directory(path: Path) -> None:
    """Create a directory and its parents, each durable in its own parent."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        sync_directory(folder.parent)


@contextmanager
def translated_errors(what: str, is_reading: bool = False) -> Iterator[None]:
    """Translate errors of the operating system into ours. A refused read concerns one file (CheckpointError);
    everything else concerns the storage (StorageError)."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingError(f"{what}: {error.strerror}") from None
    except OSError as error:
        is_general = not is_reading and error.errno in STORAGE_ERRORS
        kind = StorageError if is_general else CheckpointError
        raise kind(f"{what}: {error.strerror or error}{_remedy(error)}") from error


def _remedy(error: OSError) -> str:
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return ". Make room (holdfast checkpoints prune); the existing checkpoints stay complete"
        case errno.EFBIG:
            return ". The file size limit of this process or file system is too low (ulimit -f)"
        case _:
            return ""
