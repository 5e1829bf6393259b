"""Tensors as plain safetensors files: one, or a set with an index as Hugging Face has it. Whole when they appear."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from msgspec import Struct

from holdfast.errors import CheckpointError
from holdfast.state.tensor_specs import DTYPE_NAMES
from holdfast.storage.directory import translated_errors
from holdfast.storage.header import FORMAT_NAMES
from holdfast.util.files import sync_directory

SUFFIX = ".safetensors"
INDEX = f"model{SUFFIX}.index.json"
HEADER_ALIGNMENT_BYTES = 64


class SafetensorsFile(Struct, frozen=True, kw_only=True):
    """A tensor to write, created when its turn comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]
    others: tuple[str, ...] = ()
    """Other names of the same tensor: in the metadata, as safetensors' own `save_model` has them."""

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_one(target: Path, tensors: Sequence[SafetensorsFile]) -> None:
    """Write one file; an existing one of that name is replaced."""
    partial = _partial(target)
    with translated_errors(f"{target} cannot be written"):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write_file(partial, tensors)
            partial.replace(target)
            sync_directory(target.parent)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def write_set(target: Path, tensors: Sequence[SafetensorsFile], shard_bytes: int) -> list[Path]:
    """Write a directory of files of at most so many bytes (except for a tensor that has more), and an index if there
    are several; an existing one of that name is replaced."""
    shards = _shards(tensors, shard_bytes)
    names = [_shard_name(number, len(shards)) for number in range(1, len(shards) + 1)]
    partial = _partial(target)
    with translated_errors(f"{target} cannot be written"):
        partial.mkdir(parents=True)
        try:
            for name, shard in zip(names, shards, strict=True):
                _write_file(partial / name, shard)
            if len(shards) > 1:
                _write_index(partial / INDEX, names, shards)
            sync_directory(partial)
            if target.exists():
                shutil.rmtree(target)
            partial.rename(target)
            sync_directory(target.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return [target / name for name in names]


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")


def _shards(tensors: Sequence[SafetensorsFile], shard_bytes: int) -> list[list[SafetensorsFile]]:
    shards: list[list[SafetensorsFile]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.size_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.size_bytes
    return shards


def _shard_name(number: int, count: int) -> str:
    return f"model{SUFFIX}" if count == 1 else f"model-{number:05d}-of-{count:05d}{SUFFIX}"


def _write_index(path: Path, names: Sequence[str], shards: Sequence[list[SafetensorsFile]]) -> None:
    places = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    total = sum(tensor.size_bytes for shard in shards for tensor in shard)
    with path.open("x", encoding="utf-8") as file:
        json.dump({"metadata": {"total_size": total}, "weight_map": places}, file, indent=2)
        _sync(file)


def _write_file(path: Path, tensors: Sequence[SafetensorsFile]) -> None:
    with path.open("xb") as file:
        file.write(_header(tensors))
        for tensor in tensors:
            made = tensor.make().contiguous()
            if made.numel():
                file.write(_memory(made))
        _sync(file)


def _header(tensors: Sequence[SafetensorsFile]) -> bytes:
    metadata = {"format": "pt"} | {other: tensor.name for tensor in tensors for other in tensor.others}
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.size_bytes
        entries[tensor.name] = {"dtype": _format(tensor), "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % HEADER_ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _format(tensor: SafetensorsFile) -> str:
    name = FORMAT_NAMES.get(DTYPE_NAMES[tensor.dtype])
    if name is None:
        raise CheckpointError(f"{tensor.name} is {tensor.dtype}, for which safetensors files have no name")
    return name


def _memory(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory, valid while the tensor is."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())
