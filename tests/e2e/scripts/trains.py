"""DDP over gloo, writing the ledger of steps.py, until WORK/finish is there (rank 0 looks, all agree).

WORK/store-address-RANK    MASTER_ADDR as the worker found it
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

work = Path(os.environ["WORK"])
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "HOLDFAST_VIEW")
facts = [os.environ[name] for name in names] + [str(os.getpid())]
facts += [os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["MASTER_PORT"]]
ledger = os.open(work / "ledger", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def note(what: str, step: int) -> None:
    os.write(ledger, (" ".join([what, *facts, str(step)]) + "\n").encode())


note("start", 0)
(work / f"store-address-{facts[0]}").write_text(os.environ["MASTER_ADDR"])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
is_over = torch.zeros(1)
while not is_over.item():
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    note("step", step)
    is_over.fill_(float(dist.get_rank() == 0 and (work / "finish").exists()))
    dist.all_reduce(is_over)
note("end", step)
time.sleep(0.2)  # a gloo group that goes within milliseconds of its last collective can deadlock: pytorch#56297
dist.destroy_process_group()
