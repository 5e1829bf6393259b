"""Which ranks are given the same batches: coordinates of random meshes, and what of a batch enters the sample audit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

import holdfast as hf
from holdfast.core.mesh_shape import MeshShape
from holdfast.core.sample_audit import TOTAL_MODULUS
from holdfast.data.data_coordinates import DataCoordinates, coordinates_along
from holdfast.errors import UsageError

NAMES = ("pp", "dp", "cp", "tp")


@contextmanager
def mesh_of(sizes: dict[str, int], rank: int = 0, order: list[int] | None = None) -> Iterator[Any]:
    """A mesh as this rank has it: of groups that connect to no other."""
    count = math.prod(sizes.values())
    dist.init_process_group("fake", rank=rank, world_size=max(order or [count - 1]) + 1, store=dist.HashStore())
    try:
        ranks = torch.tensor(order or list(range(count)))
        yield DeviceMesh("cpu", ranks.view(*sizes.values()), mesh_dim_names=tuple(sizes))
    finally:
        dist.destroy_process_group()


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_every_rank_knows_the_coordinates_of_all(data: st.DataObject) -> None:
    """They are what arithmetic on the sizes gives, whichever rank asks, for one dimension and for several."""
    names = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    sizes = {name: data.draw(st.integers(1, 3)) for name in names}
    along = [name for name in names if data.draw(st.booleans())] or names[:1]
    shape = MeshShape(tuple(sizes), tuple(sizes.values()))
    rank = data.draw(st.integers(0, shape.world_size - 1))
    with mesh_of(sizes, rank) as mesh:
        found = coordinates_along(mesh[tuple(along)])
    expected = [shape.index_along(other, along) for other in range(shape.world_size)]
    assert list(found.by_rank) == expected and found.count == shape.size_along(along)
    assert found.are_ranks == (expected == list(range(shape.world_size)))
    assert all(found.is_lowest(one) == (expected.index(expected[one]) == one) for one in range(shape.world_size))


def test_the_mesh_may_have_the_ranks_in_any_order() -> None:
    with mesh_of({"dp": 2, "tp": 2}, order=[3, 1, 0, 2]) as mesh:
        assert coordinates_along(mesh["dp"]).by_rank == (1, 0, 1, 0)
        assert coordinates_along(mesh).by_rank == (2, 1, 3, 0)
        assert not coordinates_along(mesh).are_ranks


@pytest.mark.parametrize("order", [[1, 2, 3, 4], [0, 2, 4, 6]])
def test_a_mesh_without_some_ranks_of_the_job_is_refused(order: list[int]) -> None:
    with (
        mesh_of({"dp": 2, "tp": 2}, rank=order[0], order=order) as mesh,
        pytest.raises(UsageError, match="a loader needs one that has each rank of the job once"),
    ):
        coordinates_along(mesh["dp"])


def test_what_is_no_mesh_is_refused() -> None:
    with pytest.raises(UsageError, match=r"mesh is a dict: give a DeviceMesh, or a part of one such as mesh\['dp'\]"):
        coordinates_along({"dp": 2})  # type: ignore[arg-type]


def test_another_world_is_refused() -> None:
    coordinates = DataCoordinates((0, 0, 1, 1))
    assert [coordinates.of(rank, 4) for rank in range(4)] == [0, 0, 1, 1]
    with pytest.raises(UsageError, match=r"has 4 ranks, and there are 3: make mesh and loader .* @hf\.elastic"):
        coordinates.of(0, 3)


def test_a_coordinate_is_as_slow_as_its_slowest_rank() -> None:
    assert DataCoordinates((0, 0, 1, 1)).slowest((1.0, 0.5, 1.0, 0.75)) == (0.5, 0.75)
    assert DataCoordinates((0, 1, 0, 1)).slowest((1.0, 0.5, 1.0, 0.75)) == (1.0, 0.5)


# --- sources


def test_loader_and_sampler_divide_a_batch_among_data_coordinates() -> None:
    given = []
    for rank in range(4):
        with mesh_of({"dp": 2, "tp": 2}, rank) as mesh:
            sampler = hf.Sampler(20, batch_size=5, shuffle=False, mesh=mesh["dp"])
            loader = hf.Loader(list(range(20)), global_batch_size=10, shuffle=False, mesh=mesh["dp"])
        assert sampler.plan.global_batch_size == 10, "5 for each of two coordinates"
        given.append(list(sampler))
        assert [batch.tolist() for batch in loader] == given[rank]
        assert sampler.loss_scale == loader.loss_scale == 1.0
    assert given[0] == given[1] and given[2] == given[3]
    assert sorted(sample for one in (given[0], given[2]) for batch in one for sample in batch) == list(range(20))


def test_weights_of_ranks_become_those_of_their_coordinates() -> None:
    with mesh_of({"dp": 2, "tp": 2}) as mesh:
        loader = hf.Loader(list(range(20)), global_batch_size=10, slots=5, mesh=mesh["dp"])
    weights = (1.0, 1.0, 1.0, 0.25)
    assert loader.bearable(4, weights) == weights
    assert loader.bearable(4, (1.0, 1.0, 1.0, 0.001)) is None, "its twin would have nothing to do either"
    loader.set_assignment(2, 4, weights)
    assert (loader.rank, loader.world_size, loader.weights) == (1, 2, (1.0, 0.25))
    assert len(list(loader.step_batches())) == 1
    with pytest.raises(UsageError, match="has 4 ranks, and there are 2"):
        loader.set_assignment(0, 2)


# --- the sample audit


def sums(coordinates: DataCoordinates, given: list[tuple[int, int]]) -> tuple[int, int]:
    """What the master adds up, of the samples and digests that each rank was given."""
    parts = [coordinates.audited(rank, *batch) for rank, batch in enumerate(given)]
    return sum(count for count, _ in parts), sum(total for _, total in parts) % TOTAL_MODULUS


@given(st.lists(st.integers(0, TOTAL_MODULUS - 1), min_size=3, max_size=3), st.integers(1, 4))
def test_samples_are_counted_once_for_each_coordinate(digests: list[int], copies: int) -> None:
    coordinates = DataCoordinates(tuple(rank // copies for rank in range(3 * copies)))
    given = [(8, digests[coordinate]) for coordinate in coordinates.by_rank]
    assert sums(coordinates, given) == (24, sum(digests) % TOTAL_MODULUS)


def test_a_wrong_batch_on_any_rank_changes_the_sum() -> None:
    """Also one that another rank's mistake would make up for in a plain sum: batches changed round."""
    coordinates = DataCoordinates((0, 0, 0, 1, 1, 1))
    right = [(4, 1000 + coordinate) for coordinate in coordinates.by_rank]
    expected = sums(coordinates, right)
    for rank in range(6):
        wrong = list(right)
        wrong[rank] = (4, 77)
        assert sums(coordinates, wrong) != expected, rank
    for one in range(6):
        for other in range(one):
            changed = list(right)
            changed[one], changed[other] = changed[other], changed[one]
            assert (sums(coordinates, changed) == expected) == (right[one] == right[other]), (one, other)
    opposite = list(right)
    opposite[1], opposite[2] = (4, 1000 + 9), (4, 1000 - 9)
    assert sums(coordinates, opposite) != expected
