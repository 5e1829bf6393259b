"""A host that stands still says whether its device is still at work."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from holdfast.wire.progress_page import ProgressPage, WorkerPhase
from holdfast.worker.device_wait import DeviceFence
from holdfast.worker.device_watch import DeviceWatch


class Fence:
    """Of a device that works until it is told to stop."""

    def __init__(self) -> None:
        self.is_done, self.asked = False, 0

    def record(self) -> Callable[[], bool]:
        self.asked += 1
        return lambda: self.is_done


def until(condition: Callable[[], Any]) -> None:
    give_up_at = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < give_up_at, "it did not come about"
        time.sleep(0.005)


def test_the_page_shows_a_device_at_work_while_the_host_stands_still() -> None:
    page, fence = ProgressPage.private(), Fence()
    page.move(phase=WorkerPhase.BODY)
    watch = DeviceWatch(page, cast(DeviceFence, fence), quiet_s=0.02)
    watch.start()
    until(lambda: page.get("device"))
    assert fence.asked == 1, "not a second event behind the first"
    fence.is_done = True
    until(lambda: not page.get("device"))
    watch.close()


def test_a_device_is_not_asked_while_the_worker_is_between_views() -> None:
    page, fence = ProgressPage.private(), Fence()
    page.move(phase=WorkerPhase.HOLDING)
    watch = DeviceWatch(page, cast(DeviceFence, fence), quiet_s=0.02)
    watch.start()
    time.sleep(0.2)
    assert fence.asked == 0
    page.move(phase=WorkerPhase.BODY)
    until(lambda: fence.asked)
    watch.close()


def test_a_device_that_has_failed_ends_the_watch() -> None:
    def fail() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    page = ProgressPage.private()
    page.move(phase=WorkerPhase.UPDATE)
    watch = DeviceWatch(page, cast(DeviceFence, SimpleNamespace(record=lambda: fail)), quiet_s=0.02)
    watch._run()
    assert not page.get("device")
