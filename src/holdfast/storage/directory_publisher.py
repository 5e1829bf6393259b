"""Checkpoints in a directory.

<root>/step-120/manifest.json, part-0.safetensors, …, .metadata     a checkpoint
       step-120.damaged-<nonce>/                                     one found damaged when it was written again
       .step-120.<nonce>.partial/, .step-120.<nonce>.lock            an attempt, and the lock of its writers
       .step-120.<random>.removed/                                   on its way out
       .lock                                                         held by the process that renames here
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from holdfast.errors import BusyError, CheckpointError, MissingError
from holdfast.storage import failpoints, locks
from holdfast.storage.directory import TEMPORARY_PREFIX, make_directory, translated_errors
from holdfast.storage.manifest import MANIFEST, MANIFEST_BYTES_MAX, Manifest, note_file, step_folder, step_of
from holdfast.storage.publish import Clock, UnfinishedAttempt
from holdfast.storage.stores import Store
from holdfast.util.files import open_regular, remove_tree, sync_directory
from holdfast.util.logs import get_logger

PARTIAL = re.compile(r"\.step-(0|[1-9][0-9]{0,17})\.([0-9a-zA-Z_-]{1,128})\.(partial|removed)\Z")
NAME_TAKEN = (errno.ENOTEMPTY, errno.EEXIST)

log = get_logger(__name__)


class DirectoryPublisher:
    """The publish protocol of a directory: folders are renamed."""

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
        """Return the steps of all names of checkpoints, also of files and links, which are damaged ones."""
        with translated_errors(f"{self._root} cannot be listed"):
            try:
                names = [path.name for path in self._root.iterdir()]
            except FileNotFoundError:
                return []
        steps = (step_of(name) for name in names)
        return sorted((step for step in steps if step is not None), reverse=True)

    def is_published(self, step: int) -> bool:
        with translated_errors(f"{self._root} cannot be read"):
            return os.path.lexists(self._root / step_folder(step))

    def publish(self, step: int, nonce: str, manifest: bytes) -> bool:
        partial, target = self._root / self.partial(step, nonce), self._root / step_folder(step)
        try:
            self.store.put_new(f"{partial.name}/{MANIFEST}", manifest)
            failpoints.reach("manifest-written")
            with translated_errors(f"{target} cannot be published"), self._in_turn():
                sync_directory(partial)
                partial.rename(target)
                failpoints.reach("published")
                sync_directory(self._root)
        except MissingError:
            return False
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in NAME_TAKEN:
                return False
            raise
        failpoints.reach("synced")
        self._tidy(target)
        self._lock_path(step, nonce).unlink(missing_ok=True)
        failpoints.reach("tidied")
        return True

    def move_aside(self, step: int, nonce: str, manifest: bytes | None) -> None:
        target = self._root / step_folder(step)
        with translated_errors(f"{target} cannot be put aside"), self._in_turn():
            if not os.path.lexists(target) or self._manifest_bytes(target) != manifest:
                return  # another process has moved it aside and published a complete one
            aside = target.with_name(f"{target.name}.damaged-{nonce}-{secrets.token_hex(2)}")
            target.rename(aside)
            sync_directory(self._root)
        log.warning("checkpoint-damaged", f"{target} is damaged; it is kept as {aside.name}")

    def withdraw(self, step: int, manifest: Manifest | None) -> None:
        target = self._root / step_folder(step)
        with translated_errors(f"{target} cannot be removed"):
            with ExitStack() as stack:
                if not self._is_alone(stack, target):
                    raise BusyError(f"{target} is being read: it is not removed")
                failpoints.reach("removal-begun")
                gone = self._root / f".{target.name}.{secrets.token_hex(4)}.removed"
                target.rename(gone)
                sync_directory(self._root)
            failpoints.reach("removal-hidden")
            _remove(gone)

    def unfinished(self) -> list[UnfinishedAttempt]:
        found = []
        for folder in self.store.folders():
            if match := PARTIAL.match(folder):
                sizes = self.store.names(folder)
                found.append(
                    UnfinishedAttempt(
                        step=int(match[1]),
                        nonce=match[2],
                        folder=folder,
                        size_bytes=sum(sizes.values()),
                        modified_unix_s=self.store.modified_unix_s(folder),
                        is_removal=match[3] == "removed",
                    )
                )
        return found

    def sweep(self, left: UnfinishedAttempt, grace_s: float) -> bool:
        folder = self._root / left.folder
        if left.is_removal:
            with translated_errors(f"{folder} cannot be removed"):
                _remove(folder)
            return True
        lock = self._lock_path(left.step, left.nonce)
        with translated_errors(f"{folder} cannot be removed"):
            locks.touch(lock)
            with locks.exclusive(lock) as is_alone:
                if not is_alone or self._clock() - self.store.modified_unix_s(left.folder) < grace_s:
                    return False
                gone = self._root / f".step-{left.step}.{secrets.token_hex(4)}.removed"
                folder.rename(gone)
                lock.unlink(missing_ok=True)
            _remove(gone)
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
        """Remove files that never got their name, and locks of attempts that are over."""
        with translated_errors(f"{self._root} cannot be listed"):
            orphans = [path for path in self._root.glob(".step-*.lock") if not path.with_suffix(".partial").exists()]
            for path in (*self._root.glob(f"{TEMPORARY_PREFIX}*"), *orphans):
                with suppress(FileNotFoundError):  # its owner or another sweeper removed it first
                    if self._clock() - path.lstat().st_mtime >= grace_s:
                        path.unlink()

    @contextmanager
    def reading(self, step: int, manifest: Manifest) -> Iterator[None]:
        path = self._root / step_folder(step) / MANIFEST
        with ExitStack() as stack:
            with translated_errors(f"{path} cannot be read", is_reading=True):
                descriptor = _shared(stack, path)
            if descriptor is not None and not _is_still(path, descriptor):
                raise MissingError(f"{path.parent} was removed a moment ago")
            yield

    @contextmanager
    def writing(self, step: int, nonce: str) -> Iterator[None]:
        path = self._lock_path(step, nonce)
        with ExitStack() as stack:
            with translated_errors(f"{path} cannot be written"):
                make_directory(self._root)
                locks.touch(path)
                _shared(stack, path)
            yield

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        with locks.in_turn(self._root / ".lock"):
            yield

    def _is_alone(self, stack: ExitStack, target: Path) -> bool:
        """Return whether no process reads the checkpoint, and lock new readers out while the stack lasts. One without a
        manifest that is a file cannot be read."""
        try:
            os.close(open_regular(target / MANIFEST, self._root))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL):
                return True
        try:
            return stack.enter_context(locks.exclusive(target / MANIFEST))
        except FileNotFoundError:
            return True

    def _lock_path(self, step: int, nonce: str) -> Path:
        return self._root / f".step-{step}.{nonce}.lock"

    def _manifest_bytes(self, target: Path) -> bytes | None:
        try:
            return self.store.read(f"{target.name}/{MANIFEST}", 0, MANIFEST_BYTES_MAX)
        except CheckpointError:
            return None

    def _tidy(self, target: Path) -> None:
        """Remove the notes, which are not needed any more, and the temporary files of writers that died."""
        for path in (*target.glob(note_file(0).replace("0", "*")), *target.glob(f"{TEMPORARY_PREFIX}*")):
            try:
                path.unlink(missing_ok=True)
            except OSError:
                return  # they do no harm


def _shared(stack: ExitStack, path: Path) -> int | None:
    try:
        return stack.enter_context(locks.shared(path))
    except (locks.LockUnsupportedError, locks.LockTakenError) as error:
        text = f"{path} is not locked ({error.strerror}): `holdfast checkpoints` cannot tell that it is in use"
        log.warning("lock-unsupported", text)
        return None


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove(folder: Path) -> None:
    remove_tree(folder, lambda: failpoints.reach("removal-half"))
