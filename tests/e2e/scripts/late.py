"""A session on a device that runs behind its host (lab/holdfast_late.py), in which a rank kills itself.

    late.py STEPS POINT:STEP:RANK…       POINT: backward (queued, not agreed), update (committed), between (steps)

LATE_MODEL=fsdp2   a sharded model; else DistributedDataParallel, in a group of its own if it is `subgroup`
WORK/final-RANK    number of steps, digest of parameters and optimizer state
Forward and backward are the host's here, so it waits for the device before them; what follows is queued.
"""

import hashlib
import os
import signal
import sys
from pathlib import Path

import holdfast_late as device
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf

job = hf.init(seed=3)
assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0", "in a session aborts are Holdfast's"
work = Path(os.environ["WORK"])
total, faults = int(sys.argv[1]), [fault.split(":") for fault in sys.argv[2:]]


def hurt(point: str, number: int) -> None:
    for index, (where, step, rank) in enumerate(faults):
        if (where, int(step), int(rank)) != (point, number, job.rank):
            continue
        try:
            os.close(os.open(work / f"fired-{index}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        if "LATE_MARK" in os.environ:
            Path(os.environ["LATE_MARK"]).touch()
        os.kill(os.getpid(), signal.SIGKILL)


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
if os.environ.get("LATE_MODEL") == "fsdp2":
    fully_shard(model, mesh=init_device_mesh("cpu", (job.world_size,)))
else:
    group = torch.distributed.new_group() if os.environ.get("LATE_MODEL") == "subgroup" else None
    model = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=0.0002, process_group=group)
optimizer = device.LateMomentum(model.parameters())
job.track(model=model, optimizer=optimizer)
for step in job.steps(total):
    with step:
        number = step.number
        device.synchronize()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * number + job.rank))
        step.backward((model(x) - 1.0).square().mean())
        hurt("backward", number)
        if "LATE_ABORTED" in os.environ:
            device.synchronize()  # as the script's own look at its numbers does
            if not all(parameter.grad.isfinite().all() for parameter in model.parameters()):
                (work / "saw-nan").touch()
                raise ValueError("a gradient is not a number")
        optimizer.step()
        hurt("update", number)
        optimizer.zero_grad()
    if step.is_committed:
        with (work / "ledger").open("a") as ledger:
            ledger.write(f"{number} {job.rank} {os.getpid()}\n")
        hurt("between", number)
device.synchronize()
state = [*model.state_dict().values(), *(entry["velocity"] for entry in optimizer.state.values())]
digest = hashlib.sha256(b"".join(device.local(tensor.detach()).numpy().tobytes() for tensor in state)).hexdigest()
(work / f"final-{job.rank}").write_text(f"{job.step} {digest}")
