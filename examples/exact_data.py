"""Exact data in a loop of your own: every sample once per epoch, resumed in the middle, with any number of workers.

    holdfast run --standalone --nproc-per-node 3 --max-restarts 3 examples/exact_data.py --checkpoint exact.pt
    holdfast run --standalone --nproc-per-node 2 examples/exact_data.py --checkpoint exact.pt --epochs 4

The second continues where the first ended (or was killed), with two workers instead of three and the same global batch.
`torchrun` runs it as well. The lines that matter are marked.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import holdfast as hf


class Sines(Dataset):
    """Points of a sine curve. Any dataset with a length and numbered samples will do."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, sample: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tensor([sample / 1000 * 6.28])
        return x, torch.sin(x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, default=Path("exact.pt"))
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    train(args)
    dist.destroy_process_group()  # after the model: DDP must not outlive a gloo group


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    dataset = Sines()
    sampler = hf.Sampler(dataset, global_batch_size=48, seed=0)  # <- instead of DistributedSampler
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=1)  # <- the sampler is a batch_sampler

    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        sampler.load_state_dict(saved["data"])  # <- resumes at once, without reading the data before
    if dist.get_rank() == 0:
        workers = dist.get_world_size()
        print(f"starting from step {sampler.step}, epoch {sampler.epoch}, with {workers} workers", flush=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # <- committed samples of this epoch are not drawn again
        for x, y in loader:
            loss = mse_loss(model(x), y) * sampler.loss_scale  # <- the mean over the global batch
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sampler.commit()  # <- this step counts
            if sampler.step % 5 == 0 and dist.get_rank() == 0:
                save(args.checkpoint, model, optimizer, sampler)
    if dist.get_rank() == 0:
        save(args.checkpoint, model, optimizer, sampler)
        print(f"done: {sampler.step} steps, {sampler.position} samples", flush=True)


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, sampler: hf.Sampler) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": sampler.state_dict()}
    draft = path.with_suffix(".draft")
    torch.save(state, draft)
    os.replace(draft, path)


if __name__ == "__main__":
    main()
