"""What one round of a loop over `step.batches(data, keep=True)` carries into the next, read from the script's source.

After a fault the rounds of finished micro-batches are not run again (micro_batches.py), so nothing may come out of them
but gradients, tracked state and what the step records. Python cannot prove that of a function that is called. What can
be read from the loop itself is refused:

    total += loss.item()             a name is read before the round has set it
    if …: worst = loss               set in some rounds only, and read behind the loop
    losses.append(…), seen[k] = …    something from outside of the loop is changed, and it is not tracked
    total.add_(loss)
    for i, batch in enumerate(…)     rounds are counted by something else than the step
    next(iterator)                   something is used up

A name that every round sets may be read behind the loop: the last round is always run.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

CHANGING = frozenset(
    [
        *("add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert"),
        *("pop", "popitem", "popleft", "put", "remove", "setdefault", "update"),
    ]
)
"""Names of methods that change what they are called on."""
_UNKNOWN = object()

IsKept = Callable[[Any], bool]
"""Whether what changes of an object in a round is put back with the round's gradients."""


def carried(frame: FrameType, is_kept: IsKept) -> str:
    """Return what the loop that the frame is at the head of carries from round to round; empty if nothing is seen, or
    there is no source."""
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    if not source:
        return ""
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For) and _is_at(node.iter, frame.f_lineno)]
    if not loops:
        return "its batches are not taken by a `for` statement of their own"
    return carried_by(loops[-1], _scope_of(loops[-1], tree), lambda path: is_kept(_resolved(path, frame)))


def carried_by(loop: ast.For, scope: ast.AST, is_kept: Callable[[list[str]], bool]) -> str:
    """Return what a loop carries from round to round; empty if nothing is seen. `is_kept` is asked for a path of names,
    as in `self.meter`."""
    call = loop.iter
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "batches"):
        return f"`for … in {ast.unparse(call)}` goes round the batches in another object, which starts again"
    body = _LoopRound(_bound_in(loop.body), is_kept)
    body.bind(loop.target)
    for statement in loop.body:
        body.visit(statement)
    if body.found:
        return body.found[0]
    inside = {id(node) for node in ast.walk(loop)}
    read_elsewhere = {
        node.id
        for node in ast.walk(scope)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in inside
    }
    partly = sorted((body.assigned - body.certain) & read_elsewhere)
    return f"{partly[0]} is set in some rounds only, and read outside of the loop" if partly else ""


@dataclass
class _LoopRound(ast.NodeVisitor):
    """One round, walked through in the order in which it runs."""

    assigned: set[str]
    """All names that the round may set."""
    is_kept: Callable[[list[str]], bool]
    defined: set[str] = field(default_factory=set)
    """Those that are set where the walk has come to."""
    certain: set[str] = field(default_factory=set)
    """Those that every round sets."""
    is_certain: bool = True
    found: list[str] = field(default_factory=list)

    def bind(self, target: ast.AST) -> None:
        """Record a target of an assignment."""
        for node in _targets(target):
            if isinstance(node, ast.Name):
                self._bind_name(node.id)
            else:
                path = _path(node)
                if path is None or (path[0] not in self.defined and not self._is_kept(path)):
                    self.found.append(f"{ast.unparse(node)} is set, which is outside of the loop")
                self.visit(node.value if isinstance(node, ast.Attribute | ast.Subscript) else node)

    def _bind_name(self, name: str) -> None:
        self.defined.add(name)
        if self.is_certain:
            self.certain.add(name)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and node.id in self.assigned and node.id not in self.defined:
            self.found.append(f"{node.id} is carried from one round to the next")

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.bind(target)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
            self.bind(node.target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        if isinstance(node.target, ast.Name):
            if node.target.id not in self.defined:
                self.found.append(f"{node.target.id} is carried from one round to the next")
        else:
            self.bind(node.target)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self.bind(node.target)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "next":
            self.found.append(f"`{ast.unparse(node)}` uses something up")
        if isinstance(node.func, ast.Attribute) and _changes(node.func.attr):
            path = _path(node.func.value)
            if path is not None and path[0] not in self.defined and not self._is_kept(path):
                self.found.append(f"`{ast.unparse(node.func)}(…)` changes something outside of the loop")

    def _is_kept(self, path: list[str]) -> bool:
        return any(self.is_kept(path[:end]) for end in range(1, len(path) + 1))

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self._branches([node.body, node.orelse])

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        self._branches([*([case.pattern, *case.body] for case in node.cases), []])

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        if node.name is not None:
            self._bind_name(node.name)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self._branches([[], node.body], target=node.target)
        self._walk(node.orelse)

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        self._branches([[], node.body])
        self._walk(node.orelse)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            self.visit(item.context_expr)
            if item.optional_vars is not None:
                self.bind(item.optional_vars)
        self._walk(node.body)

    def visit_Try(self, node: ast.Try) -> None:
        self._branches([[*node.body, *node.orelse], *(handler.body for handler in node.handlers)])
        self._walk(node.finalbody)

    def visit_Continue(self, _: ast.Continue) -> None:
        self.is_certain = False

    def visit_Break(self, _: ast.Break) -> None:
        self.is_certain = False

    def visit_Global(self, node: ast.Global) -> None:
        self.found.append(f"{node.names[0]} is global")

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self.found.append(f"{node.names[0]} is of another function")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._bind_name(node.name)  # what it does when it is called cannot be seen

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """Look at nothing: what it does when it is called cannot be seen."""

    def _comprehension(self, node: Any) -> None:
        """Visit one whose variables are its own."""
        before = set(self.defined)
        for generator in node.generators:
            self.visit(generator.iter)
            self.defined |= _bound_in([generator.target])
            for condition in generator.ifs:
                self.visit(condition)
        for part in ("key", "value", "elt"):
            if hasattr(node, part):
                self.visit(getattr(node, part))
        self.defined = before

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension

    def _walk(self, statements: list[Any]) -> None:
        for statement in statements:
            self.visit(statement)

    def _branches(self, branches: list[list[Any]], target: ast.AST | None = None) -> None:
        """Walk through bodies of which one is run; what all of them set is set after them."""
        defined, certain, results = set(self.defined), set(self.certain), list[tuple[set[str], set[str]]]()
        for statements in branches:
            self.defined, self.certain = set(defined), set(certain)
            if target is not None and statements:
                self.bind(target)
            self._walk(statements)
            results.append((self.defined, self.certain))
        self.defined = set.intersection(*(one for one, _ in results))
        self.certain = set.intersection(*(one for _, one in results))


def _changes(method: str) -> bool:
    """Return whether a method of this name changes its object: torch's that work in place end in an underscore."""
    return method in CHANGING or (method.endswith("_") and not method.endswith("__"))


def _bound_in(statements: list[Any]) -> set[str]:
    """Return all names that are set there, in comprehensions too."""
    return {
        node.id
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _targets(target: ast.AST) -> Iterator[ast.AST]:
    """Yield the names, attributes and items in a target of an assignment."""
    match target:
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                yield from _targets(part)
        case ast.Starred(value=part):
            yield from _targets(part)
        case _:
            yield target


def _path(node: ast.AST) -> list[str] | None:
    """Return the names of `self.meters["loss"].sum` up to the first that is no attribute: self, meters; None if it
    begins with none."""
    parts: list[str] = []
    while not isinstance(node, ast.Name):
        match node:
            case ast.Attribute(value=value, attr=attribute):
                parts.append(attribute)
            case ast.Subscript(value=value):
                parts.clear()
            case _:
                return None
        node = value
    return [node.id, *reversed(parts)]


def _resolved(path: list[str], frame: FrameType) -> Any:
    """Return the object of a path of names in a frame."""
    names = {**frame.f_builtins, **frame.f_globals, **frame.f_locals}
    thing = names.get(path[0], _UNKNOWN)
    for attribute in path[1:]:
        thing = getattr(thing, attribute, _UNKNOWN)
    return thing


def _scope_of(loop: ast.For, tree: ast.Module) -> ast.AST:
    """Return the innermost function around a loop, or the module."""
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(inner is loop for inner in ast.walk(node))
    ]
    return min(around, key=lambda node: sum(1 for _ in ast.walk(node)), default=tree)


def _is_at(node: ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)
