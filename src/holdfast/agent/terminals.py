"""Terminals for workers: a pseudo-terminal in the place of a log file, so that progress bars, colours and debuggers are
what they are under torchrun, whose workers write to the user's terminal itself.

Only the one worker of a node that the console shows gets any, one for each stream that is a terminal of the agent too
and has no prefix: several workers on one terminal would only disturb each other. What the worker writes there is copied
into its log file, from which the console shows it (worker_logs.py), unchanged. The size of the window is that of the
agent's terminal, also after it has changed. Input needs nothing: a worker's stdin is the agent's.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import signal
import termios
from collections.abc import Callable

READ_BYTES_MAX = 64 * 1024


class Terminal:
    """One stream of one worker. `slave` is for the worker; the agent closes its copy when the worker has its own."""

    def __init__(self, like: int, log_file: int, copied: Callable[[], None]) -> None:
        """Open a pseudo-terminal of the size of `like`. What is written there goes to `log_file`, and `copied` is
        called after that."""
        self._like, self._copied = like, copied
        self._master, self.slave = os.openpty()
        try:
            os.set_blocking(self._master, False)
            _without_translation(self.slave)
            self._log_file = os.dup(log_file)
        except OSError:
            os.close(self._master)
            os.close(self.slave)
            raise
        self.resize()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._master, self.copy)

    @property
    def is_open(self) -> bool:
        """Whether anybody may still write to it."""
        return self._master >= 0

    def resize(self) -> None:
        """Give it the size of the agent's terminal, and tell the worker if it has changed."""
        if self._master >= 0:
            with contextlib.suppress(OSError):
                size = fcntl.ioctl(self._like, termios.TIOCGWINSZ, b"\0" * 8)
                fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)

    def copy(self) -> None:
        """Copy all that was written so far. Called by the loop; may be called at any time."""
        while self._master >= 0:
            try:
                data = os.read(self._master, READ_BYTES_MAX)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                data = b""  # no process has it open any more
            if not data:
                self.close()
                break
            with contextlib.suppress(OSError):  # a full disk costs the log, as everywhere
                os.write(self._log_file, data)
        self._copied()

    def close(self) -> None:
        """Stop copying."""
        if self._master >= 0:
            self._loop.remove_reader(self._master)
            os.close(self._master)
            os.close(self._log_file)
            self._master = -1


class Terminals:
    """The terminals of a node's workers, which follow the size of the agent's own."""

    def __init__(self) -> None:
        self._open: list[Terminal] = []

    def open(self, like: int, log_file: int, copied: Callable[[], None]) -> Terminal | None:
        """Return a new terminal; None if `like` is not one itself, or none can be had."""
        try:
            if not os.isatty(like):
                return None
            terminal = Terminal(like, log_file, copied)
        except OSError:
            return None
        if not self._open:
            with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread: the size stays
                asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, self._resize)
        self._open = [one for one in self._open if one.is_open] + [terminal]
        return terminal

    def copy(self) -> None:
        """Copy all that workers have written so far into their log files."""
        for terminal in self._open:
            terminal.copy()

    def close(self) -> None:
        """Copy the rest and close all terminals."""
        self.copy()
        for terminal in self._open:
            terminal.close()
        self._open.clear()

    def _resize(self) -> None:
        for terminal in self._open:
            terminal.resize()


def _without_translation(terminal: int) -> None:
    """Have bytes pass unchanged: the user's own terminal makes \\r\\n of \\n, and log files need neither."""
    attributes = termios.tcgetattr(terminal)
    attributes[1] &= ~termios.OPOST
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, attributes)
