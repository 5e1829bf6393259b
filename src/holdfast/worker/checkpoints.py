"""Checkpoints of the whole job, as its workers write and read them together (the format: state/checkpoint.py).

Written by the survivors of a job that cannot go on: each shard by the lowest rank that has it, a dead rank's by one
that keeps its replica. Every writer leaves a note beside its part; when all are through, rank 0 collects the notes
into the manifest and publishes.

Read at the start of a job, by every rank for itself: the newest one that is whole.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from holdfast.errors import CheckpointError
from holdfast.state import checkpoint
from holdfast.state.checkpoint import Found, Part
from holdfast.state.reshard import fetch_from, reshard
from holdfast.state.tracked import Tracked
from holdfast.state.tree import Flat
from holdfast.wire.session import Place
from holdfast.worker import groups

SHARDS_A_RANK_MAX = 16
"""How many shards one rank may offer to write: its own, and the replicas it keeps."""


def write(root: Path, step: int, held: Mapping[int, Flat], shards: int, place: Place, seed: int) -> None:
    """Our part of a checkpoint of the state before `step`, from the shards we hold; rank 0 publishes it."""
    nonce = f"view{place.view}"
    folder = checkpoint.partial_path(root, step, nonce)
    for shard in _ours(held, place.rank):
        part = checkpoint.write_part(root, step, nonce, shard, held[shard])
        (folder / f"part-{shard}.json").write_bytes(msgspec.json.encode(part))
    groups.agree((step,))
    if place.rank == 0:
        parts = _collect(folder, shards)
        manifest = checkpoint.manifest_of(
            step, place.world_size, parts, seed=seed, view=place.view, created_unix_s=time.time()
        )
        checkpoint.publish(root, step, nonce, manifest)
    groups.agree((step,))


def _ours(held: Mapping[int, Flat], rank: int) -> list[int]:
    """The shards that nobody with a lower rank has."""
    offered = sorted(held)[:SHARDS_A_RANK_MAX]
    rows = groups.gather([*offered, *([-1] * (SHARDS_A_RANK_MAX - len(offered)))])
    return [shard for shard in offered if not any(shard in row for row in rows[:rank])]


def _collect(folder: Path, shards: int) -> list[Part]:
    notes = [folder / f"part-{shard}.json" for shard in range(shards)]
    if missing := [note.stem for note in notes if not note.exists()]:
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing)}: give all nodes a --checkpoint-dir on storage they share"
        )
    parts = [msgspec.json.decode(note.read_bytes(), type=Part) for note in notes]
    for note in notes:
        note.unlink()
    return parts


def restore(root: Path, tracked: Tracked, rank: int, shards: int) -> Found | None:
    """Load the newest checkpoint there is, whatever world wrote it; None if there is none."""
    found = checkpoint.latest(root)
    if found is None:
        return None
    if found.manifest.shards == shards:
        tracked.load(checkpoint.read(found, rank % shards))
    else:
        flats = [checkpoint.read(found, shard) for shard in range(found.manifest.shards)]
        reshard(checkpoint.skeletons(found), fetch_from(flats), tracked)
    return found
