"""DTensors without their process groups: this rank's local tensor, and its place in the full tensor.

A DTensor cannot be sent or written: its mesh is made of live groups. A `Sharded` can. It is put back into a DTensor of
the same mesh (`into`), or joined with the others' into the full tensor (reshard.py).

A placement is a string: `R` replicated, `S0` sharded along dimension 0, `X0/2` the strided shard of tensor plus data
parallelism, which cuts what `S0` of a later dimension of the mesh has cut. A region of the full tensor follows from
them by DTensor's rule: chunks of ceil(n / size), so that the last ranks may have less, or nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from holdfast.errors import StateError
from holdfast.torch_compat import memory_of_dtensor


@dataclass(frozen=True, slots=True)
class TensorSharding:
    """The placement of a tensor over a mesh, and one rank's place in the mesh."""

    shape: tuple[int, ...]
    placements: tuple[str, ...]
    mesh_names: tuple[str, ...]
    mesh_sizes: tuple[int, ...]
    coordinate: tuple[int, ...]

    @property
    def cuts(self) -> list[tuple[str, int, int]]:
        """What makes the region smaller than the full tensor: placement, number of pieces, and which of them it is."""
        dimensions = zip(self.placements, self.mesh_sizes, self.coordinate, strict=True)
        return [(placement, size, at) for placement, size, at in dimensions if placement != "R" and size > 1]

    def is_same_region(self, other: TensorSharding) -> bool:
        """Return whether both are the same region of the same full tensor; of replicas, however many there are, any
        counts."""
        return self.shape == other.shape and self.cuts == other.cuts


@dataclass(frozen=True, slots=True, eq=False)
class Sharded:
    """A DTensor at rest."""

    local: torch.Tensor
    layout: TensorSharding


def layout_of(tensor: DTensor) -> TensorSharding:
    """Return the sharding of a live DTensor. Raise StateError for one without a value of its own (a partial sum)."""
    mesh, placements, shape = tensor.device_mesh, tensor.placements, tensor.shape
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise StateError("is a DTensor whose mesh this rank is not a member of: track it on the mesh's ranks only")
    # Cached with the mesh, not here: a reference to a mesh would keep its groups and their sockets alive.
    known: dict[Any, TensorSharding] = mesh.__dict__.setdefault("_holdfast_layouts", {})
    key = (shape, placements, tuple(coordinate))
    if (layout := known.get(key)) is None:
        layout = known[key] = TensorSharding(
            shape=tuple(shape),
            placements=tuple(_placement_name(placement) for placement in placements),
            mesh_names=tuple(mesh.mesh_dim_names or ()),
            mesh_sizes=tuple(mesh.shape),
            coordinate=tuple(coordinate),
        )
    return layout


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the live memory of a tensor on this rank, without autograd."""
    if isinstance(tensor, DTensor):
        local = memory_of_dtensor(tensor)
        if type(local) is not torch.Tensor:  # the result of a collective that is not yet waited for
            with torch.no_grad():
                local = tensor.to_local()
        return local.detach() if local.requires_grad else local
    return tensor.detach() if tensor.requires_grad else tensor


def into(sharded: Sharded, like: DTensor, is_ours: bool = False) -> DTensor:
    """Return a new DTensor on the mesh and with the sharding of `like`, with a copy of the local tensor, or with the
    tensor itself (`is_ours`)."""
    theirs = layout_of(like)
    if not sharded.layout.is_same_region(theirs):
        raise StateError(f"{mismatch(sharded.layout, theirs)}: it must be resharded, not loaded")
    device = local_of(like).device
    local = sharded.local if is_ours and sharded.local.device == device else copied_to(sharded.local, device)
    made: DTensor = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made


def copied_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on a device, always in new memory."""
    return torch.empty_like(tensor, device=device).copy_(tensor)


def mismatch(saved: TensorSharding, live: TensorSharding) -> str:
    """Return the difference of two shardings, for a person."""
    return f"the saved one is {_described(saved)}, the live one {_described(live)}"


def local_region(layout: TensorSharding) -> tuple[slice, ...]:
    """Return where in the full tensor the local tensor lies. StateError for an interleaved one, which is no region."""
    bounds = [(0, size) for size in layout.shape]
    cuts = list(zip(layout.placements, layout.mesh_sizes, layout.coordinate, strict=True))
    plain = [(int(placement[1:]), size, at) for placement, size, at in cuts if placement.startswith("S")]
    for dimension, size, at in plain:
        bounds[dimension] = _chunk(bounds[dimension], size, at)
    for placement, size, at in cuts:
        if placement.startswith("X"):
            # Data parallelism has cut what tensor parallelism had cut before, though its dimension of the mesh comes
            # first: within the other's region, this one's is a region too.
            dimension, split_factor = map(int, placement[1:].split("/"))
            if split_factor != math.prod(size for other, size, _ in plain if other == dimension):
                raise StateError(f"is sharded as {layout.placements}, whose shards are not regions of the full tensor")
            bounds[dimension] = _chunk(bounds[dimension], size, at)
    return tuple(slice(start, stop) for start, stop in bounds)


def _chunk(bounds: tuple[int, int], count: int, at: int) -> tuple[int, int]:
    """Return one of so many chunks, by DTensor's rule."""
    start, stop = bounds
    size = -(-(stop - start) // count)
    return min(start + at * size, stop), min(start + (at + 1) * size, stop)


def place_of(layout: TensorSharding | None, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where a rank's tensor of this shape begins in the full tensor, and the full shape. A shard that is not a
    plain region of the full tensor (an interleaved one) counts as a tensor of its own."""
    try:
        bounds = None if layout is None else local_region(layout)
    except StateError:
        bounds = None
    if layout is None or bounds is None or tuple(part.stop - part.start for part in bounds) != shape:
        return (0,) * len(shape), shape
    return tuple(part.start for part in bounds), layout.shape


def _placement_name(placement: Any) -> str:
    if isinstance(placement, Replicate):
        return "R"
    if type(placement) is Shard:
        return f"S{placement.dim}"
    if type(placement).__name__ == "_StridedShard":
        return f"X{placement.dim}/{placement.split_factor}"
    raise StateError(f"is a DTensor placed as {placement}, a sum not yet made: redistribute it before it is tracked")


def _described(layout: TensorSharding) -> str:
    return f"{list(layout.shape)} as {layout.placements} at {layout.coordinate} of a mesh of {layout.mesh_sizes}"
