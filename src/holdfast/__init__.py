"""Holdfast keeps distributed PyTorch training running.

The names for training scripts are imported when a script asks for them: the agent imports this package without torch.
The version is written once, in pyproject.toml.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.data.loader import Loader
    from holdfast.data.sampler import Sampler
    from holdfast.data.stream import Stream
    from holdfast.errors import MissingRanksError, RetryableError
    from holdfast.failover import DynamicAgentFailoverExtension, DynamicFailoverExtension, FailoverStrategy
    from holdfast.monitors import ErrorMonitor, Verdict
    from holdfast.worker.checkpointer import Checkpointer
    from holdfast.worker.elastic import elastic
    from holdfast.worker.job import Job, init
    from holdfast.worker.step import Step

    __version__: str

__all__ = [
    "Checkpointer",
    "DynamicAgentFailoverExtension",
    "DynamicFailoverExtension",
    "ErrorMonitor",
    "FailoverStrategy",
    "Job",
    "Loader",
    "MissingRanksError",
    "RetryableError",
    "Sampler",
    "Step",
    "Stream",
    "Verdict",
    "__version__",
    "elastic",
    "init",
]

_MODULES = {
    "Checkpointer": "holdfast.worker.checkpointer",
    "DynamicAgentFailoverExtension": "holdfast.failover",
    "DynamicFailoverExtension": "holdfast.failover",
    "ErrorMonitor": "holdfast.monitors",
    "FailoverStrategy": "holdfast.failover",
    "Job": "holdfast.worker.job",
    "Loader": "holdfast.data.loader",
    "MissingRanksError": "holdfast.errors",
    "RetryableError": "holdfast.errors",
    "Sampler": "holdfast.data.sampler",
    "Step": "holdfast.worker.step",
    "Stream": "holdfast.data.stream",
    "Verdict": "holdfast.monitors",
    "elastic": "holdfast.worker.elastic",
    "init": "holdfast.worker.job",
}


if sys.version_info < (3, 11):  # noqa: UP036 - before anything that such a Python cannot even read
    raise ImportError(
        f"Holdfast needs Python 3.11 or newer, this is {sys.version.split()[0]} ({sys.executable}): make the"
        " environment with another Python, as in `python3.11 -m venv venv`"
    )
if os.environ.get("HOLDFAST_SPARE"):  # in a process that no fork server has prepared
    import_module("holdfast.worker.launch.spare_environment").watch()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("holdfast")
    if module := _MODULES.get(name):
        return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
