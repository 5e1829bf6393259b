"""A worker that the console shows alone is on a terminal, as under torchrun, and its log file has all of it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from support.jobs import DEADLINE_S, agent_environment

SCRIPT = """
import os, shutil, sys, time
print(str([(os.isatty(fd), *os.get_terminal_size(fd)) for fd in (0, 1, 2)]), flush=True)  # in one write
print(f"width {shutil.get_terminal_size().columns}", file=sys.stderr, flush=True)
print("you typed", repr(input("name? ")), flush=True)
print("pdb", flush=True)
breakpoint()
while (size := os.get_terminal_size()).columns != 66:
    time.sleep(0.01)
print(f"\\x1b[1mend\\x1b[0m {size.columns} {size.lines}", flush=True)
"""
LAUNCHERS = {"torchrun": ("torch.distributed.run",), "holdfast": ("holdfast", "run")}


class Screen:
    """A terminal of 33 lines and 101 columns, with a launcher on it."""

    def __init__(self, command: list[str], directory: Path) -> None:
        self.text = b""
        self._master, slave = pty.openpty()
        self.resize(33, 101)
        environ = agent_environment(directory / "state")
        for name in ("COLUMNS", "LINES"):  # as of the terminal that the tests run in, or none
            environ.pop(name, None)
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, cwd=directory, env=environ)
        os.close(slave)

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def until(self, *texts: bytes) -> None:
        """Read until these texts have appeared after what was read before, in any order: standard output and standard
        error come by ways of their own."""
        start, deadline = len(self.text), time.monotonic() + DEADLINE_S
        while not all(text in self.text[start:] for text in texts):
            assert time.monotonic() < deadline, self.text.decode()
            if select.select([self._master], [], [], 0.1)[0]:
                self.text += self._read()

    def _read(self) -> bytes:
        try:
            return os.read(self._master, 4096)
        except OSError:  # nobody has it open any more
            raise AssertionError(self.text.decode()) from None

    def type(self, text: bytes) -> None:
        os.write(self._master, text)

    def end(self) -> int:
        """Read the rest and return the launcher's exit code."""
        deadline = time.monotonic() + DEADLINE_S
        while self.process.poll() is None and time.monotonic() < deadline:
            if select.select([self._master], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):  # nobody has it open any more
                    self.text += os.read(self._master, 4096)
        return self.process.wait(1)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_worker_has_the_terminal_and_its_debugger_works(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    flags = ["--standalone", "--nproc-per-node", "1", "--log-dir", str(tmp_path / "logs")]
    with Screen([sys.executable, "-m", *LAUNCHERS[launcher], *flags, "script.py"], tmp_path) as screen:
        use(screen)
    if launcher == "holdfast":
        [log] = (tmp_path / "logs").glob("*/attempt_0/0/stdout.log")
        assert log.read_bytes().endswith(b"\x1b[1mend\x1b[0m 66 20\n")


def use(screen: Screen) -> None:
    """Answer the script's questions."""
    screen.until(b"[(True, 101, 33), (True, 101, 33), (True, 101, 33)]", b"width 101", b"name? ")
    screen.type(b"Ada\n")
    screen.until(b"(Pdb) ")
    screen.type(b"p 6 * 7\n")
    screen.until(b"42")
    screen.resize(20, 66)
    screen.process.send_signal(signal.SIGWINCH)
    screen.type(b"c\n")
    screen.until(b"\x1b[1mend\x1b[0m 66 20")
    assert screen.end() == 0
    assert b"you typed 'Ada'" in screen.text
