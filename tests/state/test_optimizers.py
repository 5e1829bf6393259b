"""The mark of optimizers' settings, by which ranks see at each commit that they make the same update."""

import subprocess
import sys

import torch
from torch import nn

from holdfast.state.optimizers import mark_of_settings

SCRIPT = """
import torch
from holdfast.state.optimizers import mark_of_settings
parameter = torch.nn.Parameter(torch.ones(1))
print(mark_of_settings([torch.optim.AdamW([parameter], lr=0.3, weight_decay=0.1, betas=(0.9, 0.99))]))
"""


def adamw(lr: float | torch.Tensor, decay: float = 0.1, beta: float = 0.99) -> torch.optim.Optimizer:
    return torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=lr, weight_decay=decay, betas=(0.9, beta))


def test_it_differs_with_any_number_in_the_settings() -> None:
    optimizers = [adamw(0.3), adamw(0.3 + 1e-16), adamw(0.3, decay=0.2), adamw(0.3, beta=0.9)]
    assert len({mark_of_settings([one]) for one in optimizers}) == 4
    assert mark_of_settings([adamw(0.3)]) == mark_of_settings([adamw(0.3)]) != mark_of_settings([])


def test_it_is_the_same_in_every_process_and_leaves_tensors_out() -> None:
    said = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True, timeout=60)
    assert int(said.stdout) == mark_of_settings([adamw(0.3)])
    assert len({mark_of_settings([adamw(torch.tensor(lr))]) for lr in (0.1, 0.2)}) == 1
