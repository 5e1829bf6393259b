"""The exception tree of holdfast/errors.py: its drawing is complete and true."""

from __future__ import annotations

import ast
import builtins
import re
from pathlib import Path

import holdfast
from holdfast import errors

PACKAGE = Path(holdfast.__file__).parent
DRAWING = errors.__doc__ or ""


def drawn() -> dict[str, str]:
    """Return each drawn class and the class above it in the drawing."""
    parents: dict[str, str] = {}
    above: list[str] = []
    for line in DRAWING.splitlines():
        match = re.match(r"(?P<branch>[│├└─ ]*)(?P<name>[A-Z]\w+)(?:  |$)", line)
        if match:
            depth = len(match["branch"]) // 4
            above[depth:] = [match["name"]]
            parents[match["name"]] = above[depth - 1] if depth else ""
    return parents


def defined() -> dict[str, tuple[str, ...]]:
    """Return every exception class of the package and the names of its bases; private ones are left out."""
    bases: dict[str, tuple[str, ...]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                bases[node.name] = tuple(ast.unparse(base).rpartition(".")[2] for base in node.bases)

    def is_exception(name: str) -> bool:
        known = getattr(builtins, name, None)
        if isinstance(known, type):
            return issubclass(known, BaseException)
        return any(is_exception(base) for base in bases.get(name, ()))

    return {name: above for name, above in bases.items() if is_exception(name)}


def test_every_exception_class_of_the_package_is_drawn_below_its_base() -> None:
    parents = drawn()
    missing = set(defined()) - set(parents)
    assert not missing, f"draw them in holdfast/errors.py: {sorted(missing)}"
    wrong = {name for name, above in defined().items() if parents[name] and parents[name] not in above}
    assert not wrong, f"drawn below another class than their base: {sorted(wrong)}"


def test_everything_drawn_exists() -> None:
    known = {*defined(), *dir(builtins)}
    assert not set(drawn()) - known


def test_every_drawn_class_is_raised_or_caught_somewhere() -> None:
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "errors.py")
    unused = [name for name in defined() if not re.search(rf"\b{name}\b", source)]
    assert not unused, f"no code uses them: {unused}"
