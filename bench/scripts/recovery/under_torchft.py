"""The workload under torchft: this process is a replica group of one rank.

A step counts when the manager committed it and this replica took part in it.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import workload
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.manager import WorldSizeMode

RANKS, SPARES = int(os.environ["BENCH_RANKS"]), int(os.environ["BENCH_SPARES"])
COLLECTIVE_TIMEOUT_S = float(os.environ["BENCH_COLLECTIVE_TIMEOUT_S"])
MANAGER_TIMEOUT_S = 30.0

network = workload.build()
inner = torch.optim.Adam(network.parameters())


def state() -> dict:
    return {"model": network.state_dict(), "optimizer": inner.state_dict()}


def load(loaded: dict) -> None:
    network.load_state_dict(loaded["model"])
    inner.load_state_dict(loaded["optimizer"])


store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S)),
    min_replica_size=RANKS if SPARES else 1,
    world_size_mode=WorldSizeMode.FIXED_WITH_SPARES if SPARES else WorldSizeMode.DYNAMIC,
    load_state_dict=load,
    state_dict=state,
    replica_id=f"bench_{os.environ['REPLICA_GROUP_ID']}",
    timeout=timedelta(seconds=MANAGER_TIMEOUT_S),
    rank=0,
    world_size=1,
    hostname="127.0.0.1",
    store_addr="127.0.0.1",
    store_port=store.port,
)
model = DistributedDataParallel(manager, network)
optimizer = Optimizer(manager, inner)
diary = workload.Diary()
diary.note("ready", int(os.environ["REPLICA_GROUP_ID"]), RANKS)
while (before := manager.current_step()) < workload.STEPS:
    optimizer.zero_grad()
    workload.loss(model, before + 1, int(os.environ["REPLICA_GROUP_ID"])).backward()
    optimizer.step()
    step, rank, world = manager.current_step(), manager.participating_rank(), manager.num_participants()
    if rank is not None:
        diary.note("step" if step > before else "failed", rank, world, step)
    if step > before and workload.at_gate(step):
        workload.wait_at_gate(step)
    workload.breathe()
