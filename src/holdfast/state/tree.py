"""Any state, in two parts: a skeleton without tensors, and the tensors in order.

    flatten(value)                  → Flat(skeleton, tensors)      references to the live tensors, nothing is copied
    unflatten(skeleton, tensors)    → value                        with exactly these tensors in it
    specs(skeleton)                 → what each tensor is: path, dtype, shape, layout; enough to allocate them

The skeleton is msgpack and may come from a stranger: nothing in it is executed; its depth, size and the bytes it asks
for are bounded. Plain values stand for themselves; everything else is an array that begins with a tag:

    l …items          list              T dtype shape                    tensor, the next of the list
    t …items          tuple             D dtype shape layout             DTensor: its local tensor
    z …sizes          torch.Size        N dtype shape                    NumPy array: its bytes
    d k v k v …       dict              A index                          the same memory as an earlier tensor
    c k v k v …       Counter           n dtype bytes                    NumPy scalar
    i digits          int over 64 bits  y name / v name                  torch.dtype / torch.device
    j real imaginary  complex
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from holdfast.errors import StateError
from holdfast.state.decode import StateDecoder
from holdfast.state.encode import StateEncoder
from holdfast.state.tensor_specs import (
    DTYPES,
    SKELETON_BYTES_MAX,
    TENSORS_BYTES_MAX,
    VERSION,
    Alias,
    FlatTree,
    Path,
    TensorSpec,
    dotted,
    leaf_value,
)

__all__ = [
    "DTYPES",
    "SKELETON_BYTES_MAX",
    "TENSORS_BYTES_MAX",
    "VERSION",
    "FlatTree",
    "Path",
    "TensorSpec",
    "aliases",
    "describe",
    "dotted",
    "flatten",
    "leaf_value",
    "sketch",
    "specs",
    "unflatten",
]


def flatten(value: Any) -> FlatTree:
    """Take a state apart. Raises StateError naming the path of what cannot be kept."""
    writer = StateEncoder()
    try:
        skeleton = msgspec.msgpack.encode([VERSION, writer.node(value, ())])
    except UnicodeEncodeError as error:
        raise StateError(f"a string in the state is not valid Unicode: {error}") from None
    if len(skeleton) > SKELETON_BYTES_MAX:
        sizes = f"{len(skeleton)} bytes beside its tensors, more than {SKELETON_BYTES_MAX}"
        raise StateError(f"the state has {sizes}: keep long lists as tensors")
    return FlatTree(skeleton, writer.tensors, writer.specs, writer.aliases)


def unflatten(skeleton: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """Put a state together. The tensors are used as they are; DTensors come back as Sharded."""
    remaining = iter(tensors)

    def next_leaf(spec: TensorSpec) -> Any:
        tensor = next(remaining, None)
        if tensor is None:
            raise StateError(f"{dotted(spec.path)}: the skeleton has more tensors than the {len(tensors)} given")
        if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
            is_, was = f"{tensor.dtype} {list(tensor.shape)}", f"{spec.dtype} {list(spec.shape)}"
            raise StateError(f"{dotted(spec.path)} is {is_}, the skeleton says {was}")
        return leaf_value(spec, tensor)

    value = StateDecoder(next_leaf).read(skeleton)
    if next(remaining, None) is not None:
        raise StateError(f"the skeleton has fewer tensors than the {len(tensors)} given")
    return value


def specs(skeleton: bytes) -> list[TensorSpec]:
    """Return the description of each tensor of a skeleton, in order."""
    found: list[TensorSpec] = []
    sketch(skeleton, lambda _, spec: found.append(spec))
    return found


def sketch(skeleton: bytes, leaf: Callable[[int, TensorSpec], Any]) -> Any:
    """Return the state without its tensors: `leaf` says what stands for each, given its number."""
    numbers = itertools.count()
    return StateDecoder(lambda spec: leaf(next(numbers), spec)).read(skeleton)


def describe(flat: FlatTree) -> list[TensorSpec]:
    """Return the descriptions of the tensors of a state."""
    return flat.specs if flat.specs is not None else specs(flat.skeleton)


def aliases(flat: FlatTree) -> list[Alias]:
    """Return the other places where a tensor of a state stands: tied weights."""
    if flat.aliases is not None:
        return flat.aliases
    reader = StateDecoder(lambda spec: spec)
    reader.read(flat.skeleton)
    return reader.aliases
