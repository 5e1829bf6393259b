"""Kinds of processors by name: those that come with Holdfast, and others by entry points of `holdfast.accelerators`.

An entry point goes before one of ours of the same name. Nothing is imported before it is asked for, and torch is not
imported by loading a plug-in.
"""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points

from holdfast.checks.accelerators.base import Accelerator
from holdfast.core.faults.fault_table import checked_rules
from holdfast.errors import UsageError

ENTRY_POINTS = "holdfast.accelerators"
CPU = "cpu"
BUILT_IN = {
    "cuda": "holdfast.checks.accelerators.cuda:Cuda",
    "npu": "holdfast.checks.accelerators.npu:Npu",
    "xpu": "holdfast.checks.accelerators.xpu:Xpu",
    "mps": "holdfast.checks.accelerators.mps:Mps",
    CPU: "holdfast.checks.accelerators.cpu:Cpu",
}
"""In the order in which they are looked for; the CPU is always there, and so comes last."""


def names() -> tuple[str, ...]:
    """Return all names that `load` knows, installed plug-ins first."""
    return _in_order(_plugged())


def load(name: str) -> Accelerator:
    """Return the plug-in of this name. Raise UsageError if there is none, or if it cannot be imported."""
    return _load(name, _plugged())


def _load(name: str, plugged: dict[str, EntryPoint]) -> Accelerator:
    if name not in plugged and name not in BUILT_IN:
        raise UsageError(
            f"--accelerator {name}: there is no plug-in of this name, only {', '.join(_in_order(plugged))}; others are"
            f" entry points of the group {ENTRY_POINTS}"
        )
    try:
        made = plugged[name].load()() if name in plugged else resolve(BUILT_IN[name])()
    except Exception as error:  # a foreign module may raise anything
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"--accelerator {name}: the plug-in cannot be loaded ({why})") from error
    if not isinstance(made, Accelerator):
        raise UsageError(
            f"--accelerator {name}: {type(made).__name__} is not derived from"
            " holdfast.checks.accelerators.base.Accelerator"
        )
    try:
        checked_rules(made.faults)
    except UsageError as error:
        raise UsageError(f"--accelerator {name}: {error}") from None
    return made


def detect() -> tuple[Accelerator, list[str]]:
    """Return the kind of processor of this machine, and a sentence for each plug-in that failed to answer."""
    problems: list[str] = []
    for name in names():
        try:
            found = load(name)
            if name == CPU or found.is_available():
                return found, problems
        except Exception as error:  # a plug-in must not be the reason why nothing is checked
            problems.append(f"{name}: {error}")
    return load(CPU), problems


def present() -> list[Accelerator]:
    """Return all kinds of processors of this machine, as far as that is known without torch; the CPU comes last."""
    plugged = _plugged()
    found: list[Accelerator] = []
    for name in _in_order(plugged):
        try:
            kind = _load(name, plugged)
            if kind.is_present():
                found.append(kind)
        except Exception:  # a broken plug-in must not keep a job from starting; asking for it by name raises
            continue
    return found


def resolve(path: str) -> type:
    """Return the class that `module:Class` names."""
    module, _, name = path.partition(":")
    found = getattr(importlib.import_module(module), name)
    assert isinstance(found, type), f"{path} is not a class"
    return found


def _in_order(plugged: dict[str, EntryPoint]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*(name for name in plugged if name != CPU), *BUILT_IN]))


def _plugged() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}
