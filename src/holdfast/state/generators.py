"""The random generators of a process: Python's, NumPy's, torch's, and that of the device in use.

Where the steps are a session's, generators are a function of seed, step and rank. A loop of the user's own draws from
them as it goes: what it draws next is part of its state, and is another on each rank.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from typing import Any

import torch

from holdfast.errors import StateError
from holdfast.torch_compat import device_generator

_WORDS = struct.Struct("<624I")
"""The words of a Mersenne Twister: Python's and NumPy's."""


def generators() -> dict[str, Any]:
    """Return the generators' states now, in plain values."""
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {
        "python": [version, _WORDS.pack(*words[:-1]), words[-1], gauss],
        "torch": _packed(torch.default_generator.get_state()),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        current = numpy.random.get_state(legacy=False)
        if current["bit_generator"] == "MT19937":  # another one was set by the script, which has to save it itself
            state = current["state"]
            words = state["key"].astype("<u4").tobytes()
            found["numpy"] = [words, int(state["pos"]), int(current["has_gauss"]), float(current["gauss"])]
    if (device := device_generator()) is not None:
        kind, module = device
        found[kind] = _packed(module.get_rng_state())
    return found


def set_generators(saved: dict[str, Any]) -> None:
    """Make them go on as they would have. What is not there is left as it is."""
    try:
        if "python" in saved:
            version, words, position, gauss = saved["python"]
            random.setstate((version, (*_WORDS.unpack(words), position), gauss))
        if "torch" in saved:
            torch.default_generator.set_state(_bytes(saved["torch"]))
        if "numpy" in saved and (numpy := sys.modules.get("numpy")) is not None:
            words, *rest = saved["numpy"]
            numpy.random.set_state(("MT19937", _WORDS.unpack(words), *rest))
        kind = torch.accelerator.current_accelerator()
        if kind is not None and kind.type in saved and torch.accelerator.is_available():
            torch.get_device_module(kind).set_rng_state(_bytes(saved[kind.type]))
    except (TypeError, ValueError, RuntimeError, struct.error) as error:
        raise StateError(f"the random generators cannot be set to what was saved: {error}") from None


def _packed(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())


def _bytes(packed: bytes) -> torch.Tensor:
    return torch.tensor(list(packed), dtype=torch.uint8, device="cpu")
