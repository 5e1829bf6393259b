"""A make-believe accelerator for tests, of torch's own kind for other packages' devices (PrivateUse1), without tensors.

torch loads it when it is imported, as it loads a vendor's package. It shows what depends on which device a process
takes and draws numbers from. A process that has set a device, or asked for its generator, has touched it.

    SIM_DEVICES=N           how many there are; 2 if nothing is said. CUDA_VISIBLE_DEVICES is heeded too
    SIM_BUSY=N              how often a process finds its device still in use by one that has died
"""

from __future__ import annotations

import os

import torch
from torch.utils import backend_registration

KIND = "sim"


class Module:
    """`torch.sim`."""

    def __init__(self) -> None:
        self._current = 0
        self._is_touched = False
        self._generators: dict[int, torch.Generator] = {}
        self._busy = int(os.environ.get("SIM_BUSY", "0"))

    def is_available(self) -> bool:
        return self.device_count() > 0

    def is_initialized(self) -> bool:
        return self._is_touched

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return len(visible.split(",")) if visible is not None else int(os.environ.get("SIM_DEVICES", "2"))

    def current_device(self) -> int:
        return self._current

    def set_device(self, index: int) -> None:
        if index >= self.device_count():
            raise RuntimeError("SIM error: invalid device ordinal")
        self._is_touched = True
        if self._busy:
            self._busy -= 1
            raise RuntimeError("SIM error: all SIM-capable devices are busy or unavailable")
        self._current = index

    def _generator(self) -> torch.Generator:
        self._is_touched = True
        return self._generators.setdefault(self._current, torch.Generator().manual_seed(7))

    def manual_seed(self, seed: int) -> None:
        self._generator().manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        if self._is_touched:  # as torch.cuda does: else when the device is first used
            self.manual_seed(seed)

    def get_rng_state(self) -> torch.Tensor:
        return self._generator().get_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self._generator().set_state(state)

    def rand(self) -> float:
        return torch.rand(1, generator=self._generator()).item()


class Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def is_built(self) -> bool:
        return True

    def has_primary_context(self, index: int) -> bool:
        return True


def load() -> None:
    """The entry point of the group `torch.backends`."""
    backend_registration._setup_privateuseone_for_python_backend(KIND, Module(), Hooks())
