"""Checkpoints in a directory.

<root>/step-120/manifest.json, part-0.safetensors, …, .metadata     a checkpoint
       step-120.damaged-<nonce>/                                     one found damaged when it was written anew
       .step-120.<nonce>.partial/, .step-120.<nonce>.lock            an attempt, and the lock of its writers
       .step-120.<random>.removed/                                   on its way out
       .lock                                                         taken in turn by who renames here
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from holdfast.errors import BusyError, CheckpointError, MissingError
from holdfast.storage import locks, points
from holdfast.storage.directory import TEMPORARY_PREFIX, make_directory, sentences, sync_directory
from holdfast.storage.manifest import MANIFEST, Manifest, note_file, step_folder, step_of
from holdfast.storage.shelves import Clock, Unfinished
from holdfast.storage.stores import Store

PARTIAL = re.compile(r"\.step-(0|[1-9][0-9]{0,17})\.([0-9a-zA-Z_-]{1,128})\.(partial|removed)\Z")
TAKEN = (errno.ENOTEMPTY, errno.EEXIST)

log = logging.getLogger(__name__)


class DirectoryShelf:
    """By renaming folders."""

    def __init__(self, store: Store, clock: Clock) -> None:
        assert store.local is not None
        self.store = store
        self._root = store.local
        self._clock = clock

    def partial(self, step: int, nonce: str) -> str:
        return f".step-{step}.{nonce}.partial"

    def file_prefix(self, nonce: str) -> str:
        return ""

    def steps(self) -> list[int]:
        steps = (step_of(folder) for folder in self.store.folders())
        return sorted((step for step in steps if step is not None), reverse=True)

    def is_there(self, step: int) -> bool:
        with sentences(f"{self._root} cannot be read"):
            return (self._root / step_folder(step)).is_dir()

    def publish(self, step: int, nonce: str, manifest: bytes) -> bool:
        partial, target = self._root / self.partial(step, nonce), self._root / step_folder(step)
        try:
            self.store.put_new(f"{partial.name}/{MANIFEST}", manifest)
            points.reach("manifest-written")
            with sentences(f"{target} cannot be published"), self._in_turn():
                sync_directory(partial)
                partial.rename(target)
                points.reach("published")
                sync_directory(self._root)
        except MissingError:
            return False
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in TAKEN:
                return False
            raise
        points.reach("synced")
        self._tidy(target)
        self._lock_path(step, nonce).unlink(missing_ok=True)
        points.reach("tidied")
        return True

    def put_aside(self, step: int, nonce: str, manifest: bytes | None) -> None:
        target = self._root / step_folder(step)
        with sentences(f"{target} cannot be put aside"), self._in_turn():
            if not target.exists() or self._manifest_bytes(target) != manifest:
                return  # somebody else has, and has put a whole one in its place
            aside = target.with_name(f"{target.name}.damaged-{nonce}-{secrets.token_hex(2)}")
            target.rename(aside)
            sync_directory(self._root)
        log.warning("%s is damaged; it is kept as %s", target, aside.name)

    def withdraw(self, step: int, manifest: Manifest | None) -> None:
        target = self._root / step_folder(step)
        with sentences(f"{target} cannot be removed"):
            with ExitStack() as stack:
                if not self._is_alone(stack, target):
                    raise BusyError(f"{target} is being read: it is not removed")
                points.reach("removal-begun")
                gone = self._root / f".{target.name}.{secrets.token_hex(4)}.removed"
                target.rename(gone)
                sync_directory(self._root)
            points.reach("removal-hidden")
            _remove_tree(gone)

    def unfinished(self) -> list[Unfinished]:
        found = []
        for folder in self.store.folders():
            if match := PARTIAL.match(folder):
                sizes = self.store.names(folder)
                found.append(
                    Unfinished(
                        step=int(match[1]),
                        nonce=match[2],
                        folder=folder,
                        size_bytes=sum(sizes.values()),
                        modified_unix_s=self.store.modified_unix_s(folder),
                        is_removal=match[3] == "removed",
                    )
                )
        return found

    def sweep(self, left: Unfinished, grace_s: float) -> bool:
        folder = self._root / left.folder
        if left.is_removal:
            with sentences(f"{folder} cannot be removed"):
                _remove_tree(folder)
            return True
        lock = self._lock_path(left.step, left.nonce)
        with sentences(f"{folder} cannot be removed"):
            locks.touch(lock)
            with locks.exclusive(lock) as is_alone:
                if not is_alone or self._clock() - self.store.modified_unix_s(left.folder) < grace_s:
                    return False
                gone = self._root / f".step-{left.step}.{secrets.token_hex(4)}.removed"
                folder.rename(gone)
                lock.unlink(missing_ok=True)
            _remove_tree(gone)
        return True

    def forget(self, step: int, nonce: str) -> None:
        try:
            (self._root / self.partial(step, nonce)).rmdir()
        except FileNotFoundError:
            pass
        except OSError:
            return  # others of the attempt are still in there
        self._lock_path(step, nonce).unlink(missing_ok=True)

    def sweep_temporaries(self, grace_s: float) -> None:
        """Files that never got their name, locks of attempts that are over."""
        with sentences(f"{self._root} cannot be listed"):
            orphans = [path for path in self._root.glob(".step-*.lock") if not path.with_suffix(".partial").exists()]
            for path in (*self._root.glob(f"{TEMPORARY_PREFIX}*"), *orphans):
                with suppress(FileNotFoundError):  # its owner, or another who sweeps, was quicker
                    if self._clock() - path.lstat().st_mtime >= grace_s:
                        path.unlink()

    @contextmanager
    def reading(self, step: int, manifest: Manifest) -> Iterator[None]:
        path = self._root / step_folder(step) / MANIFEST
        with ExitStack() as stack:
            with sentences(f"{path} cannot be read", is_reading=True):
                descriptor = _shared(stack, path)
            if descriptor is not None and not _is_still(path, descriptor):
                raise MissingError(f"{path.parent} was removed a moment ago")
            yield

    @contextmanager
    def writing(self, step: int, nonce: str) -> Iterator[None]:
        path = self._lock_path(step, nonce)
        with ExitStack() as stack:
            with sentences(f"{path} cannot be written"):
                make_directory(self._root)
                locks.touch(path)
                _shared(stack, path)
            yield

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        with locks.in_turn(self._root / ".lock"):
            yield

    def _is_alone(self, stack: ExitStack, target: Path) -> bool:
        """Whether nobody reads it, nor begins to while the stack lasts. One without a manifest cannot be read."""
        try:
            return stack.enter_context(locks.exclusive(target / MANIFEST))
        except FileNotFoundError:
            return True

    def _lock_path(self, step: int, nonce: str) -> Path:
        return self._root / f".step-{step}.{nonce}.lock"

    def _manifest_bytes(self, target: Path) -> bytes | None:
        try:
            return (target / MANIFEST).read_bytes()
        except OSError:
            return None

    def _tidy(self, target: Path) -> None:
        """The notes have served; what writers that died left unnamed never will."""
        for path in (*target.glob(note_file(0).replace("0", "*")), *target.glob(f"{TEMPORARY_PREFIX}*")):
            try:
                path.unlink(missing_ok=True)
            except OSError:
                return  # they harm nobody


def _shared(stack: ExitStack, path: Path) -> int | None:
    try:
        return stack.enter_context(locks.shared(path))
    except locks.LockUnsupportedError as error:
        log.warning("%s is not locked, `holdfast checkpoints` cannot tell that it is in use: %s", path, error.strerror)
        return None


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        points.reach("removal-half")
    folder.rmdir()
