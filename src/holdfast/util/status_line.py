"""The status line of a terminal: one line at the bottom that is drawn again in place, as progress is.

All that a process writes to the terminal goes round it: it is taken off, the text is written, and it is drawn again
when there is news. It is only drawn where the cursor is at the start of a line, so that it never cuts a line in two
that a worker has written in part. Another process that writes to the same terminal, as the master does, takes it off
too, without knowing whether it is there: that costs nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Iterator

LOCK_WAIT_S = 0.2
CLEAR = "\r\x1b[K"
"""The cursor to the start of the line, and all that is on the line erased."""


class StatusLine:
    """The status line of this process's terminal, used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_enabled = False
        self._is_drawn = False
        self._is_at_line_start = True

    def enable(self, is_enabled: bool) -> None:
        """Draw from now on, as stderr is a terminal; or draw nothing."""
        self._is_enabled = is_enabled

    @property
    def is_enabled(self) -> bool:
        """Whether there is a terminal to draw on."""
        return self._is_enabled

    def draw(self, text: str) -> None:
        """Show this text in place of the one before, cut to the width of the terminal. While another thread writes to
        the terminal, which may have been stopped, nothing is drawn."""
        if not self._is_enabled or not self._lock.acquire(blocking=False):
            return
        try:
            if self._is_at_line_start:
                width = shutil.get_terminal_size().columns
                self._write(CLEAR + text[: max(width - 1, 1)])
                self._is_drawn = True
        finally:
            self._lock.release()

    def clear(self) -> None:
        """Take the text off the terminal."""
        with self._held() as is_held:
            if is_held and self._is_drawn:
                self._write(CLEAR)
                self._is_drawn = False

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Keep the line off while complete lines are written. Where another process may have drawn one, erase that."""
        with self._held() as is_held:
            if is_held and self._is_enabled and self._is_at_line_start:
                self._write(CLEAR)
                self._is_drawn = False
            yield

    @contextlib.contextmanager
    def making_way(self, data: bytes | memoryview, descriptor: int) -> Iterator[None]:
        """Keep the line off while `data`, which may end in the middle of a line, is written to a descriptor."""
        if not self._is_enabled or not os.isatty(descriptor):
            yield
            return
        with self._held() as is_held:
            if is_held and self._is_drawn:
                self._write(CLEAR)
                self._is_drawn = False
            yield
            self._is_at_line_start = bytes(data[-1:]) == b"\n"

    @contextlib.contextmanager
    def _held(self) -> Iterator[bool]:
        """Hold the lock, or go on without it after a moment: a thread that waits for a terminal stops no other."""
        is_held = self._lock.acquire(timeout=LOCK_WAIT_S)
        try:
            yield is_held
        finally:
            if is_held:
                self._lock.release()

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a terminal that is gone
            os.write(sys.stderr.fileno(), text.encode())


STATUS_LINE = StatusLine()
"""That of this process."""
