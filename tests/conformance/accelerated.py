"""A script for `accelerate launch`."""

import os

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
ranks = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
print(
    "rank", accelerator.process_index, "of", accelerator.num_processes, ranks, "HOLDFAST_VIEW" in os.environ, flush=True
)
