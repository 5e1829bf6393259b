"""Numbers and lists of the script's own that an aborted attempt of a step has changed: warned of, by name.

    updates = 0
    for step in job.steps(n):
        with step:
            …
            updates += 1                 # counts once more when the step is repeated

Nothing puts them back. If all ranks repeat the step alike, they go on with the same wrong number, and no comparison of
ranks shows it. What only takes a new value in each step, such as a loss or a time, is no such number. So those are
looked for that follow from what they were before, by the script's source:

    variables of functions and modules that are running    `x += …`, `x = … x …`: numbers and tensors
    attributes of the script's objects                      `self.x += …`, `self.x = … self.x …`
    lists and the like, in either                           another length at the end of the attempt than at its start

The source is read once; at the start of each step only the values are.
"""

from __future__ import annotations

import ast
import functools
import gc
import inspect
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from torch.nn import Module

from holdfast.torch_compat import version_of
from holdfast.worker.frame_variables import variables_of

NUMBERS = (int, float, str, bool, type(None))
MODULE_TABLES = frozenset(vars(Module()))
"""Attributes of every module: its parameters, its hooks."""
CONTAINERS = (list, dict, set, deque)
OBJECTS_MAX = 2000
"""How many objects of the script's are looked at. A script with more has them as data."""
STANDARD_LIBRARY = Path(os.__file__).parent
INSTALLED = frozenset({"site-packages", "dist-packages"})

Scope = tuple[str, int]
"""File and first line of a function's code; of a module's, 0."""
Place = tuple[int, str]
"""id() of a module, an object or a function's code, and a name in it."""


class OwnCounters:
    """The script's own numbers that follow from what they were. `is_known`: whether an object is tracked, or
    ignored."""

    def __init__(self, is_known: Callable[[Any], bool]) -> None:
        self._is_known = is_known
        self._names: dict[Scope, set[str]] = {}
        self._attributes: set[str] = set()
        modules = _modules_of_script()
        for module in modules:
            self._read(module)
        self._held: list[tuple[weakref.ref[Any], str, str]] = []
        """The variables of modules and the attributes of objects that are looked at: whose, name, how to call it."""
        for module in modules:
            names = self._names.get((file_of(module), 0), set())
            self._held += [(weakref.ref(module), name, name) for name, _ in _wanted(vars(module), names)]
        for thing in _objects_of_script():
            # Numbers in attributes of tracked modules are part of the state (state/attributes.py), others are not.
            is_in_state = is_known(thing)
            if is_in_state and not isinstance(thing, Module):
                continue
            for name, value in _wanted(vars(thing), self._attributes):
                is_number = type(value) in NUMBERS and value is not None
                if name not in MODULE_TABLES and not (is_in_state and is_number):
                    self._held.append((weakref.ref(thing), name, f"{name} of a {type(thing).__name__}"))
        self._before: dict[Place, tuple[Any, Any]] = {}

    def begin(self) -> None:
        """Remember the values at the start of an attempt."""
        self._before = {place: _mark(value) for place, _, value in self._values()}

    def changed(self) -> list[str]:
        """Return what the attempt under way has changed, as the script calls it."""
        found = []
        for place, name, value in self._values():
            before, now = self._before.get(place), _mark(value)
            if before is None or before == now:
                continue
            if type(value) in CONTAINERS and (before[0] != now[0] or self._is_known(value)):
                continue  # another has taken its place
            found.append(name)
        return found

    def _values(self) -> Iterator[tuple[Place, str, Any]]:
        """Yield each value that is looked at, with its place and name."""
        for whose, name, label in self._held:
            owner = whose()
            if owner is not None and name in vars(owner):
                yield (id(owner), name), label, vars(owner)[name]
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            code = frame.f_code
            if code.co_flags & inspect.CO_OPTIMIZED:
                path = _absolute(code.co_filename)
                if (path, 0) in self._names:
                    names = self._names.get((path, code.co_firstlineno), set())
                    for name, value in _wanted(variables_of(frame), names):
                        yield (id(code), name), name, value
            frame = frame.f_back

    def _read(self, module: ModuleType) -> None:
        """Learn which names of a module's source follow from what they were."""
        path = file_of(module)
        try:
            tree = ast.parse(Path(path).read_text())
        except (OSError, SyntaxError, ValueError):
            return
        self._names[path, 0] = set()
        self._walk(tree, (path, 0), (path, 0))

    def _walk(self, node: ast.AST, scope: Scope, module: Scope) -> None:
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                line = min([inner.lineno, *(one.lineno for one in inner.decorator_list)])
                self._walk(inner, (scope[0], line), module)
                outside = (one for one in ast.walk(inner) if isinstance(one, ast.Global | ast.Nonlocal))
                declared = {name for one in outside for name in one.names}
                followed = self._names.get((scope[0], line), set()) & declared
                for outer in (scope, module):
                    self._names.setdefault(outer, set()).update(followed)
                continue
            for target, value in _assignments(inner):
                if isinstance(target, ast.Name) and _reads(value, target):
                    self._names.setdefault(scope, set()).add(target.id)
                elif isinstance(target, ast.Attribute) and _reads(value, target):
                    self._attributes.add(target.attr)
            self._walk(inner, scope, module)


def _wanted(variables: Mapping[str, Any], names: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield the numbers and tensors with these names, and all lists and the like."""
    for name, value in list(variables.items()):
        kind = type(value)
        if name.startswith("__"):
            continue
        if kind in CONTAINERS or (name in names and (kind in NUMBERS or issubclass(kind, torch.Tensor))):
            yield name, value


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.AST]]:
    """Yield what a statement assigns to, with what it computes the value from."""
    if isinstance(node, ast.AugAssign):
        yield node.target, node.target
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            pairs = (
                zip(target.elts, node.value.elts, strict=False)
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                else [(target, node.value)]
            )
            yield from pairs


def _reads(value: ast.AST, target: ast.Name | ast.Attribute) -> bool:
    """Return whether a value is computed from what it is assigned to."""
    return any(type(one) is type(target) and _is_same(one, target) for one in ast.walk(value))


def _is_same(one: ast.AST, other: ast.AST) -> bool:
    if isinstance(one, ast.Name) and isinstance(other, ast.Name):
        return one.id == other.id
    if isinstance(one, ast.Attribute) and isinstance(other, ast.Attribute):
        return one.attr == other.attr and _is_same(one.value, other.value)
    return False


def _mark(value: Any) -> tuple[Any, Any]:
    """Return what tells whether a value is another one: which object, and how far it is."""
    if type(value) in CONTAINERS:
        return id(value), len(value)
    return (id(value), version_of(value)) if isinstance(value, torch.Tensor) else (0, repr(value))


def file_of(module: ModuleType | None) -> str:
    """Return the path of a module's source; empty if it has none."""
    path = getattr(module, "__file__", None)
    return _absolute(path) if isinstance(path, str) else ""


@functools.cache
def _absolute(path: str) -> str:
    return str(Path(path).absolute())


def _modules_of_script() -> list[ModuleType]:
    found = {id(module): module for name, module in list(sys.modules.items()) if _is_of_script(name)}
    return list(found.values())  # a script may be there under two names


def _is_of_script(name: Any) -> bool:
    """Return whether a module is the script's own: neither installed nor Python's, nor Holdfast."""
    if str(name).partition(".")[0] in ("holdfast", "torch") or str(name) in sys.builtin_module_names:
        return False
    path = Path(file_of(sys.modules.get(str(name))))
    return path.suffix == ".py" and not path.is_relative_to(STANDARD_LIBRARY) and not INSTALLED & set(path.parts)


def _objects_of_script() -> list[Any]:
    """Return the objects of the script's own classes; none if there are too many."""
    kinds: dict[type, bool] = {}
    found = []
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in kinds:
            kinds[kind] = bool(getattr(kind, "__dictoffset__", 0)) and _is_of_script(getattr(kind, "__module__", ""))
        if kinds[kind] and kind.__weakrefoffset__ and not issubclass(kind, type):
            found.append(thing)
    return found if len(found) <= OBJECTS_MAX else []
