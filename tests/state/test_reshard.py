"""The state is the same, bit for bit, however the world that holds it is cut."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.errors import StateError
from holdfast.state.dtensors import Sharded, TensorSharding, local_region
from holdfast.state.reshard import Fetch, needed, reshard
from holdfast.state.tracked import Tracked
from holdfast.state.tree import FlatTree, flatten

SCRIPT = Path(__file__).parent / "scripts" / "reshard_worlds.py"


def test_through_worlds_of_other_sizes_and_kinds_and_back(tmp_path: Path, leak_guard: str) -> None:
    """FSDP2 of 2 → 3 → DDP → FSDP2 of 2, twice → HSDP of 2 × 2, twice → alone → FSDP2 of 3."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-6_000:]
    digests = {path.read_text() for path in tmp_path.glob("digest-*")}
    assert len(list(tmp_path.glob("digest-*"))) == 2 + 3 + 2 + 2 + 2 + 4 + 4 + 1 + 3 and len(digests) == 1
    for same in ((0, 3, 4), (5, 6), (1, 8)):
        folders = [tmp_path / f"step-{step}" for step in same]
        contents = [{path.name: path.read_bytes() for path in folder.glob("part-*")} for folder in folders]
        assert all(content == contents[0] for content in contents)


@pytest.mark.parametrize("size", range(1, 7))
@pytest.mark.parametrize("rows", range(9))
def test_regions_are_those_of_torch_chunk(rows: int, size: int) -> None:
    whole = torch.arange(rows)
    chunks = [*torch.chunk(whole, size), *[whole[:0]] * size]
    for place in range(size):
        (part,) = local_region(TensorSharding((rows,), ("S0",), (), (size,), (place,)))
        assert torch.equal(whole[part], chunks[place])


@pytest.mark.parametrize("tensor_parallel", [1, 2, 3])
@pytest.mark.parametrize("rows", [5, 12])
def test_strided_shards_are_regions_within_those_of_tensor_parallelism(rows: int, tensor_parallel: int) -> None:
    """FSDP2 cuts what tensor parallelism has cut, and its dimension comes first in the mesh."""
    whole, sizes = torch.arange(rows), (2, tensor_parallel)
    placements = (f"X0/{tensor_parallel}", "S0")
    for dp, tp in product(range(2), range(tensor_parallel)):
        (part,) = local_region(TensorSharding((rows,), placements, (), sizes, (dp, tp)))
        of_tp = [*torch.chunk(whole, tensor_parallel), *[whole[:0]] * 3][tp]
        assert torch.equal(whole[part], [*torch.chunk(of_tp, 2), *[whole[:0]] * 2][dp])


def test_a_stride_of_something_else_is_no_region() -> None:
    with pytest.raises(StateError, match="not regions of the full tensor"):
        local_region(TensorSharding((8,), ("X0/4", "S0"), (), (2, 2), (0, 1)))


def cut(tensor: torch.Tensor, size: int, place: int) -> Sharded:
    layout = TensorSharding(tuple(tensor.shape), ("S0",), (), (size,), (place,))
    return Sharded(tensor[local_region(layout)].clone(), layout)


def shards_of(model: nn.Module, size: int) -> list[FlatTree]:
    return [
        flatten({"model": {name: cut(value, size, place) for name, value in model.state_dict().items()}})
        for place in range(size)
    ]


def fetch_from(flats: list[FlatTree]) -> Fetch:
    return lambda shard, index: flats[shard].tensors[index]


def test_only_what_is_needed_is_fetched_one_at_a_time() -> None:
    saved, live = nn.Linear(3, 5), nn.Linear(3, 5)
    flats = shards_of(saved, 3)
    asked: list[tuple[int, int]] = []

    def fetch(shard: int, index: int) -> torch.Tensor:
        asked.append((shard, index))
        return flats[shard].tensors[index]

    skeletons, before = [flat.skeleton for flat in flats], live.weight.clone()
    foreseen = needed(skeletons, Tracked(model=live))
    assert torch.equal(live.weight, before), "nothing is loaded to find out what is needed"
    reshard(skeletons, fetch, Tracked(model=live))
    assert torch.equal(live.weight, saved.weight) and torch.equal(live.bias, saved.bias)
    assert len(asked) == len(set(asked)) == 6 and asked == foreseen


def test_a_missing_shard_is_noticed() -> None:
    flats = shards_of(nn.Linear(3, 5), 3)
    known = {shard: flats[shard].skeleton for shard in (0, 2)}
    with pytest.raises(StateError, match=r"model\.weight is not complete"):
        reshard(known, fetch_from(flats), Tracked(model=nn.Linear(3, 5)))


def test_overlapping_shards_that_add_up_to_the_right_count_but_lack_rows_are_refused() -> None:
    saved, live = nn.Linear(3, 6), nn.Linear(3, 6)
    cuts = [(2, 0), (3, 1), (6, 5)]  # rows 0 to 2, 2 to 3, and 5: six rows in all, and row 4 is in none
    flats = [shards_of(saved, size)[place] for size, place in cuts]
    with pytest.raises(StateError, match=r"model\.weight is not complete.* row 4 of 6"):
        reshard([flat.skeleton for flat in flats], fetch_from(flats), Tracked(model=live))
    flats.append(shards_of(saved, 3)[2])
    reshard([flat.skeleton for flat in flats], fetch_from(flats), Tracked(model=live))
    assert torch.equal(live.weight, saved.weight) and torch.equal(live.bias, saved.bias)


def test_replicas_stand_in_for_one_another() -> None:
    """Four ranks of a mesh of 2 × 2, of which two are left, that have both shards."""
    saved, live = nn.Linear(3, 5), nn.Linear(3, 5)
    flats = []
    for rank in range(4):
        place = (rank // 2, rank % 2)
        state = {}
        for name, value in saved.state_dict().items():
            layout = TensorSharding(tuple(value.shape), ("R", "S0"), (), (2, 2), place)
            state[name] = Sharded(value[local_region(layout)].clone(), layout)
        flats.append(flatten({"model": state}))
    reshard({rank: flats[rank].skeleton for rank in (0, 3)}, fetch_from(flats), Tracked(model=live))
    assert torch.equal(live.weight, saved.weight) and torch.equal(live.bias, saved.bias)


def test_gradients_of_an_accumulation_are_resharded() -> None:
    saved, live = nn.Linear(3, 5), nn.Linear(3, 5)
    gradients = {str(index): torch.randn_like(item) for index, item in enumerate(saved.parameters())}
    flats = [
        flatten(
            {
                "model": {name: cut(value, 2, place) for name, value in saved.state_dict().items()},
                "@gradients": {name: cut(value, 2, place) for name, value in gradients.items()},
            }
        )
        for place in range(2)
    ]
    tracked = Tracked(model=live)
    reshard([flat.skeleton for flat in flats], fetch_from(flats), tracked)
    assert tracked.is_accumulating
    for index, item in enumerate(live.parameters()):
        assert item.grad is not None and torch.equal(item.grad, gradients[str(index)])


def test_shards_of_other_models_are_refused() -> None:
    flats = shards_of(nn.Linear(3, 5), 2)
    with pytest.raises(StateError, match=r"model\.weight is torch.float32 \[4, 3\], saved was"):
        reshard([flat.skeleton for flat in flats], fetch_from(flats), Tracked(model=nn.Linear(3, 4)))
    mixed = [flats[0], shards_of(nn.Linear(3, 7), 2)[1]]
    with pytest.raises(StateError, match="not the same tensor in every shard"):
        reshard([flat.skeleton for flat in mixed], fetch_from(mixed), Tracked(model=nn.Linear(3, 5)))
    with pytest.raises(StateError, match="no shard"):
        reshard([], fetch_from([]), Tracked(model=nn.Linear(3, 5)))
    wrong = [FlatTree(flat.skeleton, [tensor[:1] for tensor in flat.tensors]) for flat in flats]
    with pytest.raises(StateError, match="was fetched as"):
        reshard([flat.skeleton for flat in wrong], fetch_from(wrong), Tracked(model=nn.Linear(3, 5)))


def test_a_plain_value_of_a_hook_is_given_back_to_it() -> None:
    class Counting(nn.Linear):
        runs = 0

    def say(module: Counting, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}runs"] = module.runs

    def take_back(module: Counting, state: dict[str, Any], prefix: str, *_: Any) -> None:
        module.runs = state.pop(f"{prefix}runs")

    saved, live = Counting(3, 5), Counting(3, 5)
    for model in (saved, live):
        model.register_state_dict_post_hook(say)
        model.register_load_state_dict_pre_hook(take_back)
    saved.runs = 7
    flat = Tracked(model=saved).state()
    reshard([flat.skeleton], fetch_from([flat]), Tracked(model=live))
    assert torch.equal(live.weight, saved.weight) and live.runs == 7


class Whole(nn.Module):
    """Layers by their numbers: all of them, or those of a stage."""

    def __init__(self, layers: Iterable[int], width: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(3, width) for number in layers})
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64), persistent=False)


def trained(layers: Iterable[int], width: int = 5) -> Tracked:
    model = Whole(layers, width)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return Tracked(model=model, optimizer=optimizer)


Mesh = tuple[tuple[str, ...], tuple[int, ...]]
"""Placements and sizes."""


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Of data parallelism outside and tensor parallelism inside: replicated, sharded, strided where both cut rows."""
    sizes = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    inner = draw(st.sampled_from(("R", "S0", "S1")))
    outer = draw(st.sampled_from(("R", "S0" if inner != "S0" else f"X0/{sizes[1]}")))
    return (outer, inner), sizes


def cut_along(value: Any, mesh: Mesh, place: tuple[int, ...], width: int) -> Any:
    """Cut all tensors of a state that have the rows of a layer."""
    if isinstance(value, dict):
        return {key: cut_along(item, mesh, place, width) for key, item in value.items()}
    if not isinstance(value, torch.Tensor) or not value.dim() or value.shape[0] != width:
        return value
    placements = tuple("R" if one == "S1" and value.dim() < 2 else one for one in mesh[0])
    layout = TensorSharding(tuple(value.shape), placements, (), mesh[1], place)
    return Sharded(value.detach()[local_region(layout)].clone(), layout)


def of_stage(tree: dict[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    def is_there(name: str) -> bool:
        return int(name.split(".")[1]) in layers

    optimizer = tree["optimizer"]
    return {
        "model": {name: value for name, value in tree["model"].items() if is_there(name)},
        "@transient": tree["@transient"],
        "optimizer": {
            "state": {name: value for name, value in optimizer["state"].items() if is_there(name)},
            "param_groups": [
                {**group, "params": [name for name in group["params"] if is_there(name)]}
                for group in optimizer["param_groups"]
            ],
        },
    }


@settings(max_examples=60, deadline=None)
@given(
    mesh=meshes(), cuts=st.sets(st.integers(1, 3)), own=st.sets(st.integers(0, 3), min_size=1), width=st.integers(1, 7)
)
def test_stages_on_any_mesh_become_one_model_or_any_part_of_it(
    mesh: Mesh, cuts: set[int], own: set[int], width: int
) -> None:
    saved = trained(range(4), width)
    bounds = [0, *sorted(cuts), 4]
    stages = [range(start, stop) for start, stop in pairwise(bounds)]
    places = list(product(*(range(size) for size in mesh[1])))
    flats = [
        flatten(cut_along(of_stage(saved.tree(), stage), mesh, place, width)) for stage in stages for place in places
    ]
    for layers, is_part in ((range(4), False), (sorted(own), True)):
        live = trained(layers, width)
        live.is_part = is_part
        reshard([flat.skeleton for flat in flats], fetch_from(flats), live)
        expected = of_stage(saved.tree(), list(layers))
        for name, value in live.tree()["model"].items():
            assert torch.equal(value, expected["model"][name])
        state = live.tree()["optimizer"]
        assert state["param_groups"] == expected["optimizer"]["param_groups"]
        for name, entry in state["state"].items():
            assert all(torch.equal(value, expected["optimizer"]["state"][name][key]) for key, value in entry.items())


def test_a_smaller_model_is_refused_unless_other_ranks_have_other_names() -> None:
    saved, live = trained(range(4)), trained(range(3))
    flats = [saved.state()]
    with pytest.raises(StateError, match=r"does not have layers\.3\.bias"):
        reshard([flats[0].skeleton], fetch_from(flats), live)
    live.is_part = True
    reshard([flats[0].skeleton], fetch_from(flats), live)
    assert torch.equal(live.tree()["model"]["layers.0.bias"], saved.tree()["model"]["layers.0.bias"])
    more = trained(range(5))
    more.is_part = True
    with pytest.raises(StateError, match=r"has no saved value for layers\.4\.bias"):
        reshard([flats[0].skeleton], fetch_from(flats), more)


def test_flags_of_other_stages_are_left_out() -> None:
    saved = trained(range(2))
    tree = {**saved.tree(), "@flags": {"requires_grad": {"model.layers.0.bias": False, "model.layers.1.bias": False}}}
    flat, live = flatten(tree), trained([1])
    live.is_part = True
    reshard([flat.skeleton], fetch_from([flat]), live)
    live.flags.begin()
    layer = live.modules()["model"].get_submodule("layers.1")
    assert [parameter.requires_grad for parameter in layer.parameters()] == [True, False]
