"""The switch HOLDFAST_TORCHRUN=1: programs that launch through torch's own names (`accelerate launch`, Lightning's
Fabric, notebooks, `python -m torch.distributed.run`) get Holdfast instead, unchanged.

torch calls `autoload` at the end of its import, as the entry point of an installed package (pyproject.toml). Without
the switch that is all; with it, the module that every launch goes through is changed as soon as it is imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

SWITCH_VARIABLE = "HOLDFAST_TORCHRUN"
OFF = ("", "0", "false", "no")
LAUNCHER = "torch.distributed.launcher.api"
"""Private to torch is only that `launch_agent` of this module is what all launches call (seen in 2.0 to 2.13)."""


def autoload() -> None:
    """Do what the switch says; called in every process that imports torch."""
    if os.environ.get(SWITCH_VARIABLE, "").lower() in OFF:
        return
    if LAUNCHER in sys.modules:
        replace()
    else:
        sys.meta_path.insert(0, LauncherFinder())


def replace() -> None:
    """Have every launch of this process go through Holdfast, by whichever of torch's names."""
    launcher: Any = importlib.import_module(LAUNCHER)
    launcher.launch_agent = launch_agent


def launch_agent(config: Any, entrypoint: Any, args: list[Any], health_check_server: Any = None) -> dict[int, Any]:
    """Launch a job; what does it is imported here, because it imports torch's launcher in its turn."""
    from holdfast import torchrun

    return torchrun.launch_agent(config, entrypoint, args, health_check_server)


class LauncherFinder(importlib.abc.MetaPathFinder):
    """Waits for the import of torch's launcher, once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the launcher as Python would, with a loader that changes it; nothing else."""
        if fullname != LAUNCHER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = LauncherLoader(spec.loader)
        return spec


class LauncherLoader(importlib.abc.Loader):
    """Loads torch's launcher, then changes it."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module as its own loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, then replace what it launches by."""
        self._loader.exec_module(module)
        replace()
