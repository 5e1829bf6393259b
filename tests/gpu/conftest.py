"""Tests for those who have accelerators: `python -m pytest -m gpu tests/gpu`. Elsewhere they are skipped, with the
reason.

With GPU_SUITE_DEVICE=soft they run on an accelerator in software (e2e/lab/soft_device.cpp), those for CUDA alone aside;
with GPU_SUITE_DEVICE=cpu those that need nothing of a device run on the CPU. That tests the tests.
"""

from __future__ import annotations

import os

import pytest
import torch

from support import soft_device

HERE = "tests/gpu/"
RANKS_MAX = {"cpu": 4, "soft": 4}
"""Where there is no device."""


def devices() -> tuple[str, int]:
    """What the tests run on, and how many there are."""
    if chosen := os.environ.get("GPU_SUITE_DEVICE"):
        return chosen, RANKS_MAX.get(chosen) or torch.accelerator.device_count()
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return (kind.type, torch.accelerator.device_count()) if kind is not None else ("", 0)


def why_skipped(item: pytest.Item) -> str:
    """Why a test cannot run here; empty if it can."""
    kind, count = devices()
    if not count:
        return "this machine has no accelerator"
    wanted = item.get_closest_marker("devices")
    needed = int(wanted.args[0]) if wanted is not None else 2
    if count < needed:
        return f"{needed} devices are needed, this machine has {count} of type {kind}"
    if item.get_closest_marker("cuda_only") and kind != "cuda":
        return f"for CUDA, this machine has {kind}"
    if item.get_closest_marker("cuda_or_soft") and kind not in ("cuda", "soft"):
        return f"for CUDA and the device in software, this machine has {kind}"
    if kind == "soft" and (why := soft_device.why_not()):
        return why
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if why := why_skipped(item):
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(autouse=True)
def guarded(leak_guard: str) -> str:
    return leak_guard
