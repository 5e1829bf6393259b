"""Files that survive a crash, and locks that do not outlive the process that holds them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.errors import UsageError

LOCKS_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
OWNER_BYTES_MAX = 4_096
LOOK_AGAIN_S = 0.02
NOT_REGULAR = "it is not a regular file"
ONCE_BYTES_MAX = 2**20
"""Of a file that is created once: a token, a name."""


class LockUnsupportedError(OSError):
    """The file system has no locks."""


class LockTakenError(OSError):
    """Another process does not give a lock back."""


class FileLock:
    """A lock on a file (flock). The kernel releases it when the process ends, whatever ended it. On shared file systems
    it works across nodes if they pass flock on (NFS since Linux 2.6.12, Lustre with -o flock). `mode` is that of a file
    that is created."""

    def __init__(self, path: Path | str, mode: int = 0o600) -> None:
        self.path, self._mode = Path(path), mode
        self._descriptor = -1

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock."""
        return self._descriptor >= 0

    @property
    def descriptor(self) -> int:
        """The open file of a lock that is held."""
        assert self._descriptor >= 0, "the lock is not held"
        return self._descriptor

    def acquire(self, *, shared: bool = False, create: bool = True, owner: str = "") -> bool:
        """Take the lock; return False if another process has it. `owner` is written to the file, for `read_owner`,
        unless the disk is full. Raises LockUnsupportedError where the file system has no locks."""
        assert self._descriptor < 0, "the lock is held already"
        flags = (os.O_RDONLY if shared and not create else os.O_RDWR) | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        descriptor = open_plain(self.path, flags, self._mode)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
                return False
            if error.errno in LOCKS_UNSUPPORTED:
                raise LockUnsupportedError(
                    error.errno, "this file system has no locks (flock)", str(self.path)
                ) from None
            raise
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        if owner:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, owner.encode()[:OWNER_BYTES_MAX], 0)
        return True

    def wait(self, patience_s: float, *, shared: bool = False, create: bool = True) -> None:
        """Take the lock when other processes give it back. Raises LockTakenError if they do not for so long: any
        process that may open the file may lock it."""
        give_up_at = time.monotonic() + patience_s
        while not self.acquire(shared=shared, create=create):
            if time.monotonic() > give_up_at:
                text = f"another process has had it locked for {patience_s:.0f} s"
                raise LockTakenError(errno.ETIMEDOUT, text, str(self.path))
            time.sleep(LOOK_AGAIN_S)

    def release(self) -> None:
        """Release the lock if it is held. Closing the file alone would leave the lock with every process that was
        forked since, for as long as that process lives."""
        if self._descriptor < 0:
            return
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)
        self._descriptor = -1

    def read_owner(self) -> str:
        """Return what the last owner wrote to the file; empty if there is no file or nothing in it."""
        try:
            return read_small(self.path, OWNER_BYTES_MAX).decode(errors="replace").strip()
        except OSError:
            return ""


def expand_home(path: Path | str) -> Path:
    """Return a path with its leading ~ or ~user replaced. UsageError if there is no such user, or no such home."""
    if "\0" in str(path):
        raise UsageError(f"{str(path)!r:.80} is no path: it has a zero byte")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UsageError(f"{path}: no home directory is known for that user, give an absolute path") from None


def open_regular(path: Path | str, root: Path | None = None) -> int:
    """Return a descriptor to read a regular file. A link, a pipe or a device under its name is an OSError, at once;
    with `root`, so is a link on the way from there: what fills the directory cannot lead a reader out of it."""
    path = Path(path)
    root = root or path.parent
    *folders, file = path.relative_to(root).parts
    folder = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in folders:
            inner = _open_name(name, os.O_PATH | os.O_DIRECTORY, folder)
            os.close(folder)
            folder = inner
        descriptor = _open_name(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY, folder)
    finally:
        os.close(folder)
    return _regular(descriptor, path)


def open_plain(path: Path | str, flags: int, mode: int = 0o600) -> int:
    """Return a descriptor of a regular file, which is made if the flags say so. A link under its name is not followed,
    a pipe or a device is not waited for: both are OSErrors."""
    always = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    return _regular(_open(path, flags | always, mode), path)


def read_small(path: Path | str, bytes_max: int) -> bytes:
    """Return the content of a small file that a user has named, behind links, too. A pipe or a device, which may never
    end, and a file of more bytes than that are an OSError, at once."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    descriptor = _regular(_open(path, flags), path)
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise OSError(errno.EFBIG, f"it has more than {bytes_max} bytes", str(path))
    return content


def _open(path: Path | str, flags: int, mode: int = 0o600, folder: int | None = None) -> int:
    """Open a name. One of a socket, or of a device that is not there, is no regular file's."""
    try:
        return os.open(path, flags, mode, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENODEV):
            raise OSError(errno.EINVAL, NOT_REGULAR, str(path)) from None
        raise


def _regular(descriptor: int, path: Path | str) -> int:
    """Return a descriptor if it is of a regular file; else close it and raise OSError."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, NOT_REGULAR, str(path))


def _open_name(name: str, flags: int, folder: int) -> int:
    try:
        return _open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, folder=folder)
    except OSError as error:
        is_link = error.errno in (errno.ELOOP, errno.ENOTDIR) and stat.S_ISLNK(os.lstat(name, dir_fd=folder).st_mode)
        if not is_link:
            raise
        raise OSError(errno.ELOOP, f"{name} is a symbolic link, which is not followed here") from None


def remove_tree(path: Path, on_removed: Callable[[], None] = lambda: None) -> None:
    """Remove a name and, if it is a directory, all below it. Links are removed, never followed, whatever is done to the
    directories meanwhile. `on_removed` is called after each file and folder below it."""
    try:
        is_folder = stat.S_ISDIR(path.lstat().st_mode)
        for _, folders, files, descriptor in os.fwalk(path, topdown=False) if is_folder else ():
            for name in (*files, *folders):
                _remove_name(name, descriptor)
                on_removed()
    except RecursionError:
        raise OSError(errno.ELOOP, "its folders are nested too deeply: remove it by hand", str(path)) from None
    _remove_name(str(path))


def _remove_name(name: str, folder: int | None = None) -> None:
    try:
        is_folder = stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode)
        os.rmdir(name, dir_fd=folder) if is_folder else os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass  # another process was quicker


def write_atomically(path: Path | str, content: bytes, *, mode: int = 0o600, durable: bool = True) -> None:
    """Replace a file: a reader sees the old content or all of the new one. The file is written beside `path` and
    renamed. If it is to be `durable`, both are synced: after the return the new one survives a loss of power."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def create_once(path: Path | str, content: bytes, *, mode: int = 0o600) -> bytes:
    """Create a file unless it exists, complete or not at all, and return what it holds. If several processes try, the
    first one's content counts."""
    path = Path(path)
    if not path.exists():
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        write_atomically(draft, content, mode=mode)
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    return read_small(path, ONCE_BYTES_MAX)


def sync_directory(path: Path | str) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def allocate(descriptor: int, size_bytes: int) -> None:
    """Give a file `size_bytes` of real space, so that no later write to it can fail for lack of space. Raises OSError
    that says how much was wanted."""
    if size_bytes <= 0:
        return
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        path = _path_of(descriptor)
        text = f"{size_bytes / 2**20:.1f} MiB cannot be allocated for {path}: {os.strerror(error.errno or 0)}"
        raise OSError(error.errno, text) from error


def _path_of(descriptor: int) -> str:
    try:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
    except OSError:
        return f"descriptor {descriptor}"
