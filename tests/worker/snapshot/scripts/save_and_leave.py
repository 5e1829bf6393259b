"""save_and_leave.py DIRECTORY return|raise|exit: saves twice and ends at once, without having closed anything.

A process that was forked meanwhile ends before it: finishing is not its task."""

import multiprocessing
import sys

import torch

import holdfast as hf

model = torch.nn.Linear(1_000, 1_000)
optimizer = torch.optim.Adam(model.parameters())
checkpoints = hf.Checkpointer(sys.argv[1])
for step in (1, 2):
    model(torch.ones(1, 1_000)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model.bias.fill_(step)
    checkpoints.save(step, model=model, optimizer=optimizer)
child = multiprocessing.get_context("fork").Process(target=int)
child.start()
child.join()
assert child.exitcode == 0
if sys.argv[2] == "raise":
    raise ValueError("an error of the script's own")
if sys.argv[2] == "exit":
    sys.exit(3)
