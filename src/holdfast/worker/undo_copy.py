"""The state from before an update, for scripts that communicate after theirs.

On the CPU it is one arena. A state on a device is copied on the device if it has the room: a copy within its memory
takes a hundredth of the way to the host, and nothing waits for it. Else it goes through pinned memory to the host.

What a copy on a device costs is measured by events there: to the host it costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from holdfast.state.arena import Arena
from holdfast.state.state_size import bytes_of
from holdfast.state.tracked import Tracked
from holdfast.state.tree import FlatTree
from holdfast.torch_compat import copy_all, device_generator
from holdfast.util.logs import get_logger

DEVICE_RESERVE_BYTES = 2**30
"""Of a device's memory, beside a copy of the state. What torch has ever needed for a step it keeps, and is not counted
as free."""
DEVICE_RESERVE_SHARE = 0.1

log = get_logger(__name__)


class UndoCopy:
    """The state from before an update, copied at each of them."""

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._on_host: Arena | None = None
        self._on_device: DeviceCopy | None = None
        self._host_cost_s = 0.0

    @property
    def cost_s(self) -> float:
        """What the last copy took."""
        return self._on_device.cost_s() if self._on_device is not None else self._host_cost_s

    def before_update(self) -> None:
        """Copy the state."""
        flat = self._tracked.state()
        if self._on_host is None and (self._on_device is not None or self._fits_on_device(flat.tensors)):
            try:
                self._on_device = self._on_device or DeviceCopy()
                self._on_device.take(flat)
                return
            except torch.OutOfMemoryError:
                self._on_device = None
                log.warning("undo-copy-on-host", "no memory on the device for a copy of the state: it goes to the host")
        began_at = time.monotonic()
        if self._on_host is None:
            self._on_host = Arena(flat)
        self._on_host.take(flat, 0)
        self._host_cost_s = time.monotonic() - began_at

    def restore(self, with_others: bool = True) -> None:
        """Put it back."""
        if self._on_device is not None:
            self._tracked.load(self._on_device.flat(), with_others=with_others)
            return
        assert self._on_host is not None, "no update was begun"
        self._on_host.restore_into(self._tracked, with_others)

    def release(self) -> None:
        """Give a device's memory back: no copy is needed before the next updates."""
        self._on_device = None

    def _fits_on_device(self, tensors: Sequence[torch.Tensor]) -> bool:
        needed_bytes = sum(bytes_of(tensor) for tensor in tensors if not tensor.is_cpu)
        return bool(needed_bytes) and needed_bytes + DEVICE_RESERVE_BYTES <= free_on_device()


class DeviceCopy:
    """A copy of a state beside it: each tensor on the device on which it is. Takes no part of the host's time."""

    def __init__(self) -> None:
        self._copies: list[torch.Tensor] = []
        self._skeleton = b""
        self._events: tuple[torch.Event, torch.Event] | None = None
        self._cost_s = 0.0

    def take(self, flat: FlatTree) -> None:
        """Queue the copies, behind all that the devices were told and before all that they will be."""
        fits = [(one.dtype, one.shape, one.device) for one in self._copies]
        if fits != [(one.dtype, one.shape, one.device) for one in flat.tensors]:
            self._copies = []  # the old ones go before the new ones come
            self._copies = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in flat.tensors]
        device = next((one.device for one in flat.tensors if not one.is_cpu), None)
        before = _mark(device)
        with torch.no_grad():
            for is_cpu in (True, False):  # one call for each: mixed, each tensor would be a call of its own
                pairs = [(to, of) for to, of in zip(self._copies, flat.tensors, strict=True) if of.is_cpu is is_cpu]
                if pairs:
                    copy_all([to for to, _ in pairs], [of for _, of in pairs], non_blocking=True)
        behind = _mark(device)
        self._events = (before, behind) if before is not None and behind is not None else None
        self._skeleton = flat.skeleton

    def flat(self) -> FlatTree:
        """Return the state, valid until the next `take`."""
        return FlatTree(self._skeleton, self._copies)

    def cost_s(self) -> float:
        """Return what the last copy took that the device has come past."""
        if self._events is not None and self._events[1].query():
            self._cost_s = self._events[0].elapsed_time(self._events[1]) / 1e3
            self._events = None
        return self._cost_s


def free_on_device() -> int:
    """Return the memory that the current device has left, less a reserve for what is allocated later; 0 if its package
    does not say."""
    device = device_generator()
    ask = getattr(device[1], "mem_get_info", None) if device is not None else None
    if ask is None:
        return 0
    free, total = ask()
    return int(free - DEVICE_RESERVE_SHARE * total)


def _mark(device: torch.device | None) -> torch.Event | None:
    if device is None:
        return None
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event
