"""What a DTensor is without its process group: this rank's local tensor, and where it lies in the whole.

A DTensor cannot be sent or written: its mesh is made of live groups. A `Sharded` can. It is put back into a DTensor of
the same mesh (`into`), or joined with the others' into the whole (reshard.py).

A placement is a word: `R` replicated, `S0` sharded along dimension 0, `X0/2` the strided shard of tensor plus data
parallelism. A region of the whole follows from them by DTensor's rule: chunks of ceil(n / size), so that the last ranks
may have less, or nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from holdfast.errors import StateError


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor is spread over a mesh, and which place of the mesh is meant."""

    shape: tuple[int, ...]
    placements: tuple[str, ...]
    mesh_names: tuple[str, ...]
    mesh_sizes: tuple[int, ...]
    coordinate: tuple[int, ...]

    def is_same_cut(self, other: Layout) -> bool:
        """Whether both cut the same whole in the same way, at whatever place."""
        return (self.shape, self.placements, self.mesh_sizes) == (other.shape, other.placements, other.mesh_sizes)

    def is_same_piece(self, other: Layout) -> bool:
        """Whether both are the same part of the same whole: where it is replicated, whichever of the copies."""
        own, others = (
            [place for word, place in zip(layout.placements, layout.coordinate, strict=True) if word != "R"]
            for layout in (self, other)
        )
        return self.is_same_cut(other) and own == others


@dataclass(frozen=True, slots=True, eq=False)
class Sharded:
    """A DTensor at rest."""

    local: torch.Tensor
    layout: Layout


def layout_of(tensor: DTensor) -> Layout:
    """The layout of a live DTensor. Raises StateError for what has no value of its own (a partial sum)."""
    mesh, placements, shape = tensor.device_mesh, tensor.placements, tensor.shape
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise StateError("is a DTensor whose mesh this rank is no member of: track it on the mesh's ranks only")
    # Kept with the mesh, not here: a reference to a mesh would keep its groups and their sockets alive.
    known: dict[Any, Layout] = mesh.__dict__.setdefault("_holdfast_layouts", {})
    key = (shape, placements, tuple(coordinate))
    if (layout := known.get(key)) is None:
        layout = known[key] = Layout(
            shape=tuple(shape),
            placements=tuple(_placement_word(placement) for placement in placements),
            mesh_names=tuple(mesh.mesh_dim_names or ()),
            mesh_sizes=tuple(mesh.shape),
            coordinate=tuple(coordinate),
        )
    return layout


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The live memory of a tensor on this rank, without autograd."""
    if isinstance(tensor, DTensor):
        local: torch.Tensor = tensor._local_tensor
        if type(local) is not torch.Tensor:  # the result of a collective that is not yet waited for
            with torch.no_grad():
                local = tensor.to_local()
        return local.detach() if local.requires_grad else local
    return tensor.detach() if tensor.requires_grad else tensor


def into(sharded: Sharded, like: DTensor, is_ours: bool = False) -> DTensor:
    """A new DTensor on the mesh and with the cut of `like`, with a copy of the local tensor, or with it (`is_ours`)."""
    theirs = layout_of(like)
    if not sharded.layout.is_same_piece(theirs):
        raise StateError(f"{mismatch(sharded.layout, theirs)}: it must be resharded, not loaded")
    device = local_of(like).device
    local = sharded.local if is_ours and sharded.local.device == device else moved(sharded.local, device)
    whole: DTensor = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return whole


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on a device, always in new memory."""
    return torch.empty_like(tensor, device=device).copy_(tensor)


def mismatch(saved: Layout, live: Layout) -> str:
    """The difference of two layouts, for a person."""
    return f"the saved one is {_words(saved)}, the live one {_words(live)}"


def region(layout: Layout) -> tuple[slice, ...]:
    """Where in the whole the local tensor lies."""
    bounds = [(0, size) for size in layout.shape]
    for word, mesh_size, place in zip(layout.placements, layout.mesh_sizes, layout.coordinate, strict=True):
        if word == "R":
            continue
        if not word.startswith("S"):
            raise StateError(f"is cut as {word}, a strided shard: resharding it is not possible yet")
        dimension = int(word[1:])
        start, stop = bounds[dimension]
        chunk = -(-(stop - start) // mesh_size)
        bounds[dimension] = (min(start + place * chunk, stop), min(start + (place + 1) * chunk, stop))
    return tuple(slice(start, stop) for start, stop in bounds)


def _placement_word(placement: Any) -> str:
    if isinstance(placement, Replicate):
        return "R"
    if type(placement) is Shard:
        return f"S{placement.dim}"
    if type(placement).__name__ == "_StridedShard":
        return f"X{placement.dim}/{placement.split_factor}"
    raise StateError(f"is a DTensor placed as {placement}, a sum not yet made: redistribute it before it is tracked")


def _words(layout: Layout) -> str:
    return f"{list(layout.shape)} as {layout.placements} at {layout.coordinate} of a mesh of {layout.mesh_sizes}"
