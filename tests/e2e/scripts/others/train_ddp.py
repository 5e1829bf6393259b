"""A typical training script: argparse, the environment's rendezvous, DDP, a distributed sampler."""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("data", nargs="?", default="synthetic")
    return parser.parse_args()


def main():
    args = parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42)
    features = torch.randn(64, 8)
    dataset = TensorDataset(features, features.sum(dim=1, keepdim=True))
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, seed=7)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"rank {rank}/{world_size} epoch {epoch} loss {loss.item():.10f} on {args.data}")
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    print(f"rank {rank} local {os.environ['LOCAL_RANK']} weights {weights.double().sum().item():.12f}")
    time.sleep(0.2)  # a gloo group that goes within milliseconds of its last collective can deadlock: pytorch#56297
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    model = main()
