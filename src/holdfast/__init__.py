"""Holdfast keeps distributed PyTorch training running.

The names for training scripts are imported when they are asked for: the agent imports this package without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.data.loader import Loader
    from holdfast.data.sampler import Sampler

__version__ = "0.1.0"
__all__ = ["Loader", "Sampler", "__version__"]

_ROOMS = {"Loader": "holdfast.data.loader", "Sampler": "holdfast.data.sampler"}


def __getattr__(name: str) -> Any:
    if room := _ROOMS.get(name):
        return getattr(import_module(room), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
