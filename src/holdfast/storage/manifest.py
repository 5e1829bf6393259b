"""What a checkpoint is, in JSON that anybody can read.

    {"holdfast_checkpoint": 2, "digest": "blake2b:…", "content": {"about": {…}, "nonce": "…", "parts": […], …}}

The digest is of the content. A manifest is written in one way only, so a file that reads well but is not, byte for
byte, what we would write for what it says was changed: not one bit may differ.

Notes are the same for one part: what its writer leaves for the publisher.

Reading trusts nothing. A manifest may have as many bytes, and as many values, as the files beside it can need; every
number in it has a bound, and every text is Unicode. Whatever else it is, it is damaged (CheckpointError).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from holdfast.core.image_info import IMAGE_BYTES_MAX
from holdfast.errors import CheckpointError, MissingError
from holdfast.storage.stores import Store
from holdfast.util.blocks import block_count

FORMAT = 2
MANIFEST = "manifest.json"
METADATA = ".metadata"
"""The name stock DCP looks for."""
OBJECTS = ".objects"
"""The values that are not tensors, for stock DCP, which finds them by the metadata."""
STOCK = {-1: METADATA, -2: OBJECTS}
"""Files for stock readers, by the numbers they have in place of a part's."""
MANIFEST_BYTES_MAX = 256 * 2**20
"""Of any manifest, also of one with a million parts."""
NOTES_BYTES_MAX = 16 * 2**20
"""Of what a manifest holds beside its parts."""
PART_BYTES_MAX = 16 * 2**10
"""Of what a manifest says of one part, its checksums not counted, and its writer's notes included."""
VALUES_MAX = 100_000
PART_VALUES_MAX = 64
"""How many values a manifest may hold, in all and for each part: in memory a value has up to thirty times its bytes."""
PARTS_MAX = 1_000_000
STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})\Z")
STEP_MAX = 10**18 - 1
"""The highest with a name that is understood."""
NONCE = re.compile(r"[0-9a-zA-Z][0-9a-zA-Z_-]{0,127}\Z")
CHECKSUM_DIGITS = 8
HEXADECIMAL = re.compile(r"[0-9a-f]*\Z")

Step = Annotated[int, Meta(ge=0, le=STEP_MAX)]
Count = Annotated[int, Meta(ge=0, le=2**31)]
PartCount = Annotated[int, Meta(ge=1, le=PARTS_MAX)]
Time = Annotated[float, Meta(ge=0, le=250_000_000_000)]
"""Seconds since 1970; up to the year 9892, so that every clock can show it."""
Text = Annotated[str, Meta(max_length=4_096)]

Content = TypeVar("Content", bound=msgspec.Struct)


class PartInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The image of one rank, as a file of a checkpoint."""

    number: Annotated[int, Meta(ge=min(STOCK), le=PARTS_MAX)]
    """shard + share × shards."""
    file: Text
    """Beside the manifest, or in a folder there."""
    size_bytes: Annotated[int, Meta(ge=0, le=IMAGE_BYTES_MAX)]
    checksums: str
    """crc32c of each block of 8 MiB, eight hexadecimal digits each."""

    def checksum(self, block: int) -> int:
        """Return the checksum of one block."""
        return int(self.checksums[block * CHECKSUM_DIGITS : (block + 1) * CHECKSUM_DIGITS], 16)

    def checksum_list(self) -> list[int]:
        """Return the checksums of all blocks."""
        return [self.checksum(block) for block in range(self.blocks)]

    @property
    def blocks(self) -> int:
        return block_count(self.size_bytes)


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a checkpoint. Fields may be added; the existing ones stay."""

    step: Step
    world_size: Count
    shards: PartCount = 1
    shares: PartCount = 1
    view: Count = 0
    seed: int = 0
    created_unix_s: Time = 0.0
    job_id: Text = ""
    run: Text = ""
    """The run of the job: another one of the same name has another. Empty if it is not known."""
    versions: dict[str, str] = {}
    metrics: dict[str, float | None] = {}
    """Metrics for `best:…`. A value that is not a number is null."""
    notes: dict[str, Any] = {}
    """The position in the data, the random generators, whatever else: JSON. Those of all writers are put together."""

    @property
    def parts(self) -> int:
        return self.shards * self.shares


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest of a checkpoint. Fields may be added; the existing ones stay."""

    about: CheckpointInfo
    nonce: str
    """The nonce of the attempt that wrote it."""
    parts: tuple[PartInfo, ...]
    """In order: as many as shards times shares."""
    stock: tuple[PartInfo, ...] = ()
    """Files for stock readers; we never read them."""


class ManifestNote(msgspec.Struct, frozen=True, kw_only=True):
    """A writer's statement that a part is complete."""

    about: CheckpointInfo
    nonce: str
    part: PartInfo


for _kind in (Manifest, ManifestNote):
    msgspec.json.Decoder(_kind)
"""msgspec looks at a type when it is first used, and crashes the process if two threads are the first: notes are read
by several. So it is done here and now."""


def encode(content: Manifest | ManifestNote) -> bytes:
    """Return the one encoding of a manifest or note. CheckpointError if it could not be read back."""
    plain = msgspec.to_builtins(content)
    _convert(plain, type(content), "what is to be written")
    return "".join(_document(plain)).encode()


def bytes_max(files: Mapping[str, int]) -> int:
    """Return how large a manifest may be that describes these files, given by their sizes."""
    needed = NOTES_BYTES_MAX + sum(PART_BYTES_MAX + 2 * CHECKSUM_DIGITS * block_count(size) for size in files.values())
    return min(needed, MANIFEST_BYTES_MAX)


def decode(raw: bytes, kind: type[Content], name: str, parts_max: int = 1) -> Content:
    """Return what was encoded, of so many parts at most; raise CheckpointError with a text that begins with the
    name."""
    values = sum(raw.count(mark) for mark in (b",", b"[", b"{"))
    if values > VALUES_MAX + PART_VALUES_MAX * parts_max:
        raise CheckpointError(f"{name} has {values} values, too many for {parts_max} parts: it is damaged")
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is not JSON, it is damaged: {error}") from None
    match document:
        case {"holdfast_checkpoint": int(number)} if number != FORMAT and not isinstance(number, bool):
            raise CheckpointError(f"{name} is of format {number}, this Holdfast reads {FORMAT}")
        case {"holdfast_checkpoint": int(), "digest": str(digest), "content": dict(content)}:
            pass
        case _:
            raise CheckpointError(f"{name} is not a manifest of ours, or damaged")
    if digest != _digest(content) or not _is_document(raw, content):
        raise CheckpointError(f"{name} does not have the digest it should: it is damaged")
    return _convert(content, kind, name)


def _convert(content: dict[str, Any], kind: type[Content], name: str) -> Content:
    try:
        found = msgspec.convert(content, kind)
        msgspec.json.encode(found)  # fails for half a character, which nothing can show
    except (ValueError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{name} is not a manifest: {str(error)!r:.200}") from None
    return found


def read_manifest(store: Store, folder: str, step: int, there: Mapping[str, int]) -> Manifest:
    """Return the manifest of a published checkpoint, with every field checked; `there` are the files of the folder.
    Raise MissingError if there is none."""
    file = f"{folder}/{MANIFEST}"
    name = f"{store.url}/{file}"
    limit = bytes_max(there)
    if there.get(file, 0) > limit or len(raw := store.read(file, 0, limit + 1)) > limit:
        raise CheckpointError(f"{name} is larger than {limit} bytes, too large for the files beside it: it is damaged")
    manifest = decode(raw, Manifest, name, len(there))
    check(manifest, step, name)
    return manifest


def check(manifest: Manifest, step: int, name: str) -> None:
    """Raise CheckpointError unless the parts are those of one step, complete, in order and named as parts are named."""
    about = manifest.about
    if about.step != step:
        raise CheckpointError(f"{name} is of step {about.step}: it was moved, or put together from several checkpoints")
    if about.parts > PARTS_MAX or not NONCE.match(manifest.nonce):
        raise CheckpointError(f"{name} has an invalid number of parts or an invalid nonce")
    if [part.number for part in manifest.parts] != list(range(about.parts)):
        raise CheckpointError(f"{name} does not name the {about.parts} parts of step {step} in order")
    if any(part.number not in STOCK for part in manifest.stock):
        raise CheckpointError(f"{name} names unknown files for stock readers")
    for part in (*manifest.parts, *manifest.stock):
        _check_part(part, manifest.nonce, name)


def _check_part(part: PartInfo, nonce: str, name: str) -> None:
    file = STOCK.get(part.number) or part_file(part.number)
    if part.file not in (file, f"{nonce}/{file}"):
        raise CheckpointError(f"{name} names part {part.number} {part.file!r:.80}, which is not a valid name")
    if len(part.checksums) != part.blocks * CHECKSUM_DIGITS or not HEXADECIMAL.match(part.checksums):
        raise CheckpointError(f"{name} does not have a checksum for each block of {part.file}")


def checksum_text(checksums: Iterable[int]) -> str:
    """Return checksums as a manifest has them."""
    return "".join(f"{number:0{CHECKSUM_DIGITS}x}" for number in checksums)


def part_file(number: int) -> str:
    """Return the name of a part within its folder."""
    return f"part-{number}.safetensors"


def note_file(number: int) -> str:
    """Return the name of a part's note within its folder."""
    return f"part-{number}.json"


def finite(metrics: dict[str, float]) -> dict[str, float | None]:
    """Return metrics as JSON can hold them."""
    return {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}


def versions() -> dict[str, str]:
    """Return the versions of what writes a checkpoint. torch's is looked up, because the writer need not have imported
    torch."""
    found = {"python": platform.python_version()}
    for name in ("holdfast", "torch"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def step_folder(step: int) -> str:
    """Return the folder of a published checkpoint."""
    return f"step-{step}"


def step_of(folder: str) -> int | None:
    """Return the step of a folder's name; None if it is not a checkpoint's."""
    match = STEP.match(folder)
    return int(match[1]) if match else None


def exists(store: Store, name: str) -> bool:
    """Return whether a file of that name exists."""
    try:
        store.size(name)
    except MissingError:
        return False
    return True


def _document(content: dict[str, Any]) -> Iterator[str]:
    """Yield the one text of a manifest, piece by piece: a list of all of them would be many times as large."""
    document = {"holdfast_checkpoint": FORMAT, "digest": _digest(content), "content": content}
    try:
        yield from json.JSONEncoder(indent=1, allow_nan=False).iterencode(document)
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"the description of the checkpoint cannot be written as JSON: {error}") from None
    yield "\n"


def _is_document(raw: bytes, content: dict[str, Any]) -> bool:
    at = 0
    for piece in _document(content):
        if not raw.startswith(piece.encode(), at):
            return False
        at += len(piece)
    return at == len(raw)


def _digest(content: dict[str, Any]) -> str:
    try:
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"the description of the checkpoint cannot be written as JSON: {error}") from None
    return "blake2b:" + hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
