"""The workload under NVRx in-process restart: the function below is entered anew on all living ranks after a fault.

It keeps processes, not state: the checkpoints are the user's, as with torchrun.
"""

import os
from datetime import timedelta

import checkpoint
import nvidia_resiliency_ext.inprocess as inprocess
import torch
import torch.distributed as dist
import workload
from nvidia_resiliency_ext.inprocess.rank_assignment import ActivateAllRanks, MaxActiveWorldSize, ShiftRanks

RANKS, SPARES = int(os.environ["BENCH_RANKS"]), int(os.environ["BENCH_SPARES"])
PORT = int(os.environ["MASTER_PORT"])
COLLECTIVE_TIMEOUT = timedelta(seconds=float(os.environ["BENCH_COLLECTIVE_TIMEOUT_S"]))


def intervals() -> dict:
    """As it comes, or as short as it takes them."""
    if not (tuned_s := float(os.environ["BENCH_TUNED_S"])):
        return {}
    names = "monitor_thread_interval", "monitor_process_interval", "heartbeat_interval", "progress_watchdog_interval"
    rest_s = {"last_call_wait": 0.0, "termination_grace_time": tuned_s}
    rest_s |= {"soft_timeout": 5.0, "hard_timeout": 8.0, "heartbeat_timeout": 5.0}
    return {name: timedelta(seconds=value) for name, value in (dict.fromkeys(names, tuned_s) | rest_s).items()}


@inprocess.Wrapper(
    store_kwargs={"port": PORT},
    rank_assignment=inprocess.Compose(MaxActiveWorldSize(RANKS) if SPARES else ActivateAllRanks(), ShiftRanks()),
    **intervals(),
)
def train(call_wrapper: inprocess.CallWrapper | None = None) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = PORT + 1 + call_wrapper.iteration
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0, multi_tenant=True)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT)
    model = workload.wrap(workload.build())
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(checkpoint.resume(model, optimizer) + 1, workload.STEPS + 1):
        workload.loss(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        diary.note("step", rank, world, step)
        call_wrapper.ping()
        if checkpoint.due(step):
            with call_wrapper.atomic():
                checkpoint.save(model, optimizer, step)
        if workload.at_gate(step):
            workload.wait_at_gate(step)
        workload.breathe()


diary = workload.Diary()
diary.note("ready", int(os.environ["RANK"]), RANKS)
train()
