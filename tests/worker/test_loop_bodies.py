"""What a loop carries from round to round, read from its source."""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import Any

import pytest

from holdfast.worker.loop_bodies import carried, carried_by

KEPT = ("step", "meter", "torch", "self.meter")
"""What the loops below may change."""


def found(body: str, behind: str = "pass", head: str = "for x, y in step.batches(data, keep=True)") -> str:
    code = f"def train():\n    {head}:\n{textwrap.indent(textwrap.dedent(body), ' ' * 8)}\n    {behind}\n"
    tree = ast.parse(code)
    (function,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "train")
    (loop,) = (node for node in function.body if isinstance(node, ast.For))
    return carried_by(loop, function, lambda path: ".".join(path) in KEPT)


@pytest.mark.parametrize(
    ("body", "behind"),
    [
        ("loss = f(model(x), y)\nstep.backward(loss)\nstep.add(loss=loss)", "step.log(loss=loss)"),
        ("meter.update(x)\nself.meter.update(y)\nself.meter.sum.add_(y)", "pass"),
        ("out = {}\nout['a'] = x\nout.update(b=y)\nlist_ = [a for a in x]\nlist_.append(y)", "print(out, list_)"),
        ("if x > y:\n    z = 1\nelse:\n    z = 2", "print(z)"),
        ("if x > y:\n    z = 1\n    use(z)", "pass"),
        ("with autocast() as cast:\n    loss = cast(x)", "print(loss)"),
        ("for part in x:\n    for a, b in part:\n        loss = a + b\n        use(loss)", "pass"),
        ("total = 0\nfor part in x:\n    total += part", "print(total)"),
        ("y = torch.add(x, y)\nuse(lambda: unknown)", "print(y)"),
        ("try:\n    z = f(x)\nexcept ValueError:\n    z = 0", "print(z)"),
        ("match x:\n    case 1:\n        z = 1\n    case _:\n        z = 2\nuse(y)", "pass"),
        ("if x > y:\n    continue\nloss = f(x)\nuse(loss)", "pass"),
    ],
)
def test_loops_whose_rounds_leave_nothing(body: str, behind: str) -> None:
    assert found(body, behind) == ""


@pytest.mark.parametrize(
    ("body", "behind", "sentence"),
    [
        ("total += f(x)", "pass", "total is carried"),
        ("total = total + f(x)", "pass", "total is carried"),
        ("if f(x) > worst:\n    worst = f(x)", "pass", "worst is carried"),
        ("if f(x):\n    bad = x", "print(bad)", "bad is set in some rounds only"),
        ("if f(x):\n    continue\nloss = f(y)", "print(loss)", "loss is set in some rounds only"),
        ("for part in x:\n    loss = f(part)", "print(loss)", "loss is set in some rounds only"),
        ("losses.append(f(x))", "pass", "`losses.append(…)` changes"),
        ("self.total.add_(f(x))", "pass", "`self.total.add_(…)` changes"),
        ("self.seen = x", "pass", "self.seen is set"),
        ("self.seen += 1", "pass", "self.seen is set"),
        ("seen[y] = x", "pass", "seen[y] is set"),
        ("a, (self.b, *c) = x", "pass", "self.b is set"),
        ("global total\ntotal = f(x)", "pass", "total is global"),
        ("z = next(others)", "pass", "uses something up"),
        ("use([total for a in x if (total := f(a))])\nuse(before)\nbefore = x", "pass", "before is carried"),
    ],
)
def test_loops_that_carry_something(body: str, behind: str, sentence: str) -> None:
    assert sentence in found(body, behind)


@pytest.mark.parametrize("wrapped", ["enumerate(step.batches(data, keep=True))", "tqdm(step.batches(data, keep=True))"])
def test_a_loop_over_something_around_the_batches(wrapped: str) -> None:
    assert "starts again" in found("use(x)", head=f"for i, x in {wrapped}")


class Step:
    """Its batches tell what the loop over them carries."""

    def __init__(self, *kept: Any) -> None:
        self.kept, self.said = (*kept, self), "not asked"

    def batches(self, data: list[int]) -> Iterator[int]:
        frame: FrameType = sys._getframe(1)
        self.said = carried(frame, lambda thing: isinstance(thing, ModuleType) or any(thing is k for k in self.kept))
        yield from data


def test_the_running_loop_is_found_with_the_objects_in_it() -> None:
    seen, meter = set[int](), set[int]()
    step = Step(meter)
    for number in step.batches([1, 2]):
        meter.add(number)
        ast.parse(str(number))
    assert step.said == "" and meter == {1, 2}
    for number in step.batches([1]):
        seen.add(number)
    assert "`seen.add(…)` changes" in step.said
    list(step.batches([1]))
    assert "`for` statement of their own" in step.said
    namespace: dict[str, Any] = {"step": step}
    exec(compile("for number in step.batches([1]):\n    total = 0\n    total += number\n", "<none>", "exec"), namespace)
    assert step.said == "", "there is no source"
