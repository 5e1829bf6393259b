"""What the fork server does once, so that no worker has to.

Importing torch costs seconds, the first `DistributedDataParallel` or optimizer another (torch._dynamo). All of it
happens here, before any fork, under three rules:

1. **One thread.** Threads do not survive a fork, their locks do. So: no backward pass (the autograd engine's threads),
   no OpenMP region, and no pool inside OpenBLAS, which starts one as soon as numpy is imported unless told not to.
2. **No device.** A CUDA context does not survive a fork, and asking the runtime whether there is a device makes one.
   Asking NVML does not, and there is a variable for it.
3. **No collection.** The cyclic collector is off while 2,000 modules are imported (a fifth faster), and what they leave
   is frozen, not collected: collecting would leave holes, which the workers would fill page by page, each a copy.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from holdfast.wire.local import Mode, Ready
from holdfast.worker.birth.host_names import stop_looking_up

MODULES = (
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch.distributed.fsdp",
    "torch.distributed.device_mesh",
    "torch.distributed.elastic.multiprocessing.errors",  # where @record lives
    "torch.utils.data",
    "torch._dynamo",
    "holdfast.worker.session",  # behind `hf.init()`: a twentieth of a second of a replaced worker's start
)
NOTHING = ["none"]
"""For scripts that do without torch, or want to be the first to import it."""
# Workers get environments of their own, so these stay in the server.
SERVER_VARIABLES = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def preload(mode: Mode, user_modules: Sequence[str]) -> Ready:
    started = time.monotonic()
    problems: list[str] = []
    if mode == "warm" and list(user_modules) != NOTHING:
        gc.disable()
        os.environ.update(SERVER_VARIABLES)
        mode = "warm" if warm_up_torch(problems) else "cold"
        import_user_modules(user_modules, problems)
        ctypes.CDLL(None).fflush(None)  # else every worker would print again what C code has printed here
        gc.freeze()
    return Ready(mode=mode, preload_s=time.monotonic() - started, problems=tuple(problems))


def warm_up_torch(problems: list[str]) -> bool:
    if (reason := import_problem("torch")) is not None:
        problems.append(f"torch cannot be imported in {sys.executable} ({reason}): every worker starts cold")
        return False
    import_problem("numpy")  # not needed by anybody here
    for name in MODULES:
        if (reason := import_problem(name)) is not None:
            problems.append(f"{name} cannot be imported ({reason}): workers that need it import it themselves")
    try:
        take_one_step()
        stop_looking_up()
    except Exception as error:  # a warm-up must not be the reason why nothing starts
        traceback.print_exc()
        problems.append(f"the warm-up step failed ({error}): a worker's first step takes longer")
    return True


def take_one_step() -> None:
    """An optimizer's first step imports and builds half of what a training script needs. The gradients are given:
    computing them would start threads."""
    import torch

    model = torch.nn.Linear(4, 4)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.Adam(model.parameters()).step()


def import_user_modules(names: Sequence[str], problems: list[str]) -> None:
    """From the working directory, as `python -m` would find them."""
    sys.path.insert(0, str(Path.cwd()))
    for name in names:
        threads_before = len(thread_names())
        if (reason := import_problem(name)) is not None:
            problems.append(f"--preload {name} failed ({reason}): workers import it themselves")
        elif len(thread_names()) > threads_before:
            problems.append(f"--preload {name} started threads, which do not survive a fork: leave it out")
    sys.path.pop(0)


def import_problem(name: str) -> str | None:
    """None if the module is there now. Its traceback goes to the server's stderr, which the agent keeps."""
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a module may raise anything while it is imported
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return None


def why_no_fork() -> str | None:
    """A sentence if forking now would make a worker that hangs or crashes."""
    threads = thread_names()
    if len(threads) > 1:
        return (
            f"the fork server has {len(threads)} threads ({', '.join(threads)}), and only one survives a fork: "
            "a preloaded module started them; leave it out of --preload, or use --start-method spawn"
        )
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "a preloaded module has initialised CUDA, which does not survive a fork: leave it out of --preload"
    return None


def thread_names() -> list[str]:
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
