"""A check as people see it: in `holdfast status`, in the log, and at the end of `holdfast check`."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
from rich.console import Console, Group

from holdfast.cli.check import check
from holdfast.cli.check_table import check_table
from holdfast.core.health.findings import CheckProblem, LinkVerdict, Measured, NodeVerdict, Norm
from holdfast.core.records import CheckConcluded
from holdfast.core.sentences import measured_sentence, sentence
from holdfast.errors import UsageError

SLOW = Measured(stage="matmul", value_s=0.0119, expected_s=0.00271, limit_s=0.0029)
FAST = Measured(stage="matmul", value_s=0.00271, expected_s=0.00271, limit_s=0.0029)
PAIRED = Measured(stage="all-reduce", value_s=0.004, expected_s=0.004, limit_s=0.005, partner="c")
WRONG = CheckProblem("bandwidth", "wrong-result", "3 copied bytes are wrong", 1)
CHECK = CheckConcluded(
    at=1_000.0,
    checkup="1.1",
    why="before the job",
    took_s=2.31,
    accelerator="cpu",
    nodes=(
        NodeVerdict(node_id="a", incarnation="a.1", fitness="fit", why="", measured=(FAST, PAIRED)),
        NodeVerdict(
            node_id="b",
            incarnation="b.1",
            fitness="slow",
            why="matmul took 11.9 ms, 4.39 times the expected 2.71 ms",
            measured=(SLOW,),
            is_left_out=True,
        ),
        NodeVerdict(node_id="c", incarnation="c.1", fitness="unfit", why="it is wrong", problems=(WRONG,)),
    ),
    links=(LinkVerdict(first="a", second="d", state="broken", why="no route"),),
    norms=(Norm(stage="matmul", expected_s=0.00271, deviation=0.01, limit_s=0.0029, count=3),),
)


def shown(record: CheckConcluded = CHECK) -> list[str]:
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(Group(*check_table(record)))
    return [" ".join(line.split()) for line in capture.get().splitlines()]


def test_the_table_says_which_node_which_stage_what_was_measured_and_expected() -> None:
    lines = shown()
    assert "(before the job): 2.3 s, cpu" in lines[0]
    assert lines[2] == "expected 2.71 ms - - - -"
    assert lines[3] == "b slow, left out 11.9 ms (4.39×) - - - -", "the bad ones come first"
    assert lines[4] == "c unfit - failed - - -"
    assert lines[5] == "a fit 2.71 ms (1.00×) - - - 4 ms (1.00×)"
    assert "b: matmul took 11.9 ms" in lines[6] and "the link between a and d is broken: no route" in lines[-1]


def test_a_later_try_is_shown_with_what_it_was_compared_with() -> None:
    again = msgspec.structs.replace(FAST, value_s=0.00238, expected_s=0.00236)
    good = msgspec.structs.replace(CHECK.nodes[0], measured=(again,))
    lines = shown(msgspec.structs.replace(CHECK, nodes=(good,), links=()))
    assert lines[2:4] == ["expected 2.71 ms - - - -", "a fit 2.38 ms (1.01× 2.36 ms) - - - -"]


@pytest.mark.parametrize("words", [["foo.py"], ["foo.py", "--nnodes", "4"], ["check"], ["--", "foo.py"]])
def test_a_script_is_refused(words: list[str]) -> None:
    with pytest.raises(UsageError, match="holdfast check runs no script"):
        check(words)


def test_the_sentence_of_a_check_names_the_bad_only() -> None:
    text = sentence(CHECK)
    assert text.startswith("checked 3 nodes in 2.3 s (before the job): node b is slow, and is excluded: matmul")
    assert "node a" not in text and "link between a and d" in text
    assert measured_sentence(CHECK.nodes[1]) == "b is slow: matmul 11.9 ms (expected 2.71 ms, SLOW)"
    assert "all-reduce with c 4 ms (expected 4 ms)" in measured_sentence(CHECK.nodes[0])


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: it sets logging up for good."""
    return subprocess.run([sys.executable, "-m", "holdfast", *words], capture_output=True, text=True, check=False)


def test_help_of_the_command() -> None:
    done = command("check", "--help")
    assert done.returncode == 0 and "--accelerator NAME" in done.stdout


def test_a_processor_that_nobody_knows_is_refused_at_start() -> None:
    done = command("check", "--accelerator", "abacus")
    assert done.returncode == 2 and "there is no plug-in of this name" in done.stderr
