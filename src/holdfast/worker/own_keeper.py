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
from holdfast.wire.session import NeedRoom, Room, Sealed
from holdfast.wire.slots import SLOTS, Record, Seat, Wanted, reading

OTHERS_PATIENCE_S = 600.0
"""How long other ranks may take with their parts."""
RETRY_S = 0.05

log = logging.getLogger(__name__)


class OwnKeeper:
    """See snapshots.Keeper. `about` makes the manifest's head from a slot's record."""

    def __init__(self, store: Store, policy: Policy, nonce: str, about: Callable[[Record, Sealed], About]) -> None:
        self._store, self._policy, self._nonce, self._about = store, policy, nonce, about
        self._home = tempfile.TemporaryDirectory(prefix="holdfast-")
        self._files: list[int] = []
        directory = Path(self._home.name) / "seat-0"
        directory.mkdir()
        for name in ("control", *(f"image-{slot}" for slot in range(SLOTS))):
            self._files.append(os.memfd_create(f"holdfast-{name}"))
            (directory / name).symlink_to(f"/proc/{os.getpid()}/fd/{self._files[-1]}")
        self._seat = Seat.create(directory)
        self._thread = ThreadPoolExecutor(1, "holdfast-persist")
        self._writing: list[Future[Found]] = []
        self._lock = threading.Lock()
        self.room: Room | None = None

    def tell(self, message: NeedRoom | Sealed) -> None:
        match message:
            case NeedRoom(size_bytes=size_bytes):
                self._make_room(size_bytes)
            case Sealed(wanted=True):
                with self._lock:
                    self._writing = [one for one in self._writing if not one.done() or one.exception()]
                    self._writing.append(self._thread.submit(self._persist, message))

    def wait(self) -> None:
        """Until all that was saved is complete on storage. Raises what went wrong, once."""
        with self._lock:
            writing, self._writing = self._writing, []
        for one in writing:
            one.result()

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
        """Two images, every page of them: whoever moves in maps them."""
        needed_bytes = SLOTS * (size_bytes - self._seat.room_bytes())
        why = "" if needed_bytes < (free_bytes := _free_bytes()) else f"{free_bytes / 2**20:.0f} MiB of memory are free"
        try:
            for image in self._files[-SLOTS:] if not why else ():
                os.posix_fallocate(image, 0, size_bytes)
        except OSError as error:
            why = str(error.strerror)
        if why:
            why = f"no room for two copies of the state, {size_bytes / 2**20:.0f} MiB each: {why}"
        self.room = Room(directory="" if why else str(self._seat.directory), size_bytes=size_bytes, why=why)

    def _persist(self, message: Sealed) -> Found:
        slot, record = next((s, r) for s, r in self._seat.sealed().items() if r.step == message.step)
        with Writing(self._store, self._about(record, message), self._nonce) as writing:
            with reading(self._seat, slot, record) as memory:
                self._seat.write(slot, record._replace(wanted=Wanted.TAKEN))
                if memory is None:
                    raise CheckpointError(f"the copy of step {record.step} was overwritten before it was written")
                with memoryview(memory) as image:
                    writing.write_part(record.part, image)
            found = self._until_published(writing, record)
        try:
            Catalogue(self._store).prune(self._policy, trusted=[found.step])
        except (HoldfastError, OSError) as error:
            log.warning("old checkpoints stay: %s", error)
        return found

    def _until_published(self, writing: Writing, record: Record) -> Found:
        give_up_at = time.monotonic() + OTHERS_PATIENCE_S
        while (found := writing.publish()) is None:
            if time.monotonic() > give_up_at:
                raise CheckpointError(
                    f"step {record.step}: the other ranks' parts are not there after {OTHERS_PATIENCE_S:.0f} s; do all"
                    " ranks call save, with storage they share?"
                )
            time.sleep(RETRY_S)  # other ranks' parts make no sound
        return found


def _free_bytes() -> int:
    """Memory that nobody needs. Beyond that the kernel does not refuse: it kills."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 2**62
