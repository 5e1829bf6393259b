"""Holdfast keeps distributed PyTorch training running.

The names for training scripts are imported when they are asked for: the agent imports this package without torch.
"""

from __future__ import annotations

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
    from holdfast.worker.session import Job, init
    from holdfast.worker.steps import Step

__version__ = "0.1.0"
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

_ROOMS = {
    "Checkpointer": "holdfast.worker.checkpointer",
    "DynamicAgentFailoverExtension": "holdfast.failover",
    "DynamicFailoverExtension": "holdfast.failover",
    "ErrorMonitor": "holdfast.monitors",
    "FailoverStrategy": "holdfast.failover",
    "Job": "holdfast.worker.session",
    "Loader": "holdfast.data.loader",
    "MissingRanksError": "holdfast.errors",
    "RetryableError": "holdfast.errors",
    "Sampler": "holdfast.data.sampler",
    "Step": "holdfast.worker.steps",
    "Stream": "holdfast.data.stream",
    "Verdict": "holdfast.monitors",
    "elastic": "holdfast.worker.elastic",
    "init": "holdfast.worker.session",
}


def __getattr__(name: str) -> Any:
    if room := _ROOMS.get(name):
        return getattr(import_module(room), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
