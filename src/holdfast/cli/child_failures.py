"""How a job ended, for programs: a summary in the shape of torchrun's ChildFailedError, for tools that search logs
(`--error-format torchrun`), and the same facts as JSON for a process that started this one (holdfast/torchrun.py).

The names of the fields are those of torchrun, because tools look for them; the layout around them is plain.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from holdfast.core.faults.failures import Failure

WIDTH = 60
NOT_AVAILABLE = "<N/A>"


class ChildFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's failure as torchrun counts it."""

    rank: int
    local_rank: int
    pid: int
    exit_code: int
    """Negative for a signal."""
    error_file: str
    """Empty if the worker wrote none."""
    failed_at: float
    text: str
    """The traceback if it is known, else what is known."""


class LaunchReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a launched job's end comes to. Travels as JSON through a pipe that the caller made."""

    exit_code: int
    why: str
    failures: tuple[ChildFailure, ...] = ()
    """The root cause is the first."""
    ranks: tuple[int, ...] = ()
    """Those of this node."""


def child_failures(cause: Failure | None, failures: Sequence[Failure]) -> tuple[ChildFailure, ...]:
    """Return the failures of this node's workers, the job's root cause first: it may be another node's."""
    others = [failure for failure in failures if cause is None or failure.rank != cause.rank]
    return tuple(_child_failure(failure) for failure in ([cause] if cause else []) + others)


def _child_failure(failure: Failure) -> ChildFailure:
    from holdfast.core.faults.failures import describe

    error_file = failure.error_file if failure.error_file and os.path.exists(failure.error_file) else ""  # noqa: PTH110
    return ChildFailure(
        rank=failure.rank,
        local_rank=failure.local_rank,
        pid=failure.pid,
        exit_code=failure.exit_code,
        error_file=error_file,
        failed_at=failure.failed_at,
        text=failure.traceback.rstrip() or describe(failure),
    )


def torchrun_summary(program: str, failures: Sequence[ChildFailure]) -> str:
    """Return the summary of failed workers, the first of `failures` as the root cause."""
    root, *others = [_fields(number, failure) for number, failure in enumerate(failures)]
    bar, line = "=" * WIDTH, "-" * WIDTH
    rest = others or ["  <NO_OTHER_FAILURES>"]
    return "\n".join(
        [
            "ChildFailedError:",
            *(bar, f"{program} FAILED", line, "Failures:", *rest, line),
            *("Root Cause (first observed failure):", root, bar),
        ]
    )


def _fields(number: int, failure: ChildFailure) -> str:
    name = f" ({signal.Signals(-failure.exit_code).name})" if -failure.exit_code in set(signal.Signals) else ""
    fields = {
        "time": time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(failure.failed_at)),
        "host": socket.gethostname(),
        "rank": f"{failure.rank} (local_rank: {failure.local_rank})",
        "exitcode": f"{failure.exit_code} (pid: {failure.pid}){name}",
        "error_file": failure.error_file or NOT_AVAILABLE,
        "traceback": failure.text.replace("\n", "\n  "),
    }
    return "\n".join([f"[{number}]:", *(f"  {key:<10}: {value}" for key, value in fields.items())])
