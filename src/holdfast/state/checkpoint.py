"""A checkpoint: a directory that is there only when it is complete.

    <root>/step-120/part-0.safetensors       one part for each shard of the state; one alone if it is replicated
                    part-1.safetensors
                    manifest.json            what the parts are, their sizes, checksums and skeletons; its own digest

The only legal order: parts are written into `.step-120.<nonce>.partial` and synced, then the manifest, then the
directory; then it is renamed and its parent synced. What has no manifest, or is still called partial, is no checkpoint.

A part may be written by whoever has the shard: a survivor writes a dead rank's from its replica. The nonce is agreed
upon by those who write together.

Reading trusts nothing. A damaged checkpoint is named and passed over for the one before; nothing is ever deleted here.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import re
import shutil
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from holdfast.errors import CheckpointError, StateError
from holdfast.state import safetensors
from holdfast.state.tree import Flat

FORMAT = 1
MANIFEST = "manifest.json"
MANIFEST_BYTES_MAX = 2**30
NAME = re.compile(r"step-(0|[1-9][0-9]{0,17})\Z")
NONCE = re.compile(r"[0-9a-zA-Z]{1,64}\Z")

log = logging.getLogger(__name__)


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of a checkpoint."""

    shard: int
    file: str
    size_bytes: int
    checksum: str
    skeleton: str
    """The skeleton of its state, in base64."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint is. Fields may be added; those that are here stay."""

    step: int
    world_size: int
    """Of the job that wrote it."""
    parts: tuple[Part, ...]
    """One, if the state is the same on every rank; else one for each shard, in order."""
    seed: int = 0
    view: int = 0
    created_unix_s: float = 0.0
    versions: dict[str, str] = {}
    notes: dict[str, str] = {}

    @property
    def shards(self) -> int:
        return len(self.parts)


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint on disk whose manifest is sound."""

    path: Path
    manifest: Manifest
    skipped: tuple[str, ...] = field(default=())
    """What was wrong with newer ones."""

    @property
    def step(self) -> int:
        return self.manifest.step


def write_part(root: Path, step: int, nonce: str, shard: int, flat: Flat) -> Part:
    """Write one shard's state where `publish` will find it. To be called once for each shard, by anybody."""
    folder = partial_path(root, step, nonce)
    name = f"part-{shard}.safetensors"
    with _sentences(f"{folder / name} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        size_bytes, checksum = safetensors.write(folder / name, flat)
        _sync_directory(folder)
    skeleton = b64encode(flat.skeleton).decode()
    return Part(shard=shard, file=name, size_bytes=size_bytes, checksum=checksum, skeleton=skeleton)


def publish(root: Path, step: int, nonce: str, manifest: Manifest) -> Found:
    """Make the parts a checkpoint, in one atomic move. A sound one of this step that is already there is kept."""
    folder, target = partial_path(root, step, nonce), root / f"step-{step}"
    _check_parts(manifest, step)
    _check_files(folder, manifest)
    with _sentences(f"{target} cannot be published"):
        _write_manifest(folder / MANIFEST, manifest)
        _sync_directory(folder)
        if target.exists() and (found := _keep_or_put_aside(target, nonce)) is not None:
            shutil.rmtree(folder)
            return found
        folder.rename(target)
        _sync_directory(root)
    return Found(target, manifest)


def partial_path(root: Path, step: int, nonce: str) -> Path:
    """Where a checkpoint is written before it is one."""
    if step < 0 or not NONCE.match(nonce):
        raise CheckpointError(f"step {step} with nonce {nonce!r:.80}: no checkpoint can be named so")
    return root / f".step-{step}.{nonce}.partial"


def versions() -> dict[str, str]:
    """What wrote a checkpoint, for its manifest."""
    return {"holdfast": importlib.metadata.version("holdfast"), "torch": str(torch.__version__)}


def latest(root: Path, on_damage: Callable[[str], None] = log.warning, is_deep: bool = True) -> Found | None:
    """The newest complete checkpoint. Damaged ones are named to `on_damage`, left in place and passed over.

    `is_deep` reads every part and compares checksums; without it, only manifests and sizes are looked at, and `read`
    finds out the rest.
    """
    skipped: list[str] = []
    for path in candidates(root):
        try:
            found = open_checkpoint(path)
            if is_deep:
                verify(found)
        except CheckpointError as error:
            skipped.append(str(error))
            on_damage(f"checkpoint passed over: {error}")
        else:
            return Found(found.path, found.manifest, tuple(skipped))
    return None


def candidates(root: Path) -> list[Path]:
    """What is named like a checkpoint, newest first."""
    with _sentences(f"{root} cannot be listed"):
        if not root.exists():
            return []
        named = [(int(match[1]), path) for path in root.iterdir() if (match := NAME.match(path.name))]
    return [path for _, path in sorted(named, reverse=True)]


def open_checkpoint(path: Path) -> Found:
    """Read a checkpoint's manifest and look whether its parts are there, in full size."""
    manifest = _read_manifest(path / MANIFEST)
    match = NAME.match(path.name)
    if match is None or int(match[1]) != manifest.step:
        raise CheckpointError(f"{path} holds step {manifest.step}: it was renamed, or put together from several")
    _check_parts(manifest, manifest.step)
    _check_files(path, manifest)
    return Found(path, manifest)


def verify(found: Found) -> None:
    """Read all parts and compare their checksums."""
    for part in found.manifest.parts:
        actual = safetensors.checksum_of(safetensors.mapping(found.path / part.file))
        if actual != part.checksum:
            file = found.path / part.file
            raise CheckpointError(f"{file} has the checksum {actual}, its manifest says {part.checksum}: it is damaged")


def read(found: Found, shard: int = 0) -> Flat:
    """The state of one shard, verified, as views of the mapped file: load it, then let it go."""
    if not 0 <= shard < found.manifest.shards:
        raise CheckpointError(f"{found.path} has {found.manifest.shards} shards, none with the number {shard}")
    part = found.manifest.parts[shard]
    try:
        return safetensors.read(found.path / part.file, _skeleton(part), part.checksum)
    except StateError as error:
        raise CheckpointError(f"{found.path / part.file}: {error}") from None


def read_for(found: Found, rank: int, world_size: int) -> Flat:
    """The state of one rank. Raises CheckpointError if the world has another size: then it must be resharded."""
    shards = found.manifest.shards
    if shards not in (1, world_size):
        raise CheckpointError(f"{found.path} has {shards} shards, the world {world_size} ranks: it must be resharded")
    return read(found, rank if shards == world_size else 0)


def skeletons(found: Found) -> list[bytes]:
    """The skeleton of each shard, for resharding."""
    return [_skeleton(part) for part in found.manifest.parts]


def _skeleton(part: Part) -> bytes:
    try:
        return b64decode(part.skeleton, validate=True)
    except ValueError as error:
        raise CheckpointError(f"{part.file} has a skeleton that is not base64: {error}") from None


def _check_parts(manifest: Manifest, step: int) -> None:
    """Parts must be those of one step, whole and in order; their names may lead nowhere else."""
    expected = [(shard, f"part-{shard}.safetensors") for shard in range(len(manifest.parts))]
    if manifest.step != step or not expected or [(part.shard, part.file) for part in manifest.parts] != expected:
        raise CheckpointError(f"the manifest of step {step} does not name the parts of step {manifest.step} in order")


def _check_files(folder: Path, manifest: Manifest) -> None:
    for part in manifest.parts:
        path = folder / part.file
        try:
            size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path} is missing: {error.strerror}") from None
        if size != part.size_bytes:
            raise CheckpointError(f"{path} has {size} bytes, its manifest says {part.size_bytes}: it is damaged")


def _write_manifest(path: Path, manifest: Manifest) -> None:
    content = msgspec.to_builtins(manifest)
    document = {"holdfast_checkpoint": FORMAT, "digest": _digest(content), "content": content}
    with path.open("x", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _read_manifest(path: Path) -> Manifest:
    try:
        if path.stat().st_size > MANIFEST_BYTES_MAX:
            raise CheckpointError(f"{path} is larger than {MANIFEST_BYTES_MAX} bytes: it is not a manifest")
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    match document:
        case {"holdfast_checkpoint": int(number)} if number != FORMAT:
            raise CheckpointError(f"{path} is of format {number}, this Holdfast reads {FORMAT}")
        case {"holdfast_checkpoint": int(), "digest": str(digest), "content": content} if digest == _digest(content):
            pass
        case _:
            raise CheckpointError(f"{path} does not have the digest it should: it is damaged")
    try:
        return msgspec.convert(content, Manifest)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path} is not a manifest: {error}") from None


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return "blake2b:" + hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _keep_or_put_aside(target: Path, nonce: str) -> Found | None:
    """The checkpoint that is already there, if it is sound; else it is put aside under another name."""
    try:
        found = open_checkpoint(target)
        verify(found)
    except CheckpointError as error:
        aside = target.with_name(f"{target.name}.damaged-{nonce}")
        log.warning("%s; it is kept as %s", error, aside.name)
        target.rename(aside)
        return None
    return found


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _sentences(what: str) -> Iterator[None]:
    """The operating system's refusals (no space, no permission, a part written twice) as ours."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what}: {error.strerror or error}") from error


def manifest_of(step: int, world_size: int, parts: Sequence[Part], **more: Any) -> Manifest:
    """A manifest of parts in any order, with the versions filled in."""
    ordered = tuple(sorted(parts, key=lambda part: part.shard))
    return Manifest(step=step, world_size=world_size, parts=ordered, versions=versions(), **more)
