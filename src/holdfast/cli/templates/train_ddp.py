"""Train with DistributedDataParallel under Holdfast.

    holdfast run --standalone --nproc-per-node 2 --spares 1 train.py

Kill a worker while it runs (`kill -9`): the interrupted step is repeated, and the run ends with the same bits. Replace
what is marked with TODO. The same script runs under torchrun, and alone with python; then nothing is repaired.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import holdfast as hf


class RandomPoints(Dataset[tuple[Tensor, Tensor]]):
    """Points around ten centres. TODO: your dataset; any with a length and numbered samples will do."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(32, generator=torch.Generator().manual_seed(index))
        label = index % 10
        return noise + nn.functional.one_hot(torch.arange(32) % 10, 10)[:, label], torch.tensor(label)


def build_model() -> nn.Module:
    """Return the model. TODO: yours."""
    return nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 10))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64, help="of all workers together, however many there are")
    arguments = parser.parse_args()

    job = hf.init()  # joins the job; torch.distributed is ready, and the process's own device is the current one
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(0)
    model = DistributedDataParallel(build_model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
    data = hf.Loader(RandomPoints(), global_batch_size=arguments.batch, seed=0)
    # Everything that makes up the state; here it is restored, if there is something to restore.
    job.track(model=model, optimizer=optimizer, scheduler=scheduler, data=data)

    def report() -> None:
        if job.rank == 0 and job.step % 20 == 0:
            print(f"step {job.step:5d}  loss {job.logged['loss']:.4f}", flush=True)

    for step in job.steps(arguments.steps):  # the steps that are left
        with step:  # what communicates or changes the state belongs in here: a fault repeats the step
            for x, y in step.batches(data):
                loss = cross_entropy(model(x.to(device)), y.to(device))
                step.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step.log(loss=loss)
            step.after_commit(report)  # once for each step, when it is certain that it counts

    if job.rank == 0:
        print("trained", flush=True)  # TODO: save model.module.state_dict(), or give --checkpoint-dir to holdfast run


if __name__ == "__main__":
    main()
