"""Data loaders with processes of their own, by both of their start methods, one after the other."""

import os

import torch
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        assert torch.utils.data.get_worker_info().num_workers == 2
        return torch.tensor(index * index)


def augment(batch):
    return torch.stack(batch) + int(os.environ["RANK"])


if __name__ == "__main__":
    for context in ("fork", "spawn"):
        torch.manual_seed(0)
        loader = DataLoader(
            Squares(), batch_size=4, shuffle=True, num_workers=2, multiprocessing_context=context, collate_fn=augment
        )
        print(os.environ["RANK"], context, [batch.tolist() for batch in loader])
