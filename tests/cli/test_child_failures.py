"""The end of a job for programs: the fields of torchrun's summary, and what goes to a program that launched the job."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from holdfast.cli.child_failures import child_failures, torchrun_summary
from holdfast.core.faults.failures import Exited, Failure, Signalled

FIELD = re.compile(r"^ *(time|host|rank|exitcode|error_file|traceback) *: ?(.*?) *$", re.MULTILINE)


def fields(summary: str) -> list[tuple[str, str]]:
    return [(name, " ".join(value.split())) for name, value in FIELD.findall(summary)]


def failure(rank: int, end: Exited | Signalled, **more: Any) -> Failure:
    facts = {"node_id": "a", "view": 1, "local_rank": rank, "pid": 100 + rank, "failed_at": 1_700_000_000.7}
    return Failure(rank=rank, end=end, **(facts | more))  # type: ignore[arg-type]


def test_a_program_that_searches_torchruns_summary_finds_the_same_here(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    file.write_text(
        '{"message": {"message": "m", "extraInfo": {"timestamp": "1700000000", "py_callstack": "line 1\\nline 2"}}}'
    )
    ours = [
        failure(1, Exited(3), error_file=str(file), traceback="line 1\nline 2\n"),
        failure(0, Signalled(9, "SIGKILL"), error_file=str(tmp_path / "none")),
    ]
    theirs = {f.rank: ProcessFailure(f.local_rank, f.pid, f.exit_code, f.error_file) for f in ours}
    found = torchrun_summary("train.py", child_failures(ours[0], ours))
    expected = ChildFailedError("train.py", theirs).format_msg()
    theirs_found, ours_found = fields(expected), fields(found)
    assert len(ours_found) == 12
    unlike = {"time", "host", "traceback"}  # of a worker without an error file, torchrun has the time of the summary
    assert [pair for pair in ours_found if pair[0] not in unlike] == [
        pair for pair in theirs_found if pair[0] not in unlike
    ]
    assert [name for name, _ in ours_found] == [name for name, _ in theirs_found]
    for line in ("train.py FAILED", "Failures:", "Root Cause (first observed failure):"):
        assert line in found and line in expected
    assert found.index("rank      : 0") < found.index("Root Cause") < found.index("rank      : 1")
    assert "traceback : line 1\n  line 2\n" in found


def test_the_cause_comes_first_and_once_also_if_it_is_another_nodes() -> None:
    cause, own = failure(5, Exited(1)), failure(1, Exited(1))
    assert [found.rank for found in child_failures(cause, [own])] == [5, 1]
    assert [found.rank for found in child_failures(own, [own])] == [1]
    assert child_failures(None, []) == ()
    assert child_failures(cause, [])[0].error_file == ""
