"""What is no tensor, for stock torch: whatever stands in a skeleton, nothing in it makes us fall over."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import CheckpointError
from holdfast.storage.non_tensors import stock_objects


def values_of(node: Any) -> dict[str, Any]:
    content, stored = stock_objects([msgspec.msgpack.encode([1, node])])
    packed = {one.name: content[one.start : one.start + one.size_bytes] for one in stored}
    return {name: torch.load(io.BytesIO(archive), weights_only=False) for name, archive in packed.items()}


def test_values_stand_where_torch_looks_for_them() -> None:
    node = ["d", "a", 1, "b", ["d", "c", 2.5, 7, "x"], "l", ["l", 1, ["t", 2, None]], "e", ["d"]]
    assert values_of(node) == {"a": 1, "b.c": 2.5, "b.7": "x", "l": [1, (2, None)]}
    group = ["d", "lr", 0.1, "params", ["l", "w"]]
    assert values_of(["d", "g", ["l", group]]) == {"g.0.lr": 0.1, "g.0.params": ["w"]}
    assert values_of(["d", "m", ["l", ["T", "float32", [2]], 5]]) == {"m.1": 5}


def test_what_only_numpy_could_make_is_left_out() -> None:
    assert values_of(["d", "n", ["n", "<f4", b"0000"], "a", True]) == {"a": True}


NODES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(),
        st.text(max_size=3),
        st.binary(max_size=3),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(st.sampled_from("ltzdcTDNAnijyv"), inner, inner).map(list),
        st.dictionaries(st.text(max_size=2), inner, max_size=2),
    ),
    max_leaves=10,
)


@given(NODES)
def test_any_skeleton_is_read_or_refused(node: Any) -> None:
    stock_objects([msgspec.msgpack.encode([1, node])])


@given(st.binary(max_size=60))
def test_garbage_is_a_sentence(content: bytes) -> None:
    try:
        stock_objects([content])
    except CheckpointError:
        pass


def test_depth_has_an_end() -> None:
    node: Any = 1
    for _ in range(400):
        node = ["l", node]
    assert stock_objects([msgspec.msgpack.encode([1, node])])[1] == ()
    with pytest.raises(CheckpointError):
        stock_objects([b"\x92\x01" + b"\x91" * 100_000])


def test_parameters_of_groups_are_those_of_all_shards() -> None:
    def skeleton(rate: float, *names: str) -> bytes:
        group = ["d", "lr", rate, "params", ["l", *names], "betas", ["l", rate]]
        return msgspec.msgpack.encode([1, ["d", "optimizer", ["d", "param_groups", ["l", group]], names[0], rate]])

    content, stored = stock_objects([skeleton(0.5, "a", "b"), skeleton(0.25, "b", "c")])
    values = {
        one.name: torch.load(io.BytesIO(content[one.start : one.start + one.size_bytes]), weights_only=True)
        for one in stored
    }
    path = "optimizer.param_groups.0"
    expected = {f"{path}.lr": 0.5, f"{path}.params": ["a", "b", "c"], f"{path}.betas": [0.5], "a": 0.5, "b": 0.25}
    assert values == expected
