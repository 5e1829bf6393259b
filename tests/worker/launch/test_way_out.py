"""No worker hangs or dies on its way out because gloo's threads want the interpreter's lock (pytorch#56297)."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.nest import Nest, Result, write

# The threads of gloo run only while the main thread waits: so they are always late with what they have to release.
COMMON = """
import faulthandler, os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
faulthandler.dump_traceback_later(40, exit=True)
sys.setswitchinterval(1000)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

def build():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for task in os.listdir("/proc/self/task"):
        if open(f"/proc/self/task/{task}/comm").read() == "pt_gloo_runloop\\n":
            os.sched_setscheduler(int(task), os.SCHED_IDLE, os.sched_param(0))
    return DistributedDataParallel(torch.nn.Linear(4, 4))
"""
GROUP_GOES_BEFORE_ITS_MODEL = """
def main():
    model = build()
    model(torch.ones(1, 4)).sum().backward()
    dist.destroy_process_group()

for _ in range(30):
    main()
print("done")
"""
GLOBALS_AT_THE_END = """
model = build()
model(torch.ones(1, 4)).sum().backward()
print("done")
"""
RUNS = 8


def test_a_group_may_be_destroyed_before_the_model_that_uses_it(warm: Nest, tmp_path: Path) -> None:
    write(tmp_path / "script.py", COMMON + GROUP_GOES_BEFORE_ITS_MODEL)
    result = warm.run(["script.py"], tmp_path)
    assert (result.code, result.stdout) == (0, "done\n"), result.stderr


def test_a_worker_ends_well_while_the_threads_of_its_group_are_at_work(warm: Nest, tmp_path: Path) -> None:
    write(tmp_path / "script.py", COMMON + GLOBALS_AT_THE_END)

    async def run_all() -> list[Result]:
        return [await warm.run_async(["script.py"], tmp_path) for _ in range(RUNS)]

    results = warm.do(asyncio.wait_for(run_all(), 120))
    assert [(result.code, result.stdout) for result in results] == [(0, "done\n")] * RUNS, results
