"""The status line: drawn in place on a terminal, out of the way of everything else that is written there."""

from __future__ import annotations

import contextlib
import os
import pty
import threading

import pytest

from holdfast.util.logs import get_logger, set_up_logging
from holdfast.util.status_line import CLEAR, STATUS_LINE, StatusLine


class Terminal:
    """A terminal of our own in the place of stderr."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "40")
        self.master, self.slave = pty.openpty()
        monkeypatch.setattr("sys.stderr", os.fdopen(self.slave, "w", buffering=1, closefd=False))
        os.set_blocking(self.master, False)

    def shown(self) -> str:
        found = b""
        with contextlib.suppress(BlockingIOError):
            while True:
                found += os.read(self.master, 65_536)
        return found.decode().replace("\r\n", "\n")


def test_it_is_drawn_in_place_and_cut_to_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    line = StatusLine()
    line.draw("before it is enabled")
    assert terminal.shown() == ""
    line.enable(True)
    line.draw("step 1")
    line.draw("x" * 100)
    assert terminal.shown() == f"{CLEAR}step 1{CLEAR}{'x' * 39}"
    line.clear()
    line.clear()
    assert terminal.shown() == CLEAR


def test_a_workers_output_is_never_written_behind_it_nor_cut_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    line = StatusLine()
    line.enable(True)
    line.draw("step 1")
    with line.making_way(b"half a line", terminal.slave):
        os.write(terminal.slave, b"half a line")
    line.draw("step 2")
    assert terminal.shown() == f"{CLEAR}step 1{CLEAR}half a line", "nothing is drawn in the middle of a line"
    with line.making_way(b" and its end\n", terminal.slave):
        os.write(terminal.slave, b" and its end\n")
    line.draw("step 3")
    assert terminal.shown() == f" and its end\n{CLEAR}step 3"


def test_a_message_takes_it_off_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    set_up_logging("text", "agent")
    try:
        STATUS_LINE.draw("step 1")
        terminal.shown()
        get_logger("holdfast.somewhere").notice("said", "a notice")
        assert terminal.shown().startswith(f"{CLEAR}holdfast ")
    finally:
        STATUS_LINE.enable(False)


def test_a_terminal_that_takes_nothing_stops_no_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    line = StatusLine()
    line.enable(True)
    entered, left = threading.Event(), threading.Event()

    def write() -> None:
        with line.making_way(b"stuck", terminal.slave):
            entered.set()
            left.wait(60)

    stuck = threading.Thread(target=write)
    stuck.start()
    entered.wait(60)
    line.draw("step 1")
    line.clear()
    assert terminal.shown() == ""
    left.set()
    stuck.join()
