"""Randomness that belongs to the data, not to the process.

A random augmentation must come out the same whichever worker computes it, and dropout the same whichever rank runs the
slot; after a repeated step too. So the generators of Python, NumPy and torch are set from what is being computed:

    augmentation   (seed, epoch, sample)     sample_randomness
    dropout        (seed, step, slot)        slot_randomness; in a pipeline also by its stage

and put back afterwards, so that what the surrounding program draws does not depend on it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from holdfast.torch_compat import device_generator

try:
    import numpy as np
except ImportError:  # torch works without it, and then nothing draws from it
    np = None  # type: ignore[assignment]


def sample_key(seed: int, epoch: int, sample: int) -> int:
    """Return a 64-bit key for all that is random about a sample in an epoch."""
    return _key("sample", seed, epoch, sample)


def batch_key(seed: int, first: int, end: int) -> int:
    """Return a 64-bit key for all that is random about collating a batch, by its positions."""
    return _key("batch", seed, first, end)


def slot_key(seed: int, step: int, slot: int, stage: int = 0) -> int:
    """Return a 64-bit key for all that is random about a slot in a step, in a stage of a pipeline."""
    return _key("slot", seed, step, slot, *([stage] if stage else []))


def between_key(seed: int, step: int, slot: int, stage: int = 0) -> int:
    """Return a 64-bit key for what a rank draws between two steps, before this one."""
    return _key("between", seed, step, slot, *([stage] if stage else []))


@contextmanager
def sample_randomness(seed: int, epoch: int, sample: int) -> Iterator[None]:
    """Set the generators to the sample's own while this context lasts, and restore them afterwards."""
    with preserved_generators():
        set_generators(sample_key(seed, epoch, sample))
        yield


@contextmanager
def slot_randomness(seed: int, step: int, slot: int) -> Iterator[None]:
    """Set the generators, the device's included, to the slot's own while this context lasts, and restore them
    afterwards."""
    with preserved_generators():
        set_generators(slot_key(seed, step, slot))
        yield


def set_generators(key: int) -> None:
    """Set Python's, NumPy's and torch's global generators, and those of the device in use."""
    random.seed(key)
    if np is not None:
        np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)
    if (device := device_generator()) is not None:
        device[1].manual_seed(key)


def generator_states() -> tuple[Any, ...]:
    """Return the generators' states, which are equal if nothing was drawn or set in between."""
    used = device_generator()
    device = used[1].get_rng_state().numpy().tobytes() if used is not None else None
    numpy: Any = np.random.get_state() if np is not None else None
    words = (numpy[1].tobytes(), *numpy[2:]) if numpy else None
    return random.getstate(), words, torch.default_generator.get_state().numpy().tobytes(), device


@contextmanager
def preserved_generators(is_needed: bool = True) -> Iterator[None]:
    """Restore the generators after this context, whatever was drawn or set in it."""
    if not is_needed:
        yield
        return
    python, cpu = random.getstate(), torch.default_generator.get_state()
    numpy: Any = np.random.get_state() if np is not None else None
    device = device_generator()
    on_device = device[1].get_rng_state() if device is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        if np is not None:
            np.random.set_state(numpy)
        torch.default_generator.set_state(cpu)
        if device is not None:
            device[1].set_rng_state(on_device)


def _key(kind: str, *numbers: int) -> int:
    text = f"holdfast {kind} 1\0" + "\0".join(map(str, numbers))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
