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

_WORDS = struct.Struct("<624I")
"""Of a Mersenne Twister: Python's and NumPy's."""


def generators() -> dict[str, Any]:
    """Their states now, in plain values."""
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {
        "python": [version, _WORDS.pack(*words[:-1]), words[-1], gauss],
        "torch": _packed(torch.default_generator.get_state()),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        said = numpy.random.get_state(legacy=False)
        if said["bit_generator"] == "MT19937":  # or it is one that the script has put there, which is its own to keep
            state = said["state"]
            words = state["key"].astype("<u4").tobytes()
            found["numpy"] = [words, int(state["pos"]), int(said["has_gauss"]), float(said["gauss"])]
    if torch.cuda.is_initialized() and not torch.cuda._is_in_bad_fork():  # type: ignore[no-untyped-call]
        found["cuda"] = _packed(torch.cuda.get_rng_state())
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
        if "cuda" in saved and torch.cuda.is_available():
            torch.cuda.set_rng_state(_bytes(saved["cuda"]))
    except (TypeError, ValueError, RuntimeError, struct.error) as error:
        raise StateError(f"the random generators cannot be set to what was saved: {error}") from None


def _packed(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())


def _bytes(packed: bytes) -> torch.Tensor:
    return torch.tensor(list(packed), dtype=torch.uint8)
