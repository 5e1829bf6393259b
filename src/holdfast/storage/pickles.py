"""Pickles that stock torch reads, written opcode by opcode. Ours never reads one, and writes none but these two.

    tensor_pickle     the `data.pkl` of a one-tensor torch.save archive
    dcp_metadata      the `.metadata` of a directory, for torch.distributed.checkpoint

What torch itself would write, less the bookkeeping. No class is imported for it: a pickle names classes by words, so
this package needs no torch. Tests open both with the stock loaders.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.storage.coverage import Coverage

if TYPE_CHECKING:
    from holdfast.storage.header import Path, TensorEntry
    from holdfast.storage.image import ImageLayout
    from holdfast.storage.non_tensors import StoredObject

LEGACY_STORAGES = {
    "bool": "BoolStorage",
    "uint8": "ByteStorage",
    "int8": "CharStorage",
    "int16": "ShortStorage",
    "int32": "IntStorage",
    "int64": "LongStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}
"""The names that torch.save has for the storage of a dtype. Later dtypes have none: their storage is untyped bytes."""
LISTED_MAX = 4096
"""The longest list that a number in a path may make of a branch, for a reader that unflattens."""
METADATA = "torch.distributed.checkpoint.metadata"
_LENGTH = struct.Struct("<I")


class Global(NamedTuple):
    """A class or function, by its name."""

    module: str
    name: str


class Call(NamedTuple):
    """The result of a call."""

    function: Global
    arguments: tuple[Any, ...]


class Instance(NamedTuple):
    """An object made without its constructor, and then given its state."""

    kind: Global
    state: Any


class Persistent(NamedTuple):
    """A reference that the reader resolves: torch's way to name a storage in the archive."""

    key: tuple[Any, ...]


class Pairs(NamedTuple):
    """A dictionary whose keys are made by the reader."""

    items: Sequence[tuple[Any, Any]]


@lru_cache(maxsize=4096)  # a model has many tensors and few shapes
def tensor_pickle(dtype: str, shape: tuple[int, ...], size_bytes: int) -> bytes:
    """Return the pickle of a contiguous tensor whose bytes are the archive's storage 0."""
    strides = [math.prod(max(size, 1) for size in shape[at + 1 :]) for at in range(len(shape))]
    legacy = LEGACY_STORAGES.get(dtype)
    kind = Global("torch", legacy) if legacy else Global("torch.storage", "UntypedStorage")
    storage = Persistent(("storage", kind, "0", "cpu", math.prod(shape) if legacy else size_bytes))
    hooks = Call(Global("collections", "OrderedDict"), ())
    arguments: tuple[Any, ...] = (storage, 0, shape, tuple(strides), False, hooks)
    if not legacy:
        arguments = (*arguments, Global("torch", dtype))
    return pickled(Call(Global("torch._utils", f"_rebuild_tensor_v{2 if legacy else 3}"), arguments))


def dcp_metadata(
    parts: Sequence[tuple[str, ImageLayout]], objects: Sequence[tuple[str, StoredObject]] = (), shards: int = 1
) -> bytes:
    """Return the `.metadata` that torch.distributed.checkpoint reads: which file has which region of which tensor at
    which offset.

    `objects` are the values that are not tensors, each with the file that has it (non_tensors.py). Part number p is a
    share of shard p % `shards`.
    """
    tensors, paths = _collect(parts, shards)
    others = {one.name: (file, one) for file, one in objects if one.name not in tensors}
    storage = [_storage(name, *region) for name, regions in tensors.items() for region in regions]
    storage += [_stored(file, one) for file, one in others.values()]
    kinds = {name: _tensor(regions) for name, regions in tensors.items()}
    return pickled(
        _instance(
            "Metadata",
            state_dict_metadata={**kinds, **{name: _instance("BytesStorageMetadata") for name in others}},
            planner_data=_planner_paths({**paths, **{name: one.path for name, (_, one) in others.items()}}),
            storage_data=Pairs(storage),
            storage_meta=_instance("StorageMeta", checkpoint_id=None, save_id=None, load_id=None, modules=[]),
            version="1.0.0",
        )
    )


def _collect(
    parts: Sequence[tuple[str, ImageLayout]], shards: int
) -> tuple[dict[str, list[tuple[TensorEntry, str]]], dict[str, Path]]:
    """Return the regions of each tensor with their files, and the tensor's path.

    A region that several shards have (a tensor that is replicated over them) is listed once, as the first of them has
    it, which each cuts into shares of its own. Regions of the same name that do not belong to one tensor (each rank has
    another tensor there) get a name with the number of the part. Tied tensors are in the files once, and here under
    each of their names.
    """
    tensors: dict[str, list[tuple[TensorEntry, str]]] = {}
    paths: dict[str, Path] = {}
    covered: dict[str, Coverage] = {}
    for number in sorted(range(len(parts)), key=lambda number: (number % shards, number)):
        file, layout = parts[number]
        for entry in layout.entries:
            name, path = entry.name, entry.path
            if name in tensors and not _is_same_tensor(tensors[name][0][0], entry):
                name, path = f"{name}@{number}", (*path[:-1], f"{path[-1] if path else ''}@{number}")
            is_empty_tensor = math.prod(entry.full_shape) == 0
            if name not in covered:
                covered[name] = Coverage(entry.full_shape)
            elif is_empty_tensor:
                continue
            if not covered[name].add(entry.offsets, entry.shape) and not is_empty_tensor:
                continue
            paths[name] = path
            tensors.setdefault(name, []).append((entry, file))
    for regions in list(tensors.values()):
        for path in regions[0][0].aliases:
            if (alias := ".".join(map(str, path))) not in tensors:
                tensors[alias], paths[alias] = regions, path
    return tensors, paths


def _is_same_tensor(one: TensorEntry, other: TensorEntry) -> bool:
    return (one.full_shape, one.dtype, one.path) == (other.full_shape, other.dtype, other.path)


def _planner_paths(paths: Mapping[str, Path]) -> dict[str, Path]:
    """Return the place of each tensor in the nested state. The unflattening reader makes lists of integer keys, so
    integers are used only where the state has lists."""
    unlisted = {
        path[:at]
        for path in paths.values()
        for at, key in enumerate(path)
        if isinstance(key, str) or not 0 <= key < LISTED_MAX
    }
    return {
        name: tuple(str(key) if path[:at] in unlisted else key for at, key in enumerate(path)) or ("state",)
        for name, path in paths.items()
    }


def _tensor(regions: Sequence[tuple[TensorEntry, str]]) -> Instance:
    first = regions[0][0]
    chunks = [
        _instance("ChunkStorageMetadata", offsets=_size(entry.offsets), sizes=_size(entry.shape))
        for entry, _ in regions
    ]
    return _instance(
        "TensorStorageMetadata", properties=_properties(first.dtype), size=_size(first.full_shape), chunks=chunks
    )


def _properties(dtype: str) -> Instance:
    strided = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = Call(Global(METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    return Instance(Global(METADATA, "TensorProperties"), (Global("torch", dtype), strided, False, contiguous, False))


def _storage(name: str, entry: TensorEntry, file: str) -> tuple[Instance, Instance]:
    location = {"relative_path": file, "offset": entry.frame_start, "length": entry.frame_bytes}
    info = Instance(Global("torch.distributed.checkpoint.filesystem", "_StorageInfo"), location)
    return _instance("MetadataIndex", fqn=name, offset=_size(entry.offsets), index=None), info


def _stored(file: str, one: StoredObject) -> tuple[Instance, Instance]:
    location = {"relative_path": file, "offset": one.start, "length": one.size_bytes}
    info = Instance(Global("torch.distributed.checkpoint.filesystem", "_StorageInfo"), location)
    return _instance("MetadataIndex", fqn=one.name, offset=None, index=None), info


def _instance(kind: str, **fields: Any) -> Instance:
    return Instance(Global(METADATA, kind), fields)


def _size(sizes: Iterable[int]) -> Call:
    return Call(Global("torch", "Size"), (tuple(sizes),))


def pickled(value: Any) -> bytes:
    """Return the pickle, in protocol 2, of a value made of plain ones and of the kinds above."""
    writer = _PickleWriter()
    writer.write(value)
    return b"\x80\x02" + bytes(writer.out) + b"."


class _PickleWriter:
    def __init__(self) -> None:
        self.out = bytearray()
        self._memo: dict[Global, int] = {}
        self._writers: dict[type, Callable[[Any], None]] = {
            NoneType: self._constant,
            bool: self._constant,
            int: self._integer,
            float: self._float,
            str: self._text,
            bytes: self._bytes,
            tuple: self._tuple,
            list: self._list,
            dict: self._dictionary,
            Global: self._global,
            Call: self._call,
            Instance: self._instance,
            Persistent: self._persistent,
            Pairs: self._pairs,
        }

    def write(self, value: Any) -> None:
        self._writers[type(value)](value)

    def _constant(self, value: bool | None) -> None:
        self.out += b"N" if value is None else b"\x88" if value else b"\x89"

    def _integer(self, value: int) -> None:
        self.out += _integer(value)

    def _float(self, value: float) -> None:
        self.out += b"G" + struct.pack(">d", value)

    def _text(self, value: str) -> None:
        text = value.encode()
        self.out += b"X" + _LENGTH.pack(len(text)) + text

    def _bytes(self, value: bytes) -> None:
        self.out += b"B" + _LENGTH.pack(len(value)) + value

    def _tuple(self, value: tuple[Any, ...]) -> None:
        self.out += b"("
        self._all(value)
        self.out += b"t"

    def _list(self, value: list[Any]) -> None:
        self.out += b"]("
        self._all(value)
        self.out += b"e"

    def _dictionary(self, value: dict[Any, Any]) -> None:
        self.out += b"}("
        for pair in value.items():
            self._all(pair)
        self.out += b"u"

    def _pairs(self, value: Pairs) -> None:
        self.out += b"}("
        for pair in value.items:
            self._all(pair)
        self.out += b"u"

    def _call(self, value: Call) -> None:
        self._global(value.function)
        self._tuple(value.arguments)
        self.out += b"R"

    def _instance(self, value: Instance) -> None:
        self._global(value.kind)
        self.out += b")\x81"
        self.write(value.state)
        self.out += b"b"

    def _persistent(self, value: Persistent) -> None:
        self._tuple(value.key)
        self.out += b"Q"

    def _all(self, values: Iterable[Any]) -> None:
        for value in values:
            self._writers[type(value)](value)

    def _global(self, value: Global) -> None:
        if (known := self._memo.get(value)) is not None:
            self.out += b"j" + _LENGTH.pack(known)
            return
        self._memo[value] = len(self._memo)
        self.out += f"c{value.module}\n{value.name}\n".encode() + b"r" + _LENGTH.pack(self._memo[value])


@lru_cache(maxsize=4096)
def _integer(value: int) -> bytes:
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)
