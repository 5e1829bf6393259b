"""Directories that no other user can read, change, or replace by another one.

A directory is private if it belongs to this user, is not a link, gives others no permission, and if nothing on the way
to it can be renamed by others: each directory above it belongs to this user or to root, and where others may write to
it, it has the sticky bit, as /tmp and /dev/shm do. Whatever is done below a private directory, by whatever name, is
then safe from other users. Members of a group that may write to a directory above it are trusted.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

PRIVATE_MODE = 0o700


class NotPrivateError(OSError):
    """Another user owns a directory, or could replace it."""

    def __init__(self, directory: Path, text: str) -> None:
        super().__init__(errno.EPERM, text, str(directory))


def make_private(directory: Path) -> None:
    """Create a directory, if it is not there, and make certain that it is private. NotPrivateError if it is another
    user's, a link, or can be replaced; another OSError if it cannot be created."""
    directory = directory.absolute()
    directory.parent.mkdir(mode=PRIVATE_MODE, parents=True, exist_ok=True)
    check_above(directory)
    try:
        directory.mkdir(mode=PRIVATE_MODE)
    except FileExistsError:
        pass  # by this process or another
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        _check_own(directory, directory.lstat())  # another user's cannot be opened, and that is what is wrong
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise NotPrivateError(directory, f"{directory} is not a directory but a link or a file") from None
        raise
    try:
        found = os.fstat(descriptor)
        _check_own(directory, found)
        if stat.S_IMODE(found.st_mode) != PRIVATE_MODE:
            os.fchmod(descriptor, PRIVATE_MODE)
    finally:
        os.close(descriptor)


def make_closed(directory: Path) -> None:
    """Create a directory, with those above it that are missing, for this user only; one that is there and is this
    user's own is closed to others."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=PRIVATE_MODE, exist_ok=True)
    found = directory.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and found.st_mode & 0o077:
        directory.chmod(PRIVATE_MODE)


def is_private(directory: Path) -> bool:
    """Return whether a directory is there and is this user's own, closed to others."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _check_own(directory: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise NotPrivateError(directory, f"{directory} belongs to user {found.st_uid}")


def check_above(path: Path) -> None:
    """Raise NotPrivateError if another user could replace a file or directory, by renaming it or one above it."""
    check_owners(path)
    for above, found in _above(path):
        if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            raise NotPrivateError(path, f"every user can write to {above} and could replace {path}")


def check_owners(path: Path) -> None:
    """Raise NotPrivateError if a directory above a file or directory belongs to another user than this one and root."""
    for above, found in _above(path):
        if found.st_uid not in (0, os.geteuid()) and not _is_unmapped(found.st_uid):
            raise NotPrivateError(path, f"{above} belongs to user {found.st_uid}, who could replace {path}")


def _above(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the directories above a path that are there, the links on the way, and where those lead."""
    named, real = path.absolute().parents, Path(os.path.realpath(path.parent), path.name).parents
    for above in dict.fromkeys((*named, *real)):
        try:
            yield above, above.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue


def _is_unmapped(user: int) -> bool:
    """Return whether a number stands for the users of a host that this container knows nothing of."""
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
        mapped = Path("/proc/self/uid_map").read_text().split()
    except (OSError, ValueError):
        return False
    return user == overflow and mapped[2:] != ["4294967295"]
