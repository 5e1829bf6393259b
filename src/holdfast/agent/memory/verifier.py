"""Checksums of the images in this node's memory, so that whoever restores from one knows that it is what was written.

Those that are written to storage get theirs on the way; all others get them here, in a process of its own, of the
lowest priority (SCHED_IDLE): it takes what the processors have left over. A thread of the agent's would not do: one
that waits for a processor while it holds the interpreter keeps the whole agent waiting.

It takes no locks. An image that is overwritten while it is read gets no checksums, and the next one is looked at. One
that cannot be read is left out until the next. A process that has died is started again, a few times: after that
images are believed as they are, and that is said.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import structlog
from crc32c import crc32c

from holdfast.storage.stores import BLOCK_BYTES
from holdfast.wire.slots import Record, Seat, Status, map_image

STARTS_MAX = 5
"""Of the process: one that dies so often will die again."""

log = structlog.get_logger("agent")


class Verifier:
    """The agent's end. The process begins with the first image, and ends with the agent."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0

    def note(self, directory: Path) -> None:
        """There is another image in this vault."""
        if self._process is not None and self._process.poll() is not None:
            self._note_end(self._process.returncode)
        if self._process is None and self._starts < STARTS_MAX:
            self._start(directory)
        if self._process is not None:
            try:
                os.write(self._pipe, b"\n")
            except OSError:
                pass  # it has not looked at the last few yet, or it is gone: the next note finds out

    def _start(self, directory: Path) -> None:
        self._starts += 1
        command = [sys.executable, "-m", __spec__.name, str(directory)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        os.set_blocking(self._pipe, False)

    def _note_end(self, code: int) -> None:
        self.close()
        if self._starts == 1:
            log.warning(f"the process that checks snapshots ended with {code}: it is started again")
        elif self._starts == STARTS_MAX:
            log.warning(
                f"the process that checks snapshots ended {STARTS_MAX} times, now with {code}: from now on those that"
                " are not written to storage are believed as they are"
            )

    def close(self) -> None:
        """It has nothing that must be finished."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.kill()
            process.wait()

    @property
    def _pipe(self) -> int:
        assert self._process is not None and self._process.stdin is not None
        return self._process.stdin.fileno()


class Reader:
    """The process's end."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seats: dict[Path, Seat] = {}
        self._mapped: dict[Path, mmap.mmap] = {}
        """Kept: a mapping whose pages are in place is read at the speed of memory."""

    def work_off(self) -> None:
        """Read every image that has no checksums yet, the newest first. One that cannot be read is left out."""
        bad: set[tuple[Path, int]] = set()
        self._open_seats()
        while (found := self._next(bad)) is not None:
            seat, slot, record = found
            try:
                if not self._read(seat, slot, record):
                    return
            except (OSError, ValueError):  # its file is gone, or shorter than its record says: who restores finds out
                bad.add((seat.directory, slot))

    def _open_seats(self) -> None:
        for directory in self._directory.glob("seat-*"):
            if directory not in self._seats:
                try:
                    self._seats[directory] = Seat.open(directory)
                except (OSError, ValueError):
                    continue  # it is being made: its first image comes later

    def _next(self, bad: Collection[tuple[Path, int]]) -> tuple[Seat, int, Record] | None:
        unread = [
            (record.created_ns, seat, slot, record)
            for seat in self._seats.values()
            for slot, record in seat.sealed().items()
            if (seat.directory, slot) not in bad and seat.checksums(slot, record) is None
        ]
        return max(unread, key=lambda one: one[0])[1:] if unread else None

    def _read(self, seat: Seat, slot: int, record: Record) -> bool:
        """Whether it stayed as it was for so long."""
        memory, checksums = self._map(seat.path(slot), record.size_bytes), []
        with memoryview(memory) as image:
            for start in range(0, record.size_bytes, BLOCK_BYTES):
                checksums.append(crc32c(image[start : min(start + BLOCK_BYTES, record.size_bytes)]))
                now = seat.record(slot)
                if (now.status, now.created_ns) != (Status.SEALED, record.created_ns):
                    return False
        seat.note_checksums(slot, record, checksums)
        return True

    def _map(self, path: Path, size_bytes: int) -> mmap.mmap:
        known = self._mapped.get(path)
        if known is None or len(known) < size_bytes:
            self._mapped[path] = known = map_image(path, size_bytes, is_writable=False)
        return known


def main() -> None:
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        os.nice(19)  # a sandbox that does not allow it
    reader = Reader(Path(sys.argv[1]))
    while os.read(sys.stdin.fileno(), 4_096):  # one byte an image; nothing: the agent is gone
        reader.work_off()


if __name__ == "__main__":
    main()
