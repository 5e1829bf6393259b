"""Data loaders with processes of their own, by both of their start methods, one after the other."""

import os

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info


class Squares(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        assert get_worker_info() is not None
        return torch.tensor(index * index)


def augment(batch):
    return torch.stack(batch) + int(os.environ["RANK"])


if __name__ == "__main__":
    for context, num_workers in (("fork", 2), ("spawn", 1)):
        loader = DataLoader(
            Squares(),
            batch_size=4,
            shuffle=True,
            num_workers=num_workers,
            multiprocessing_context=context,
            collate_fn=augment,
        )
        batches = list(loader)
        print(f"rank {os.environ['RANK']} {context}: {len(batches)} batches, sum {int(torch.cat(batches).sum())}")
