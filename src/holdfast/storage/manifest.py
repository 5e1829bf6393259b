"""What a checkpoint is, in JSON that anybody can read.

    {"holdfast_checkpoint": 2, "digest": "blake2b:…", "content": {"about": {…}, "nonce": "…", "parts": […], …}}

The digest is of the content. A manifest is written in one way only, so a file that reads well but is not, byte for
byte, what we would write for what it says was changed by somebody or something: not one bit may differ.

Notes are the same for one part: what its writer leaves for whoever publishes.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import platform
import re
from typing import Any, TypeVar

import msgspec

from holdfast.errors import CheckpointError, MissingError
from holdfast.storage.stores import BLOCK_BYTES, Store

FORMAT = 2
MANIFEST = "manifest.json"
METADATA = ".metadata"
"""The name stock DCP looks for."""
OBJECTS = ".objects"
"""What is no tensor, where stock DCP will find it: the metadata says where."""
STOCK = {-1: METADATA, -2: OBJECTS}
"""Files for stock readers, by the numbers they have in place of a part's."""
MANIFEST_BYTES_MAX = 2**30
PARTS_MAX = 1_000_000
STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})\Z")
STEP_MAX = 10**18 - 1
"""The highest with a name that is understood."""
NONCE = re.compile(r"[0-9a-zA-Z][0-9a-zA-Z_-]{0,127}\Z")
CHECKSUM_DIGITS = 8

Content = TypeVar("Content", bound=msgspec.Struct)


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's image."""

    number: int
    """shard + share × shards."""
    file: str
    """Beside the manifest, or in a folder there."""
    size_bytes: int
    checksums: str
    """crc32c of each block of 8 MiB, eight hexadecimal digits each."""

    def checksum(self, block: int) -> int:
        """Of one block."""
        return int(self.checksums[block * CHECKSUM_DIGITS : (block + 1) * CHECKSUM_DIGITS], 16)

    def checksum_list(self) -> list[int]:
        """Of all blocks."""
        return [self.checksum(block) for block in range(self.blocks)]

    @property
    def blocks(self) -> int:
        return -(-self.size_bytes // BLOCK_BYTES)


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What the checkpoint is of. Fields may be added; those that are here stay."""

    step: int
    world_size: int
    shards: int = 1
    shares: int = 1
    view: int = 0
    seed: int = 0
    created_unix_s: float = 0.0
    job_id: str = ""
    run: str = ""
    """Which run of the job: another one of the same name has another. Empty: it is not known."""
    versions: dict[str, str] = {}
    metrics: dict[str, float | None] = {}
    """For `best:…`. A value that is no number is null."""
    notes: dict[str, Any] = {}
    """The position in the data, the random generators, whatever else: JSON. Those of all writers are put together."""

    @property
    def parts(self) -> int:
        return self.shards * self.shares


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint. Fields may be added; those that are here stay."""

    about: About
    nonce: str
    """Of the attempt that wrote it."""
    parts: tuple[Part, ...]
    """In order: as many as shards times shares."""
    stock: tuple[Part, ...] = ()
    """Files for stock readers; we never read them."""


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """One writer's word that a part is whole."""

    about: About
    nonce: str
    part: Part


for _kind in (Manifest, Note):
    msgspec.json.Decoder(_kind)
"""msgspec looks at a type when it is first used, and crashes the process if two threads are the first: notes are read
by several. So it is done here and now."""


def encode(content: Manifest | Note) -> bytes:
    """The one way to write it."""
    return _document(msgspec.to_builtins(content))


def decode(raw: bytes, kind: type[Content], name: str) -> Content:
    """What was written, or a CheckpointError that begins with the name."""
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
    if digest != _digest(content) or raw != _document(content):
        raise CheckpointError(f"{name} does not have the digest it should: it is damaged")
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{name} is not a manifest: {error}") from None


def read_manifest(store: Store, folder: str, step: int) -> Manifest:
    """Of a published checkpoint, every field of it checked. MissingError if there is none."""
    file = f"{folder}/{MANIFEST}"
    name = f"{store.url}/{file}"
    raw = store.read(file, 0, MANIFEST_BYTES_MAX + 1)
    if len(raw) > MANIFEST_BYTES_MAX:
        raise CheckpointError(f"{name} is larger than {MANIFEST_BYTES_MAX} bytes: it is not a manifest")
    manifest = decode(raw, Manifest, name)
    check(manifest, step, name)
    return manifest


def check(manifest: Manifest, step: int, name: str) -> None:
    """Parts must be those of one step, whole and in order; their names may lead nowhere else."""
    about = manifest.about
    if about.step != step:
        raise CheckpointError(f"{name} is of step {about.step}: it was moved, or put together from several checkpoints")
    if about.shards < 1 or about.shares < 1 or about.parts > PARTS_MAX or not NONCE.match(manifest.nonce):
        raise CheckpointError(f"{name} has a shape or nonce that cannot be")
    if [part.number for part in manifest.parts] != list(range(about.parts)):
        raise CheckpointError(f"{name} does not name the {about.parts} parts of step {step} in order")
    if any(part.number not in STOCK for part in manifest.stock):
        raise CheckpointError(f"{name} names files for stock readers that there are not")
    for part in (*manifest.parts, *manifest.stock):
        _check_part(part, manifest.nonce, name)


def _check_part(part: Part, nonce: str, name: str) -> None:
    file = STOCK.get(part.number) or part_file(part.number)
    if part.file not in (file, f"{nonce}/{file}"):
        raise CheckpointError(f"{name} calls part {part.number} {part.file!r:.80}, which no part is called")
    if part.size_bytes < 0 or not re.fullmatch(f"[0-9a-f]{{{part.blocks * CHECKSUM_DIGITS}}}", part.checksums):
        raise CheckpointError(f"{name} does not have a checksum for each block of {part.file}")


def part_file(number: int) -> str:
    """Of a part, within its folder."""
    return f"part-{number}.safetensors"


def note_file(number: int) -> str:
    """Of a part's note, within its folder."""
    return f"part-{number}.json"


def finite(metrics: dict[str, float]) -> dict[str, float | None]:
    """Metrics as JSON can hold them."""
    return {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}


def versions() -> dict[str, str]:
    """Of what writes a checkpoint. torch's is looked up, as who writes need not have imported it."""
    found = {"python": platform.python_version()}
    for name in ("holdfast", "torch"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def step_folder(step: int) -> str:
    """Of a published checkpoint."""
    return f"step-{step}"


def step_of(folder: str) -> int | None:
    """The step of a folder's name; None if it is not of a checkpoint."""
    match = STEP.match(folder)
    return int(match[1]) if match else None


def exists(store: Store, name: str) -> bool:
    """Whether there is a file of that name."""
    try:
        store.size(name)
    except MissingError:
        return False
    return True


def _document(content: dict[str, Any]) -> bytes:
    document = {"holdfast_checkpoint": FORMAT, "digest": _digest(content), "content": content}
    try:
        return json.dumps(document, indent=1, allow_nan=False).encode() + b"\n"
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"what is said about the checkpoint is no JSON: {error}") from None


def _digest(content: dict[str, Any]) -> str:
    try:
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"what is said about the checkpoint is no JSON: {error}") from None
    return "blake2b:" + hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
