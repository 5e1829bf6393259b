"""Checkpoints in an object store, or whatever has no atomic rename of folders.

<prefix>/step-120/manifest.json                           a checkpoint: put last, if there is none
                  <nonce>/part-0.safetensors, …, .metadata   its files, which stock readers open from that folder
                  <other nonce>/…                            another attempt at the step, garbage unless it goes on
                  manifest.json.damaged-<nonce>              what was found damaged when the step was written again
                  <random>.lease                             a reader is active
         step-120/<nonce>/<random>.lease                     a writer is active
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from holdfast.errors import BusyError, CheckpointError, MissingError
from holdfast.storage import failpoints
from holdfast.storage.manifest import (
    MANIFEST,
    MANIFEST_BYTES_MAX,
    NONCE,
    Manifest,
    exists,
    note_file,
    read_manifest,
    step_folder,
    step_of,
)
from holdfast.storage.object_locks import SUFFIX, lease, live_leases
from holdfast.storage.publish import Clock, UnfinishedAttempt
from holdfast.storage.stores import Store
from holdfast.util.logs import get_logger

REQUESTS_AT_ONCE = 8
ASIDE = ".damaged-"

log = get_logger(__name__)


class ObjectPublisher:
    """The publish protocol of an object store: the manifest is put last and deleted first."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self.store = store
        self._clock = clock

    def partial(self, step: int, nonce: str) -> str:
        return f"{step_folder(step)}/{nonce}"

    def file_prefix(self, nonce: str) -> str:
        return f"{nonce}/"

    def steps(self) -> list[int]:
        steps = [step for folder in self.store.folders() if (step := step_of(folder)) is not None]
        with ThreadPoolExecutor(REQUESTS_AT_ONCE, thread_name_prefix="holdfast-list") as pool:
            are_there = list(pool.map(self.is_published, steps))
        return sorted((step for step, is_published in zip(steps, are_there, strict=True) if is_published), reverse=True)

    def is_published(self, step: int) -> bool:
        return exists(self.store, f"{step_folder(step)}/{MANIFEST}")

    def publish(self, step: int, nonce: str, manifest: bytes) -> bool:
        name = f"{step_folder(step)}/{MANIFEST}"
        damaged = self._damaged_manifest(step, nonce)
        done = self.store.put_new(name, manifest) if damaged is None else self.store.replace(name, manifest, damaged)
        if not done:
            return False
        for point in ("manifest-written", "published", "synced"):
            failpoints.reach(point)
        self._tidy(step, nonce)
        failpoints.reach("tidied")
        return True

    def move_aside(self, step: int, nonce: str, manifest: bytes | None) -> None:
        """Store a copy of the damaged manifest. The original stays until the new one replaces it, and its files are
        under their own nonce."""
        if manifest is not None:
            self.store.put_new(self._aside(step, nonce), manifest)
            log.warning("checkpoint-damaged", f"{self.store.url}/{step_folder(step)} is damaged; its manifest is kept")

    def withdraw(self, step: int, manifest: Manifest | None) -> None:
        folder = step_folder(step)
        self._refuse_if_read(folder)
        failpoints.reach("removal-begun")
        self._hide(folder)
        failpoints.reach("removal-hidden")
        nonces = self._idle(folder) if manifest is None else {manifest.nonce}
        for name in self.store.names(folder):
            rest = name[len(folder) + 1 :]
            if "/" not in rest or rest.partition("/")[0] in nonces:
                self.store.delete(name)
                failpoints.reach("removal-half")

    def unfinished(self) -> list[UnfinishedAttempt]:
        found = []
        for folder in self.store.folders():
            step = step_of(folder)
            for nonce in [] if step is None else self._unpublished(folder):
                path = f"{folder}/{nonce}"
                if not (names := self.store.names(path)):
                    continue  # some file systems keep empty folders
                size, modified = sum(names.values()), self.store.modified_unix_s(path)
                found.append(
                    UnfinishedAttempt(
                        step=step or 0, nonce=nonce, folder=path, size_bytes=size, modified_unix_s=modified
                    )
                )
        return found

    def sweep(self, left: UnfinishedAttempt, grace_s: float) -> bool:
        now = self._clock()
        if now - self.store.modified_unix_s(left.folder) < grace_s or live_leases(self.store, left.folder, now):
            return False
        if left.nonce not in self._unpublished(step_folder(left.step)):
            return False
        for name in self.store.names(left.folder):
            self.store.delete(name)
            failpoints.reach("removal-half")
        return True

    def forget(self, step: int, nonce: str) -> None:
        """Do nothing: folders are name prefixes here, so nothing is left of them."""

    def sweep_temporaries(self, grace_s: float) -> None:
        """Do nothing: objects appear complete, so there are no temporary files."""

    @contextmanager
    def reading(self, step: int, manifest: Manifest) -> Iterator[None]:
        folder = step_folder(step)
        with lease(self.store, folder, self._clock):
            try:  # after the lease, as `withdraw` looks for leases after it has hidden the manifest: one sees the other
                self.store.size(f"{folder}/{MANIFEST}")
            except MissingError:
                raise MissingError(f"{self.store.url}/{folder} was removed a moment ago") from None
            yield

    @contextmanager
    def writing(self, step: int, nonce: str) -> Iterator[None]:
        with lease(self.store, self.partial(step, nonce), self._clock):
            yield

    def _hide(self, folder: str) -> None:
        name = f"{folder}/{MANIFEST}"
        try:
            content = self.store.read(name, 0, MANIFEST_BYTES_MAX + 1)
        except MissingError:
            return
        self.store.delete(name)
        try:
            self._refuse_if_read(folder)
        except BusyError:
            if len(content) <= MANIFEST_BYTES_MAX:  # a larger one is no manifest
                self.store.put_new(name, content)
            raise

    def _refuse_if_read(self, folder: str) -> None:
        if readers := live_leases(self.store, folder, self._clock()):
            raise BusyError(f"{self.store.url}/{folder} is being read by {readers[0]}: it is not removed")

    def _unpublished(self, folder: str) -> list[str]:
        """Return the attempts that are not the checkpoint. If its manifest is damaged, which attempt that is cannot be
        known; and the files of one that was put aside stay with it."""
        if any(name.startswith(f"{folder}/{MANIFEST}{ASIDE}") for name in self.store.names(folder)):
            return []
        nonces = [nonce for nonce in self.store.folders(folder) if NONCE.match(nonce)]
        try:
            manifest = read_manifest(self.store, folder, step_of(folder) or 0, self.store.names(folder))
        except MissingError:
            return nonces
        except CheckpointError:
            return []
        return [nonce for nonce in nonces if nonce != manifest.nonce]

    def _idle(self, folder: str) -> set[str]:
        now = self._clock()
        return {nonce for nonce in self.store.folders(folder) if not live_leases(self.store, f"{folder}/{nonce}", now)}

    def _damaged_manifest(self, step: int, nonce: str) -> bytes | None:
        try:
            return self.store.read(self._aside(step, nonce), 0, MANIFEST_BYTES_MAX)
        except MissingError:
            return None

    def _aside(self, step: int, nonce: str) -> str:
        return f"{step_folder(step)}/{MANIFEST}{ASIDE}{nonce}"

    def _tidy(self, step: int, nonce: str) -> None:
        """Remove the notes, which are not needed any more."""
        start, end = note_file(0).split("0")
        for name in self.store.names(self.partial(step, nonce)):
            file = name.rpartition("/")[2]
            if (file.startswith(start) and file.endswith(end)) or file.endswith(SUFFIX):
                self.store.delete(name)
