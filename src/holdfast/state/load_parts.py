"""Loads the state of images into live objects, verified, at about the speed of memory.

Everything is copied block by block (block_loader.py). The targets are chosen before, in one of two ways:

    same sharding      the tensors of the live modules and optimizers themselves; what has no tensor yet (the state of a
                       fresh optimizer) gets new ones, which become the live ones
    other layout       as reshard.py requests it: the rows that intersect what this rank needs, no others

State that each rank has for itself (per_rank_state.py) comes from the part that this very rank wrote, never from
another one.

Targets that are not contiguous, or on a device, are assembled in host memory first. After an error the objects may hold
a mixture, and must be loaded from another source.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from holdfast.errors import CheckpointError
from holdfast.state.block_loader import BlockLoader, StoredRegion
from holdfast.state.dtensors import place_of
from holdfast.state.modules import unwrapped
from holdfast.state.per_rank_state import LOCAL, owner_key
from holdfast.state.plain_copies import StoredRows, have_same_bytes
from holdfast.state.reshard import PlainCopy, Region, SavedLayout, SavedRegion, request_loads
from holdfast.state.tensor_specs import DTYPES, FlatTree, Path, TensorSpec, dotted
from holdfast.state.tracked import GENERATORS, TRANSIENT, Tracked
from holdfast.state.tree import describe, leaf_value, sketch, specs
from holdfast.storage.part_readers import PartSource

Holders = dict[int, list[StoredRegion]]
"""Number of a tensor in a shard → its regions, in order."""


def load_parts(
    sources: Mapping[int, PartSource],
    shards: int,
    shares: int,
    tracked: Tracked,
    threads: int = 2,
    shard: int | None = None,
) -> None:
    """Make the objects what they were when the parts were written: part number = shard + share × shards.

    `shard`: which one these objects have, if the state is still sharded in the same way. If it is not given, it is
    found by the names and the sharding of the live tensors; where nothing is sharded, it is shard 0. Sources are looked
    up as they are needed: with the same sharding, those of one shard only.
    """
    saved = _Saved(sources, shards, shares)
    tracked.saved_generators = saved.generators(tracked.generators_of)
    live = tracked.state()
    ours = saved.find_shard(live, tracked, shard)
    loader = BlockLoader()
    if ours is None:
        finish = request_loads(_Parts(saved, loader), tracked)
        loader.run(threads)
        for action in finish:
            action()
        return
    targets = _targets(live, saved.specs(ours), tracked)
    for index, tensor in targets.items():
        for stored in saved.holders(ours)[index]:
            rows = stored.entry.shape[0] if stored.entry.shape else 1
            loader.add(stored, slice(0, rows), tensor[stored.row : stored.row + rows] if tensor.dim() else tensor)
    local = _request_local(saved, ours, tracked.owner, loader)
    loader.add_rest(saved.parts_of(ours))
    loader.run(threads)
    tree = _tree(saved.skeleton(ours), targets)
    tracked.load_tree({**tree, **_local_tree(saved, ours, tracked.owner, {**targets, **local})}, is_ours=True)


def _request_local(saved: _Saved, shard: int, owner: tuple[int, int], loader: BlockLoader) -> dict[int, torch.Tensor]:
    """Return new memory for the tensors of this rank's own state, and request the loads that fill it."""
    part = saved.part_with_local(shard, owner)
    made: dict[int, torch.Tensor] = {}
    for entry in part.layout.entries if part is not None else ():
        if part is not None and entry.path[:2] == (LOCAL, owner_key(owner)):
            made[entry.index] = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="cpu")
            loader.add(StoredRegion(part, entry, 0), slice(0, entry.shape[0] if entry.shape else 1), made[entry.index])
    return made


def _local_tree(
    saved: _Saved, shard: int, owner: tuple[int, int], tensors: Mapping[int, torch.Tensor]
) -> dict[str, Any]:
    """Return the branch of this rank's own state; that of other ranks, if only those were saved, so that it can be
    refused."""
    part = saved.part_with_local(shard, owner)
    skeleton = saved.skeleton(shard) if part is None else part.skeleton
    branch = _tree(skeleton, tensors).get(LOCAL)
    return {} if branch is None else {LOCAL: branch}


def _tree(skeleton: bytes, tensors: Mapping[int, torch.Tensor]) -> dict[str, Any]:
    """Return the state of a skeleton; the placeholder of a tensor that is not given must not be used."""
    tree = sketch(skeleton, lambda index, spec: leaf_value(spec, tensors[index]) if index in tensors else None)
    if not isinstance(tree, dict):
        raise CheckpointError("what was saved is not the state of tracked objects")
    return tree


class _Saved:
    """The parts of a checkpoint, shard by shard."""

    def __init__(self, sources: Mapping[int, PartSource], shards: int, shares: int) -> None:
        self._sources, self._shards, self._shares = sources, shards, shares
        self._specs: dict[int, list[TensorSpec]] = {}
        self._holders: dict[int, Holders] = {}

    def parts_of(self, shard: int) -> list[PartSource]:
        return [self._part(shard + share * self._shards) for share in range(self._shares)]

    def skeletons(self) -> dict[int, bytes]:
        return {shard: self.skeleton(shard) for shard in range(self._shards)}

    def skeleton(self, shard: int) -> bytes:
        return self._part(shard).skeleton

    def specs(self, shard: int) -> list[TensorSpec]:
        if shard not in self._specs:
            self._specs[shard] = specs(self.skeleton(shard))
        return self._specs[shard]

    def holders(self, shard: int) -> Holders:
        """Return the regions of each of a shard's tensors. Raise CheckpointError unless together they are the
        tensor."""
        if shard not in self._holders:
            self._holders[shard] = self._assemble(shard)
        return self._holders[shard]

    def find_shard(self, live: FlatTree, tracked: Tracked, given: int | None) -> int | None:
        """Return the shard that has the names of the live state, and is sharded as it is; where one is given, that one
        or none. Plain parameters that several shards have can be loaded by a given number only."""
        candidates = range(self._shards) if given is None else (given,)
        modules = tracked.modules() if self._shards > 1 or tracked.is_part else ()  # else loading says what differs
        known = describe(live)
        found = next((shard for shard in candidates if _is_cut_alike(self.specs(shard), known, modules)), None)
        return None if found is not None and given is None and self._has_copies(found, tracked) else found

    def _has_copies(self, shard: int, tracked: Tracked) -> bool:
        """Return whether other shards have a plain parameter of this one too."""
        modules = {name: unwrapped(module) for name, module in tracked.modules().items()}
        parameters = {(name, path) for name, module in modules.items() for path, _ in module.named_parameters()}
        plain = {spec.path for spec in self.specs(shard) if spec.layout is None and spec.path in parameters}
        others = (self.specs(other) for other in range(self._shards) if other != shard and plain)
        return any(spec.path in plain for described in others for spec in described)

    def generators(self, rank: int | None) -> dict[str, Any] | None:
        """Return the generators of a rank: they are in its own part, if there was such a rank, and it saved them."""
        if rank is None or rank not in self._sources:
            return None
        tree = sketch(self._sources[rank].skeleton, lambda _, spec: spec)
        found = tree.get(GENERATORS) if isinstance(tree, dict) else None
        return found if isinstance(found, dict) else None

    def part_with_local(self, shard: int, owner: tuple[int, int]) -> PartSource | None:
        """Return the part that has a rank's own state: the one it wrote itself, or another of its shard that survivors
        wrote for a rank that was gone."""
        own = owner[0] if owner[0] % self._shards == shard and owner[0] in self._sources else shard
        others = (shard + share * self._shards for share in range(self._shares))
        for number in dict.fromkeys((own, *others)):
            tree = sketch(self._part(number).skeleton, lambda _, spec: spec)
            if isinstance(tree, dict) and owner_key(owner) in (tree.get(LOCAL) or {}):
                return self._part(number)
        return None

    def _part(self, number: int) -> PartSource:
        if number not in self._sources:
            raise CheckpointError(f"part {number} of {self._shards * self._shares} is missing")
        return self._sources[number]

    def _assemble(self, shard: int) -> Holders:
        described = self.specs(shard)
        found: Holders = {index: [] for index, spec in enumerate(described) if spec.path[0] != LOCAL}
        parts = self.parts_of(shard)
        for part in parts:
            self._check_alike(part, parts[0], shard)
            for entry in part.layout.entries:
                if entry.path[:1] == (LOCAL,):
                    continue
                if entry.index not in found:
                    raise CheckpointError(f"{part.name}: {entry.name} is not in its skeleton")
                found[entry.index].append(StoredRegion(part, entry, 0))
        return {index: _in_order(described[index], stored) for index, stored in found.items()}

    def _check_alike(self, part: PartSource, first: PartSource, shard: int) -> None:
        if part.skeleton != first.skeleton and _outlines(specs(part.skeleton)) != _outlines(self.specs(shard)):
            raise CheckpointError(f"{part.name} and {first.name} are not parts of the same state")


def is_same_cut(skeleton: bytes, tracked: Tracked) -> bool:
    """Return whether the live objects have the names of a shard, and are sharded as it is."""
    return _is_cut_alike(specs(skeleton), describe(tracked.state()), tracked.modules())


def _is_cut_alike(saved: Sequence[TensorSpec], live: Sequence[TensorSpec], modules: Collection[str]) -> bool:
    known = {spec.path: spec for spec in live}
    has_names = _names_in([spec.path for spec in saved], modules) == _names_in(known, modules)
    return has_names and all(_is_alike(spec, known) for spec in saved)


def _names_in(paths: Iterable[Path], modules: Collection[str]) -> set[Path]:
    """Return the names of the tensors of modules."""
    return {path for path in paths if path[0] in modules}


def _outlines(described: Sequence[TensorSpec]) -> list[Any]:
    """Return what must be the same in all parts of a shard, without each rank's own state."""
    return [(spec.path, spec.dtype, spec.shape) for spec in described if spec.path[0] != LOCAL]


def _is_alike(saved: TensorSpec, live: Mapping[Path, TensorSpec]) -> bool:
    """Return whether a tensor can be loaded as it is: state that does not exist yet will be created like its
    parameter."""
    there = live.get(saved.path)
    if there is None:
        return True
    if saved.layout is None or there.layout is None:
        return saved.layout is there.layout
    return saved.layout.is_same_region(there.layout)


def _in_order(spec: TensorSpec, stored: Sequence[StoredRegion]) -> list[StoredRegion]:
    """Return the regions from the first row to the last; raise if rows are missing or there twice."""
    begins, full_shape = place_of(spec.layout, spec.shape)
    row, found = 0, []
    for item in sorted(stored, key=lambda item: item.entry.offsets[:1]):
        entry, expected = item.entry, (begins[0] + row, *begins[1:]) if begins else ()
        dtype = str(spec.dtype).removeprefix("torch.")
        is_sharded_alike = (entry.shape[1:], entry.full_shape, entry.dtype) == (spec.shape[1:], full_shape, dtype)
        if entry.offsets != expected or not is_sharded_alike:
            raise CheckpointError(
                f"{item.source.name}: {entry.name} begins at {list(entry.offsets)} of {list(entry.full_shape)},"
                f" where the region at {list(expected)} of {list(full_shape)} belongs"
            )
        found.append(item._replace(row=row))
        row += entry.shape[0] if entry.shape else 1
    if not found or row != (spec.shape[0] if spec.shape else 1):
        rows = spec.shape[0] if spec.shape else 1
        missing = f"rows {row} to {rows - 1} of {rows} are missing" if row < rows else f"they have {row} rows of {rows}"
        name = dotted(spec.path)
        raise CheckpointError(f"{name} is not complete in its shard's parts, {missing}: they do not belong together")
    return found


def _targets(live: FlatTree, described: Sequence[TensorSpec], tracked: Tracked) -> dict[int, torch.Tensor]:
    """Return where each tensor that ranks share goes, by its number: the live one of a module or an optimizer, or new
    memory."""
    ours = {TRANSIENT, *tracked.modules(), *tracked.optimizers()}
    known = {spec.path: (spec, tensor) for spec, tensor in zip(describe(live), live.tensors, strict=True)}
    targets: dict[int, torch.Tensor] = {}
    for index, spec in enumerate(described):
        if spec.path[0] == LOCAL:
            continue
        there, tensor = known.get(spec.path, (None, None))
        fits = there is not None and (there.dtype, there.shape) == (spec.dtype, spec.shape) and spec.path[0] in ours
        targets[index] = (
            tensor if fits and tensor is not None else torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
        )
    return targets


class _Parts(SavedLayout):
    """Old shards in parts: requests are recorded, and loaded all at once."""

    def __init__(self, saved: _Saved, loader: BlockLoader) -> None:
        self._saved, self._loader = saved, loader
        super().__init__(saved.skeletons())

    def regions_of_tensor(self, shard: int, index: int, spec: TensorSpec, region: Region) -> list[SavedRegion]:
        found = []
        for stored in self._saved.holders(shard)[index]:
            rows = stored.entry.shape[0] if stored.entry.shape else 1
            start = region[0].start + stored.row if region else 0
            part = (slice(start, start + rows), *region[1:]) if region else ()
            found.append(SavedRegion(shard, index, spec, part, slice(stored.row, stored.row + rows), stored))
        return found

    def have_same_content(self, one: PlainCopy, other: PlainCopy) -> bool:
        copies = [
            [StoredRows(stored.source, stored.entry) for stored in self._saved.holders(copy.shard)[copy.index]]
            for copy in (one, other)
        ]
        return have_same_bytes(*copies)

    def transfer(self, saved_region: SavedRegion, inside: Region, target: torch.Tensor) -> None:
        stored: StoredRegion = saved_region.origin
        rows = inside[0] if inside else slice(0, 1)
        if tuple(part.stop - part.start for part in inside[1:]) == stored.entry.shape[1:]:
            self._loader.add(stored, rows, target)
            return
        buffer = torch.empty((rows.stop - rows.start, *stored.entry.shape[1:]), dtype=target.dtype, device="cpu")
        self._loader.add(stored, rows, buffer)
        self._loader.afterwards.append((target, buffer[(slice(None), *inside[1:])]))
