"""Data coordinates: which ranks are given the same batches, where a model is split over several ranks.

Ranks that hold pieces of one copy of the model (tensor, pipeline or context parallel) train on the same samples. The
dimensions of torch's DeviceMesh along which the batch is divided say which ranks these are:

    mesh = init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))

    rank                       0 1 2 3 4 5 6 7
    mesh["dp"]                 0 0 1 1 0 0 1 1     2 data coordinates
    mesh["dp", "tp"]           0 1 2 3 0 1 2 3     4
    mesh                       0 1 2 3 4 5 6 7     8

Every rank knows the coordinates of all ranks, without asking any: a replacement has them before it has met the others.

**The sample audit** adds up the digests of what all ranks were given in a step, and compares the sum with the plan's
(core/sample_audit.py). So that samples count once, and a wrong batch on any rank is still found, a rank's digest enters
with a factor, and the factors of a coordinate add up to 1: each of its ranks but the lowest has a factor of its own,
and the lowest has what is missing. The sum is the plan's if all ranks of a coordinate were given the same samples.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from holdfast.core.sample_audit import DIGEST_BYTES, TOTAL_MODULUS
from holdfast.errors import UsageError
from holdfast.torch_compat import ranks_along_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class DataCoordinates:
    """The data coordinate of each rank of a job."""

    by_rank: tuple[int, ...]

    @cached_property
    def count(self) -> int:
        """The number of data coordinates."""
        return max(self.by_rank) + 1

    @cached_property
    def are_ranks(self) -> bool:
        """Whether each rank's coordinate is its rank: the mesh is of data parallelism alone."""
        return self.by_rank == tuple(range(len(self.by_rank)))

    def of(self, rank: int, world_size: int) -> int:
        """Return the coordinate of a rank. Raises UsageError in a world of another size."""
        self._check(world_size)
        return self.by_rank[rank]

    def is_lowest(self, rank: int) -> bool:
        """Return whether no lower rank has the same coordinate."""
        return rank in self._lowest

    def slowest(self, weights: Sequence[float]) -> tuple[float, ...]:
        """Return the weight of each coordinate, from one a rank: its ranks wait for the slowest of them."""
        self._check(len(weights))
        lowest = [max(weights)] * self.count
        for coordinate, weight in zip(self.by_rank, weights, strict=True):
            lowest[coordinate] = min(lowest[coordinate], weight)
        return tuple(lowest)

    def audited(self, rank: int, samples: int, total: int) -> tuple[int, int]:
        """Return the number of samples of a batch and the sum of their digests as they enter the sample audit."""
        return (samples if self.is_lowest(rank) else 0), total * self._audit_factors[rank] % TOTAL_MODULUS

    @cached_property
    def _lowest(self) -> frozenset[int]:
        return frozenset(dict(zip(reversed(self.by_rank), reversed(range(len(self.by_rank))), strict=True)).values())

    @cached_property
    def _audit_factors(self) -> tuple[int, ...]:
        factors = [0 if self.is_lowest(rank) else _factor(rank) for rank in range(len(self.by_rank))]
        sums = Counter[int]()
        for coordinate, factor in zip(self.by_rank, factors, strict=True):
            sums[coordinate] += factor
        return tuple(
            1 - sums[coordinate] if self.is_lowest(rank) else factors[rank]
            for rank, coordinate in enumerate(self.by_rank)
        )

    def _check(self, world_size: int) -> None:
        if world_size != len(self.by_rank):
            raise UsageError(
                f"the mesh that the loader was given has {len(self.by_rank)} ranks, and there are {world_size}: make"
                " mesh and loader for the ranks that there are, in a function with @hf.elastic if their number changes"
            )


def coordinates_along(mesh: DeviceMesh) -> DataCoordinates:
    """Return the coordinates along the dimensions of a mesh, or of a part of one such as `mesh["dp"]`. The first of
    several dimensions varies slowest. Raises UsageError for a mesh that does not have each rank of a job once."""
    slices = _slices_of(mesh)
    ranks = sorted(rank for ranks in slices for rank in ranks)
    if ranks != list(range(len(ranks))):
        raise UsageError(
            f"the mesh has the ranks {ranks[:8]}{' …' * (len(ranks) > 8)}: a loader needs one that has each rank of the"
            " job once, as init_device_mesh makes it"
        )
    by_rank = [0] * len(ranks)
    for one in slices:
        for coordinate, rank in enumerate(one):
            by_rank[rank] = coordinate
    return DataCoordinates(tuple(by_rank))


def _slices_of(mesh: Any) -> list[list[int]]:
    from torch.distributed.device_mesh import DeviceMesh  # takes a while, and most loaders have no mesh

    if not isinstance(mesh, DeviceMesh):
        raise UsageError(f"mesh is a {type(mesh).__name__}: give a DeviceMesh, or a part of one such as mesh['dp']")
    return ranks_along_mesh(mesh)


def _factor(rank: int) -> int:
    """Return an odd number that looks random: no digest but zero is lost by it, and no two ranks' errors cancel."""
    digest = hashlib.blake2b(f"holdfast audit 1\0{rank}".encode(), digest_size=DIGEST_BYTES).digest()
    return int.from_bytes(digest, "little") | 1
