"""The state in images into live objects, verified, at about the speed of memory.

Everything is moved block by block (moves.py). Where the bytes are to go is settled before, in one of two ways:

    the same cut       the tensors of the live modules and optimizers themselves; what has no tensor yet (the state of a
                       fresh optimizer) gets new ones, which become the live ones
    another cut        as reshard.py asks for it: the rows that meet what this rank needs, no others

What lies scattered in memory, or on a device, is put together in host memory first. After an error the objects may hold
a mixture, and must be loaded from another source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast.errors import CheckpointError
from holdfast.state.leaves import Flat, Spec, dotted
from holdfast.state.moves import Held, Moves
from holdfast.state.reshard import Old, Piece, Region, ask
from holdfast.state.tracked import GENERATORS, TRANSIENT, Tracked
from holdfast.state.tree import describe, sketch, specs
from holdfast.storage.sources import PartSource

Holders = dict[int, list[Held]]
"""Number of a tensor in a shard → its pieces, in order."""


def load_parts(
    sources: Mapping[int, PartSource],
    shards: int,
    shares: int,
    tracked: Tracked,
    threads: int = 2,
    shard: int | None = None,
) -> None:
    """Make the objects what they were when the parts were written: part number = shard + share × shards.

    `shard`: which one these objects have, if the state is still cut in the same way. If it is not said, it is found by
    how the live tensors are cut; where nothing is, shard 0 is taken. Sources are looked up as they are needed: of the
    same cut, those of one shard only.
    """
    saved = _Saved(sources, shards, shares)
    tracked.saved_generators = saved.generators(tracked.generators_of)
    live = tracked.state()
    ours = saved.find_shard(live, range(shards) if shard is None else [shard])
    moves = Moves()
    if ours is None:
        finish = ask(_Parts(saved, moves), tracked)
        moves.run(threads)
        for action in finish:
            action()
        return
    targets = _targets(live, saved.specs(ours), tracked)
    for index, tensor in enumerate(targets):
        for held in saved.holders(ours)[index]:
            rows = held.entry.shape[0] if held.entry.shape else 1
            moves.add(held, slice(0, rows), tensor[held.row : held.row + rows] if tensor.dim() else tensor)
    moves.add_rest(saved.parts_of(ours))
    moves.run(threads)
    tracked.load(Flat(saved.skeleton(ours), targets), is_ours=True)


class _Saved:
    """The parts, shard by shard."""

    def __init__(self, sources: Mapping[int, PartSource], shards: int, shares: int) -> None:
        self._sources, self._shards, self._shares = sources, shards, shares
        self._specs: dict[int, list[Spec]] = {}
        self._holders: dict[int, Holders] = {}

    def parts_of(self, shard: int) -> list[PartSource]:
        return [self._part(shard + share * self._shards) for share in range(self._shares)]

    def skeletons(self) -> dict[int, bytes]:
        return {shard: self.skeleton(shard) for shard in range(self._shards)}

    def skeleton(self, shard: int) -> bytes:
        return self._part(shard).skeleton

    def specs(self, shard: int) -> list[Spec]:
        if shard not in self._specs:
            self._specs[shard] = specs(self.skeleton(shard))
        return self._specs[shard]

    def holders(self, shard: int) -> Holders:
        """The pieces of each of a shard's tensors. Raises CheckpointError unless together they are the tensor."""
        if shard not in self._holders:
            self._holders[shard] = self._assemble(shard)
        return self._holders[shard]

    def find_shard(self, live: Flat, candidates: Sequence[int]) -> int | None:
        """The shard that is cut as the live state is."""
        known = {spec.path: spec for spec in describe(live)}
        return next((shard for shard in candidates if all(_is_alike(spec, known) for spec in self.specs(shard))), None)

    def generators(self, rank: int | None) -> dict[str, Any] | None:
        """Of a rank: they are in its own part, if there was such a rank, and it kept them."""
        if rank is None or rank not in self._sources:
            return None
        tree = sketch(self._sources[rank].skeleton, lambda _, spec: spec)
        found = tree.get(GENERATORS) if isinstance(tree, dict) else None
        return found if isinstance(found, dict) else None

    def _part(self, number: int) -> PartSource:
        if number not in self._sources:
            raise CheckpointError(f"part {number} of {self._shards * self._shares} is missing")
        return self._sources[number]

    def _assemble(self, shard: int) -> Holders:
        described = self.specs(shard)
        found: Holders = {index: [] for index in range(len(described))}
        parts = self.parts_of(shard)
        for part in parts:
            self._check_alike(part, parts[0], shard)
            for entry in part.layout.entries:
                if entry.index not in found:
                    raise CheckpointError(f"{part.name}: {entry.name} is not in its skeleton")
                found[entry.index].append(Held(part, entry, 0))
        return {index: _in_order(described[index], held) for index, held in found.items()}

    def _check_alike(self, part: PartSource, first: PartSource, shard: int) -> None:
        if part.skeleton != first.skeleton:
            theirs = [(spec.path, spec.dtype, spec.shape) for spec in specs(part.skeleton)]
            if theirs != [(spec.path, spec.dtype, spec.shape) for spec in self.specs(shard)]:
                raise CheckpointError(f"{part.name} and {first.name} are not parts of the same state")


def _is_alike(saved: Spec, live: Mapping[tuple[str | int, ...], Spec]) -> bool:
    """Whether a tensor can be loaded as it is: what is not there yet will be made like its parameter."""
    there = live.get(saved.path)
    if there is None:
        return True
    if saved.layout is None or there.layout is None:
        return saved.layout is there.layout
    return saved.layout.is_same_piece(there.layout)


def _in_order(spec: Spec, held: Sequence[Held]) -> list[Held]:
    """The pieces from the first row to the last, none missing and none twice."""
    ordered = sorted(held, key=lambda item: item.entry.offsets[:1])
    row, found = 0, []
    for item in ordered:
        rows = item.entry.shape[:1] or (1,)
        first = item.entry.offsets[0] - ordered[0].entry.offsets[0] if item.entry.offsets else row
        if first != row or item.entry.shape[1:] != spec.shape[1:] or item.entry.dtype != str(spec.dtype)[6:]:
            raise CheckpointError(f"{item.source.name}: {item.entry.name} is not the piece that belongs there")
        found.append(item._replace(row=row))
        row += rows[0]
    if not found or row != (spec.shape[0] if spec.shape else 1):
        raise CheckpointError(f"{dotted(spec.path)} is not whole in its shard's parts: they do not belong together")
    return found


def _targets(live: Flat, described: Sequence[Spec], tracked: Tracked) -> list[torch.Tensor]:
    """Where each tensor goes: the live one of a module or an optimizer, or new memory."""
    ours = {TRANSIENT, *tracked.modules(), *tracked.optimizers()}
    known = {spec.path: (spec, tensor) for spec, tensor in zip(describe(live), live.tensors, strict=True)}
    targets = []
    for spec in described:
        there, tensor = known.get(spec.path, (None, None))
        fits = there is not None and (there.dtype, there.shape) == (spec.dtype, spec.shape) and spec.path[0] in ours
        targets.append(tensor if fits and tensor is not None else torch.empty(spec.shape, dtype=spec.dtype))
    return targets


class _Parts(Old):
    """Old shards in parts: what is asked for is noted, and moved all at once."""

    def __init__(self, saved: _Saved, moves: Moves) -> None:
        self._saved, self._moves = saved, moves
        super().__init__(saved.skeletons())

    def pieces_of(self, shard: int, index: int, spec: Spec, lies: Region) -> list[Piece]:
        found = []
        for held in self._saved.holders(shard)[index]:
            rows = held.entry.shape[0] if held.entry.shape else 1
            start = lies[0].start + held.row if lies else 0
            part = (slice(start, start + rows), *lies[1:]) if lies else ()
            found.append(Piece(shard, index, spec, part, slice(held.row, held.row + rows), held))
        return found

    def move(self, piece: Piece, inside: Region, target: torch.Tensor) -> None:
        held: Held = piece.origin
        rows = inside[0] if inside else slice(0, 1)
        if tuple(part.stop - part.start for part in inside[1:]) == held.entry.shape[1:]:
            self._moves.add(held, rows, target)
            return
        room = torch.empty((rows.stop - rows.start, *held.entry.shape[1:]), dtype=target.dtype)
        self._moves.add(held, rows, room)
        self._moves.afterwards.append((target, room[(slice(None), *inside[1:])]))
