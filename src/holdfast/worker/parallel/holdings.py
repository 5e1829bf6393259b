"""What a rank holds of the tracked models, as a number: equal numbers on two ranks mean that they hold the same regions
of the same tensors. Ranks with equal holdings have the same shard (core/shard_map.py).

A DTensor says which region of the full tensor it is. A plain tensor does not: stages of a pipeline differ by their
names, tensors cut by hand mostly by their shapes. What differs in neither is declared by `hf.init(mesh=…,
replicated=…)`, and found by its content in the first steps where it is not (replica_check.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Module

from holdfast.core.mesh_shape import MeshShape, mesh_shape
from holdfast.core.shard_map import ShardMap, declared_map, number_holdings, shard_map_of
from holdfast.core.stacks import ranks_text
from holdfast.errors import ScriptError, StateError, UsageError
from holdfast.state.dtensors import layout_of

BITS = 62
"""Of the number: it travels as a signed one of 64 bits."""


def holdings_of(modules: Mapping[str, Module]) -> int:
    """Return the number of what a rank holds of these modules."""
    return _number(f"{name}.{line}" for name, module in modules.items() for line in _lines(module))


def names_of(modules: Mapping[str, Module]) -> int:
    """Return the number of the names of what a rank holds: those of the stages of a pipeline differ."""
    return _number(f"{name}.{path}" for name, module in modules.items() for path, _ in _tensors(module))


def _number(lines: Iterable[str]) -> int:
    return int.from_bytes(hashlib.sha256("\n".join(sorted(lines)).encode()).digest()[:8], "big") >> (64 - BITS)


def _lines(module: Module) -> Iterator[str]:
    for path, tensor in _tensors(module):
        if not isinstance(tensor, DTensor):
            yield f"{path} {tuple(tensor.shape)}"
            continue
        try:
            layout = layout_of(tensor)
        except StateError as error:
            raise ScriptError(f"{path} {error}") from None
        yield f"{path} {layout.shape} {layout.cuts}"


def _tensors(module: Module) -> Iterable[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


class DeclaredMesh:
    """The mesh that a script has named in `hf.init`, and along which of its dimensions the state is replicated."""

    def __init__(self, mesh: MeshShape, replicated: Sequence[str]) -> None:
        mesh.check_names(replicated, "replicated")
        self.mesh, self.replicated = mesh, tuple(replicated)
        self.shard_map = declared_map(mesh, self.replicated)

    def check_size(self, world_size: int) -> None:
        """Raise UsageError for a world of another size."""
        if self.mesh.world_size != world_size:
            sizes = " × ".join(map(str, self.mesh.sizes))
            raise UsageError(
                f"hf.init was given a mesh of {sizes} = {self.mesh.world_size} ranks, and there are {world_size}: give"
                " the sizes of this run, or start as many workers"
            )


def declared_mesh(mesh: DeviceMesh | Mapping[str, int], replicated: str | Sequence[str]) -> DeclaredMesh:
    """Return what a script declares. Raises UsageError for a mesh that does not say where each rank is."""
    if isinstance(mesh, DeviceMesh):
        ranks = mesh.mesh.flatten().tolist()
        if not mesh.mesh_dim_names:
            raise UsageError(
                "hf.init(mesh=…) needs the names of its dimensions: init_device_mesh(…, mesh_dim_names=(…))"
            )
        if ranks != list(range(len(ranks))):
            raise UsageError("hf.init(mesh=…) needs the mesh of all ranks in their order, not a part of it")
        mesh = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    if not isinstance(mesh, Mapping):
        raise UsageError(
            f"hf.init(mesh=…) takes a DeviceMesh, or sizes by name as in {{'dp': 4, 'tp': 2}}, not {mesh!r}"
        )
    return DeclaredMesh(mesh_shape(mesh), (replicated,) if isinstance(replicated, str) else tuple(replicated))


def map_of_holdings(holdings: Sequence[int], declared: DeclaredMesh | None) -> ShardMap:
    """Return which shard each rank has, from what all ranks hold. Raises ScriptError where that contradicts what the
    script has declared."""
    if declared is None:
        try:
            return shard_map_of(number_holdings(holdings))
        except UsageError as error:
            raise ScriptError(str(error)) from None
    declared.check_size(len(holdings))
    for shard in range(declared.shard_map.shards):
        first, *others = declared.shard_map.ranks_of(shard, len(holdings))
        for rank in others:
            if holdings[rank] != holdings[first]:
                along = ", ".join(declared.replicated)
                raise ScriptError(
                    f"hf.init declares the state replicated along {along}, and {ranks_text((first, rank))} hold other"
                    " tensors, or other regions of them: name in replicated= only dimensions along which the model is"
                    " the same"
                )
    return declared.shard_map


def own_part(shard_map: ShardMap, rank: int, world_size: int) -> tuple[int, int, int]:
    """Return which part of the state a rank's image is, of how many shards, in how many shares each."""
    part = shard_map.shard_of(rank) + shard_map.replica_of(rank) * shard_map.shards
    return part, shard_map.shards, shard_map.replicas(world_size)
