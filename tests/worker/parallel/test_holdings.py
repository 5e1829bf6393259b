"""What ranks hold, as numbers; and what a script may declare."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast.core.mesh_shape import mesh_shape
from holdfast.core.shard_map import ALL_OF_IT, ShardMap
from holdfast.errors import ScriptError, UsageError
from holdfast.worker.parallel.holdings import DeclaredMesh, declared_mesh, holdings_of, map_of_holdings, own_part


def test_equal_models_hold_the_same_whatever_their_numbers() -> None:
    torch.manual_seed(0)
    one, other = nn.Linear(2, 3), nn.Linear(2, 3)
    assert holdings_of({"model": one}) == holdings_of({"model": other})


@pytest.mark.parametrize(
    "other", [{"model": nn.Linear(3, 2)}, {"model": nn.Linear(2, 3, bias=False)}, {"net": nn.Linear(2, 3)}, {}]
)
def test_other_shapes_and_names_are_other_holdings(other: dict[str, nn.Module]) -> None:
    assert holdings_of({"model": nn.Linear(2, 3)}) != holdings_of(other)


def test_buffers_count() -> None:
    assert holdings_of({"model": nn.BatchNorm1d(2)}) != holdings_of(
        {"model": nn.BatchNorm1d(2, track_running_stats=False)}
    )


def test_ranks_with_the_same_holdings_have_one_shard() -> None:
    assert map_of_holdings([7, 7, 7], None) == ALL_OF_IT
    assert map_of_holdings([5, 6, 5, 6], None) == ShardMap(2)
    stages = map_of_holdings([5, 5, 6, 6], None)
    assert [stages.shard_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [own_part(stages, rank, 4) for rank in range(4)] == [(0, 2, 2), (2, 2, 2), (1, 2, 2), (3, 2, 2)]


def test_a_shard_on_fewer_ranks_than_others_ends_the_script() -> None:
    with pytest.raises(ScriptError, match="give each part of the model to equally many ranks"):
        map_of_holdings([5, 5, 6], None)


def test_a_declaration_cuts_what_looks_alike() -> None:
    declared = DeclaredMesh(mesh_shape({"dp": 2, "ep": 2}), ["dp"])
    assert map_of_holdings([9, 9, 9, 9], declared) == ShardMap(2)


def test_a_declaration_must_not_contradict_what_is_seen() -> None:
    declared = DeclaredMesh(mesh_shape({"dp": 2, "tp": 2}), ["dp", "tp"])
    with pytest.raises(ScriptError, match=r"replicated along dp, tp, and ranks 0-1 hold other tensors"):
        map_of_holdings([5, 6, 5, 6], declared)
    with pytest.raises(UsageError, match="2 × 2 = 4 ranks, and there are 2"):
        map_of_holdings([5, 5], declared)


@pytest.mark.parametrize(
    ("mesh", "replicated", "sentence"),
    [
        ([2, 2], "dp", "takes a DeviceMesh, or sizes by name"),
        ({"dp": 2}, "ddp", "'ddp'; the mesh has dp"),
        ({"dp": -1}, "dp", "a size is a number of ranks, 1 or more"),
    ],
)
def test_what_is_no_declaration_is_refused(mesh: object, replicated: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        declared_mesh(mesh, replicated)  # type: ignore[arg-type]
