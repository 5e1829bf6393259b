"""Node of a skeleton → value, trusting nothing (tree.py has the table of nodes)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from holdfast.errors import StateError
from holdfast.state.dtensors import TensorSharding
from holdfast.state.tensor_specs import (
    DEPTH_MAX,
    DIMENSIONS_MAX,
    DTYPES,
    NUMPY_DTYPE,
    NUMPY_SCALAR,
    SKELETON_BYTES_MAX,
    TENSORS_BYTES_MAX,
    VERSION,
    Alias,
    Path,
    TensorSpec,
    dotted,
    numpy_module,
)

DEVICE = re.compile(r"[a-z]{1,20}(:[0-9]{1,4})?\Z")


class StateDecoder:
    """A decoder of nodes into values, which trusts nothing. `take` says what stands for each tensor."""

    def __init__(self, take: Callable[[TensorSpec], Any]) -> None:
        self._take = take
        self.aliases: list[Alias] = []
        self._leaves: list[Any] = []
        self._layouts: dict[Any, TensorSharding] = {}
        self._tags: dict[str, Callable[[list[Any], Path], Any]] = {
            "l": lambda node, path: self._items(node, path),
            "t": lambda node, path: tuple(self._items(node, path)),
            "z": lambda node, _: torch.Size(_sizes(node[1:])),
            "d": self._mapping,
            "c": lambda node, path: Counter(self._mapping(node, path)),
            "T": self._tensor,
            "D": self._sharded,
            "N": self._array,
            "A": self._alias,
            "n": self._scalar,
            "i": lambda node, _: _integer(node[1]),
            "j": lambda node, _: complex(node[1], node[2]),
            "y": lambda node, _: DTYPES[node[1]],
            "v": lambda node, _: torch.device(_matching(DEVICE, node[1])),
        }

    def read(self, skeleton: bytes) -> Any:
        """Return the value; raise StateError for whatever is wrong with the bytes."""
        if len(skeleton) > SKELETON_BYTES_MAX:
            raise StateError(f"the skeleton has {len(skeleton)} bytes, more than {SKELETON_BYTES_MAX}")
        try:
            document = msgspec.msgpack.decode(skeleton)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, TypeError) as error:
            raise StateError(f"the skeleton cannot be read: {error}") from None
        if type(document) is not list or len(document) != 2 or document[0] != VERSION:
            raise StateError("the skeleton is not one of this version of Holdfast")
        return self._value(document[1], ())

    def _value(self, node: Any, path: Path) -> Any:
        kind = type(node)
        if kind in (str, float, bool, bytes, int) or node is None:
            return node
        if len(path) > DEPTH_MAX:
            raise StateError(f"the skeleton is nested deeper than {DEPTH_MAX}")
        read = self._tags.get(node[0]) if kind is list and node and type(node[0]) is str else None
        if read is None:
            raise StateError(f"{dotted(path)}: the skeleton has something unknown there")
        try:
            return read(node, path)
        except StateError:
            raise
        except (IndexError, KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise StateError(f"{dotted(path)}: the skeleton is wrong there: {error!r:.200}") from None

    def _items(self, node: list[Any], path: Path) -> list[Any]:
        return [self._value(item, (*path, index)) for index, item in enumerate(node[1:])]

    def _mapping(self, node: list[Any], path: Path) -> dict[Any, Any]:
        keys = node[1::2]
        if len(node) % 2 == 0 or any(type(key) not in (str, int) for key in keys) or len(set(keys)) < len(keys):
            raise ValueError("keys and values do not pair up")
        return {key: self._value(item, (*path, key)) for key, item in zip(keys, node[2::2], strict=True)}

    def _tensor(self, node: list[Any], path: Path) -> Any:
        _, dtype, shape = node
        return self._leaf(_spec(path, DTYPES[dtype], _sizes(shape)))

    def _sharded(self, node: list[Any], path: Path) -> Any:
        _, dtype, local, shape, placements, names, sizes, coordinate = node
        key = (*map(tuple, (shape, placements, names, sizes, coordinate)),)
        if (layout := self._layouts.get(key)) is None:  # a model has many tensors and few layouts
            layout = TensorSharding(
                _sizes(shape), _strings(placements), _strings(names), _sizes(sizes), _sizes(coordinate)
            )
            _check_layout(layout)
            self._layouts[key] = layout
        return self._leaf(_spec(path, DTYPES[dtype], _sizes(local), layout))

    def _array(self, node: list[Any], path: Path) -> Any:
        _, name, shape = node
        itemsize = int(_matching(NUMPY_DTYPE, name)[2:]) * (4 if name[1] == "U" else 1)
        size = _sizes(shape)
        return self._leaf(_spec(path, torch.uint8, (math.prod(size) * itemsize,), None, (name, size)))

    def _leaf(self, spec: TensorSpec) -> Any:
        self._leaves.append(self._take(spec))
        return self._leaves[-1]

    def _alias(self, node: list[Any], path: Path) -> Any:
        _tag, index = node
        if type(index) is not int or index < 0:
            raise ValueError("an alias must name an earlier tensor")
        self.aliases.append((path, index))
        return self._leaves[index]

    def _scalar(self, node: list[Any], _: Path) -> Any:
        _tag, name, content = node
        (scalar,) = numpy_module().frombuffer(content, numpy_module().dtype(_matching(NUMPY_SCALAR, name)))
        return scalar


def _spec(
    path: Path,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    layout: TensorSharding | None = None,
    array: tuple[str, tuple[int, ...]] | None = None,
) -> TensorSpec:
    spec = TensorSpec(path, dtype, shape, layout, array)
    if len(shape) > DIMENSIONS_MAX or spec.size_bytes > TENSORS_BYTES_MAX:
        raise ValueError(f"a tensor of {spec.size_bytes} bytes in {len(shape)} dimensions")
    return spec


def _check_layout(layout: TensorSharding) -> None:
    lengths = {len(layout.placements), len(layout.mesh_sizes), len(layout.coordinate)}
    in_mesh = all(place < size for place, size in zip(layout.coordinate, layout.mesh_sizes, strict=True))
    for text in layout.placements:
        dimension = re.fullmatch(r"R|S([0-9]{1,2})|X([0-9]{1,2})/[0-9]{1,6}", text)
        axis = dimension and (dimension[1] or dimension[2])
        if dimension is None or (axis and int(axis) >= len(layout.shape)):
            raise ValueError(f"the placement {text:.20}")
    if len(lengths) != 1 or not in_mesh or (layout.mesh_names and len(layout.mesh_names) not in lengths):
        raise ValueError("a mesh whose parts do not fit together")


def _sizes(values: Any) -> tuple[int, ...]:
    if type(values) is not list or any(type(value) is not int or not 0 <= value < 2**63 for value in values):
        raise ValueError("sizes must be integers")
    return tuple(values)


def _strings(values: Any) -> tuple[str, ...]:
    if type(values) is not list or any(type(value) is not str for value in values):
        raise ValueError("words are expected")
    return tuple(values)


def _integer(digits: Any) -> int:
    if type(digits) is not str or not re.fullmatch(r"-?[0-9]{1,4000}", digits):
        raise ValueError("digits are expected")
    return int(digits)


def _matching(pattern: re.Pattern[str], text: Any) -> str:
    if type(text) is not str or not pattern.match(text):
        raise ValueError(f"{text!r:.40} is not a name")
    return text
