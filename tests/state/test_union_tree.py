"""Trees of several shards become one, and its groups those of a live optimizer."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import StateError
from holdfast.state.union_tree import fitted_groups, has_same_settings, union_of


def group(lr: float, *params: str | int) -> dict[str, Any]:
    return {"lr": lr, "params": list(params)}


def optimizer(*groups: dict[str, Any]) -> dict[str, Any]:
    state = {label: {"step": f"step of {label}"} for one in groups for label in one["params"]}
    return {"state": state, "param_groups": list(groups)}


def union(*trees: dict[str, Any]) -> dict[str, Any]:
    return union_of(trees, ["model"], ["optimizer"])


def groups_of(*saved: dict[str, Any]) -> list[Any]:
    tree = union(*({"optimizer": one} for one in saved))
    return [(one["lr"], one["params"]) for one in tree["optimizer"]["param_groups"]]


def test_names_of_all_shards_are_there_and_the_first_shard_counts() -> None:
    first = {"model": {"a": 1, "b": 2}, "@flags": {"training": {"model.a": False}}, "seen": {"x": 1}}
    second = {
        "model": {"b": 3, "c": 4},
        "@flags": {"training": {"model.c": False}, "process": {"default_dtype": "float64"}},
        "@transient": {"model": {"cache": 5}},
        "seen": {"x": 2, "y": 3},
        "meter": {"z": 1},
    }
    assert union(first, second) == {
        "model": {"a": 1, "b": 2, "c": 4},
        "@flags": {
            "training": {"model.a": False, "model.c": False},
            "process": {"default_dtype": "float64"},
        },
        "@transient": {"model": {"cache": 5}},
        "seen": {"x": 1},
        "meter": {"z": 1},
    }
    assert first["model"] == {"a": 1, "b": 2}, "the trees stay as they are"


def test_groups_are_joined_by_their_settings() -> None:
    assert groups_of(optimizer(group(1, "a")), optimizer(group(1, "b"))) == [(1, ["a", "b"])]
    # A stage without a group of the first kind.
    two = optimizer(group(1, "a"), group(2, "b"))
    assert groups_of(two, optimizer(group(2, "c"))) == [(1, ["a"]), (2, ["b", "c"])]
    assert groups_of(optimizer(group(2, "c")), two) == [(2, ["c", "b"]), (1, ["a"])]
    # Groups of equal settings are joined at their places; a parameter that is in both shards says where.
    alike = optimizer(group(1, "a"), group(1, "b"))
    assert groups_of(alike, optimizer(group(1, "c"), group(1, "d"))) == [(1, ["a", "c"]), (1, ["b", "d"])]
    assert groups_of(alike, optimizer(group(1, "b", "c"))) == [(1, ["a"]), (1, ["b", "c"])]
    # Equal ones stay what they are.
    assert groups_of(alike, alike) == [(1, ["a"]), (1, ["b"])]


def test_the_state_of_all_parameters_is_there() -> None:
    tree = union({"optimizer": optimizer(group(1, "a"))}, {"optimizer": optimizer(group(1, "b"))})
    assert set(tree["optimizer"]["state"]) == {"a", "b"}


def test_what_has_no_name_cannot_be_joined() -> None:
    with pytest.raises(StateError, match="in no tracked module"):
        groups_of(optimizer(group(1, "a", 3)), optimizer(group(1, "b", 3)))
    stages = [{"model": {name: 1}, "@gradients": {"0": 1}} for name in "ab"]
    with pytest.raises(StateError, match="gradients in accumulation"):
        union(*stages)
    assert union(stages[0], stages[0])["@gradients"] == {"0": 1}
    with pytest.raises(StateError, match="not the state of tracked objects"):
        union_of([1], [], [])


def fitted(saved: Any, *live: list[Any], known: str = "abcd", is_part: bool = False) -> list[Any]:
    made = fitted_groups(saved, live, set(known), is_part, "optimizer")
    assert set(made["state"]) == {label for one in made["param_groups"] for label in one["params"]}
    return [(one["lr"], one["params"]) for one in made["param_groups"]]


def test_groups_become_those_of_the_live_optimizer() -> None:
    saved = optimizer(group(2, "c", "b"), group(1, "a"))
    assert fitted(saved, ["a"], ["b", "c"]) == [(1, ["a"]), (2, ["b", "c"])]
    assert fitted(saved, ["b"], ["c"], ["a"]) == [(2, ["b"]), (2, ["c"]), (1, ["a"])]
    assert fitted(optimizer(group(1, "a"), group(1, "b")), ["a", "b"]) == [(1, ["a", "b"])]
    with pytest.raises(StateError, match="saved in groups with other settings"):
        fitted(saved, ["a", "b", "c"])


def test_a_part_takes_its_own_and_a_group_that_was_added_follows() -> None:
    saved = optimizer(group(1, "a", "x"), group(2, "b", "y"), group(3, "c"))
    assert fitted(saved, ["a"], ["b"], is_part=True) == [(1, ["a"]), (2, ["b"]), (3, ["c"])]
    assert fitted(saved, ["a"], ["b"], known="ab", is_part=True) == [(1, ["a"]), (2, ["b"])]
    assert fitted(saved, [], ["b"], known="b", is_part=True) == [(1, []), (2, ["b"])]


def test_what_does_not_fit_is_left_to_be_refused() -> None:
    saved = optimizer(group(1, "a", "b"))
    for live in ([["a"]], [["a", "b"], ["c"]], [["a", "b"], []]):
        assert fitted_groups(saved, live, set("abc"), False, "optimizer") is saved
    assert fitted_groups({"own": 1}, [["a"]], set("a"), True, "optimizer") == {"own": 1}


def test_settings_that_are_tensors_are_compared_by_what_they_are() -> None:
    class Leaf:
        def __init__(self, shape: tuple[int, ...]) -> None:
            self.spec = type("Spec", (), {"dtype": "float32", "shape": shape})

    assert has_same_settings({"lr": Leaf(()), "params": [1]}, {"lr": Leaf(()), "params": [2]})
    assert not has_same_settings({"lr": Leaf(()), "params": []}, {"lr": Leaf((1,)), "params": []})
