"""save_and_wait.py DIRECTORY: saves a small state, says so when it is on storage, and waits for its end."""

import sys

import torch

import holdfast as hf

torch.manual_seed(2**63 + 5)  # as large as the seed of a script that sets none may be
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(1, 64)).sum().backward()
optimizer.step()
checkpoints = hf.Checkpointer(sys.argv[1])
checkpoints.save(7, model=model, optimizer=optimizer)
checkpoints.wait()
print(checkpoints._host._page.capacity_bytes(), flush=True)
sys.stdin.readline()
