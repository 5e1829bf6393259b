"""A DDP loop with hf.Sampler whose dataset and commits are logged, a file for each process.

Arguments: directory, epochs, data loader workers, step at which rank 1 kills itself in its first life (0: never).
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import holdfast as hf

SIZE, GLOBAL_BATCH, SAVE_EVERY_STEPS = 193, 16, 4
"""The last step of an epoch has one sample: all other ranks get ghosts."""


class Logged(Dataset):
    """Writes down which samples it was asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, sample: int) -> tuple[int, torch.Tensor]:
        with (self.directory / f"reads-{os.getpid()}").open("a") as file:
            file.write(f"{sample}\n")
        return sample, torch.tensor([sample / SIZE])


def main() -> None:
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
    dist.destroy_process_group()  # after the model is gone: pytorch#56297


def train(directory: Path, epochs: int, workers: int, fatal_step: int) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = Logged(directory)
    sampler = hf.Sampler(dataset, global_batch_size=GLOBAL_BATCH, seed=3)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=workers)
    checkpoint = directory / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        sampler.load_state_dict(saved["data"])
    life = f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{dist.get_world_size()}-{rank}"
    print(f"life {life} from step {sampler.step}", flush=True)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for samples, x in loader:
            optimizer.zero_grad()
            if sampler.step == fatal_step > 0 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            ((model(x) - x.sin()).square().mean() * sampler.loss_scale).backward()
            optimizer.step()
            used = samples.tolist() if sampler.loss_scale else []
            with (directory / f"commits-{life}").open("a") as file:
                file.write(f"{sampler.step} {' '.join(map(str, used))}\n")
            sampler.commit()
            if sampler.step % SAVE_EVERY_STEPS == 0 and rank == 0:
                torch.save({"model": model.state_dict(), "data": sampler.state_dict()}, directory / "draft.pt")
                os.replace(directory / "draft.pt", checkpoint)


if __name__ == "__main__":
    main()
