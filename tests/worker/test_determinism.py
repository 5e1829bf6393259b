"""What "the same bits" needs on a device is named until it is set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from holdfast.worker.determinism import describe_missing, missing_for_same_bits


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_by_default_nothing_is_set() -> None:
    assert missing_for_same_bits("cuda", {}) == [
        "torch.use_deterministic_algorithms(True)",
        "CUBLAS_WORKSPACE_CONFIG=:4096:8",
        "NCCL_ALGO=…",
        "NCCL_PROTO=…",
    ]
    assert "HCCL_DETERMINISTIC=…" in describe_missing("npu", {})


def test_a_workspace_that_does_not_fix_the_algorithm_is_named(deterministic: None) -> None:
    fixed = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
    assert missing_for_same_bits("cuda", fixed | {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}) == [
        "CUBLAS_WORKSPACE_CONFIG=:4096:8"
    ]


def test_choosing_kernels_by_timing_is_named(deterministic: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert "torch.backends.cudnn.benchmark = False" in missing_for_same_bits("cuda", {})


def test_when_all_is_set_nothing_is_said(deterministic: None) -> None:
    set_by_user = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    assert describe_missing("cuda", set_by_user) == ""
    assert describe_missing("xpu", {}) == ""
