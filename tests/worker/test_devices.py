"""`--nproc-per-node auto` and `gpu`, on a machine without accelerators."""

from __future__ import annotations

import os

import pytest
import torch

from holdfast.worker.devices import count_devices

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without accelerators")


def test_auto_is_one_worker_for_each_processor_that_may_be_used() -> None:
    assert count_devices("auto") == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("name", ["gpu", "cuda", "xpu"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="this machine has no accelerator: give a number, cpu or auto"):
        count_devices(name)
