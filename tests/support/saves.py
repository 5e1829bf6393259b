"""Checkpoints to try things on: small images without torch, whole attempts, ways to damage them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holdfast.storage.checkpoint_catalogue import CheckpointCatalogue, FoundCheckpoint
from holdfast.storage.checkpoint_writer import CheckpointWriter
from holdfast.storage.image import TensorRegion, plan
from holdfast.storage.manifest import CheckpointInfo
from holdfast.storage.stores import Store, open_store

BLOCK = 8 * 2**20


def image(seed: int, size_bytes: int = 40_000) -> memoryview:
    """A part with one tensor of random bytes."""
    count = max(1, size_bytes // 4)
    region = TensorRegion(
        name=f"model.weight{seed}",
        path=("model", f"weight{seed}"),
        index=0,
        dtype="float32",
        shape=(count,),
        offsets=(0,),
        full_shape=(count,),
    )
    layout = plan([region], 4096, {})
    buffer = memoryview(bytearray(layout.size_bytes))
    layout.frame(buffer)
    layout.put_skeleton(buffer, b"\x92\x01\xc0")
    entry = layout.entries[0]
    buffer[entry.start : entry.start + entry.size_bytes] = random.Random(seed).randbytes(entry.size_bytes)
    return buffer


def about(step: int, parts: int = 2, **more: Any) -> CheckpointInfo:
    return CheckpointInfo(step=step, world_size=parts, shards=parts, created_unix_s=1.5, job_id="job", **more)


def save(store: Store, step: int, parts: int = 2, nonce: str = "job-1", **more: Any) -> FoundCheckpoint:
    """A whole checkpoint by one writer."""
    with CheckpointWriter(store, about(step, parts, **more), nonce) as writing:
        for number in range(parts):
            writing.write_part(number, image(step * 100 + number))
        found = writing.publish()
    assert found is not None
    return found


def saved(root: Path, steps: Iterable[int], **more: Any) -> CheckpointCatalogue:
    """A directory with checkpoints."""
    store = open_store(str(root))
    for step in steps:
        save(store, step, **more)
    return CheckpointCatalogue(store)


def flip(path: Path, byte: int = -100, bit: int = 3) -> None:
    """One bit of a file."""
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


def visible(root: Path) -> set[str]:
    """What is not hidden."""
    return {path.name for path in root.iterdir() if not path.name.startswith(".")}
