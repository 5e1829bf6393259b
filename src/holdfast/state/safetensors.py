"""The safetensors format, written and read by ourselves: 8 bytes of length, a JSON header, then the tensors' bytes.

What the format wants: offsets without holes, from zero on, over the whole file. What we add: wide types first and a
header padded to 64 bytes, so that every tensor lies at a multiple of its item size and can be used where it is mapped.
A dtype the format has no name for is written as its bytes (U8); the skeleton knows what it is.
"""

from __future__ import annotations

import ctypes
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import torch

from holdfast.errors import CheckpointError
from holdfast.state.tree import Flat, Spec, dotted, specs

HEADER_BYTES_MAX = 100_000_000
"""The format's own limit."""
HEADER_ALIGNMENT_BYTES = 64
CHECKSUM_BLOCK_BYTES = 8 * 2**20

FORMAT_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def write(path: Path, flat: Flat) -> tuple[int, str]:
    """Write a state's tensors to a new file and sync it; its size and checksum."""
    described = specs(flat.skeleton)
    order = _order(described)
    header = _header(described, order)
    pieces: Iterable[bytes | memoryview] = chain((header,), _bytes_of(flat.tensors[index] for index in order))
    checksum = size = 0
    with path.open("xb") as file:
        for piece in pieces:
            _write_all(file, piece)
            checksum, size = zlib.crc32(piece, checksum), size + len(piece)
        file.flush()
        os.fsync(file.fileno())
    return size, _checksum_text(checksum)


def read(path: Path, skeleton: bytes, checksum: str) -> Flat:
    """The state in a file, as views of its mapping. Raises CheckpointError if a single bit is wrong."""
    mapped = mapping(path)
    if (found := checksum_of(mapped)) != checksum:
        raise CheckpointError(f"{path} has the checksum {found}, its manifest says {checksum}: it is damaged")
    header, start = _read_header(path, mapped)
    described = specs(skeleton)
    names = _names(described)
    content = mapped[start:]
    tensors = [_tensor(path, content, header, name, spec) for name, spec in zip(names, described, strict=True)]
    return Flat(skeleton, tensors)


def mapping(path: Path) -> torch.Tensor:
    """A file's bytes, mapped; writing to them does not change the file."""
    try:
        size = path.stat().st_size
        return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8) if size else torch.empty(0)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def checksum_of(content: torch.Tensor) -> str:
    """The checksum of bytes, taken in blocks so that they need not be in memory all at once."""
    checksum = 0
    for start in range(0, content.numel(), CHECKSUM_BLOCK_BYTES):
        checksum = zlib.crc32(_memory(content[start : start + CHECKSUM_BLOCK_BYTES]), checksum)
    return _checksum_text(checksum)


def _checksum_text(checksum: int) -> str:
    return f"crc32:{checksum:08x}"


def _order(described: Sequence[Spec]) -> list[int]:
    """Wide types first, else as they come."""
    return sorted(range(len(described)), key=lambda index: -described[index].dtype.itemsize)


def _names(described: Sequence[Spec]) -> list[str]:
    """Each tensor's path, made unique: keys may contain dots, so two paths may read the same."""
    names: list[str] = []
    taken: set[str] = {"__metadata__"}
    for spec in described:
        name, count = dotted(spec.path), 1
        while name in taken:
            count += 1
            name = f"{dotted(spec.path)}#{count}"
        taken.add(name)
        names.append(name)
    return names


def _header(described: Sequence[Spec], order: Iterable[int]) -> bytes:
    names = _names(described)
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for index in order:
        spec, start = described[index], end
        end += spec.size_bytes
        format_name, shape = _format(spec)
        entries[names[index]] = {"dtype": format_name, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-(len(text) + 8) % HEADER_ALIGNMENT_BYTES)
    if len(text) > HEADER_BYTES_MAX:
        raise CheckpointError(f"{len(described)} tensors have a header of {len(text)} bytes, too many for one file")
    return len(text).to_bytes(8, "little") + text


def _format(spec: Spec) -> tuple[str, list[int]]:
    if name := FORMAT_NAMES.get(spec.dtype):
        return name, list(spec.shape)
    return "U8", [spec.size_bytes]


def _bytes_of(tensors: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    for tensor in tensors:
        held = tensor.detach().cpu().contiguous()
        if held.numel():
            yield _memory(held)


def _memory(held: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory. Valid while the tensor is."""
    size = held.numel() * held.element_size()
    memory = (ctypes.c_ubyte * size).from_address(held.data_ptr())
    memory._holdfast_keeps = held  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def _write_all(file: BinaryIO, piece: bytes | memoryview) -> None:
    rest = memoryview(piece)
    while rest:
        rest = rest[file.write(rest) :]


def _read_header(path: Path, mapped: torch.Tensor) -> tuple[dict[str, Any], int]:
    if mapped.numel() < 8:
        raise CheckpointError(f"{path} has {mapped.numel()} bytes: it is not a safetensors file")
    length = int.from_bytes(bytes(mapped[:8].tolist()), "little")
    if not 2 <= length <= min(HEADER_BYTES_MAX, mapped.numel() - 8):
        raise CheckpointError(f"{path} says that its header has {length} bytes: it is damaged")
    try:
        header = json.loads(bytes(_memory(mapped[8 : 8 + length])))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has a header that is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a header that is no table of tensors")
    return header, 8 + length


def _tensor(path: Path, content: torch.Tensor, header: dict[str, Any], name: str, spec: Spec) -> torch.Tensor:
    format_name, shape = _format(spec)
    match header.get(name):
        case {"dtype": str(dtype), "shape": list(size), "data_offsets": [int(start), int(end)]}:
            fits = (dtype, size) == (format_name, shape) and end - start == spec.size_bytes
            if fits and 0 <= start <= end <= content.numel():
                return _view(content[start:end], spec)
    raise CheckpointError(f"{path} does not hold {name} as its skeleton says: it is damaged or of another checkpoint")


def _view(piece: torch.Tensor, spec: Spec) -> torch.Tensor:
    if not piece.numel():
        return torch.empty(spec.shape, dtype=spec.dtype)
    if piece.data_ptr() % spec.dtype.itemsize or piece.storage_offset() % spec.dtype.itemsize:
        piece = piece.clone()  # a file of somebody else's making
    return piece.view(spec.dtype).view(spec.shape)
