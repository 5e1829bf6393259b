"""A device for tests of machines that have none.

torch's own stand-ins do not help: tensors of "meta" have no values, and "privateuse1" has no tensors before somebody
registers a backend in C++. So host tensors are taken for a device's. What the real thing does with streams, events and
pinned memory is not shown by this: only who waits for whom.
"""

from __future__ import annotations

import threading

import torch

from holdfast.state.copier import CopyArrival, CopyTask, CopyWork


class Event:
    """Of a stream that is held up until the test lets it go on."""

    def __init__(self, work: DeviceWork) -> None:
        self._work, self._lock, self._is_done = work, threading.Lock(), False
        self.waits = 0
        self._has_waited = threading.Event()
        self.seconds_each = DeviceWork.wait_s

    def wait(self) -> None:
        """On a device, its stream runs the copies before what is changed next. Here that is now."""
        self.waits += 1
        self._run()
        self._has_waited.set()

    def synchronize(self) -> None:
        assert DeviceWork.gate.wait(60.0), "the test has not let go"
        if self.seconds_each:  # slow copies: the update gets there before they are done
            assert self._has_waited.wait(60.0), "no update has waited"
        self._run()

    def waited_s(self) -> float | None:
        return self.seconds_each * self.waits if self._is_done else None

    def _run(self) -> None:
        with self._lock:
            if not self._is_done:
                self._is_done = True
                self._work.carry()


class DeviceWork(CopyWork):
    """All of whose tensors are said to be on a device."""

    gate = threading.Event()
    gate.set()
    wait_s = 0.0
    """What the device's own clock shows for each wait of its stream."""

    @classmethod
    def hold(cls) -> None:
        cls.gate.clear()

    @classmethod
    def release(cls) -> None:
        cls.gate.set()

    def carry(self) -> None:
        for index, task in enumerate(self._on_device):
            with torch.no_grad():
                self._staging[index].copy_(task.source)

    def _set_out(self) -> CopyArrival:
        self._staging = {index: torch.empty_like(task.source) for index, task in enumerate(self._on_device)}
        return Event(self)

    def _is_on_host(self, task: CopyTask) -> bool:
        return False
