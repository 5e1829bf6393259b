"""The members of a new view fill objects that are cut otherwise than the state they have: copies of old shards.

What lies where after a change of the world: each process that was there before has copies of shards in memory, its own
and its replicas of others', of the step that is settled on (and of its neighbours, which do not count). Its objects
are new and hold nothing; those of newcomers too. So, all together:

    1  everybody says which shards, of how many, it has a whole copy of (one gather)
    2  a cut of which no shard is missing is chosen; for each shard the lowest rank that has it serves it
    3  the structure of each shard goes to all: from it, and from how its own objects are cut, each rank knows which
       tensors it needs, and in which order; where the cut is the same, those of one shard
    4  these lists go to all; everybody begins to send what the others want of it, out of the copies, in their order
    5  each fills its objects: what it needs is taken from its own copies, or received, one tensor at a time

Two cuts may be on offer: when a fault hit the first step after a change, some have copies of the new cut already. The
copies of the old one are kept until a step is committed under the new one, so one of them is always complete.
A fault in the middle leaves the objects half filled, and the copies as they are: it is all done again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from holdfast.core.shard_map import ShardMap
from holdfast.errors import StateConflictError, StateError
from holdfast.state.arena import Arena
from holdfast.state.load_parts import is_same_cut
from holdfast.state.reshard import needed, reshard
from holdfast.state.tracked import Tracked
from holdfast.state.tree import SKELETON_BYTES_MAX, specs
from holdfast.worker.collectives import groups
from holdfast.worker.parallel.holdings import names_of
from holdfast.worker.resume_point import ResumePoint

OFFERS_MAX = 32
"""How many copies one rank may offer: its own, and the replicas it keeps, of two cuts."""
SKELETONS_BYTES_MAX = 2 * 2**30
"""The structures of all shards together, which every rank holds for a moment."""
NEEDS_MAX = 2**22
"""Tensors that one rank may want to receive."""
_TAG = 9_101

Offers = Mapping[tuple[int, int], Arena]
"""(number of shards, shard) → a whole copy of it, of the settled step."""
Need = tuple[int, int]
"""(shard, number of the tensor in it)."""


class ReshardSource(NamedTuple):
    """The cut that is used: who serves each of its shards, and how long their structures are."""

    shards: int
    servers: dict[int, int]
    skeleton_bytes: dict[int, int]


def is_needed(resume: ResumePoint, shard_map: ShardMap) -> bool:
    """Return whether some rank's objects do not hold the state that is theirs."""
    held = zip(resume.holders, resume.held, strict=False)
    return any(one != (shard_map.shards, shard_map.shard_of(rank)) for rank, one in held)


def carry_out(offers: Offers, step: int, tracked: Tracked, shard_map: ShardMap) -> None:
    """Fill our objects, whose cut is `shard_map`; all ranks at once. See the top of the file."""
    source = choose(offers, step)
    ours = {shard: copy.flat().tensors for (shards, shard), copy in offers.items() if shards == source.shards}
    skeletons = _share_skeletons(source, offers)
    rank, modules = groups.default_group().rank(), tracked.modules()
    tracked.is_part = len({row[0] for row in groups.gather((names_of(modules),))}) > 1
    if source.shards == shard_map.shards and is_same_cut(skeletons[shard_map.shard_of(rank)], tracked):
        skeletons = {shard_map.shard_of(rank): skeletons[shard_map.shard_of(rank)]}
    wanted = [need for need in needed(skeletons, tracked) if need[0] not in ours]
    sending = _send(source, ours, _share(wanted))
    received = _receive(source, skeletons, wanted)

    def fetch(shard: int, index: int) -> torch.Tensor:
        if shard in ours:
            return ours[shard][index]
        need, tensor = next(received, ((-1, -1), torch.empty(0, device="cpu")))
        if need != (shard, index):
            raise StateError(f"tensor {index} of shard {shard} was asked for out of turn")
        return tensor

    reshard(skeletons, fetch, tracked)
    for work in sending:
        work.wait()


# --- who has what


def choose(offers: Offers, step: int) -> ReshardSource:
    """Return a cut of which every shard is on offer, the finest. Raises StateConflictError, on all ranks, if there is
    none."""
    rows = [list(_triples(row)) for row in groups.gather(_words(offers))]
    cuts = sorted({shards for row in rows for shards, _, _ in row}, reverse=True)
    found = [_source(rows, shards) for shards in cuts]
    for source in found:
        if len(source.servers) == source.shards:
            return source
    if not found:
        raise StateConflictError(f"no rank has a copy of the state before step {step}")
    best = min(found, key=lambda source: source.shards - len(source.servers))
    missing = next(shard for shard in range(best.shards) if shard not in best.servers)
    raise StateConflictError(f"no rank has a copy of shard {missing} of {best.shards} of the state before step {step}")


def _words(offers: Offers) -> list[int]:
    """Shards, shard, bytes of the structure, of each; zeros behind."""
    said = [(*key, len(offers[key].skeleton)) for key in sorted(offers)[:OFFERS_MAX]]
    return [word for triple in (*said, *[(0, 0, 0)] * (OFFERS_MAX - len(said))) for word in triple]


def _triples(row: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    for at in range(0, len(row), 3):
        if row[at]:
            yield row[at], row[at + 1], row[at + 2]


def _source(rows: Sequence[Iterable[tuple[int, int, int]]], shards: int) -> ReshardSource:
    source = ReshardSource(shards, {}, {})
    for rank, row in enumerate(rows):
        for cut, shard, size_bytes in row:
            if cut == shards and shard not in source.servers:
                source.servers[shard], source.skeleton_bytes[shard] = rank, size_bytes
    return source


# --- what goes to all


def _share_skeletons(source: ReshardSource, offers: Offers) -> dict[int, bytes]:
    sizes = source.skeleton_bytes.values()
    if max(sizes) > SKELETON_BYTES_MAX or sum(sizes) > SKELETONS_BYTES_MAX:
        raise StateError(f"the structures of {source.shards} shards have {sum(sizes)} bytes, more than can be shared")
    rank = groups.default_group().rank()
    skeletons: dict[int, bytes] = {}
    for shard in range(source.shards):
        room = torch.empty(source.skeleton_bytes[shard], dtype=torch.uint8, device="cpu")
        if source.servers[shard] == rank:
            room = torch.frombuffer(bytearray(offers[source.shards, shard].skeleton), dtype=torch.uint8)
        groups.broadcast(room, source.servers[shard])
        skeletons[shard] = room.numpy().tobytes()
    return skeletons


def _share(wanted: Sequence[Need]) -> list[list[Need]]:
    """Return what each rank wants of others, in its order."""
    if len(wanted) > NEEDS_MAX:
        raise StateError(f"{len(wanted)} tensors would have to be received, more than {NEEDS_MAX}")
    longest = max(length for (length,) in groups.gather([len(wanted)]))
    words = [word for need in wanted for word in need]
    rows = groups.gather([*words, *[-1] * (2 * longest - len(words))]) if longest else []
    return [[(row[at], row[at + 1]) for at in range(0, len(row), 2) if row[at] >= 0] for row in rows]


# --- from copy to object


def _send(
    source: ReshardSource, ours: Mapping[int, Sequence[torch.Tensor]], wishes: Sequence[Sequence[Need]]
) -> list[Any]:
    """Begin to send what we serve; nothing is copied for it."""
    group = groups.default_group()
    rank = group.rank()
    return [
        group.send([groups.as_bytes(ours[shard][index])], to, _TAG)
        for to, wish in enumerate(wishes)
        for shard, index in wish
        if source.servers[shard] == rank and ours[shard][index].numel()
    ]


def _receive(
    source: ReshardSource, skeletons: Mapping[int, bytes], wanted: Sequence[Need]
) -> Iterator[tuple[Need, torch.Tensor]]:
    """Receive tensors one after another, as they are asked for."""
    known = {shard: specs(skeletons[shard]) for shard in {shard for shard, _ in wanted}}
    for shard, index in wanted:
        spec = known[shard][index]
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
        groups.recv(tensor, source.servers[shard], _TAG)
        yield (shard, index), tensor
