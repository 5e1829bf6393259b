"""What a script can notice of its process, as JSON: run under torchrun and under Holdfast, and compared.

    state.py DIRECTORY ARGUMENTS…      writes DIRECTORY/state-RANK-RESTART.json

In the first try, rank 1 then exits with code 3, and rank 0 waits until the launcher ends it.

Nothing is imported before it is looked at: what the process starts with is what counts.
"""

import sys

AT_START = {
    "modules of torch": "torch" in sys.modules,
    "modules of numpy": "numpy" in sys.modules,
    "own modules": sorted(name for name in sys.modules if name.partition(".")[0] == "holdfast"),
    "excepthook": sys.excepthook is sys.__excepthook__,
    "displayhook": sys.displayhook is sys.__displayhook__,
    "frames below": sys._getframe().f_back is not None,
    "recursion limit": sys.getrecursionlimit(),
    "switch interval": sys.getswitchinterval(),
    "meta path": [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path],
    "path hooks": len(sys.path_hooks),
    "warn options": list(sys.warnoptions),
    "x options": dict(sys._xoptions),
    "flags": repr(sys.flags),
    "trace": [sys.gettrace() is None, sys.getprofile() is None],
    "last error": [hasattr(sys, name) for name in ("last_type", "last_value", "last_traceback")],
    "main attributes": {
        name: value if isinstance(value, str | type(None)) else type(value).__name__
        for name, value in sorted(globals().items())
        if name.startswith("__") and name != "__doc__"
    },
    "main is main": sys.modules["__main__"].__dict__ is globals(),
    "multiprocessing's main": "__mp_main__" in sys.modules,
}

import warnings

AT_START["warnings filters"] = [[f[0], f[2].__name__, str(f[1]), str(f[3]), f[4]] for f in warnings.filters]

import gc

AT_START["garbage collection"] = [gc.isenabled(), gc.get_threshold(), gc.get_debug()]

import threading

AT_START["threads"] = [thread.name for thread in threading.enumerate()]
AT_START["threads of the system"] = len(__import__("os").listdir("/proc/self/task"))

import atexit
import builtins
import codecs
import json
import locale
import logging
import os
import resource
import signal
import stat
import tempfile
import time
from pathlib import Path


def kind_of(descriptor: int) -> str:
    mode = os.fstat(descriptor).st_mode
    return next(
        name for name in ("REG", "FIFO", "CHR", "SOCK", "DIR", "LNK", "BLK") if getattr(stat, f"S_IS{name}")(mode)
    )


def stream(name: str) -> list[object]:
    file = getattr(sys, name)
    buffer = type(file.buffer).__name__
    return [file.encoding, file.errors, file.line_buffering, file.write_through, file.isatty(), file.mode, buffer]


def descriptors() -> list[int]:
    """Those that are open, without the one that lists them."""
    return [number for number in sorted(map(int, os.listdir("/proc/self/fd"))) if is_open(number)]


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def at_end() -> dict[str, object]:
    open_now = descriptors()
    handlers = {}
    for number in sorted(signal.valid_signals()):
        handler = signal.getsignal(number)
        handlers[int(number)] = getattr(handler, "name", None) or getattr(handler, "__qualname__", repr(handler))
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    return {
        "arguments": sys.argv,
        "original arguments": sys.orig_argv,
        "path": list(sys.path),
        "executable": [sys.executable, sys.prefix, sys.base_prefix, sys._base_executable],
        "directory": os.getcwd(),
        "umask": status["Umask"].strip(),
        "signal handlers": handlers,
        "signal mask": [status[name].strip() for name in ("SigBlk", "SigIgn", "SigCgt", "ShdPnd")],
        "descriptors": [[number, kind_of(number)] for number in open_now if number < 3],
        "further descriptors": [kind_of(number) for number in open_now if number > 2],
        "descriptors that programs inherit": [
            number for number in open_now if number > 2 and os.get_inheritable(number)
        ],
        "stdin": stream("stdin")[:3],
        "stdout": stream("stdout"),
        "stderr": stream("stderr"),
        "locale": [
            locale.getlocale(),
            locale.getpreferredencoding(False),
            codecs.lookup(sys.getfilesystemencoding()).name,
        ],
        "leader of a session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "nice": os.nice(0),
        "processors": sorted(os.sched_getaffinity(0)),
        "limits": {
            name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")
        },
        "privileges": [status[name].strip() for name in ("NoNewPrivs", "Seccomp", "CapEff", "Uid", "Groups")],
        "logging": [logging.root.level, [type(h).__name__ for h in logging.root.handlers], logging.raiseExceptions],
        "atexit": atexit._ncallbacks(),
        "temporary directory": tempfile.tempdir,
        "builtins": sorted(name for name in dir(builtins) if name not in ("__build_class__", "_")),
        "byte code": [sys.dont_write_bytecode, sys.pycache_prefix, __debug__],
        "threading": [threading.main_thread() is threading.current_thread(), threading.current_thread().name],
        "command line": Path("/proc/self/cmdline").read_text().split("\0")[:3],
        "process name": Path("/proc/self/comm").read_text().strip(),
    }


def of_torch() -> dict[str, object]:
    import torch
    import torch.distributed as dist

    return {
        "torch: threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "torch: defaults": [str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.initial_seed() != 0],
        "torch: deterministic": [torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark],
        "torch: distributed": [dist.is_available(), dist.is_initialized(), dist.is_torchelastic_launched()],
        "torch: print options": torch._tensor_str.PRINT_OPTS.precision,
        "torch: warnings": [torch.is_warn_always_enabled(), torch.get_float32_matmul_precision()],
        "torch: loggers": sorted(
            f"{name} {logger.level} {len(logger.handlers)}"
            for name, logger in logging.root.manager.loggerDict.items()
            if isinstance(logger, logging.Logger) and name.startswith("torch") and (logger.level or logger.handlers)
        ),
        "multiprocessing": __import__("multiprocessing").get_start_method(allow_none=True),
    }


def main() -> None:
    directory, rank = sys.argv[1], os.environ["RANK"]
    restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
    found = AT_START | at_end() | of_torch()
    found["environment"] = dict(os.environ)
    found["own values"] = {  # chance: compared between ranks and lives, not between launchers
        "hash seed": hash("x"),
        "addresses": id(main),
        "torch": __import__("torch").rand(()).item(),
        "random": __import__("random").random(),
    }
    with open(f"{directory}/state-{rank}-{restart}.json", "w") as file:
        json.dump(found, file, default=str)
    print(f"rank {rank} in try {restart} says", *sys.argv[2:])
    print(f"rank {rank} complains", file=sys.stderr)
    if restart == "0" and rank == "1":
        while not os.path.exists(f"{directory}/said"):  # else the launcher may end rank 0 before it has said all
            time.sleep(0.01)
        sys.exit(3)
    if restart == "0":
        open(f"{directory}/said", "w").close()
        signal.pause()  # until the launcher ends it


if __name__ == "__main__":
    main()
