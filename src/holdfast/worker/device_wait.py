"""Waiting for a device that runs behind its host.

With gloo a collective has ended when `work.wait()` returns. On an accelerator it has only been queued: the host runs
ahead, passes the barrier of a step and queues the optimizer, while the gradients are still being summed. If a peer dies
then, the abort leaves partial sums, which the queued optimizer uses, in a step that is committed and never repeated.

So before a rank agrees to a commit, its device must have done all that it was told:

    record     an event on the current stream of each device that has tracked tensors, or computes with them (FSDP2's
               offloading keeps them on the CPU). DistributedDataParallel and FSDP2 have joined the streams of their
               collectives to it when backward returns
    poll       the event, and between two looks whether the view is over. Never a plain synchronize: a collective whose
               peer has died does not end before this process is told, and aborts it
    check      once more whether the view is over: an abort ends the kernels too, with whatever sums they had
    ask        the communicators for errors that only their own threads have seen

What a device has still to do is said by the plug-in of its kind (`Accelerator.record`), or nothing, for one on which a
call that has returned is done: the CPU. Then there is no fence, and nothing is paid for it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from holdfast.checks.accelerators import registry
from holdfast.checks.accelerators.base import Accelerator
from holdfast.errors import DeviceError, UsageError

PAUSE_SHARE = 0.05
"""Of the time waited so far, between two looks: the wait is at most so much longer than it need be."""
PAUSE_S_MIN = 0.000_02
PAUSE_S_MAX = 0.001
REST_TIMEOUT_S = 30.0
"""After an abort all kernels of collectives have ended; what is left is at most the rest of one step."""


class DeviceFence:
    """The devices that have tracked tensors and run behind the host."""

    def __init__(self, devices: Sequence[tuple[Accelerator, int]]) -> None:
        self._devices = devices

    @property
    def kind(self) -> str:
        """The type of the devices, as torch names it."""
        return self._devices[0][0].name

    def wait(self, check: Callable[[], None], timeout_s: float) -> None:
        """Wait until the devices have done all that they have been told so far. `check` is called between two polls,
        and raises what ends the wait. TimeoutError when the time is up."""
        recorded = [plug_in.record(index) for plug_in, index in self._devices]
        waited_from = time.monotonic()
        for event in recorded:
            while event is not None and not event.query():
                check()
                waited_s = time.monotonic() - waited_from
                if waited_s > timeout_s:
                    raise TimeoutError(f"the device has not done its work within {timeout_s:g} s")
                time.sleep(min(max(waited_s * PAUSE_SHARE, PAUSE_S_MIN), PAUSE_S_MAX))

    def record(self) -> Callable[[], bool]:
        """Return a function that says whether the devices have done all that they were told so far."""
        recorded = [plug_in.record(index) for plug_in, index in self._devices]
        return lambda: all(event is None or event.query() for event in recorded)

    def settle(self, timeout_s: float = REST_TIMEOUT_S) -> None:
        """Wait after an abort until the devices are at rest. DeviceError if they do not come to it, or answer with an
        error: then every later call in this process would fail, and it must be replaced."""
        try:
            self.wait(lambda: None, timeout_s)
        except Exception as error:  # whatever a vendor's library raises for a context that is broken
            why = f"{type(error).__name__}: {error}"
            raise DeviceError(
                f"the device did not come to rest after its collectives were aborted ({why}): this process is replaced"
            ) from error


def fence_of(devices: Iterable[torch.device]) -> DeviceFence | None:
    """Return the fence for these devices; None if on all of them a call that has returned is done."""
    kinds = sorted({(device.type, device.index or 0) for device in devices})
    found = [(plug_in, index) for kind, index in kinds if (plug_in := _behind_host(kind)) is not None]
    return DeviceFence(found) if found else None


@functools.cache
def _behind_host(kind: str) -> Accelerator | None:
    """Return the plug-in of a kind of device that runs behind the host. None for others, and where there is no plug-in:
    then there is no communicator either, whose collectives would have to be waited for."""
    try:
        plug_in = registry.load(kind)
    except UsageError:
        return None
    return plug_in if plug_in.runs_behind_host else None
