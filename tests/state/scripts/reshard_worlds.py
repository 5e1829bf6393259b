"""Worlds of other sizes and kinds, of real processes, each loading the parts that the one before has written.

Run as `python reshard_worlds.py FOLDER`: torch is imported once, each world is forked. Every rank checks what it can by
itself and fails the world otherwise; worlds of the same cut are compared by the test. What ours loads, torch's stock
loaders load too, from the same files.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # or each process would import it, with its first optimizer
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from holdfast.state import load_parts, partition, reshard
from holdfast.state.arena import Arena
from holdfast.state.tracked import Tracked
from holdfast.storage.pickles import dcp_metadata
from holdfast.util.blocks import block_checksums

partition.CHUNK_BYTES_MIN = 64  # or nothing here would be large enough to be cut
WORLDS = [
    *(("fsdp", 2), ("fsdp", 3), ("ddp", 2), ("fsdp", 2), ("fsdp", 2)),
    *(("hsdp", 4), ("hsdp", 4), ("plain", 1), ("fsdp", 3)),
]


def main(root: Path) -> None:
    torch.set_num_threads(1)
    for number, (kind, size) in enumerate(WORLDS):
        children = [fork(root, number, kind, rank, size) for rank in range(size)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            sys.exit(f"world {number} ({kind} of {size}) ended with {codes}")


def fork(root: Path, number: int, kind: str, rank: int, size: int) -> int:
    if child := os.fork():
        return child
    code = 1
    try:
        store = dist.FileStore(str(root / f"store-{number}"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        run(root, number, kind, rank, size)
        dist.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def build(kind: str, size: int, seed: int) -> Tracked:
    torch.manual_seed(seed)
    # 7 and 5 rows divide by neither 2 nor 3; a bias of one row leaves ranks with nothing.
    inner = nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    model: Any = inner
    if kind == "ddp":
        model = DistributedDataParallel(inner)
    elif kind != "plain":
        sizes, names = ((size,), ("shard",)) if kind == "fsdp" else ((2, size // 2), ("replicate", "shard"))
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        for layer in (inner[0], inner[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(inner, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return Tracked(model=model, optimizer=optimizer, scheduler=scheduler)


def train(tracked: Tracked, steps: int, rank: int) -> None:
    model, optimizer = tracked.modules()["model"], tracked.optimizers()["optimizer"]
    for step in range(steps):
        model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        tracked.others()["scheduler"].step()


def run(root: Path, number: int, kind: str, rank: int, size: int) -> None:
    tracked = build(kind, size, seed=number)
    if number == 0:
        train(tracked, 3, rank)
    else:
        is_same_cut = WORLDS[number - 1] == (kind, size)
        # With the same sharding nothing is resharded: a call would fail.
        load_parts.request_loads = None if is_same_cut else reshard.request_loads  # type: ignore[assignment]
        load(root / f"step-{number - 1}", tracked, rank)
        load_as_others_do(root / f"step-{number - 1}", tracked, kind, size)
    digest = whole(tracked)
    (root / f"digest-{number}-{rank}").write_text(digest)
    save(root / f"step-{number}", kind, rank, size, tracked)
    if number == [one for one, _ in WORLDS].index(kind):
        roll_back(tracked, digest, rank)
        take_over(tracked, build(kind, size, seed=100 + number), rank)


def save(folder: Path, kind: str, rank: int, size: int, tracked: Tracked) -> None:
    shards = {"fsdp": size, "hsdp": size // 2}.get(kind, 1)
    folder.mkdir(exist_ok=True)
    image = partition.write_image(tracked.state(), size // shards, rank // shards)
    (folder / f"part-{rank}.safetensors").write_bytes(image)
    note = {"shards": shards, "shares": size // shards, "checksums": block_checksums(memoryview(image))}
    (folder / f"part-{rank}.json").write_text(json.dumps(note))
    dist.barrier()
    if rank == 0:
        files = [(f"part-{number}.safetensors", open_part(folder, number).layout) for number in range(size)]
        (folder / ".metadata").write_bytes(dcp_metadata(files))
    dist.barrier()


def open_part(folder: Path, number: int) -> partition.FilePart:
    note = json.loads((folder / f"part-{number}.json").read_text())
    return partition.FilePart(folder / f"part-{number}.safetensors", note["checksums"])


def load(folder: Path, tracked: Tracked, rank: int) -> None:
    note = json.loads((folder / "part-0.json").read_text())
    sources = {number: open_part(folder, number) for number in range(note["shards"] * note["shares"])}
    partition.load_parts(sources, note["shards"], note["shares"], tracked)


def load_as_others_do(folder: Path, tracked: Tracked, kind: str, size: int) -> None:
    """With nothing of ours: into tensors of the same kind, cut as the world is now."""
    wanted = tensors_of(tracked.tree())
    readers = [dcp.FileSystemReader(folder), dcp.HuggingFaceStorageReader(str(folder))]
    for reader in readers:
        found = {name: torch.zeros_like(value) for name, value in wanted.items()}
        dcp.load(found, storage_reader=reader)
        for name, value in wanted.items():
            left, right = (one.to_local() if isinstance(one, DTensor) else one for one in (value, found[name]))
            assert torch.equal(left, right), f"{name} of {folder} in a {kind} of {size}"


def tensors_of(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    """By their paths in dots."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    found: dict[str, torch.Tensor] = {}
    for key, item in items:
        found |= tensors_of(item, f"{path}.{key}" if path else str(key))
    return found


def roll_back(tracked: Tracked, digest: str, rank: int) -> None:
    """A snapshot undoes a step, in place; and the step made again gives the same."""
    before = Arena(tracked.state())
    before.take(tracked.state(), 0)
    train(tracked, 1, rank)
    after = whole(tracked)
    assert after != digest
    before.restore_into(tracked)
    assert whole(tracked) == digest
    train(tracked, 1, rank)
    assert whole(tracked) == after


def take_over(tracked: Tracked, newcomer: Tracked, rank: int) -> None:
    """A fresh rank gets the bytes of the one it replaces, as they would be sent, and goes on as it would have."""
    sent, received = Arena(), Arena()
    sent.take(tracked.state(), 9)
    for target, source in zip(received.receive(sent.skeleton, sent.step), sent.parts(), strict=True):
        target.copy_(source)
    received.seal()
    assert received.restore_into(newcomer) == 9
    assert whole(newcomer) == whole(tracked)
    accumulate_and_put_back(newcomer)
    train(newcomer, 2, rank)
    train(tracked, 2, rank)
    assert whole(newcomer) == whole(tracked)


def accumulate_and_put_back(tracked: Tracked) -> None:
    """A repeated step leaves no trace, in buffers nor in gradients."""
    before, gradients, saved = whole(tracked), tracked.gradients(is_after_update=True), tracked.volatile()
    tracked.modules()["model"](torch.ones(4, 6)).sum().backward()
    assert whole(tracked) != before  # BatchNorm has counted
    tracked.restore_volatile(saved)
    tracked.restore_gradients(gradients)
    assert whole(tracked) == before and all(parameter.grad is None for parameter in tracked.parameters())


def whole(tracked: Tracked) -> str:
    """A digest of the whole state, as if it were not cut."""
    digest = hashlib.sha256()

    def add(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                add(f"{path}.{key}", value[key])
        elif isinstance(value, list):
            for index, item in enumerate(value):
                add(f"{path}.{index}", item)
        elif isinstance(value, torch.Tensor):
            full = value.full_tensor() if isinstance(value, DTensor) else value
            digest.update(f"{path} {full.dtype} {full.shape} {full.tolist()}".encode())
        else:
            digest.update(f"{path} {value!r}".encode())

    add("", tracked.tree())
    return digest.hexdigest()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
