"""What of the state is in the nodes' memory and on storage, and what that is safe against. Pure.

Each node reports which images it holds: its own workers', those it keeps for other nodes, and those that it could make
again together with the others of its parity group. A step is complete if all parts of one partition are there, copied
in the same view. From that follow three steps:

    in memory      complete on the nodes that are there: survives all workers
    elsewhere too  complete without any one of them: survives a node
    on storage     published: survives the job

Nodes do not report at the same moment, so that their reports together may name no step that all have: one is at steps
41 and 40, another was at 38 and 37. But every worker keeps the last step that is complete everywhere
(snapshots/slot_file.py), and so
do those who hold its copies: so there is one, not below the least of what is the newest of each part. (Where a partner
could not keep up, snapshots went on without it, and there may be none: the start sees that, and takes a checkpoint.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from holdfast.core.image_info import ImagePart, StateKey

IMAGES_MAX = 4_096
"""How many one node may report: two for each worker, and what it keeps for others."""
FEW_NODES = 16
"""Of as many, each report is looked at together with all others'."""
JOURNAL_EVERY_S = 30.0
"""The time between two journal entries about memory, which changes with every step."""


class ImageReport(ImagePart, frozen=True, array_like=True):
    """One part of the state before a step that a node has in memory."""

    is_replica: bool = False
    """Whether it is kept for another node."""
    pieces: int = 1
    """It is there if so many nodes report it: each has its piece of the parity."""


class SnapshotStats(msgspec.Struct, frozen=True):
    """How snapshots are made: of one node, or of all together."""

    every: int = 0
    """Steps; 0: there are none yet."""
    is_asked: bool = False
    """By --snapshots, and not by advice (snapshot_interval.py)."""
    step_s: float = 0.0
    stall_s: float = 0.0
    """How long a step takes, and how long a snapshot keeps it waiting."""
    taken: int = 0
    skipped: int = 0
    spoiled: int = 0
    """How many there were; left out as no room was free; given up as the state changed under the copy."""


class Durability(msgspec.Struct, frozen=True):
    """Steps; -1: none."""

    memory: int = -1
    elsewhere: int = -1
    storage: int = -1


Images = Mapping[str, tuple[ImageReport, ...]]
"""By node."""


def newest_complete_step(images: Iterable[ImageReport]) -> int:
    """Return a step such that it or a later one is complete; -1: none."""
    there: dict[StateKey, dict[int, int]] = {}
    for state, part in _present_parts(images):
        there.setdefault(state, {})[part] = 1
    return _newest_complete(there)


def _newest_complete(holders: Mapping[StateKey, Mapping[int, int]]) -> int:
    """Return the step, from how many hold each part of each state."""
    newest: dict[StateKey, dict[int, int]] = {}
    for state in sorted(holders):  # by step
        newest.setdefault(state._replace(step=-1), {}).update(dict.fromkeys(holders[state], state.step))
    named = (state.step for state, parts in holders.items() if len(parts) >= state.parts)
    guaranteed = (min(steps.values()) for state, steps in newest.items() if len(steps) >= state.parts)
    return max((*named, *guaranteed), default=-1)


def combine_stats(snapshot_stats_by_node: Iterable[SnapshotStats]) -> SnapshotStats:
    """Return the statistics of several workers or nodes: of the slowest one, with the counts added up."""
    found = [one for one in snapshot_stats_by_node if one.every]
    if not found:
        return SnapshotStats()
    slowest = max(found, key=lambda one: one.stall_s)
    return msgspec.structs.replace(
        slowest,
        taken=sum(one.taken for one in found),
        skipped=sum(one.skipped for one in found),
        spoiled=sum(one.spoiled for one in found),
    )


def durability(images: Images, storage: int) -> Durability:
    """Return which steps survive the loss of all workers, of a node, and of the job."""
    holders = _holders(images)
    return Durability(_newest_complete(holders), _elsewhere(holders), storage)


def _holders(images: Images) -> dict[StateKey, dict[int, int]]:
    """Return how many nodes hold each part of each state. Parity counts as another holder, as it is never on the node
    that has the image."""
    states = _StateKeys()
    holders: dict[StateKey, dict[int, int]] = {}
    pieces = [one for node in images.values() for one in node if one.pieces > 1]
    alone = ({(states.of(one), one.part) for one in node if one.pieces == 1} for node in images.values())
    for found in (*alone, _present_parts(pieces)):
        for state, part in found:
            counts = holders.setdefault(state, {})
            counts[part] = counts.get(part, 0) + 1
    return holders


def _elsewhere(holders: Mapping[StateKey, Mapping[int, int]]) -> int:
    """Return the highest step that stays complete whichever single node is lost: each of its parts is on two nodes."""
    safe = (state.step for state, counts in holders.items() if len(counts) >= state.parts and min(counts.values()) >= 2)
    return max(safe, default=-1)


def _present_parts(images: Iterable[ImageReport]) -> set[tuple[StateKey, int]]:
    """Return the state and the part of each image that is present."""
    states = _StateKeys()
    found = Counter((states.of(one), one.part, one.pieces) for one in images)
    return {(state, part) for (state, part, pieces), count in found.items() if count >= pieces}


class _StateKeys(dict[tuple[int, int, int, int], StateKey]):
    """The states of images, each made once: there are few, of very many images."""

    def of(self, image: ImageReport) -> StateKey:
        return self[image.step, image.view, image.shards, image.shares]

    def __missing__(self, key: tuple[int, int, int, int]) -> StateKey:
        state = self[key] = StateKey(*key)
        return state
