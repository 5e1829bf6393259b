"""Any state comes back from its skeleton and tensors; a stranger's skeleton gets an error."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.errors import StateError
from holdfast.state.dtensors import Sharded, TensorSharding
from holdfast.state.tree import DTYPES, VERSION, describe, dotted, flatten, specs, unflatten

NUMPY_DTYPES = ("<f4", ">f8", "|b1", "<i8", "<u2", "<c8", "|S3", "<U2")


def same(a: Any, b: Any) -> bool:
    """Equal in type and in every bit."""
    if isinstance(a, torch.Tensor):
        return type(b) is torch.Tensor and (a.dtype, a.shape) == (b.dtype, b.shape) and bits(a) == bits(b)
    if isinstance(a, Sharded):
        return isinstance(b, Sharded) and a.layout == b.layout and same(a.local, b.local)
    if isinstance(a, np.ndarray | np.generic):
        return type(a) is type(b) and (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, OrderedDict | defaultdict):
        a = dict(a)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return math.copysign(1, a) == math.copysign(1, b) and (a == b or (math.isnan(a) and math.isnan(b)))
    return bool(a == b)


def bits(tensor: torch.Tensor) -> bytes:
    whole = tensor.contiguous()
    return bytes(whole.reshape(-1).view(torch.uint8).tolist()) if whole.numel() else b""


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = math.prod(shape) * dtype.itemsize
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    content = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    made = content.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    return made.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else made


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    dtype = np.dtype(draw(st.sampled_from(NUMPY_DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
    array = np.zeros(math.prod(shape), dtype=dtype)
    array = np.array([str(draw(st.integers(0, 99))) for _ in array]).astype(dtype) if dtype.kind in "US" else array + 1
    return np.asarray(array, dtype=dtype).reshape(shape)


@st.composite
def shards(draw: st.DrawFn) -> Sharded:
    size, place = 3, draw(st.integers(0, 2))
    local = torch.ones(1 if place < 2 else 0, 2)
    return Sharded(
        local, TensorSharding((2, 2), ("R", "S0"), draw(st.sampled_from([(), ("a", "b")])), (1, size), (0, place))
    )


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.complex_numbers(allow_nan=False),
    st.text(),
    st.binary(),
    tensors(),
    arrays(),
    shards(),
    st.sampled_from([np.float32(1.5), np.int64(-3), np.bool_(True), np.float64("nan"), torch.float8_e5m2]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda:3"), torch.Size([2, 0]), torch.Size([])]),
)
keys = st.one_of(st.text(max_size=5), st.integers(-(2**63), 2**64 - 1))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.dictionaries(keys, inner, max_size=4).map(lambda items: defaultdict(list, items)),
        st.dictionaries(keys, st.integers(0, 9), max_size=4).map(Counter),
    ),
    max_leaves=12,
)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@given(values)
@settings(max_examples=250, deadline=None)
def test_any_state_comes_back(value: Any) -> None:
    flat = flatten(value)
    assert same(value, unflatten(flat.skeleton, flat.tensors))
    received = [torch.empty(spec.shape, dtype=spec.dtype) for spec in specs(flat.skeleton)]
    for target, source in zip(received, flat.tensors, strict=True):
        assert target.shape == source.shape and target.dtype == source.dtype
        target.copy_(source)
    assert same(value, unflatten(flat.skeleton, received))
    assert flatten(unflatten(flat.skeleton, flat.tensors)).skeleton == flat.skeleton


@given(st.binary(max_size=200))
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\x91" * 5_000)
@settings(max_examples=300, deadline=None)
def test_a_strangers_bytes_get_an_error(content: bytes) -> None:
    with pytest.raises(StateError):
        unflatten(content, [])


json_like = st.recursive(
    st.one_of(st.none(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=4), st.binary(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.dictionaries(st.text(max_size=2), inner, max_size=2),
        st.tuples(st.sampled_from("ltzdcTDNAnijyv"), inner, inner).map(list),
        st.tuples(st.sampled_from("TN"), st.sampled_from(["float32", "<f4", "<U9"]), st.lists(inner)).map(list),
        st.tuples(st.sampled_from("nijyvA"), inner).map(list),
    ),
    max_leaves=10,
)


@given(json_like)
@settings(max_examples=400, deadline=None)
def test_a_strangers_skeleton_is_read_or_refused_and_nothing_else(node: Any) -> None:
    skeleton = msgspec.msgpack.encode([VERSION, node])
    try:
        wanted = specs(skeleton)
    except StateError:
        return
    assert all(spec.size_bytes >= 0 for spec in wanted)


@pytest.mark.parametrize(
    "node",
    [
        ["T", "float32", [2**62]],
        ["T", "float32", [2**40, 2**40]],
        ["T", "float32", [-1]],
        ["T", "float32", [1] * 65],
        ["T", "object", [1]],
        ["T", "float32"],
        ["T", "float32", [True]],
        ["N", "|O8", [1]],
        ["N", "<f4,<i4", [1]],
        ["n", "<f4", b"12"],
        ["n", "|O8", b"12345678"],
        ["A", 0],
        ["A", -1],
        ["v", "__import__"],
        ["y", "Tensor"],
        ["i", "9" * 5_000],
        ["d", "a"],
        ["d", "a", 1, "a", 2],
        ["d", ["l"], 1],
        ["D", "float32", [1], [1], ["S1"], [], [1], [0]],
        ["D", "float32", [1], [1], ["S0"], [], [2], [2]],
        ["D", "float32", [1], [1], ["S0", "R"], [], [2], [0]],
        ["z", -1],
        ["q"],
        [],
        {"a": 1},
    ],
)
def test_a_wrong_node_is_refused(node: Any) -> None:
    with pytest.raises(StateError):
        specs(msgspec.msgpack.encode([VERSION, node]))


class Foo:
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"optimizer": {"state": {3: {"foo": Foo()}}}}, r"optimizer\.state\.3\.foo is a .*Foo, which cannot be kept"),
        ({"a": [{(1, 2): 3}]}, r"a\.0 has the key \(1, 2\)"),
        ({"a": {1, 2}}, "a is a builtins.set"),
        ({"a": torch.empty(2, device="meta")}, "a is a meta tensor"),
        ({"a": torch.eye(2).to_sparse()}, "a is a cpu tensor of .*sparse"),
        ({"a": np.array([Foo()])}, "a is a numpy.ndarray"),
        ({"a": "\ud800"}, "not valid Unicode"),
        ({"a": 1 << 100_000}, "a is an integer of 100001 bits"),
    ],
)
def test_values_that_cannot_be_saved_are_named(value: Any, message: str) -> None:
    with pytest.raises(StateError, match=message):
        flatten(value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused() -> None:
    with pytest.raises(StateError, match="a is a nested cpu tensor"):
        flatten({"a": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])})


def test_a_state_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(StateError, match="deeper than"):
        flatten(value)


def test_tensors_are_the_live_ones_and_tied_ones_are_stored_once() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    flat = flatten({"a": weight, "b": weight.detach(), "c": weight.detach().t()})
    assert [dotted(spec.path) for spec in describe(flat)] == ["a", "c"]
    assert flat.tensors[0].data_ptr() == weight.data_ptr()
    value = unflatten(flat.skeleton, flat.tensors)
    assert value["a"] is value["b"]


def test_tensors_that_do_not_fit_the_skeleton_are_refused() -> None:
    flat = flatten({"a": torch.ones(2)})
    for wrong in ([], [torch.ones(3)], [torch.ones(2, dtype=torch.float64)], [torch.ones(2), torch.ones(2)]):
        with pytest.raises(StateError):
            unflatten(flat.skeleton, wrong)
