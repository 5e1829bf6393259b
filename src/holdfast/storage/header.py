"""The head of an image, which is the head of a safetensors file: 8 bytes of length, then JSON, filled up with spaces.

What the format wants: every byte behind the head belongs to a named tensor, without holes. So the frames around our
tensors are tensors too, of bytes, named `__pad__.N`, and so is the skeleton, `__holdfast__.skeleton`. A dtype that the
format had no name for from early on is shown as its bytes. Beside it, for whoever reads a directory of parts:

    DCP_SHARDING_INFO    where in the whole tensor each one begins, as HuggingFaceStorageReader wants to know it
    holdfast             what each entry is and where its frame lies; what ours reads

Reading trusts nothing, and allocates no more than a few times what it is given to read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from holdfast.errors import CheckpointError
from holdfast.storage.frames import ALIGNMENT_BYTES
from holdfast.storage.pieces import ITEM_BYTES, Entry, Path

FORMAT = 2
HEADER_BYTES_MAX = 100_000_000
"""The format's own limit."""
PAGE_BYTES = 4096
DIMENSIONS_MAX = 64
SIZE_MAX = 2**62
METADATA = "__metadata__"
SKELETON = "__holdfast__.skeleton"
PADDING = "__pad__."
OURS = "holdfast"
STOCK = (OURS, "format", "DCP_VERSION", "DCP_SHARDING_INFO")
RESERVED = (METADATA, "__holdfast__.", PADDING)
"""How no tensor's name may begin."""

FORMAT_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""Names that every version of the package knows: one that it does not know keeps it from opening the file at all."""


class Head(NamedTuple):
    """What a header says. Places count from the end of the header."""

    entries: tuple[Entry, ...]
    skeleton_start: int
    skeleton_capacity: int
    about: dict[str, str]


class _Listed(msgspec.Struct, frozen=True):
    """A tensor, as the format lists it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Row(msgspec.Struct, frozen=True, array_like=True):
    """A tensor, as we list it beside."""

    name: str
    path: Path
    index: int
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    whole: tuple[int, ...]
    frame_start: int
    frame_bytes: int
    aliases: tuple[Path, ...] = ()


class _Version(msgspec.Struct, frozen=True):
    format: int


class _Ours(_Version, frozen=True):
    data_bytes: int
    """Behind the header, to the end of the file."""
    rows: tuple[_Row, ...]


# --- writing


def encode(head: Head, data_bytes: int) -> bytes:
    """The header of an image whose data, behind it, has so many bytes. A multiple of the page."""
    listed: dict[str, Any] = {METADATA: {}}
    offsets: dict[str, Any] = {}
    for name, dtype, shape, start, end, begins in _spans(head, data_bytes):
        listed[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        offsets[name] = {"saved_offsets": begins}
    rows = [tuple(getattr(item, field) for field in _Row.__struct_fields__) for item in head.entries]
    listed[METADATA] = {
        **head.about,
        "format": "pt",
        "DCP_VERSION": "1.0",
        "DCP_SHARDING_INFO": _text(offsets),
        OURS: _text({"format": FORMAT, "data_bytes": data_bytes, "rows": rows}),
    }
    content = _text(listed).encode()
    content += b" " * (-(len(content) + 8) % PAGE_BYTES)
    if len(content) > HEADER_BYTES_MAX:
        raise CheckpointError(f"{len(rows)} tensors have a header of {len(content)} bytes, too many for one file")
    return len(content).to_bytes(8, "little") + content


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _spans(head: Head, data_bytes: int) -> Iterable[tuple[str, str, Sequence[int], int, int, Sequence[int]]]:
    """All bytes behind the header, in order: name, dtype, shape, from, to, where in the whole it begins."""
    end = head.skeleton_start + head.skeleton_capacity
    yield SKELETON, "U8", [head.skeleton_capacity], head.skeleton_start, end, [0]
    paddings = 0
    for item in head.entries:
        if item.start > end:
            yield f"{PADDING}{paddings}", "U8", [item.start - end], end, item.start, [0]
            paddings += 1
        end = item.end
        yield item.name, *_shown(item.dtype, item.shape), item.start, end, _begins(item)
    if data_bytes > end:
        yield f"{PADDING}{paddings}", "U8", [data_bytes - end], end, data_bytes, [0]


def _shown(dtype: str, shape: tuple[int, ...]) -> tuple[str, Sequence[int]]:
    if name := FORMAT_NAMES.get(dtype):
        return name, shape
    return "U8", (math.prod(shape) * ITEM_BYTES[dtype],)


def _begins(item: Entry) -> Sequence[int]:
    """Of rows shown as bytes, the byte with which they begin: right where whole rows are cut, as shares are."""
    if item.dtype in FORMAT_NAMES:
        return item.offsets
    row_bytes = math.prod(item.whole[1:]) * ITEM_BYTES[item.dtype]
    return [item.offsets[0] * row_bytes if item.offsets else 0]


# --- reading

# Made here, not where they are used: msgspec looks at a type when it is first used, and crashes the process if two
# threads are the first. Heads are read by several.
_listed, _version, _ours = msgspec.json.Decoder(_Listed), msgspec.json.Decoder(_Version), msgspec.json.Decoder(_Ours)


def header_bytes(first: bytes, size_bytes: int) -> int:
    """How many bytes the header has, its length included, given the first 8 bytes of a file of so many."""
    length = int.from_bytes(first, "little")
    if len(first) != 8 or not 2 <= length <= min(HEADER_BYTES_MAX, size_bytes - 8):
        raise CheckpointError(f"its header would have {length} of its {size_bytes} bytes: it is damaged, or no image")
    if (8 + length) % ALIGNMENT_BYTES:
        raise CheckpointError("its header does not end where one of ours would: it is damaged, or not written by us")
    return 8 + length


def decode(content: bytes, data_bytes: int) -> Head:
    """What a header says, checked against itself and against the bytes that follow it."""
    try:
        listed = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        about = msgspec.json.decode(listed.pop(METADATA, msgspec.Raw(b"{}")), type=dict[str, str])
        rows = _rows(about, data_bytes)
        entries = tuple(_entry(row, _listed.decode(listed[row.name])) for row in rows)
        skeleton = _listed.decode(listed[SKELETON]).data_offsets
    except (msgspec.DecodeError, KeyError, ValueError, RecursionError) as error:
        raise CheckpointError(f"its header cannot be read: {error!r:.200}") from None
    _check_order([skeleton, *((item.frame_start, item.frame_start + item.frame_bytes) for item in entries)], data_bytes)
    start, end = skeleton
    if end - start < 8 or len({item.name for item in entries}) < len(entries):
        raise CheckpointError("its header has no room for the skeleton, or the same name twice")
    about = {key: value for key, value in about.items() if key not in STOCK}
    return Head(entries, start, end - start, about)


def _rows(about: Mapping[str, str], data_bytes: int) -> tuple[_Row, ...]:
    if OURS not in about:
        raise CheckpointError("it is a safetensors file, but not one that Holdfast wrote")
    if (found := _version.decode(about[OURS]).format) != FORMAT:
        raise CheckpointError(f"it has the format {found}, this Holdfast reads {FORMAT}: use the one that wrote it")
    ours = _ours.decode(about[OURS])
    if ours.data_bytes != data_bytes:
        raise CheckpointError(f"it has {data_bytes} bytes behind its header, which says {ours.data_bytes}")
    return ours.rows


def _entry(row: _Row, listed: _Listed) -> Entry:
    """One entry; ValueError if what is said of it here and there does not fit together."""
    start, end = listed.data_offsets
    sizes = (*row.shape, *row.offsets, *row.whole, row.index, start, end, row.frame_start, row.frame_bytes)
    lengths = {len(row.shape), len(row.offsets), len(row.whole)}
    if any(not 0 <= size < SIZE_MAX for size in sizes) or len(lengths) > 1 or max(lengths) > DIMENSIONS_MAX:
        raise ValueError(f"the sizes of {row.name:.80}")
    entry = Entry(start=start, **{field: getattr(row, field) for field in _Row.__struct_fields__})
    lies = all(at + size <= whole for at, size, whole in zip(row.offsets, row.shape, row.whole, strict=True))
    framed = row.frame_start <= start and end <= row.frame_start + row.frame_bytes and start % ALIGNMENT_BYTES == 0
    is_shown = _shown(row.dtype, row.shape) == (listed.dtype, listed.shape) and not row.name.startswith(RESERVED)
    if not lies or not framed or not is_shown or entry.end != end:
        raise ValueError(f"the place of {row.name:.80}")
    return entry


def _check_order(spans: Sequence[tuple[int, int]], data_bytes: int) -> None:
    """From first to last, none over another, all within the data."""
    places = [0, *(place for span in spans for place in span), data_bytes]
    if any(one > other for one, other in pairwise(places)):
        raise CheckpointError("its header puts one thing over another, or beyond its end: it is damaged")
