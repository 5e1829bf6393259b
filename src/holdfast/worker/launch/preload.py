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
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence, Set
from pathlib import Path

from holdfast.wire.launch_messages import ForkServerReady, Mode, PreloadPlan
from holdfast.worker.launch.no_reverse_dns import stop_looking_up
from holdfast.worker.launch.script_imports import NOT_AHEAD, ScriptImport, ScriptSource, locate, script_imports
from holdfast.worker.launch.script_variables import APPLIED, variables_set

MODULES = (
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch.distributed.fsdp",
    "torch.distributed.device_mesh",
    "torch.distributed.elastic.multiprocessing.errors",  # where @record lives
    "torch.utils.data",
    "torch._dynamo",
    "torch.utils.file_baton",  # patched in the workers (build_locks.py)
    "holdfast.worker.job",  # behind `hf.init()`: a twentieth of a second of a replaced worker's start
)
NOTHING = ["none"]
"""For scripts that do without torch, or want to be the first to import it."""
AUTOMATIC = "auto"
"""In the place of a module's name: what the script imports at its top (script_imports.py)."""
AUTOMATIC_TIMEOUT_S = 60.0
"""For all of those together. The first workers wait for them, but would have imported them one by one themselves."""
SERVER_VARIABLES = {
    "OPENBLAS_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # pyarrow's allocator starts a thread otherwise, as soon as it is imported
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""Workers get environments of their own, so these stay in the server."""
DEVICE_FILES = ("/dev/nvidia-uvm", "/dev/kfd")
"""Open in a process that has initialised CUDA or ROCm, by whichever library."""


class ImportTookTooLong(BaseException):
    """Raised inside an import that has used up the time for all of them. Not an Exception: libraries catch those."""


def preload(mode: Mode, plan: PreloadPlan) -> ForkServerReady:
    """Import what workers will need. Modules that make this process unfit to fork are named in
    `ForkServerReady.unsafe`."""
    started = time.monotonic()
    problems: list[str] = []
    unsafe: dict[str, str] = {}
    imported: list[str] = []
    sets: tuple[str, ...] = ()
    if mode == "warm" and list(plan.modules) != NOTHING:
        gc.disable()
        sets = variables_set(locate(plan.script_kind, plan.script)) if plan.script else ()
        os.environ.update(SERVER_VARIABLES)
        mode = "warm" if warm_up_torch(problems) else "cold"
        import_user_modules(plan, problems, unsafe)
        if AUTOMATIC in plan.modules and plan.script:
            imported = import_ahead(plan, unsafe)
        ctypes.CDLL(None).fflush(None)  # else every worker would print again what C code has printed here
        gc.freeze()
    return ForkServerReady(
        mode=mode,
        preload_s=time.monotonic() - started,
        problems=tuple(problems),
        unsafe=unsafe,
        imported=tuple(imported),
        sets=sets if mode == "warm" else (),
        is_fit=mode != "warm" or APPLIED.issuperset(sets),
    )


def warm_up_torch(problems: list[str]) -> bool:
    if (reason := import_problem("torch")) is not None:
        problems.append(f"torch cannot be imported in {sys.executable} ({reason}): every worker starts cold")
        return False
    import_problem("numpy")  # not needed by this package
    for name in MODULES:
        if (reason := import_problem(name)) is not None:
            problems.append(f"{name} cannot be imported ({reason}): workers that need it import it themselves")
    try:
        from holdfast import torch_compat

        take_one_step()
        stop_looking_up()
        torch_compat.keep_groups_beyond_reducers()
        torch_compat.ask_groups_for_batches()  # before a script imports the function by its name
    except Exception as error:  # a warm-up must not be the reason why nothing starts
        traceback.print_exc()
        problems.append(f"the warm-up step failed ({error}): a worker's first step takes longer")
    return True


def take_one_step() -> None:
    """Take one step of an optimizer, which imports and builds half of what a training script needs. The gradients are
    given: computing them would start threads."""
    import torch

    model = torch.nn.Linear(4, 4)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.Adam(model.parameters()).step()


def import_user_modules(plan: PreloadPlan, problems: list[str], unsafe: dict[str, str]) -> None:
    """Import what `--preload` names, from the working directory too, as `python -m` would find it."""
    sys.path.insert(0, str(Path.cwd()))
    for name in plan.modules:
        if name == AUTOMATIC or name in plan.without:
            continue
        before = thread_names()
        if (reason := import_problem(name)) is not None:
            problems.append(f"--preload {name} failed ({reason}): workers import it themselves")
        if (danger := why_unsafe(before)) is not None:
            unsafe[name] = danger
    sys.path.pop(0)


def import_ahead(plan: PreloadPlan, unsafe: dict[str, str]) -> list[str]:
    """Import what the script imports at its top, and return the packages. An import that fails here will fail in the
    workers, with its traceback where the user looks for it, so it is no problem here."""
    source = locate(plan.script_kind, plan.script)
    wanted = [one for one in script_imports(source) if one.package not in plan.without]
    imported: dict[str, None] = {}
    deadline = time.monotonic() + AUTOMATIC_TIMEOUT_S
    signal.signal(signal.SIGALRM, _took_too_long)
    for one in wanted:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0 or one.package in unsafe:
            continue
        threads_before, modules_before = thread_names(), set(sys.modules)
        danger = _import_as_script(one, remaining_s) or why_unsafe(threads_before)
        danger = danger or _why_not_ahead(
            {name.partition(".")[0] for name in set(sys.modules) - modules_before}, source
        )
        if danger:
            unsafe[one.package] = danger
        else:
            imported[one.package] = None
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return list(imported)


def _import_as_script(one: ScriptImport, timeout_s: float) -> str | None:
    """Import it with the names that the script takes from it, as packages may load them only when asked for. Return
    what is wrong with this process after an import that was cut off in its middle."""
    try:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        module = __import__(one.module, fromlist=one.names or ("__name__",))
        for name in one.names:
            getattr(module, name)
    except ImportTookTooLong:
        return f"was not imported within {AUTOMATIC_TIMEOUT_S:.0f} s"
    except (Exception, SystemExit):  # a module may raise anything while it is imported
        traceback.print_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return None


def _took_too_long(_number: int, _frame: object) -> None:
    raise ImportTookTooLong


def _why_not_ahead(packages: Set[str], source: ScriptSource) -> str | None:
    """Why the script must not find these packages imported already."""
    for package in sorted(packages):
        if package in NOT_AHEAD:
            return f"imports {package} ({NOT_AHEAD[package]})"
        if source.is_own(package):
            return f"imports {package}, of which the script has one of its own"
    return None


def why_unsafe(threads_before: Sequence[str]) -> str | None:
    """Return what an import has done to this process that a fork does not survive."""
    started = list((Counter(thread_names()) - Counter(threads_before)).elements())
    if started:
        return f"started threads ({', '.join(started)}), which do not survive a fork"
    return "initialised a device, which does not survive a fork" if has_device() else None


def import_problem(name: str) -> str | None:
    """Import a module; return what went wrong, or None. The traceback goes to the server's stderr, which the agent
    keeps."""
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a module may raise anything while it is imported
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return None


def why_no_fork() -> str | None:
    """Return a sentence if forking now would make a worker that hangs or crashes."""
    threads = thread_names()
    if len(threads) > 1:
        return (
            f"the fork server has {len(threads)} threads ({', '.join(threads)}), and only one survives a fork: "
            "a preloaded module started them; leave it out of --preload, or use --start-method spawn"
        )
    if has_device():
        return "a preloaded module has initialised a device, which does not survive a fork: leave it out of --preload"
    return None


def has_device() -> bool:
    """Return whether this process has a CUDA or ROCm context."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return True
    return any(_target(link) in DEVICE_FILES for link in Path("/proc/self/fd").iterdir())


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""  # the descriptor of the listing itself


def thread_names() -> list[str]:
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
