"""A session whose records come from streamed shards: WORK/shards/NNN.jsonl, record r of shard s is [s, r].

usage: streamed.py STEPS [--fault WHERE:STEP:RANK]… [--pause S] [--spoilt SHARD:RECORD] [--threads N] [--sharded]

WHERE is `read` (in the middle of a shard, as its line is parsed) or `forward`; the process kills itself, once. Without
threads a step reads in its body; a thread would also read, and kill, before the step before is written down.
--spoilt: this record can never be read.
WORK/trained    STEP RANK RECORD…   of each committed step, what the worker was given; record = shard · 1000 + number
WORK/ledger     as session.py's
"""

import argparse
import json
import os
import signal
from pathlib import Path

import torch
from pacing import pause
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf
from holdfast.data.formats import read_text

parser = argparse.ArgumentParser()
parser.add_argument("steps", type=int)
parser.add_argument("--fault", action="append", default=[])
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--until-hurry", action="store_true")
parser.add_argument("--spoilt", default="")
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--sharded", action="store_true")
arguments = parser.parse_args()
work = Path(os.environ["WORK"])
ledger = os.open(work / "ledger", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
trained = os.open(work / "trained", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def hurt(where: str) -> None:
    for index, fault in enumerate(arguments.fault):
        if fault == f"{where}:{job.step}:{job.rank}":
            try:
                os.close(os.open(work / f"fired-{index}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)


def read(shard, first):
    for line in read_text(shard, first):
        hurt("read")
        number, record = json.loads(line)
        if arguments.spoilt == f"{number}:{record}":
            raise ValueError(f"record {record} is spoilt")
        yield number * 1000 + record


job = hf.init()
torch.manual_seed(0)
model = fully_shard(nn.Linear(4, 1)) if arguments.sharded else DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
shards = str(work / "shards" / "*.jsonl")
data = hf.Stream(shards, global_batch_size=12, slots=6, seed=3, format=read, threads=arguments.threads)
job.track(model=model, optimizer=optimizer, data=data)

for step in job.steps(arguments.steps):
    drawn: list[int] = []
    with step:
        rank, world_size = job.rank, job.world_size
        total = torch.zeros(())
        for records in step.batches(data):
            drawn += records.tolist() if data.loss_scale else []
            hurt("forward")
            x = torch.stack([records % 7, records % 11, records % 13, records // 1000], 1).float()
            loss = model(x).square().mean()
            step.backward(loss)
            total += step.scale(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        step.log(loss=total)
    if step.is_committed:
        line = f"{step.number} {rank} {os.getpid()} {job.view} {world_size} {job.logged['loss'].hex()}\n"
        os.write(ledger, line.encode())
        os.write(trained, f"{step.number} {rank} {' '.join(map(str, drawn))}\n".encode())
    pause(work, arguments.pause, arguments.steps - step.number - 1, arguments.until_hurry)
