"""ZeRO-1: an update that communicates is undone by a snapshot, learning rate included, and made again.

Run as `python zero.py FOLDER`.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch
import torch._dynamo  # or each process would import it, with its first optimizer
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from holdfast.state.arena import Arena
from holdfast.state.tracked import Tracked

SIZE = 2


def run(rank: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    tracked = Tracked(model=model, optimizer=optimizer, scheduler=scheduler)

    def train(step: int) -> list[torch.Tensor]:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return [tensor.clone() for tensor in tracked.state().tensors]

    train(0)
    snapshot = Arena()
    snapshot.take(tracked.state(), 0)
    rate = optimizer.param_groups[0]["lr"]
    after = train(1)
    snapshot.restore_into(tracked)
    assert optimizer.param_groups[0]["lr"] == rate
    assert all(torch.equal(left, right) for left, right in zip(after, train(1), strict=True))


def fork(root: Path, rank: int) -> int:
    if child := os.fork():
        return child
    code = 1
    try:
        dist.init_process_group("gloo", store=dist.FileStore(str(root / "store"), SIZE), rank=rank, world_size=SIZE)
        run(rank)
        dist.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    children = [fork(Path(sys.argv[1]), rank) for rank in range(SIZE)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(f"ended with {codes}" if any(codes) else 0)
