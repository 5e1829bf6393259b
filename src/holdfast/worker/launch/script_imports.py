"""Which installed modules a script imports first of all, found by reading its source. Nothing of it is run.

The fork server imports them ahead, so that no worker has to (`--preload auto`). A module imported ahead is imported
*before* the script's first line, so only those are taken for which that makes no difference: the absolute imports that
the script begins with. The reading stops at the first statement that may prepare an import that comes after it:

    a call, an assignment to an attribute or an item    os.environ["HF_HOME"] = …, sys.path.insert(…)
    a class, a decorated function                       both call something
    an import of the script's own modules               they may do any of this

An import inside `if` or `try` is not taken: whether it happens is known only when the script runs. The standard
library is not taken either, as it costs little.
"""

from __future__ import annotations

import ast
import importlib.machinery
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.wire.launch_messages import ScriptKind

INSTALLED_DIRECTORIES = frozenset({"site-packages", "dist-packages"})
"""Where pip and Linux distributions put what is not the user's own."""
NOT_AHEAD = {
    "mpi4py": "importing it joins an MPI world, which a fork cannot share",
    "horovod": "importing it loads MPI",
    "tensorflow": "it keeps thread pools and takes devices",
    "jax": "it keeps thread pools and takes devices",
    "ray": "it keeps threads and connections",
    "grpc": "it does not survive a fork",
    "cupy": "it takes a device",
    "pycuda": "it takes a device",
    "deepspeed": "it reads the devices and LOCAL_RANK while it is imported",
    "bitsandbytes": "it looks for devices while it is imported",
}
"""Modules that the fork server never imports unless `--preload` names them, and why."""


class ScriptImport(NamedTuple):
    """`import module`, or `from module import names`."""

    module: str
    names: tuple[str, ...] = ()

    @property
    def package(self) -> str:
        """Return the top-level package or module."""
        return self.module.partition(".")[0]


class ScriptSource(NamedTuple):
    """The files that run first, in this order, and the directories that a worker searches before all others."""

    files: tuple[Path, ...]
    own_directories: tuple[str, ...]

    def is_own(self, package: str) -> bool:
        """Return whether the script's own directory has a module of this name. A directory without __init__.py gives
        way to an installed package."""
        spec = importlib.machinery.PathFinder.find_spec(package, self.own_directories)
        return spec is not None and spec.origin is not None


def locate(kind: ScriptKind, script: str) -> ScriptSource:
    """Return the script's source files; none where there is no source to read (a zip file, a .pyc)."""
    if kind == "module":
        directory = str(Path.cwd())
        return ScriptSource(tuple(module_files(script, [directory, *sys.path])), (directory,))
    path = Path(os.path.realpath(script))
    if path.is_dir():
        return ScriptSource((path / "__main__.py",), (str(path),))
    own = (str(path.parent),) if kind == "script" else ()
    return ScriptSource((path,) if path.suffix == ".py" else (), own)


def module_files(name: str, search_path: Sequence[str]) -> Iterator[Path]:
    """Return the files that `python -m name` runs, those of its parent packages first. Parents are found without
    importing them, which importlib.util.find_spec would do."""
    locations: Sequence[str] = search_path
    parts = name.split(".")
    for depth in range(1, len(parts) + 2):
        is_inside = depth <= len(parts)
        part = ".".join(parts[:depth]) if is_inside else f"{name}.__main__"
        spec = importlib.machinery.PathFinder.find_spec(part, locations)
        if spec is None:
            return
        if spec.origin is not None:
            yield Path(spec.origin)
        if spec.submodule_search_locations is None:
            return
        locations = list(spec.submodule_search_locations)


def script_imports(source: ScriptSource) -> list[ScriptImport]:
    """Return what can be imported ahead, in the script's order."""
    found: dict[ScriptImport, None] = {}
    for path in source.files:
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            break  # the worker will say so better
        if not _read(tree.body, source, found):
            break
    return list(found)


def _read(body: Sequence[ast.stmt], source: ScriptSource, found: dict[ScriptImport, None]) -> bool:
    """Collect the imports of a file; False if the reading stopped before its end."""
    for statement in body:
        if _may_prepare(statement) or any(_is_local(one, source) for one in _imports_in(statement)):
            return False
        if isinstance(statement, ast.Import | ast.ImportFrom):
            found.update((one, None) for one in imports_of(statement) if _is_installed(one, source))
    return True


def _imports_in(statement: ast.stmt) -> Iterator[ScriptImport]:
    for node in run_at_once(statement):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports_of(node)


def imports_of(statement: ast.Import | ast.ImportFrom) -> Iterator[ScriptImport]:
    """Yield what an import statement imports."""
    if isinstance(statement, ast.Import):
        yield from (ScriptImport(alias.name) for alias in statement.names)
    elif statement.level or not statement.module:
        yield ScriptImport("")  # a relative import: of the script's own package
    elif statement.module != "__future__":
        names = tuple(alias.name for alias in statement.names if alias.name != "*")
        yield ScriptImport(statement.module, names)


def _may_prepare(statement: ast.stmt) -> bool:
    return any(
        isinstance(node, ast.Call | ast.Await | ast.ClassDef)
        or (isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load))
        or (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and bool(node.decorator_list))
        for node in run_at_once(statement)
    )


def run_at_once(statement: ast.AST) -> Iterator[ast.AST]:
    """Yield what is run when the statement is: all of it but the bodies of functions."""
    yield statement
    for child in ast.iter_child_nodes(statement):
        is_function = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if not (is_function and child not in _evaluated(statement)):
            yield from run_at_once(child)


def _evaluated(function: ast.AST) -> list[ast.AST]:
    """Return what of a function is evaluated when it is defined."""
    return [child for child in ast.iter_child_nodes(function) if isinstance(child, ast.arguments)]


def _is_local(one: ScriptImport, source: ScriptSource) -> bool:
    """Return whether importing it runs code of the user's own, or is not understood."""
    if not one.module or source.is_own(one.package):
        return True
    return not (one.package in sys.stdlib_module_names or _is_known(one.package) or _is_in_site_packages(one.package))


def _is_installed(one: ScriptImport, source: ScriptSource) -> bool:
    if one.package in sys.stdlib_module_names or one.package in NOT_AHEAD or source.is_own(one.package):
        return False
    return _is_known(one.package) or _is_in_site_packages(one.package)


def _is_known(package: str) -> bool:
    """Return whether this process has it, as torch and holdfast, wherever they are installed."""
    return package in sys.modules


def _is_in_site_packages(package: str) -> bool:
    spec = importlib.machinery.PathFinder.find_spec(package, sys.path)
    if spec is None:
        return False
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    return bool(places) and all(INSTALLED_DIRECTORIES & set(Path(assignment).parts) for assignment in places)
