"""The coordinates of ranks on a mesh, as torch's DeviceMesh numbers them: the last dimension varies fastest."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import msgspec

from holdfast.errors import UsageError


class MeshShape(msgspec.Struct, frozen=True):
    """The names and sizes of a mesh's dimensions; rank 0 is at its origin."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """The number of ranks on the mesh."""
        return math.prod(self.sizes)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return a rank's coordinate in each dimension."""
        found = []
        for size in reversed(self.sizes):
            found.append(rank % size)
            rank //= size
        return tuple(reversed(found))

    def size_along(self, names: Collection[str]) -> int:
        """Return how many different coordinates there are along some dimensions."""
        return math.prod(size for name, size in zip(self.names, self.sizes, strict=True) if name in names)

    def index_along(self, rank: int, names: Collection[str]) -> int:
        """Return the number of a rank's coordinate along some dimensions, in the order of the mesh."""
        index = 0
        for name, size, coordinate in zip(self.names, self.sizes, self.coordinates(rank), strict=True):
            if name in names:
                index = index * size + coordinate
        return index

    def check_names(self, names: Collection[str], what: str) -> None:
        """Raise UsageError for a dimension that the mesh does not have."""
        for name in names:
            if name not in self.names:
                raise UsageError(f"{what} names the dimension {name!r}; the mesh has {', '.join(self.names)}")


def mesh_shape(sizes: Mapping[str, int]) -> MeshShape:
    """Return the shape that a script declares. Raises UsageError for sizes that cannot be."""
    for name, size in sizes.items():
        if not isinstance(name, str) or not name:
            raise UsageError(f"a dimension of the mesh is named {name!r}: names are words, as in {{'dp': 4, 'tp': 2}}")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise UsageError(
                f"the mesh's dimension {name!r} has the size {size!r}: a size is a number of ranks, 1 or more"
            )
    if not sizes:
        raise UsageError("the mesh has no dimension: name each with its size, as in {'dp': 4, 'tp': 2}")
    return MeshShape(tuple(sizes), tuple(sizes.values()))
