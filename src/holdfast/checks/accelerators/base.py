"""What Holdfast must know of a kind of processor. Without torch: the agent reads the fault tables too.

A plug-in is a class derived from `Accelerator`, or from `generic.TorchAccelerator`, which does all that torch's own
interfaces allow, and is found by the entry point of its name in the group `holdfast.accelerators`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from holdfast.core.fault_types import FaultRule as FaultRule

TOOL_TIMEOUT_S = 10.0
"""For a vendor's tool to answer. One that does not is itself a sign: it hangs on a driver that hangs."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One processor of a node."""

    index: int
    name: str
    memory_bytes: int
    memory_free_bytes: int


class Ailment(msgspec.Struct, frozen=True, kw_only=True):
    """What a health counter says that a device should not be used with."""

    fault: str
    text: str
    """A sentence without its subject, e.g. `3 uncorrectable memory errors`."""
    device: int = -1
    """-1: the node as a whole."""


class Work(Protocol):
    """A piece of work that can be repeated, the same on every node."""

    def run(self) -> None:
        """Once, to its end: on return the device has done it."""

    def verify(self) -> str:
        """After the last run: what is wrong with the result; empty if it is right."""


class Accelerator:
    """A kind of processor. Made without arguments."""

    name = ""
    """As torch names the device's type, and `--accelerator` takes it."""
    backend = ""
    """torch.distributed's name of what its tensors are communicated through."""
    communicator = ""
    """`module:Class` of a communicator that survives a change of members (worker/collectives/communicators.py); empty:
    one is made of the backend of the name above, as far as torch can make it."""
    memory_free_share_min = 0.8
    """Before a job begins a device of its own is empty but for its context: with less free memory than this somebody
    else's process is on it."""
    faults: tuple[FaultRule, ...] = ()
    """Exit codes and error texts of this kind of processor that mean hardware."""

    def is_available(self) -> bool:
        """Whether this machine has, or ought to have, such devices."""
        raise NotImplementedError

    def is_present(self) -> bool:
        """The same, told without torch, which the agent has not: by a file of the driver. Where it is so, `faults`
        counts for the job's workers also if nobody named this kind."""
        return False

    def devices(self) -> list[Device]:
        """All there are, in the order of their numbers."""
        raise NotImplementedError

    def prepare_matmul(self, index: int) -> Work:
        """A matrix multiplication on a device, whose result can be checked."""
        raise NotImplementedError

    def prepare_bandwidth(self, index: int) -> Work:
        """A copy from a device's memory to the same, far larger than its caches."""
        raise NotImplementedError

    def tensor(self, index: int, size_bytes: int) -> Any:
        """Float32 ones on a device, to communicate."""
        raise NotImplementedError

    def synchronize(self, index: int) -> None:
        """Wait for the device to have done what it was told."""

    def ailments(self) -> list[Ailment]:
        """What the vendor's counters say; nothing where there are none."""
        return []


def tool_output(words: Sequence[str]) -> str | None:
    """What a vendor's tool prints; None if it is not there, fails, or hangs."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
