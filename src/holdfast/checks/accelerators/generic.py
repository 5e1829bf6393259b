"""What torch's own interfaces allow for every kind of device. torch is imported where it is used: the agent, which has
none, loads the plug-ins' classes too.

The numbers of the multiplication are small integers, so that float32 holds every sum exactly, in whatever order and
with whatever rounding of the factors (TF32, HF32, bfloat16) a device multiplies. So the result is either right or
wrong, on every kind of processor alike: no tolerance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.checks.accelerators.base import Accelerator, Benchmark, Device, DeviceCounters

if TYPE_CHECKING:
    import torch

FACTOR_MAX = 4
"""With 4,096 products of up to 4 × 4 a sum stays far below 2**24."""
SEED = 20_000
PATTERN = 0x5A
WRONG_SHOWN_MAX = 3


class TorchAccelerator(Accelerator):
    """A device that torch knows by `name`."""

    matmul_size = 4_096
    """Rows and columns. Some milliseconds of work on the kind of device it is for."""
    copy_bytes = 512 * 2**20
    """Many times its caches."""

    def is_available(self) -> bool:
        """Return what torch says."""
        return bool(self._module().is_available())

    def devices(self) -> list[Device]:
        """Return the devices that torch knows."""
        return [self._device(index) for index in range(self._module().device_count())]

    def prepare_matmul(self, index: int) -> Benchmark:
        """Return the exact multiplication that the top of this file describes."""
        return MatmulBenchmark(self, index, self.matmul_size)

    def prepare_bandwidth(self, index: int) -> Benchmark:
        """Return a copy within the device's memory."""
        return CopyBenchmark(self, index, self.copy_bytes)

    def tensor(self, index: int, size_bytes: int) -> Any:
        """Return float32 ones."""
        import torch

        return torch.ones(max(size_bytes // 4, 1), dtype=torch.float32, device=self.torch_device(index))

    def synchronize(self, index: int) -> None:
        """Wait by the device's module of torch."""
        self._module().synchronize(index)

    def record(self, index: int) -> DeviceCounters | None:
        """Return an event of torch."""
        import torch

        event = torch.Event(self.torch_device(index))
        event.record(torch.accelerator.current_stream(self.torch_device(index)))
        return event

    def torch_device(self, index: int) -> torch.device:
        """Return the device as torch writes it."""
        import torch

        return torch.device(self.name, index)

    def _device(self, index: int) -> Device:
        free, total = self._module().mem_get_info(index)
        name = str(self._module().get_device_name(index))
        return Device(index=index, name=name, memory_bytes=int(total), memory_free_bytes=int(free))

    def _module(self) -> Any:
        import torch

        return getattr(torch, self.name)


class MatmulBenchmark:
    """A product C = A·B with a proof in a fraction of the time: C·x = A·(B·x) for a vector x without zeros. An error in
    one number of C always shows."""

    def __init__(self, accelerator: TorchAccelerator, index: int, size: int) -> None:
        import torch

        self._accelerator, self._index = accelerator, index
        numbers = torch.Generator().manual_seed(SEED)
        shape = (size, size)
        self._left = torch.randint(
            -FACTOR_MAX, FACTOR_MAX + 1, shape, generator=numbers, dtype=torch.int32, device="cpu"
        )
        self._right = torch.randint(
            -FACTOR_MAX, FACTOR_MAX + 1, shape, generator=numbers, dtype=torch.int32, device="cpu"
        )
        self._probe = torch.randint(1, 1_000, (size,), generator=numbers, dtype=torch.int64, device="cpu")
        device = accelerator.torch_device(index)
        self._left_there = self._left.to(torch.float32).to(device)
        self._right_there = self._right.to(torch.float32).to(device)
        self.product = torch.zeros(shape, dtype=torch.float32, device=device)

    def run(self) -> None:
        """Multiply once."""
        import torch

        torch.matmul(self._left_there, self._right_there, out=self.product)
        self._accelerator.synchronize(self._index)

    def verify(self) -> str:
        """Compare on the processor, in integers."""
        import torch

        found = self.product.to("cpu")
        if not bool(torch.isfinite(found).all()):
            return "the product has numbers that are not finite"
        wanted = (self._left.to(torch.int64) * (self._right.to(torch.int64) * self._probe).sum(1)).sum(1)
        have = (found.to(torch.float64) * self._probe.to(torch.float64)).sum(1)
        wrong = torch.nonzero(have != wanted.to(torch.float64)).flatten().tolist()
        if not wrong:
            return ""
        rows = ", ".join(map(str, wrong[:WRONG_SHOWN_MAX]))
        return f"the product is wrong in {len(wrong)} of {len(found)} rows ({rows}{', …' * (len(wrong) > 3)})"


class CopyBenchmark:
    """A copy from one half of a stretch of memory to the other."""

    def __init__(self, accelerator: TorchAccelerator, index: int, size_bytes: int) -> None:
        import torch

        self._accelerator, self._index = accelerator, index
        device = accelerator.torch_device(index)
        self._source = torch.full((size_bytes,), PATTERN, dtype=torch.uint8, device=device)
        self._target = torch.zeros_like(self._source)

    def run(self) -> None:
        """Copy once."""
        self._target.copy_(self._source)
        self._accelerator.synchronize(self._index)

    def verify(self) -> str:
        """Compare every byte."""
        import torch

        differing = int(torch.count_nonzero(self._target != PATTERN).item())
        return f"{differing} copied bytes are wrong" if differing else ""
