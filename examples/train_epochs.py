"""Epochs, an evaluation after each, and the best model, with a session: the loop that most scripts have.

    holdfast run --standalone --nproc-per-node 2 --spares 1 examples/train_epochs.py --epochs 3 --best best.pt

Kill a worker at any moment, in the evaluation too: the interrupted step is repeated, and accuracy and model are those
of an undisturbed run, to the bit. It also runs with torchrun, or with python alone.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import holdfast as hf

BATCH = 50  # of all workers together


class Points(Dataset):
    """Points in a plane with the quadrant that they are in, of which every tenth is wrong in the training data."""

    def __init__(self, size: int, seed: int, wrong_every: int = 0) -> None:
        self.points = torch.randn(size, 2, generator=torch.Generator().manual_seed(seed))
        self.quadrants = (self.points[:, 0] > 0).long() * 2 + (self.points[:, 1] > 0).long()
        if wrong_every:
            self.quadrants[::wrong_every] = (self.quadrants[::wrong_every] + 1) % 4

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.points[index], self.quadrants[index]


@torch.no_grad()
def evaluate(model: nn.Module, data: Points, job: hf.Job) -> float:
    """Return the accuracy, the same on every rank: each looks at a part of the data."""
    model.eval()
    mine = slice(job.rank, None, job.world_size)
    right = (model(data.points[mine]).argmax(1) == data.quadrants[mine]).sum()
    dist.all_reduce(right)
    model.train()
    return right.item() / len(data)


def save(path: Path, model: nn.Module) -> None:
    draft = path.with_suffix(".draft")
    torch.save(model.state_dict(), draft)
    os.replace(draft, path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--best", type=Path, default=Path("best.pt"), help="where rank 0 keeps the best model")
    args = parser.parse_args()

    job = hf.init()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    training, validation = Points(2_000, seed=1, wrong_every=10), Points(500, seed=2)
    data = hf.Loader(training, global_batch_size=BATCH, seed=0)
    job.track(model=model, optimizer=optimizer, data=data, best=0.0, best_epoch=-1)  # the last two are plain values

    steps_per_epoch = len(training) // BATCH
    for epoch, steps in job.epochs(args.epochs, steps_per_epoch):
        for step in steps:
            with step:
                for x, y in step.batches(data):
                    step.backward(cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                # In the epoch's last step, so that a fault repeats it. And once in the first, for a look at whether it
                # works; from then on it is known that there are collectives after an update, and a copy is kept.
                if step.number == 0 or (step.number + 1) % steps_per_epoch == 0:
                    with job.paused("evaluation"):  # an evaluation may take long and is no hang
                        accuracy = evaluate(model.module, validation, job)
                    if accuracy > job.values.best:
                        job.values.best, job.values.best_epoch = accuracy, epoch
                        if job.rank == 0:
                            step.after_commit(lambda: save(args.best, model.module))
                    step.log(accuracy=accuracy)
        if job.rank == 0:
            print(f"epoch {epoch}: accuracy {job.logged.get('accuracy', 0):.3f}", flush=True)

    if job.rank == 0:
        print(f"best: {job.values.best!r} in epoch {job.values.best_epoch}", flush=True)


if __name__ == "__main__":
    main()
