"""Value → node of a skeleton (tree.py has the table of nodes). What cannot be kept is named by its path."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.errors import StateError
from holdfast.state.dtensors import Sharded, TensorSharding, layout_of, local_of
from holdfast.state.tensor_specs import (
    DEPTH_MAX,
    DIGITS_MAX,
    DTYPE_NAMES,
    NUMPY_DTYPE,
    NUMPY_SCALAR,
    Alias,
    Path,
    TensorSpec,
    dotted,
)

TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class StateEncoder:
    """An encoder of values into nodes. Tensors that are the same memory are stored once."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.specs: list[TensorSpec] = []
        self.aliases: list[Alias] = []
        self._seen: dict[int, list[tuple[int, TensorSharding | None]]] = {}

    def node(self, value: Any, path: Path) -> Any:
        """Return the node of a value."""
        kind = type(value)
        if kind in (str, float, bool, bytes) or value is None:
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**64 else ["i", self._digits(value, path)]
        if kind in TENSOR_TYPES:
            return self._tensor(value, path)
        if len(path) >= DEPTH_MAX:
            raise StateError(f"{dotted(path[:8])}… is nested deeper than {DEPTH_MAX}: does it contain itself?")
        if kind in (dict, OrderedDict, defaultdict, Counter):
            return self._mapping(value, path)
        if kind in (list, tuple, torch.Size):
            tag = "l" if kind is list else "t" if kind is tuple else "z"
            return [tag, *(self.node(item, (*path, index)) for index, item in enumerate(value))]
        return self._rare(value, path)

    def _mapping(self, value: dict[Any, Any], path: Path) -> list[Any]:
        node: list[Any] = ["c" if type(value) is Counter else "d"]
        for key, item in value.items():
            if type(key) is not str and not (type(key) is int and -(2**63) <= key < 2**64):
                raise StateError(f"{dotted(path)} has the key {key!r:.80}: keys must be words or 64-bit numbers")
            node += (key, self.node(item, (*path, key)))
        return node

    def _digits(self, value: int, path: Path) -> str:
        if value.bit_length() > DIGITS_MAX * 3:
            raise StateError(f"{dotted(path)} is an integer of {value.bit_length()} bits: keep it as bytes")
        return str(value)

    def _tensor(self, tensor: torch.Tensor, path: Path) -> list[Any]:
        stored = self._plain(tensor, path)
        if (alias := self._alias(stored, path)) is not None:
            return ["A", alias]
        return ["T", DTYPE_NAMES[stored.dtype], list(stored.shape)]

    def _plain(self, tensor: torch.Tensor, path: Path) -> torch.Tensor:
        is_dense = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_nested
        if tensor.dtype not in DTYPE_NAMES or not is_dense:
            kind = f"{'nested ' * tensor.is_nested}{tensor.device.type} tensor of {tensor.dtype}, {tensor.layout}"
            raise StateError(f"{dotted(path)} is a {kind}: only dense tensors with values can be kept; convert it")
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        return tensor.detach() if tensor.requires_grad else tensor

    def _alias(self, stored: torch.Tensor, path: Path, layout: TensorSharding | None = None) -> int | None:
        """Return the number of an earlier tensor that is the same memory; if there is none, record this one."""
        if address := stored.data_ptr():
            known = self._seen.setdefault(address, [])
            for index, its_layout in known:
                if its_layout == layout and _is_same(self.tensors[index], stored):
                    self.aliases.append((path, index))
                    return index
            known.append((len(self.tensors), layout))
        self._add(stored, TensorSpec(path, stored.dtype, tuple(stored.shape), layout))
        return None

    def _add(self, stored: torch.Tensor, spec: TensorSpec) -> None:
        self.tensors.append(stored)
        self.specs.append(spec)

    def _sharded(self, local: torch.Tensor, layout: TensorSharding, path: Path) -> list[Any]:
        stored = self._plain(local, path)
        if (alias := self._alias(stored, path, layout)) is not None:
            return ["A", alias]
        parts = (layout.shape, layout.placements, layout.mesh_names, layout.mesh_sizes, layout.coordinate)
        return ["D", DTYPE_NAMES[stored.dtype], list(stored.shape), *parts]

    def _rare(self, value: Any, path: Path) -> list[Any]:
        if isinstance(value, DTensor):
            try:
                layout = layout_of(value)
            except StateError as error:
                raise StateError(f"{dotted(path)} {error}") from None
            return self._sharded(local_of(value), layout, path)
        match value:
            case Sharded():
                return self._sharded(value.local, value.layout, path)
            case torch.dtype() if value in DTYPE_NAMES:
                return ["y", DTYPE_NAMES[value]]
            case torch.device():
                return ["v", str(value)]
            case complex() if type(value) is complex:
                return ["j", value.real, value.imag]
        return self._numpy(value, path)

    def _numpy(self, value: Any, path: Path) -> list[Any]:
        numpy = sys.modules.get("numpy")  # a value of NumPy's cannot be without it
        if numpy and isinstance(value, numpy.generic) and NUMPY_SCALAR.match(value.dtype.str):
            return ["n", value.dtype.str, value.tobytes()]
        if numpy and type(value) is numpy.ndarray and NUMPY_DTYPE.match(value.dtype.str):
            array = numpy.ascontiguousarray(value)
            array = array if array.flags.writeable else array.copy()
            stored = torch.from_numpy(array.reshape(-1).view(numpy.uint8))
            self._add(
                stored, TensorSpec(path, stored.dtype, tuple(stored.shape), None, (value.dtype.str, tuple(value.shape)))
            )
            return ["N", value.dtype.str, list(value.shape)]
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        advice = "give numbers, words, tensors, or dicts, lists and tuples of them, in its state_dict()"
        raise StateError(f"{dotted(path)} is a {kind}, which cannot be kept: {advice}")


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors that begin at the same address are the same memory, read in the same way."""
    kind = (one.dtype, one.shape, one.stride(), one.device)
    return kind == (other.dtype, other.shape, other.stride(), other.device) and one.numel() > 0
