"""Lines of a file that still grows. It is opened for each look: a thousand followed workers cost no descriptors."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

READ_BYTES_MAX = 256 * 1024
LINE_BYTES_MAX = 64 * 1024
"""A longer line is shown in pieces."""

# A carriage return ends a line too (progress bars). The last alternative is a line whose end has not come yet.
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+")


class Tail:
    """One file, read from the beginning or from its last lines, and then onwards."""

    def __init__(self, path: Path, lines_max: int | None = None) -> None:
        self.path = path
        self._lines_max = lines_max
        self._read_bytes: int | None = None
        self._held = b""

    def lines(self, *, last: bool = False) -> Iterator[bytes]:
        """Lines that have come since, with their ends. `last`: no more will come, so one without an end counts too."""
        while chunk := self._chunk():
            yield from self._whole(self._held + chunk)
        if last and self._held:
            yield self._held
            self._held = b""

    def _chunk(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                if self._read_bytes is None:
                    self._read_bytes = start_of_last(file.fileno(), self._lines_max)
                chunk = os.pread(file.fileno(), READ_BYTES_MAX, self._read_bytes)
        except FileNotFoundError:
            self._read_bytes = self._read_bytes or 0  # once it comes, all of it is news
            return b""
        except OSError:
            return b""
        self._read_bytes += len(chunk)
        return chunk

    def _whole(self, data: bytes) -> list[bytes]:
        """The lines that have ended; the rest is held. A carriage return at the very end may be half of an end."""
        lines = _LINE.findall(data)
        self._held = b""
        if not lines[-1].endswith(b"\n") and len(lines[-1]) < LINE_BYTES_MAX:
            self._held = lines.pop()
        return lines


def start_of_last(fd: int, lines_max: int | None) -> int:
    """Where the last lines begin, found from the end: the file may be huge."""
    if lines_max is None:
        return 0
    at_bytes = end_bytes = os.fstat(fd).st_size
    newlines_left = lines_max
    while at_bytes > 0 and newlines_left > 0:
        from_bytes = max(at_bytes - READ_BYTES_MAX, 0)
        block = os.pread(fd, at_bytes - from_bytes, from_bytes)
        position = len(block) - (at_bytes == end_bytes)  # the last line's own end does not count
        while (position := block.rfind(b"\n", 0, position)) >= 0:
            newlines_left -= 1
            if newlines_left == 0:
                return from_bytes + position + 1
        at_bytes = from_bytes
    return at_bytes
