"""A script that calls torch.set_default_device has its own tensors elsewhere, and none of Holdfast's: whatever is made
without a device would be on the script's, and could not be sent over gloo or read as bytes."""

from __future__ import annotations

import ast
from pathlib import Path

import torch

from holdfast.state.arena import Arena
from holdfast.state.tree import flatten

SOURCE = Path(__file__).parents[1] / "src" / "holdfast"
SCRIPTS = {"cli/templates"}
"""Scripts of users' own, to begin with."""
FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand"),
    *("randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"),
}


def without_device(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES:
            is_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if is_torch and not any(keyword.arg == "device" for keyword in node.keywords):
                found.append(f"{path.relative_to(SOURCE)}:{node.lineno}: torch.{node.func.attr}(…) without device=")
    return found


def test_every_tensor_that_holdfast_makes_says_where() -> None:
    paths = [path for path in SOURCE.rglob("*.py") if path.parent.relative_to(SOURCE).as_posix() not in SCRIPTS]
    assert not [line for path in paths for line in without_device(path)]


def test_an_arena_is_in_host_memory_whatever_the_scripts_default_device_is() -> None:
    state = flatten({"weight": torch.ones(3)})
    torch.set_default_device("meta")
    try:
        arena = Arena(state)
        arena.take(state, 1)
    finally:
        torch.set_default_device(None)
    assert all(part.is_cpu for part in arena.parts())
    assert torch.equal(arena.flat().tensors[0], torch.ones(3))
