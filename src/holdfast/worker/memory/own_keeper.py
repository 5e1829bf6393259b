"""Stands in for the agent where there is none: memory for two images, and a thread that writes them to storage.

For `hf.Checkpointer` under another launcher, or none. The images are files of memory without a name (memfd): they go
with the process, whatever ends it. In a directory of the process's own they are found by links to its open files.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from holdfast.errors import CheckpointError, HoldfastError
from holdfast.storage.catalogue import Catalogue, Found
from holdfast.storage.manifest import About
from holdfast.storage.retention import Policy
from holdfast.storage.stores import Store
from holdfast.storage.writing import Writing
from holdfast.wire.cgroups import memory_headroom
from holdfast.wire.session import NeedRoom, Room, Sealed
from holdfast.wire.slots import SLOTS, Record, Seat, Wanted, reading

OTHERS_PATIENCE_S = 600.0
"""How long other ranks may take with their parts."""
RETRY_S = 0.05

log = logging.getLogger(__name__)


class OwnKeeper:
    """See snapshots.Keeper. `about` makes the manifest's head from a slot's record."""

    def __init__(self, store: Store, policy: Policy, about: Callable[[Record, Sealed], About]) -> None:
        self._store, self._policy, self._about = store, policy, about
        self.nonce = ""
        """The name of this run's attempts, the same on all ranks; to be known before the first is written."""
        self._home = tempfile.TemporaryDirectory(prefix="holdfast-")
        self._files: list[int] = []
        directory = Path(self._home.name) / "seat-0"
        directory.mkdir()
        for name in ("control", *(f"image-{slot}" for slot in range(SLOTS))):
            self._files.append(os.memfd_create(f"holdfast-{name}"))
            (directory / name).symlink_to(f"/proc/{os.getpid()}/fd/{self._files[-1]}")
        self._seat = Seat.create(directory)
        self._thread = ThreadPoolExecutor(1, "holdfast-persist")
        self._writing: list[Future[None]] = []
        self._lock = threading.Lock()
        self._is_leaving = False
        self.room: Room | None = None

    def tell(self, message: NeedRoom | Sealed) -> None:
        match message:
            case NeedRoom(size_bytes=size_bytes):
                self._make_room(size_bytes)
            case Sealed(wanted=True):
                with self._lock:
                    self._writing = [one for one in self._writing if not one.done() or one.exception()]
                    self._writing.append(self._thread.submit(self._persist_or_warn, message))

    def wait(self) -> None:
        """Until all that was saved is complete on storage. Raises what went wrong, once."""
        with self._lock:
            writing, self._writing = self._writing, []
        for one in writing:
            one.result()

    def leave(self) -> None:
        """Before the process ends: until our parts are written. The last of all ranks to be so far publishes, so nobody
        waits for others; some of them may be dead."""
        self._is_leaving = True
        self.wait()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._seat.close()
            for file in self._files:
                os.close(file)
            self._home.cleanup()

    def _make_room(self, size_bytes: int) -> None:
        """Two images, without their pages: whoever moves in has those made, one image after the other."""
        needed_bytes = SLOTS * (size_bytes - self._seat.room_bytes())
        free_bytes, where = memory_headroom()  # beyond that the kernel does not refuse: it kills
        why = "" if needed_bytes < free_bytes else f"{free_bytes / 2**20:.0f} MiB of memory are free {where}"
        try:
            for image in self._files[-SLOTS:] if not why else ():
                os.ftruncate(image, max(size_bytes, os.fstat(image).st_size))
        except OSError as error:
            why = str(error.strerror)
        if why:
            why = f"no room for two copies of the state, {size_bytes / 2**20:.0f} MiB each: {why}"
        self.room = Room(directory="" if why else str(self._seat.directory), size_bytes=size_bytes, why=why)

    def _persist_or_warn(self, message: Sealed) -> None:
        """Who hears of it only at the end of the training hears of it too late."""
        try:
            self._persist(message)
        except (HoldfastError, OSError) as error:
            log.warning("step %d is not saved: %s", message.step, error)
            raise

    def _persist(self, message: Sealed) -> None:
        slot, record = self._image_of(message)
        with Writing(self._store, self._about(record, message), self.nonce) as writing:
            with reading(self._seat, slot, record) as memory:
                self._seat.write(slot, record._replace(wanted=Wanted.TAKEN))
                if memory is None:
                    raise CheckpointError(f"the copy of step {record.step} was overwritten before it was written")
                with memoryview(memory) as image:
                    writing.write_part(record.part, image)
            found = self._until_published(writing, record)
        if found is None:
            return
        if found.manifest.nonce != self.nonce:
            log.warning("%s was there already, of another run: that one stays, and ours is not kept", found.url)
        try:
            Catalogue(self._store).prune(self._policy, trusted=[found.step])
        except (HoldfastError, OSError) as error:
            log.warning("old checkpoints stay: %s", error)

    def _image_of(self, message: Sealed) -> tuple[int, Record]:
        for slot, record in self._seat.sealed().items():
            if (record.step, record.created_ns) == (message.step, message.created_ns):
                return slot, record
        raise CheckpointError(f"the copy of step {message.step} was overwritten before it was written")

    def _until_published(self, writing: Writing, record: Record) -> Found | None:
        give_up_at = time.monotonic() + OTHERS_PATIENCE_S
        while (found := writing.publish()) is None:
            if self._is_leaving:
                return None
            if time.monotonic() > give_up_at:
                raise CheckpointError(
                    f"step {record.step}: the other ranks' parts are not there after {OTHERS_PATIENCE_S:.0f} s; do all"
                    " ranks call save, with storage they share?"
                )
            time.sleep(RETRY_S)  # other ranks' parts make no sound
        return found
