"""An accelerator in software for tests: tensors, streams, events, pinned memory and a generator of its own, on a device
that does what it is told behind its host (soft_device.cpp). torch loads it when it is imported, as it loads a vendor's
package; its collectives are in holdfast_soft_group.py.

Everything in Holdfast that is for devices runs on it as on a GPU: nothing here takes the CPU's place.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from holdfast.checks.accelerators.base import Device
from holdfast.checks.accelerators.generic import TorchAccelerator

KIND = "soft"
DEVICES = 8


class Soft(TorchAccelerator):
    """What Holdfast asks of it."""

    name = KIND
    backend = "gloo"
    communicator = "holdfast_soft_group:SoftGroups"
    matmul_size = 256
    copy_bytes = 2**20

    def devices(self) -> list[Device]:
        size = 2**34
        return [Device(index=index, name="soft", memory_bytes=size, memory_free_bytes=size) for index in range(DEVICES)]


class Module:
    """`torch.soft`."""

    def __init__(self, native: Any) -> None:
        import torch

        self.native = native
        self.Stream, self.Event = torch.Stream, torch.Event
        self.manual_seed = native.manual_seed

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return bool(self.native.is_touched())

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return DEVICES

    def current_device(self) -> int:
        import torch

        return torch.accelerator.current_device_index()

    def set_device(self, index: Any) -> None:
        import torch

        self.native.touch()
        torch.accelerator.set_device_index(torch.device(index).index if isinstance(index, str) else index)

    def synchronize(self, index: int | None = None) -> None:
        self.native.synchronize(self.current_device() if index is None else index)

    def current_stream(self, device: Any = None) -> Any:
        import torch

        return torch.accelerator.current_stream(device)

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext() if stream is None else stream

    def get_rng_state(self, device: Any = None) -> Any:
        return self.native.get_rng_state()

    def set_rng_state(self, state: Any, device: Any = None) -> None:
        self.native.set_rng_state(state)

    def manual_seed_all(self, seed: int) -> None:
        self.manual_seed(seed)

    def mem_get_info(self, index: int | None = None) -> tuple[int, int]:
        size = int(os.environ.get("SOFT_FREE_BYTES", 2**34))
        return size, 2**34

    def _sleep(self, cycles: int) -> None:
        """A kernel of its own, as long as one of CUDA at a gigahertz."""
        self.native.sleep(cycles / 1e9)

    def get_amp_supported_dtype(self) -> list[Any]:
        import torch

        return [torch.bfloat16, torch.float16]


def load() -> None:
    """The entry point of the group `torch.backends`."""
    import soft_device
    import torch

    torch.utils.rename_privateuse1_backend(KIND)
    torch._register_device_module(KIND, Module(soft_device))
    torch.utils.generate_methods_for_privateuse1_backend()
