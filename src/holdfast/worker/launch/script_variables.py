"""Which environment variables a script sets before it imports torch, though torch reads them while it is imported.

In a fork torch has been imported already, with the environment of the job, so such an assignment would have no effect.
Two of them can be made up for when they happen (`install`); a script that sets others gets a clean interpreter for each
worker. They are found by reading the source, in the order in which it runs: the script, its own modules where it
imports them, up to the first `import torch` outside of functions. A function may be called before that, so what
functions say counts too. Nothing is run. Names that are computed, or come from a file, are not found.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator, MutableMapping
from typing import Any

from holdfast.worker.launch import reset_interpreter
from holdfast.worker.launch.script_imports import ScriptSource, imports_of, module_files, run_at_once

READ_WHILE_IMPORTED = re.compile(
    r"(OMP|KMP|GOMP|MKL|OPENBLAS|GOTO|NPY|NUMPY|TORCH|TORCHINDUCTOR|TORCHDYNAMO|PYTORCH)_.+"
)
READ_LATER = re.compile(
    r"TORCH_(NCCL|GLOO|UCC|FR)_.+|TORCH_(HOME|EXTENSIONS_DIR|CUDA_ARCH_LIST)|TORCHINDUCTOR_CACHE_DIR"
    r"|PYTORCH_KERNEL_CACHE_PATH"
)
"""Of those: what is read when it is needed, so that a fork makes no difference."""
APPLIED = frozenset({"OMP_NUM_THREADS", "TORCH_DISTRIBUTED_DEBUG"})
"""What can be made up for in a fork."""
MODULES_MAX = 100
"""How many of the script's own modules are read."""


def variables_set(source: ScriptSource) -> tuple[str, ...]:
    """Return the variables that the script sets too late for a fork, in its order."""
    return _Reader(source).read()


class _Reader:
    def __init__(self, source: ScriptSource) -> None:
        self._source = source
        self._found: dict[str, None] = {}
        self._seen: set[str] = set()

    def read(self) -> tuple[str, ...]:
        for path in self._source.files:
            if self._file(str(path)):
                break
        return tuple(self._found)

    def _file(self, path: str) -> bool:
        """Read one file; return whether torch has been imported at its end."""
        if path in self._seen or len(self._seen) >= MODULES_MAX:
            return False
        self._seen.add(path)
        try:
            with open(path, "rb") as file:  # noqa: PTH123
                tree = ast.parse(file.read())
        except (OSError, SyntaxError, ValueError, RecursionError):
            return False
        return any(self._statement(statement) for statement in tree.body)

    def _statement(self, statement: ast.stmt) -> bool:
        self._found.update(
            (name, None) for node in ast.walk(statement) for name in names_set(node) if is_too_late(name)
        )
        for node in run_at_once(statement):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            for one in imports_of(node):
                if one.package == "torch":
                    return True
                if one.module and self._source.is_own(one.package) and self._own(one.module):
                    return True
        return False

    def _own(self, module: str) -> bool:
        return any(self._file(str(path)) for path in module_files(module, self._source.own_directories))


def is_too_late(name: str) -> bool:
    """Return whether torch has read a variable when it has been imported."""
    return bool(READ_WHILE_IMPORTED.fullmatch(name)) and not READ_LATER.fullmatch(name)


def names_set(node: ast.AST) -> Iterator[str]:
    """Yield the names of the variables that a piece of code sets to something else than they are."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                match target:
                    case ast.Subscript(value=mapping, slice=ast.Constant(value=str(name))) if _is_environment(mapping):
                        if not _is_as_before(name, value):
                            yield name
                    case _:
                        pass
        case ast.AugAssign(target=target, value=ast.Dict() as value) if _is_environment(target):
            yield from _keys(value)
        case ast.Call(func=ast.Attribute(attr="putenv"), args=[ast.Constant(value=str(name)), value]):
            if not _is_as_before(name, value):
                yield name
        case ast.Call(func=ast.Attribute(value=mapping, attr=attr)) if _is_environment(mapping):
            yield from _by_method(attr, node)
        case _:
            pass


def _by_method(attr: str, call: ast.Call) -> Iterator[str]:
    match attr, call.args:
        case "setdefault", [ast.Constant(value=str(name)), *_] if name not in os.environ:
            yield name
        case "update", arguments:
            yield from (keyword.arg for keyword in call.keywords if keyword.arg)
            for argument in arguments:
                if isinstance(argument, ast.Dict):
                    yield from _keys(argument)
        case _:
            pass


def _keys(mapping: ast.Dict) -> Iterator[str]:
    for key, value in zip(mapping.keys, mapping.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(key.value, str) and not _is_as_before(key.value, value):
            yield key.value


def _is_environment(node: ast.AST) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )


def _is_as_before(name: str, value: ast.AST) -> bool:
    return isinstance(value, ast.Constant) and os.environ.get(name) == value.value


# --- in the worker


def install(names: tuple[str, ...]) -> None:
    """Have assignments to these variables, all of them in APPLIED, take effect when they are made."""
    if not names:
        return
    environment: Any = type(os.environ)
    assign = environment.__setitem__

    def assign_and_apply(self: MutableMapping[str, str], key: str, value: str) -> None:
        assign(self, key, value)
        if key in names and self is os.environ:
            apply(key)

    environment.__setitem__ = assign_and_apply


def apply(name: str) -> None:
    """Do what torch would have done if it had found the variable's present value."""
    if name == "TORCH_DISTRIBUTED_DEBUG":
        sys.modules["torch.distributed"].set_debug_level_from_env()
    else:
        sys.modules["torch"].set_num_threads(reset_interpreter.threads_wanted(name))
        reset_interpreter.set_openblas_threads()
