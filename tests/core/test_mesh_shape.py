"""Coordinates on a mesh."""

from __future__ import annotations

import pytest

from holdfast.core.mesh_shape import MeshShape, mesh_shape
from holdfast.errors import UsageError


def test_the_last_dimension_varies_fastest() -> None:
    shape = mesh_shape({"pp": 2, "dp": 2, "tp": 2})
    assert shape == MeshShape(("pp", "dp", "tp"), (2, 2, 2))
    assert shape.world_size == 8
    assert [shape.coordinates(rank) for rank in (0, 1, 2, 5)] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 1)]
    assert [shape.index_along(rank, ["pp", "dp"]) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [shape.index_along(rank, ["dp"]) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert (shape.size_along(["dp", "tp"]), shape.size_along([])) == (4, 1)


@pytest.mark.parametrize("sizes", [{}, {"dp": 0}, {"dp": True}, {"": 2}, {"dp": "2"}])
def test_what_is_no_mesh_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=r"dimension|mesh"):
        mesh_shape(sizes)


def test_a_dimension_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match=r"replicated names the dimension 'ddp'; the mesh has dp, tp"):
        mesh_shape({"dp": 2, "tp": 2}).check_names(["ddp"], "replicated")
