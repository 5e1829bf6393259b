"""A child's output reaches `sys.stdout` and `sys.stderr` where those are not descriptors 1 and 2."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.util.program_streams import ProgramStreams

DEADLINE_S = 60.0
WRITES = "import os; os.write(1, 'a\\u00e9\\n'.encode() * 50_000); os.write(2, b'wrong\\n\\xff')"


def run_child(numbers: tuple[int, ...]) -> None:
    streams = ProgramStreams(numbers)
    child = subprocess.Popen(
        [sys.executable, "-c", WRITES], stdout=streams.for_child.get(1), stderr=streams.for_child.get(2)
    )
    streams.begin()
    assert child.wait(DEADLINE_S) == 0
    streams.finish()


def test_what_a_child_writes_is_written_to_the_programs_streams() -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        run_child((1, 2))
    assert out.getvalue() == "a\u00e9\n" * 50_000
    assert err.getvalue() == "wrong\n\ufffd"


def test_a_stream_that_was_not_asked_for_is_the_childs_own(capfd: pytest.CaptureFixture[str]) -> None:
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        run_child((1,))
    assert err.getvalue() == "" and capfd.readouterr().err.startswith("wrong\n")


def test_streams_that_are_the_processs_own_are_left_alone(tmp_path: Path) -> None:
    program = "from holdfast.util.program_streams import ProgramStreams; print(ProgramStreams((1, 2)).for_child)"
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, check=True, timeout=DEADLINE_S)
    assert (tmp_path / "out").read_text() == "{}\n"


def test_a_stream_that_takes_nothing_does_not_stop_the_child() -> None:
    out = io.StringIO()
    out.close()
    with contextlib.redirect_stdout(out):
        run_child((1,))
