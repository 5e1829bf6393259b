"""A directory: of this machine's disk, or shared by all nodes.

Every file appears under its name in one move and is on the disk by then: it is written under a name nobody looks for,
synced, renamed, and its folder synced.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.errors import CheckpointError, MissingError, StorageError
from holdfast.storage import points
from holdfast.storage.direct import read_block, write_file
from holdfast.storage.stores import Progress

TEMPORARY_PREFIX = ".put-"
"""Of files that are not whole yet."""

STORAGE_TROUBLES = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
        *(errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EREMOTEIO),
    }
)
"""What the file system as a whole says; all else is about one file."""


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
        self, name: str, pieces: Iterable[memoryview], size_bytes: int, on_progress: Progress | None = None
    ) -> None:
        target = self._root / name
        with sentences(f"{target} cannot be written"):
            make_directory(target.parent)
            temporary = target.with_name(_temporary_name())
            try:
                write_file(temporary, pieces, size_bytes, on_progress)
                points.reach("part-written")
                temporary.rename(target)
            except BaseException:
                _discard(temporary)
                raise
            sync_directory(target.parent)

    def put_new(self, name: str, content: bytes) -> bool:
        target = self._root / name
        with sentences(f"{target} cannot be written"), self._small_file(content) as temporary:
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
        with sentences(f"{target} cannot be written"), self._small_file(content) as temporary:
            temporary.rename(target)
            sync_directory(target.parent)
        return True

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        path = self._root / name
        with sentences(f"{path} cannot be read", is_reading=True):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                size = os.fstat(descriptor).st_size - start if size is None else size
                return read_block(descriptor, start, max(size, 0))
            finally:
                os.close(descriptor)

    def size(self, name: str) -> int:
        path = self._root / name
        with sentences(f"{path} cannot be read", is_reading=True):
            return path.stat().st_size

    def names(self, folder: str) -> dict[str, int]:
        return {name: status.st_size for name, status in self._walk(folder)}

    def folders(self, folder: str = "") -> list[str]:
        path = self._root / folder
        with sentences(f"{path} cannot be listed"):
            try:
                with os.scandir(path) as entries:
                    return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
            except FileNotFoundError:
                return []

    def modified_unix_s(self, folder: str) -> float:
        try:
            own = (self._root / folder).stat().st_mtime
        except OSError:
            own = 0.0
        return max((status.st_mtime for _, status in self._walk(folder)), default=own)

    def delete(self, name: str) -> None:
        path = self._root / name
        with sentences(f"{path} cannot be removed"):
            path.unlink(missing_ok=True)

    def _walk(self, folder: str) -> Iterator[tuple[str, os.stat_result]]:
        path = self._root / folder
        with sentences(f"{path} cannot be listed"):
            try:
                with os.scandir(path) as scanned:
                    entries = sorted(scanned, key=lambda entry: entry.name)
            except FileNotFoundError:
                return
            for entry in entries:
                name = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir(follow_symlinks=False):
                    yield from self._walk(name)
                else:
                    try:
                        yield name, entry.stat()
                    except FileNotFoundError:  # removed since
                        continue

    @contextmanager
    def _small_file(self, content: bytes) -> Iterator[Path]:
        """Whole and durable, in the root: a folder that is renamed meanwhile does not take it along."""
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


def _temporary_name() -> str:
    return f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"


def _link(temporary: Path, target: Path) -> None:
    """Name a file, unless there is one of the name. Where there are no hard links, by looking before."""
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
        pass  # it has a name nobody looks for, and `prune` finds it


def make_directory(path: Path) -> None:
    """With all above it, each durable in its parent."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        sync_directory(folder.parent)


def sync_directory(path: Path) -> None:
    """Have the names in it on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def sentences(what: str, is_reading: bool = False) -> Iterator[None]:
    """The operating system's refusals as ours. To read one file is refused for that file; all else is the storage's."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingError(f"{what}: {error.strerror}") from None
    except OSError as error:
        is_general = not is_reading and error.errno in STORAGE_TROUBLES
        kind = StorageError if is_general else CheckpointError
        raise kind(f"{what}: {error.strerror or error}{_remedy(error)}") from error


def _remedy(error: OSError) -> str:
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return ". Make room (holdfast checkpoints prune); the checkpoints that are there stay whole"
        case errno.EFBIG:
            return ". The file size limit of this process or file system is too low (ulimit -f)"
        case _:
            return ""
