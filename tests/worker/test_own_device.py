"""Which device a process takes, and what it is told if there is none for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from holdfast.errors import DeviceError, ScriptError
from holdfast.wire.worker_messages import Assignment
from holdfast.worker import own_device
from holdfast.worker.membership import announce


class Devices:
    """As much of `torch.cuda` as is asked."""

    def __init__(self, count: int) -> None:
        self._count, self.current, self.busy_times, self.tries = count, 0, 0, 0

    def is_initialized(self) -> bool:
        return bool(self.current)

    def device_count(self) -> int:
        return self._count

    def current_device(self) -> int:
        return self.current

    def set_device(self, index: int) -> None:
        self.tries += 1
        if self.tries <= self.busy_times:
            raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")
        self.current = index


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    made = Devices(2)
    monkeypatch.setattr(own_device, "accelerator_module", lambda: made)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(own_device, "BUSY_PAUSE_S", 0.001)
    return made


def test_a_worker_takes_the_device_with_its_number_unless_the_script_has_chosen(devices: Devices) -> None:
    own_device.take(1, 2)
    assert devices.current == 1
    own_device.take(0, 2)
    assert devices.current == 1 and devices.tries == 1


def test_more_workers_than_devices_are_refused(devices: Devices) -> None:
    with pytest.raises(ScriptError, match=r"worker 2 of 3 .* the process sees 2 of type cuda"):
        own_device.take(2, 3)
    assert not devices.tries


def test_a_device_that_is_still_in_use_is_tried_again_for_a_while(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices.busy_times = 3
    own_device.take(1, 2)
    assert (devices.current, devices.tries) == (1, 4)
    devices.current, devices.busy_times = 0, 10**9
    monkeypatch.setattr(own_device, "BUSY_TIMEOUT_S", 0.05)
    with pytest.raises(DeviceError, match="end the process that uses it"):
        own_device.take(1, 2)


@pytest.mark.parametrize("is_virtual", [True, False])
def test_a_spare_that_has_used_a_device_cannot_be_given_another(devices: Devices, is_virtual: bool) -> None:
    own_device.check_untouched(is_virtual)
    devices.current = 1
    if not is_virtual:
        own_device.check_untouched(is_virtual)
        return
    with pytest.raises(ScriptError, match="used a device before it had a rank"):
        own_device.check_untouched(is_virtual)


def test_local_rank_keeps_naming_the_device_when_workers_close_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local rank 1 of three has been lost; the third closes up, and its tensors stay where they are."""
    environment: dict[str, str] = {}
    monkeypatch.setattr("os.environ", environment)
    numbers: dict[str, Any] = dict.fromkeys((field.name for field in msgspec.structs.fields(Assignment)), 0)
    told = SimpleNamespace(**numbers | {"local_rank": 1, "device_index": 2, "visible_devices": "", "store_host": "h"})
    announce(told)  # type: ignore[arg-type]
    assert environment["LOCAL_RANK"] == "2" and "CUDA_VISIBLE_DEVICES" not in environment
