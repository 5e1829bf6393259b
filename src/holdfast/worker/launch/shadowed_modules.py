"""A user's module that has the name of one which the fork server has imported already.

`python train.py` looks into the script's directory first: a `statistics.py` beside the script is what `import
statistics` means there, for the script and for whatever is imported later. In a fork the name is taken by the module
that the server found, so it is given up before the script runs. What the server has imported keeps the modules it has.

Not given up: what the interpreter itself has imported before any script could (built in, frozen, encodings), where
Python does not look at the script's directory either; and Holdfast, which the worker runs on.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from pathlib import Path

NEVER_SHADOWED = frozenset({"__main__", "__mp_main__", "encodings", "holdfast", "sitecustomize", "usercustomize"})


def forget_shadowed(directory: str) -> None:
    """Give up modules of the fork server of which this directory, the first on the search path, has others."""
    try:
        entries = os.listdir(directory)  # noqa: PTH208  # as Python's own finder does at the first import
    except OSError:
        return
    names = {entry.partition(".")[0] for entry in entries}
    for name in sorted(names & {module for module in sys.modules if "." not in module}):
        if is_shadowed(name, directory):
            for module in [one for one in sys.modules if one == name or one.startswith(f"{name}.")]:
                del sys.modules[module]


def is_shadowed(name: str, directory: str) -> bool:
    """Return whether the directory has another module of this name than the one that is imported."""
    if name in NEVER_SHADOWED or name in sys.builtin_module_names:
        return False
    if importlib.machinery.FrozenImporter.find_spec(name) is not None:
        return False
    found = importlib.machinery.PathFinder.find_spec(name, [directory])
    if found is None or found.origin is None:  # a directory without __init__.py gives way to an installed package
        return False
    known = getattr(sys.modules[name], "__file__", None)
    return known is None or Path(known).resolve() != Path(found.origin).resolve()
