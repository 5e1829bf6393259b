"""Where the samples come from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

import holdfast as hf

from .bench import DDP, GLOBAL_BATCH, Bench, Net, Samples, Training, variation


def torch_loader(bench: Bench, **choices: object) -> DataLoader:
    """As every tutorial has it."""
    sampler = DistributedSampler(Samples(), bench.job.world_size, bench.job.rank, shuffle=True, seed=3)
    return DataLoader(Samples(), batch_size=GLOBAL_BATCH // bench.job.world_size, sampler=sampler, **choices)


@variation()
def distributed_sampler(bench: Bench) -> Training:
    return Training(DDP(Net()), data=torch_loader(bench))


@variation()
def distributed_sampler_after_the_model(bench: Bench) -> Training:
    """The rank is read when everything else is built."""
    model = DDP(Net())
    return Training(model, data=torch_loader(bench))


@variation()
def distributed_sampler_with_workers(bench: Bench) -> Training:
    return Training(DDP(Net()), data=torch_loader(bench, num_workers=2))


@variation()
def persistent_workers(bench: Bench) -> Training:
    return Training(DDP(Net()), data=torch_loader(bench, num_workers=2, persistent_workers=True))


@variation()
def shuffled_by_torch(bench: Bench) -> Training:
    """No sampler: the order comes from the global generator."""
    return Training(DDP(Net()), data=DataLoader(Samples(), batch_size=8, shuffle=True))


@variation()
def loader_with_slots(bench: Bench) -> Training:
    return Training(DDP(Net()), data=hf.Loader(Samples(), global_batch_size=GLOBAL_BATCH, seed=3, slots=4))


@variation()
def loader_with_workers(bench: Bench) -> Training:
    return Training(DDP(Net()), data=hf.Loader(Samples(), global_batch_size=GLOBAL_BATCH, seed=3, num_workers=2))


@variation()
def sampler_in_a_batch_sampler(bench: Bench) -> Training:
    """The script itself tells it the epoch, at the beginning of each: a newcomer comes in the middle of one."""
    sampler = DistributedSampler(Samples(64), bench.job.world_size, bench.job.rank, shuffle=True, seed=3)
    loader = DataLoader(Samples(64), batch_sampler=BatchSampler(sampler, 8, drop_last=False))

    def compute(step: hf.Step) -> torch.Tensor:
        if step.number % len(loader) == 0:
            sampler.set_epoch(step.number // len(loader))
        for x, y in bench.batches(step):
            loss = bench.mean_loss(x, y)
            step.backward(loss)
        return loss

    return Training(DDP(Net()), data=loader, compute=compute)


class Positioned(DataLoader):
    """A loader that keeps its position in its state, as torchdata's, and not the epoch of its sampler."""

    position = 0

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(super().__iter__()):
            if number >= self.position:
                self.position += 1
                yield batch
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@variation()
def loader_with_a_state(bench: Bench) -> Training:
    sampler = DistributedSampler(Samples(64), bench.job.world_size, bench.job.rank, shuffle=True, seed=3)
    loader = Positioned(Samples(64), batch_size=8, sampler=sampler)
    return Training(DDP(Net()), data=loader, tracked={"data": loader})
