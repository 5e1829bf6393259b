"""Two ranks that hold some things otherwise than each other: what is loaded is what rank 0 had, but for the generators
of random numbers; what could never be loaded is not saved.

Run as `python two_ranks.py FOLDER`.
"""

import multiprocessing
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf
from holdfast.errors import StateError

SIZE = 2


class Position:
    """In the data of a rank."""

    def __init__(self, rank: int) -> None:
        self.state: dict[str, Any] = {"at": rank, "seen": torch.full((9,), rank), "next": torch.full((9,), 7 + rank)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def refused(folder: Path, why: str, **objects: Any) -> None:
    try:
        with hf.Checkpointer(folder / "refused") as checkpoints:
            checkpoints.save(1, **objects)
    except StateError as error:
        assert why in str(error), error
    else:
        raise AssertionError("what nobody could load was saved")


def run(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), SIZE), rank=rank, world_size=SIZE)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8))
    parallel, position = DistributedDataParallel(model), Position(rank)
    optimizer = torch.optim.Adam(model.parameters())
    parallel(torch.randn(16, 8) + rank).square().sum().backward()
    optimizer.step()
    expected = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for buffer in expected.values():
        dist.broadcast(buffer, 0)
    random.seed(rank)
    torch.manual_seed(rank)
    with hf.Checkpointer(folder / "saved") as checkpoints:
        checkpoints.save(1, model=parallel, optimizer=optimizer, position=position)
    drawn = random.random(), torch.rand(3).tolist()
    assert hf.Checkpointer(folder / "saved").load(model=parallel, optimizer=optimizer, position=position) == 1
    assert (random.random(), torch.rand(3).tolist()) == drawn, "the generators are not this rank's own"
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[name]), f"{name} is not that of rank 0"
    assert (position.state["at"], int(position.state["seen"][0]), int(position.state["next"][0])) == (0, 0, 7)
    position.state = {"seen": torch.zeros(100 + rank)}
    refused(folder, "rank 1 has other tensors than rank 0", model=parallel, optimizer=optimizer, position=position)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    refused(folder, "optimizer has other state on each rank", model=parallel, optimizer=zero)
    dist.destroy_process_group()


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run, args=(rank, Path(sys.argv[1]))) for rank in range(SIZE)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    sys.exit(any(one.exitcode for one in ranks))
