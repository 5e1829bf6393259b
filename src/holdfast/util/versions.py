"""The versions of Python and torch that Holdfast is tested with, and what is said about others (docs/stability.md).

torch is looked for, not imported: the agent does without it.
"""

from __future__ import annotations

import importlib.util
import platform
import re
from pathlib import Path

PYTHON_TESTED = ("3.11",)
TORCH_TESTED = ("2.13",)


def is_tested(version: str, tested: tuple[str, ...]) -> bool:
    """Return whether a version such as 2.13.0+cpu belongs to one of these releases."""
    return ".".join(version.split(".")[:2]) in tested


def torch_version() -> str | None:
    """Return the version of torch that would be imported; None if there is none, empty if it does not say."""
    found = importlib.util.find_spec("torch")
    if found is None:
        return None
    try:
        text = Path(found.origin or "").with_name("version.py").read_text()
    except (OSError, UnicodeDecodeError, ValueError):
        return ""
    version = re.search(r"""^__version__ = ["']([^"']+)""", text, re.MULTILINE)
    return version[1] if version else ""


def untested(torch: str | None) -> str:
    """Return a sentence about versions that Holdfast is not tested with; empty if there are none."""
    python = platform.python_version()
    found = [] if is_tested(python, PYTHON_TESTED) else [f"Python {python}"]
    if torch and not is_tested(torch, TORCH_TESTED):
        found.append(f"torch {torch}")
    if not found:
        return ""
    return (
        f"{' and '.join(found)}: Holdfast is not tested with {'it' if len(found) == 1 else 'them'}, but with Python"
        f" {', '.join(PYTHON_TESTED)} and torch {', '.join(TORCH_TESTED)}. It may work: try a fault first"
    )
