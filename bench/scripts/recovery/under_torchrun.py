"""The workload as a careful user writes it for torchrun: saves every few steps and, started again, resumes from there.

Without BENCH_CHECKPOINT_EVERY it is the plain script that knows of no faults, which overheads are compared with.
"""

import torch
import torch.distributed as dist
import workload

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = workload.wrap(workload.build())
optimizer = torch.optim.Adam(model.parameters())
done = 0
if workload.CHECKPOINT_EVERY:
    import checkpoint

    done = checkpoint.resume(model, optimizer)
diary = workload.Diary()
diary.note("ready", rank, world)
for step in range(done + 1, workload.STEPS + 1):
    workload.loss(model, step, rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    diary.note("step", rank, world, step)
    if workload.CHECKPOINT_EVERY and checkpoint.due(step):
        checkpoint.save(model, optimizer, step)
    if workload.at_gate(step):
        workload.wait_at_gate(step)
    workload.breathe()
