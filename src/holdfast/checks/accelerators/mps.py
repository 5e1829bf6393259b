"""Apple's GPUs, through torch.mps. One device, no counters, no library to communicate through: tensors go through the
processor's memory by gloo. Not run on such a device by this project's tests."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from holdfast.checks.accelerators.base import Device, FaultRule
from holdfast.checks.accelerators.generic import TorchAccelerator

if TYPE_CHECKING:
    import torch


class Mps(TorchAccelerator):
    """Apple's GPUs."""

    name = "mps"
    backend = "gloo"
    communicator = "holdfast.worker.collectives.communicators:Gloo"
    memory_free_share_min = 0.1  # it shares the machine's memory
    matmul_size = 2_048
    faults = (
        FaultRule(fault="device-out-of-memory", text=r"command buffer exited with error status.*Insufficient Memory"),
        FaultRule(fault="gpu-launch-failure", text=r"command buffer exited with error status"),
    )

    def is_present(self) -> bool:
        """Return whether this machine has one of Apple's own processors."""
        return (platform.system(), platform.machine()) == ("Darwin", "arm64")

    def is_available(self) -> bool:
        """Return what torch says."""
        import torch

        return torch.backends.mps.is_available()

    def devices(self) -> list[Device]:
        """Return the one device."""
        import torch

        total = int(torch.mps.recommended_max_memory())
        free = total - int(torch.mps.driver_allocated_memory())
        return [Device(index=0, name=platform.processor(), memory_bytes=total, memory_free_bytes=free)]

    def synchronize(self, index: int) -> None:
        """Wait for the one device."""
        import torch

        torch.mps.synchronize()

    def torch_device(self, index: int) -> torch.device:
        """Return the one device as torch writes it."""
        import torch

        return torch.device("mps")

    def tensor(self, index: int, size_bytes: int) -> torch.Tensor:
        """Return a tensor in the processor's memory, which is what gloo communicates."""
        import torch

        return torch.ones(max(size_bytes // 4, 1), dtype=torch.float32, device="cpu")
