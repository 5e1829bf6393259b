"""Worlds of other layouts, of real processes: each loads what the one before has saved, and saves it, by Checkpointer.

Run as `python layout_worlds.py FOLDER`: torch is imported once, each world is forked. The first world trains; all
others must have its bits, by the names of the whole model. What is saved is also opened by stock torch.
"""

from __future__ import annotations

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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf
from holdfast.state.optimizers import optimizer_state
from holdfast.storage.checkpoint_catalogue import CheckpointCatalogue
from holdfast.storage.stores import open_store

BLOCKS = 4
RANKS = {"single": 1, "ddp": 2}
"""Of the layouts; all others are of four."""
WORLDS = [
    *("single", "pp_tp", "fsdp_tp", "fsdp", "interleaved", "pp_tp"),
    *("single", "fsdp_tp", "ddp", "interleaved", "single"),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stage(nn.Module):
    """Some blocks, by their names in the whole model: all of them, or those of the stages that a rank has."""

    def __init__(self, blocks: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): Block() for number in blocks})
        if BLOCKS - 1 in blocks:
            self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            x = block(x)
        return self.head(x)


def main(root: Path) -> None:
    torch.set_num_threads(1)
    for number, kind in enumerate(WORLDS):
        size = RANKS.get(kind, 4)
        children = [fork(root, number, kind, rank, size) for rank in range(size)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            sys.exit(f"world {number} ({WORLDS[number - 1]} → {kind} of {size}) ended with {codes}")


def fork(root: Path, number: int, kind: str, rank: int, size: int) -> int:
    if child := os.fork():
        return child
    code = 1
    try:
        store = dist.FileStore(str(root / f"store-{number}"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        run(root, number, kind)
        dist.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def build(kind: str, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    pp_rank = dist.get_rank() // 2
    stages = {"pp_tp": [2 * pp_rank, 2 * pp_rank + 1], "interleaved": [pp_rank, pp_rank + 2]}
    model: Any = Stage(stages.get(kind, list(range(BLOCKS))))
    if kind in ("pp_tp", "fsdp_tp"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "tp"))
        for block in model.blocks.values():
            cut_by_tensor_parallelism(block, mesh["tp"])
    if kind == "fsdp_tp":
        fully_shard(model, mesh=mesh["other"])
    elif kind == "interleaved":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        fully_shard(model, mesh=mesh["dp"])
    elif kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    # Two groups, the second of which has parameters in every stage.
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [item for name, item in parameters.items() if "norm" not in name], "weight_decay": 0.1},
        {"params": [item for name, item in parameters.items() if "norm" in name], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, 0.01)


def cut_by_tensor_parallelism(block: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def run(root: Path, number: int, kind: str) -> None:
    model, optimizer = build(kind, seed=number)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    tracked = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with hf.Checkpointer(root / "run", keep="all") as checkpoints:
        if number == 0:
            for step in range(3):
                model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            torch.save(whole(model, optimizer), root / "expected.pt")
        else:
            assert checkpoints.load(**tracked) == number - 1
        check(root, whole(model, optimizer))
        assert scheduler.last_epoch == 3 and optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] < 0.01
        checkpoints.save(number, **tracked)
        checkpoints.wait()
    dist.barrier()
    if dist.get_rank() == 0:
        catalogue = CheckpointCatalogue(open_store(str(root / "run")))
        catalogue.verify(catalogue.open(number))
        open_as_others_do(root, number)


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """What this rank has of the state, by names, each tensor as if it were not cut; all ranks of a mesh together."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {f"model.{name}": value for name, value in model.state_dict().items()}
    state = optimizer_state(optimizer, names)
    for label, entry in state["state"].items():
        found |= {f"optimizer.state.{label}.{key}": value for key, value in entry.items()}
    for group in state["param_groups"]:
        for label in group["params"]:
            found |= {f"optimizer.of.{label}.{key}": torch.tensor(group[key]) for key in ("lr", "weight_decay")}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}


def check(root: Path, have: dict[str, torch.Tensor]) -> None:
    expected = torch.load(root / "expected.pt", weights_only=True)
    for name, value in have.items():
        assert torch.equal(value, expected[name]), name
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, sorted(have))
    assert {name for row in rows for name in row} == set(expected), "every tensor is on some rank"


def open_as_others_do(root: Path, number: int) -> None:
    """With nothing of ours, into one plain model."""
    expected = torch.load(root / "expected.pt", weights_only=True)
    wanted = {name: torch.full_like(value, 7) for name, value in expected.items() if ".of." not in name}
    dcp.load(wanted, checkpoint_id=root / "run" / f"step-{number}", no_dist=True)
    for name, value in wanted.items():
        assert torch.equal(value, expected[name]), f"{name} by torch"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
