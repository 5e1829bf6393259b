"""Computes checksums of the images in this node's memory, so that a restore can verify them.

Images that are uploaded get theirs on the way; all others get them here, in a process of its own with the lowest
priority (SCHED_IDLE), which uses what the processors have left over. A thread of the agent would not do: one that waits
for a processor while it holds the interpreter keeps the whole agent waiting.

It takes no locks. An image that is overwritten while it is read gets no checksums, and the next one is read. One that
cannot be read is left out until then. A process that has died, or was stopped by a signal and therefore killed by the
agent, is started again, a few times: after that images are restored without verification, and a warning says so.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from holdfast.snapshots.slot_file import SlotPage, SlotRecord, SlotStatus, find_ranks, map_image
from holdfast.util.blocks import iter_blocks, pack_checksums
from holdfast.util.logs import get_logger
from holdfast.util.processes import module_command

STARTS_MAX = 5
"""How often the process is started: one that dies so often will die again."""

log = get_logger(__name__)


class Checksummer:
    """The agent's end. The process starts with the first image, and ends with the agent."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0

    def wake(self, directory: Path) -> None:
        """Have the images in this directory read: there is another one."""
        if self._process is not None and self._process.poll() is not None:
            self._log_end(self._process.returncode)
        if self._process is None and self._starts < STARTS_MAX:
            self._start(directory)
        if self._process is not None:
            try:
                os.write(self._pipe, b"\n")
            except OSError:
                pass  # it has not read the last few yet, or it is gone: the next call finds out

    def _start(self, directory: Path) -> None:
        self._starts += 1
        command = [*module_command(__spec__.name), str(directory)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # the terminal's Ctrl-C is for the agent
        )
        os.set_blocking(self._pipe, False)

    def _log_end(self, code: int) -> None:
        self.close()
        if self._starts == 1:
            log.warning("checksummer-died", f"the process that verifies snapshots ended with {code}; restarting it")
        elif self._starts == STARTS_MAX:
            log.warning(
                "checksummer-given-up",
                f"the process that verifies snapshots ended {STARTS_MAX} times, now with {code}: from now on snapshots"
                " that are not uploaded are restored without verification",
            )

    def close(self) -> None:
        """End the process; it has nothing that must be finished."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.kill()
            process.wait()

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """The process, if it was started and is not known to have ended."""
        return self._process if self._process is not None and self._process.returncode is None else None

    @property
    def _pipe(self) -> int:
        assert self._process is not None and self._process.stdin is not None
        return self._process.stdin.fileno()


class SnapshotReader:
    """The end that runs in the process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pages: dict[Path, SlotPage] = {}
        self._mapped: dict[Path, mmap.mmap] = {}
        """Kept: a mapping whose pages are in place is read at the speed of memory."""

    def read_all(self) -> None:
        """Read every image that has no checksums yet, the newest first. One that cannot be read is left out."""
        bad: set[tuple[Path, int]] = set()
        self._open_pages()
        while (found := self._next(bad)) is not None:
            page, slot, record = found
            try:
                if not self._read(page, slot, record):
                    return
            except (OSError, ValueError):  # its file is gone, or shorter than its record says: a restore finds out
                bad.add((page.directory, slot))

    def _open_pages(self) -> None:
        for directory in find_ranks(self._directory).values():
            if directory not in self._pages:
                try:
                    self._pages[directory] = SlotPage.open(directory)
                except (OSError, ValueError):
                    continue  # it is being made: its first image comes later

    def _next(self, bad: Collection[tuple[Path, int]]) -> tuple[SlotPage, int, SlotRecord] | None:
        unread = [
            (record.image.created_ns, page, slot, record)
            for page in self._pages.values()
            for slot, record in page.sealed().items()
            if (page.directory, slot) not in bad and page.details(slot, record.image) is None
        ]
        return max(unread, key=lambda one: one[0])[1:] if unread else None

    def _read(self, page: SlotPage, slot: int, record: SlotRecord) -> bool:
        """Compute the checksums of an image; return False if it changed in the meantime."""
        memory, checksums = self._map(page.path(slot), record.image.size_bytes), []
        with memoryview(memory)[: record.image.size_bytes] as image:
            for _, checksum in iter_blocks(image):
                checksums.append(checksum)
                now = page.record(slot)
                if (now.status, now.image.created_ns) != (SlotStatus.SEALED, record.image.created_ns):
                    return False
        page.write_details(slot, record.image, pack_checksums(checksums))
        return True

    def _map(self, path: Path, size_bytes: int) -> mmap.mmap:
        known = self._mapped.get(path)
        if known is None or len(known) < size_bytes:
            self._mapped[path] = known = map_image(path, size_bytes, is_writable=False)
        return known


def main() -> None:
    """Read images as often as the agent asks for it, until the agent is gone."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        os.nice(19)  # a sandbox that does not allow it
    reader = SnapshotReader(Path(sys.argv[1]))
    while os.read(sys.stdin.fileno(), 4_096):  # one byte for each image; nothing: the agent is gone
        reader.read_all()


if __name__ == "__main__":
    main()
