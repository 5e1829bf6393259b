"""The head of an image, which is the head of a safetensors file: 8 bytes of length, then JSON, filled up with spaces.

What the format wants: every byte behind the head belongs to a named tensor, without holes. So the frames around our
tensors are tensors too, of bytes, named `__pad__.N`, and so is the skeleton, `__holdfast__.skeleton`. A dtype that the
format had no name for from early on is shown as its bytes. Beside it, for readers of a directory of parts:

    DCP_SHARDING_INFO    where in the full tensor each one begins, as HuggingFaceStorageReader wants to know it
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
from holdfast.storage.archive_frames import ALIGNMENT_BYTES

FORMAT = 2
HEADER_BYTES_MAX = 100_000_000
"""The format's own limit."""
KEYS_MAX = 2_000_000
"""How many keys a header may have, six for each tensor: in memory a key has up to twenty times its bytes."""
PAGE_BYTES = 4096
DIMENSIONS_MAX = 64
SIZE_MAX = 2**62
SKELETON_BYTES_MAX = 2**30
"""What a state holds beside its tensors is read in one go."""
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

ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
}
"""Bytes of one element, by the name that torch has for the dtype."""

Path = tuple[str | int, ...]
"""The keys that lead to a value in a state."""


class TensorRegion(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor or some of its rows, and their offsets in the full tensor."""

    name: str
    """The path in dots, for people and stock loaders, the same in every part that has a region of it."""
    path: Path
    """Where it stands in the state."""
    index: int
    """Number of the tensor in the skeleton of its shard."""
    dtype: str
    shape: tuple[int, ...]
    """The shape of the region."""
    offsets: tuple[int, ...]
    """Where the region begins in the full tensor, which all shards and shares have together."""
    full_shape: tuple[int, ...]
    """The shape of the full tensor."""
    aliases: tuple[Path, ...] = ()
    """Other places in the state where the same tensor stands: tied weights."""

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class TensorEntry(TensorRegion, frozen=True, kw_only=True):
    """A region with its place in an image. Offsets count from the image's first byte."""

    start: int
    frame_start: int
    """The archive around it, for stock torch."""
    frame_bytes: int

    @property
    def end(self) -> int:
        return self.start + self.size_bytes


class ImageHead(NamedTuple):
    """The content of a header. Offsets count from the end of the header."""

    entries: tuple[TensorEntry, ...]
    skeleton_start: int
    skeleton_capacity: int
    about: dict[str, str]


class _Listed(msgspec.Struct, frozen=True):
    """A tensor as the safetensors format lists it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Row(msgspec.Struct, frozen=True, array_like=True):
    """A tensor as we list it in the metadata."""

    name: str
    path: Path
    index: int
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    full_shape: tuple[int, ...]
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


def encode(head: ImageHead, data_bytes: int) -> bytes:
    """Return the header of an image that has `data_bytes` behind it. Its length is a multiple of the page."""
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
    if _keys(content) > KEYS_MAX:
        raise CheckpointError(f"{len(rows)} tensors are too many for one file")
    if len(content) > HEADER_BYTES_MAX:
        raise CheckpointError(f"{len(rows)} tensors have a header of {len(content)} bytes, too many for one file")
    return len(content).to_bytes(8, "little") + content


def _keys(content: bytes) -> int:
    """Return how many keys a JSON text has, those of texts in it included, or a few more."""
    return content.count(b'":')


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _spans(head: ImageHead, data_bytes: int) -> Iterable[tuple[str, str, Sequence[int], int, int, Sequence[int]]]:
    """Return all bytes behind the header, in order: name, dtype, shape, start, end, offset in the full tensor."""
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


def _begins(item: TensorEntry) -> Sequence[int]:
    """Return the offset of a region in the full tensor; of a dtype that is shown as bytes, the first byte. That is
    exact because regions are complete rows."""
    if item.dtype in FORMAT_NAMES:
        return item.offsets
    row_bytes = math.prod(item.full_shape[1:]) * ITEM_BYTES[item.dtype]
    return [item.offsets[0] * row_bytes if item.offsets else 0]


# --- reading

# Made here, not where they are used: msgspec looks at a type when it is first used, and crashes the process if two
# threads are the first. Heads are read by several.
_listed, _version, _ours = msgspec.json.Decoder(_Listed), msgspec.json.Decoder(_Version), msgspec.json.Decoder(_Ours)


def header_bytes(first: bytes, size_bytes: int) -> int:
    """Return the length of the header with its 8 bytes of length, given those 8 bytes of a file of `size_bytes`."""
    length = int.from_bytes(first, "little")
    if len(first) != 8 or not 2 <= length <= min(HEADER_BYTES_MAX, size_bytes - 8):
        raise CheckpointError(f"its header would have {length} of {size_bytes} bytes: it is damaged, or not an image")
    if (8 + length) % ALIGNMENT_BYTES:
        raise CheckpointError("its header does not end where one of ours would: it is damaged, or not written by us")
    return 8 + length


def decode(content: bytes, data_bytes: int) -> ImageHead:
    """Return the content of a header, checked against itself and against the number of bytes that follow it."""
    if (keys := _keys(content)) > KEYS_MAX:
        raise CheckpointError(f"its header has {keys} keys, more than any of ours: it is damaged")
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
    if end - start > SKELETON_BYTES_MAX:
        raise CheckpointError(f"its header has {end - start} bytes for the skeleton; {SKELETON_BYTES_MAX} are allowed")
    if end - start < 8 or len({item.name for item in entries}) < len(entries):
        raise CheckpointError("its header has too little space for the skeleton, or the same name twice")
    about = {key: value for key, value in about.items() if key not in STOCK}
    return ImageHead(entries, start, end - start, about)


def _rows(about: Mapping[str, str], data_bytes: int) -> tuple[_Row, ...]:
    if OURS not in about:
        raise CheckpointError("it is a safetensors file, but not one that Holdfast wrote")
    if (found := _version.decode(about[OURS]).format) != FORMAT:
        raise CheckpointError(f"it has the format {found}, this Holdfast reads {FORMAT}: use the one that wrote it")
    ours = _ours.decode(about[OURS])
    if ours.data_bytes != data_bytes:
        raise CheckpointError(f"it has {data_bytes} bytes behind its header, which says {ours.data_bytes}")
    return ours.rows


def _entry(row: _Row, listed: _Listed) -> TensorEntry:
    """Return one entry; raise ValueError if the two listings of it do not agree."""
    start, end = listed.data_offsets
    sizes = (*row.shape, *row.offsets, *row.full_shape, row.index, start, end, row.frame_start, row.frame_bytes)
    lengths = {len(row.shape), len(row.offsets), len(row.full_shape)}
    if any(not 0 <= size < SIZE_MAX for size in sizes) or len(lengths) > 1 or max(lengths) > DIMENSIONS_MAX:
        raise ValueError(f"the sizes of {row.name:.80}")
    entry = TensorEntry(start=start, **{field: getattr(row, field) for field in _Row.__struct_fields__})
    is_inside = all(at + size <= limit for at, size, limit in zip(row.offsets, row.shape, row.full_shape, strict=True))
    is_framed = row.frame_start <= start and end <= row.frame_start + row.frame_bytes and start % ALIGNMENT_BYTES == 0
    is_shown = _shown(row.dtype, row.shape) == (listed.dtype, listed.shape) and not row.name.startswith(RESERVED)
    if not is_inside or not is_framed or not is_shown or entry.end != end:
        raise ValueError(f"the place of {row.name:.80}")
    return entry


def _check_order(spans: Sequence[tuple[int, int]], data_bytes: int) -> None:
    """Raise CheckpointError unless the spans are in order, do not overlap and lie within the data."""
    places = [0, *(place for span in spans for place in span), data_bytes]
    if any(one > other for one, other in pairwise(places)):
        raise CheckpointError("its header has overlapping entries, or entries beyond its end: it is damaged")
