"""What Holdfast must know of a kind of processor. Without torch: the agent reads the fault tables too.

A plug-in is a class derived from `Accelerator`, or from `generic.TorchAccelerator`, which does all that torch's own
interfaces allow, and is found by the entry point of its name in the group `holdfast.accelerators`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from holdfast.core.faults.fault_types import FaultRule as FaultRule

TOOL_TIMEOUT_S = 10.0
"""The time for a vendor's tool to answer. One that does not is itself a sign: it hangs on a driver that hangs."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One processor of a node."""

    index: int
    name: str
    memory_bytes: int
    memory_free_bytes: int


class DeviceProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A health counter's reading that a device should not be used with."""

    fault: str
    text: str
    """A sentence without its subject, e.g. `3 uncorrectable memory errors`."""
    device: int = -1
    """-1: the node as a whole."""


class DeviceCounters(Protocol):
    """A point in the work that was submitted to a device."""

    def query(self) -> bool:
        """Return at once whether the device has reached it; raise if the device has failed."""


class Benchmark(Protocol):
    """A task that can be repeated and is the same on every node."""

    def run(self) -> None:
        """Run the task once; on return the device has finished it."""

    def verify(self) -> str:
        """Return what is wrong with the result of the last run; empty if it is right."""


class Accelerator:
    """A kind of processor. It is created without arguments."""

    name = ""
    """The device type as torch and `--accelerator` name it."""
    backend = ""
    """torch.distributed's name of what its tensors are communicated through."""
    communicator = ""
    """`module:Class` of a communicator that survives a change of members (worker/collectives/communicators.py); empty:
    one is made of the backend of the name above, as far as torch can make it."""
    runs_behind_host = True
    """Whether a call only queues work, which the device does later. Then a step is not committed before the device has
    done it (worker/device_wait.py)."""
    memory_free_share_min = 0.8
    """Before a job begins a device of its own is empty but for its context: with less free memory than this another
    process uses it."""
    faults: tuple[FaultRule, ...] = ()
    """Exit codes and error texts of this kind of processor that mean hardware."""

    def is_available(self) -> bool:
        """Return whether this machine has, or ought to have, such devices."""
        raise NotImplementedError

    def is_present(self) -> bool:
        """Return the same by a file of the driver, without torch, which the agent does not import. Where it is true,
        `faults` applies to the job's workers even if this kind was not asked for."""
        return False

    def devices(self) -> list[Device]:
        """Return all devices in the order of their numbers."""
        raise NotImplementedError

    def prepare_matmul(self, index: int) -> Benchmark:
        """Return a matrix multiplication on a device, whose result can be checked."""
        raise NotImplementedError

    def prepare_bandwidth(self, index: int) -> Benchmark:
        """Return a copy within a device's memory, far larger than its caches."""
        raise NotImplementedError

    def tensor(self, index: int, size_bytes: int) -> Any:
        """Return float32 ones on a device, to communicate."""
        raise NotImplementedError

    def synchronize(self, index: int) -> None:
        """Wait for the device to have done what it was told."""

    def record(self, index: int) -> DeviceCounters | None:
        """Return a point behind all work that was submitted to the current stream of a device; None if there is nothing
        to wait for."""
        raise NotImplementedError(f"the plug-in of {self.name} has no record(): define it, or runs_behind_host = False")

    def ailments(self) -> list[DeviceProblem]:
        """Return the problems that the vendor's counters show; none where there are no counters."""
        return []


def tool_output(words: Sequence[str]) -> str | None:
    """Return what a vendor's tool prints; None if it is not installed, fails or hangs."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
