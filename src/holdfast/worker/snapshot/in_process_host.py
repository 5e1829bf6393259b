"""Stands in for the agent where there is none: memory for two images, and a thread that uploads them.

For `hf.Checkpointer` under another launcher, or none. The images are files of memory without a name (memfd): they go
with the process, whatever ends it. In a directory of the process's own they are found by links to its open files. The
uploads are those of an agent (snapshots/uploader.py), in an event loop in a thread of its own.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import tempfile
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from holdfast.errors import CheckpointError
from holdfast.snapshots.slot_file import SLOTS, SlotImage, SlotPage, rank_directory
from holdfast.snapshots.uploader import CheckpointUploader
from holdfast.util.cgroups import memory_headroom
from holdfast.wire.worker_messages import AllocateBuffers, BuffersReady, SnapshotSealed


class InProcessSnapshotHost:
    """The memory and the uploads of a process without an agent (buffers.SnapshotHost)."""

    def __init__(self, url: str, keep: str) -> None:
        self._url, self._keep = url, keep
        self._home = tempfile.TemporaryDirectory(prefix="holdfast-")
        self._files: list[int] = []
        directory = rank_directory(Path(self._home.name), 0)
        directory.mkdir()
        for name in ("control", *(f"image-{slot}" for slot in range(SLOTS))):
            self._files.append(os.memfd_create(f"holdfast-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            fcntl.fcntl(self._files[-1], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # what is mapped stays there
            (directory / name).symlink_to(f"/proc/{os.getpid()}/fd/{self._files[-1]}")
        self._page = SlotPage.create(directory)
        self._uploader = CheckpointUploader(self, keep, lambda step, url: None, writers=1, stores_checksums=False)
        self._uploader.open(os.environ.get("TORCHELASTIC_RUN_ID", ""), "")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="holdfast-uploads", daemon=True)
        self._thread.start()
        self._uploads: list[Future[str]] = []
        self._lock = threading.Lock()
        self.buffers_ready: BuffersReady | None = None

    def name_attempts(self, nonce: str) -> None:
        """Set the name of this run's attempts, the same on all ranks, before the first is written."""
        self._uploader.nonce = nonce

    def tell(self, message: AllocateBuffers | SnapshotSealed) -> None:
        """Allocate buffers, or begin an upload."""
        match message:
            case AllocateBuffers(size_bytes=size_bytes):
                self._allocate(size_bytes)
            case SnapshotSealed(wanted=True):
                upload = Future[str]()
                with self._lock:
                    self._uploads = [one for one in self._uploads if not one.done() or one.result()]
                    self._uploads.append(upload)
                message = msgspec.structs.replace(message, url=self._url, keep=self._keep)
                self._loop.call_soon_threadsafe(self._uploader.upload, 0, message, upload.set_result)

    def images(self) -> Sequence[SlotImage]:
        """Return the complete images (uploader.UploadSource)."""
        return [SlotImage(self._page, slot, record, record.image) for slot, record in self._page.sealed().items()]

    def complete_version(self) -> int:
        """Return that no step is known to be complete on all ranks: nothing is rescued."""
        return -1

    def wait(self) -> None:
        """Wait until all that was saved is complete on storage. Raises CheckpointError, once, if something is not."""
        with self._lock:
            uploads, self._uploads = self._uploads, []
        if problems := [problem for upload in uploads if (problem := upload.result())]:
            raise CheckpointError("; ".join(problems))

    def leave(self) -> None:
        """Wait until our parts are written, before the process ends. The last of all ranks to get there publishes, so
        none waits for others; some of them may be dead."""
        self._run(self._uploader.drain(others_wait_s=0.0))
        self.wait()

    def close(self) -> None:
        """Wait for all uploads, and give the memory back."""
        try:
            self.wait()
        finally:
            self._run(self._uploader.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._page.close()
            for file in self._files:
                os.close(file)
            self._home.cleanup()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _allocate(self, size_bytes: int) -> None:
        """Allocate two images without their pages: the process that maps them has those made, one after the other."""
        needed_bytes = SLOTS * (size_bytes - self._page.capacity_bytes())
        free_bytes, where = memory_headroom()  # beyond that the kernel does not refuse: it kills
        why = "" if needed_bytes < free_bytes else f"{free_bytes / 2**20:.0f} MiB of memory are free {where}"
        try:
            for image in self._files[-SLOTS:] if not why else ():
                os.ftruncate(image, max(size_bytes, os.fstat(image).st_size))
        except OSError as error:
            why = str(error.strerror)
        if why:
            why = f"no room for two copies of the state, {size_bytes / 2**20:.0f} MiB each: {why}"
        self.buffers_ready = BuffersReady(
            directory="" if why else str(self._page.directory), size_bytes=size_bytes, why=why
        )
