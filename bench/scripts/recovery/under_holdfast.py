"""The workload in a Holdfast session: no checkpoint, no restart, no handling of faults in the script."""

import torch
import workload

import holdfast as hf

job = hf.init()
model = workload.wrap(workload.build())
optimizer = torch.optim.Adam(model.parameters())
job.track(model=model, optimizer=optimizer)
if workload.WATCH:
    job.watch(numbers="go-on", checksum_every=workload.WATCH)
diary = workload.Diary()
diary.note("ready", job.rank, job.world_size)
for step in job.steps(workload.STEPS):
    with step:
        step.backward(workload.loss(model, step.number, job.rank))
        optimizer.step()
        optimizer.zero_grad()
    if step.is_committed:
        diary.note("step", job.rank, job.world_size, step.number)
    if workload.at_gate(step.number):
        with job.paused("gate"):
            workload.wait_at_gate(step.number)
    workload.breathe()
