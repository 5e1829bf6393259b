"""Which tables type the ends of a job's workers: by the flags, and by what processors the machine has."""

from __future__ import annotations

import pytest

from holdfast.checks.accelerators import cuda
from holdfast.cli.run import fault_table
from holdfast.cli.run_flags import parse_run
from holdfast.core.faults.failures import Exited, Failure
from holdfast.core.faults.fault_table import classify


def names(*words: str) -> list[str]:
    """Of a worker that says that its GPU is lost, and of one that exits as if the driver did not work."""
    table = fault_table(parse_run([*words, "train.py"], {}))
    worker = {"node_id": "a", "view": 1, "rank": 0, "local_rank": 0, "pid": 1, "failed_at": 0.0}
    ends = [(1, "NVRM: GPU is lost"), (201, "")]
    return [
        classify(Failure(**worker, end=Exited(code), log_tail=(said,)), table).name  # type: ignore[arg-type]
        for code, said in ends
    ]


def test_the_table_of_a_processor_that_is_here_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "has_device_files", lambda: False)
    assert names() == ["exited", "driver-error"]
    monkeypatch.setattr(cuda, "has_device_files", lambda: True)
    assert names() == ["gpu-lost", "driver-error"], "what we know of a code stays"


def test_the_table_of_a_processor_that_is_named_counts_before_ours() -> None:
    assert names("--accelerator", "cuda") == ["gpu-lost", "gpu-driver-error"]
    assert names("--accelerator", "cpu") == ["exited", "driver-error"]
