"""What stands in a skeleton for a tensor, and the bounds of skeletons."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.errors import StateError
from holdfast.state.dtensors import Sharded, TensorSharding

VERSION = 1
DEPTH_MAX = 100
SKELETON_BYTES_MAX = 64 * 2**20
TENSORS_BYTES_MAX = 2**46
"""The most that a skeleton may ask a receiver to allocate, unless the receiver knows better."""
DIMENSIONS_MAX = 64
DIGITS_MAX = 4_000
"""The most digits of an integer; Python itself refuses to read longer ones."""

DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
NUMPY_DTYPE = re.compile(r"[<>|=][biufcSU][1-9][0-9]{0,8}\Z")
NUMPY_SCALAR = re.compile(r"[<>|=][biufc][1-9][0-9]?\Z")

Path = tuple[str | int, ...]
Alias = tuple[Path, int]
"""Another place in the state where a tensor stands, and its number."""


@dataclass(frozen=True, slots=True)
class FlatTree:
    """A state: its skeleton and its tensors."""

    skeleton: bytes
    tensors: list[torch.Tensor]
    specs: list[TensorSpec] | None = field(default=None, compare=False, repr=False)
    """The descriptions of the tensors, where they are known without reading the skeleton."""
    aliases: list[Alias] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The description of one tensor of a skeleton."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: TensorSharding | None = None
    array: tuple[str, tuple[int, ...]] | None = None
    """For a NumPy array its dtype and shape; the tensor is its bytes."""

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def leaf_value(spec: TensorSpec, tensor: torch.Tensor) -> Any:
    """Return what a tensor of a state stands for: itself, a shard, a NumPy array."""
    if spec.layout is not None:
        return Sharded(tensor, spec.layout)
    if spec.array is not None:
        name, shape = spec.array
        return tensor.cpu().numpy().view(numpy_module().dtype(name)).reshape(shape)
    return tensor


def dotted(path: Path) -> str:
    """Return a path for a person: optimizer.state.3.exp_avg."""
    return ".".join(str(part) for part in path) or "the state"


def numpy_module() -> Any:
    """Return NumPy where it is installed: torch works without it, and so does a state without its values."""
    try:
        import numpy
    except ImportError:
        raise StateError("the state has NumPy values, and NumPy is not installed here: install it") from None
    return numpy
