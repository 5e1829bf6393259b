"""What of the state is in the nodes' memory and on storage, and what that is safe against. Pure.

Each node says which images it holds: its own workers', those it keeps for other nodes, and those that it could make
again together with the others of its parity group. A step is whole if all parts of one cut are there, copied in the
same view. From that follow three steps:

    in memory      whole on the nodes that are there: survives all workers
    elsewhere too  whole without any one of them: survives a node
    on storage     published: survives the job

Nodes do not speak at the same moment, so that what they say together may name no step that all have: one is at steps
41 and 40, another was at 38 and 37. But every seat keeps the last step that is whole everywhere (wire/slots.py), and so
do those who hold its copies: so there is one, not below the least of what is the newest of each part. (Where a partner
could not keep up, snapshots went on without it, and there may be none: the start sees that, and takes a checkpoint.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

IMAGES_MAX = 4_096
"""That one node may name: two a seat, and what it keeps for others."""
SAID_EVERY_S = 30.0
"""Between two entries of the journal about memory: it is for people who look, and changes with every step."""


class KeptImage(msgspec.Struct, frozen=True, array_like=True):
    """One part of the state before a step."""

    step: int
    part: int
    shards: int
    shares: int
    view: int = 0
    """In which it was copied."""
    is_replica: bool = False
    """Kept for another node."""
    pieces: int = 1
    """It is there if so many nodes say so: each has its piece of the parity."""


class Pacing(msgspec.Struct, frozen=True):
    """How snapshots are made: of one node, or of all together."""

    every: int = 0
    """Steps; 0: there are none yet."""
    is_asked: bool = False
    """By --snapshots, and not by advice (interval.py)."""
    step_s: float = 0.0
    stall_s: float = 0.0
    """How long a step takes, and how long a snapshot keeps it waiting."""
    taken: int = 0
    skipped: int = 0
    spoiled: int = 0
    """How many there were; left out as no room was free; given up as the state changed under the copy."""


class Safety(msgspec.Struct, frozen=True):
    """Steps; -1: none."""

    memory: int = -1
    elsewhere: int = -1
    storage: int = -1


Images = Mapping[str, tuple[KeptImage, ...]]
"""By node."""


class Cut(NamedTuple):
    """Images that agree in this are parts of states that were cut alike."""

    view: int
    shards: int
    shares: int

    @property
    def parts(self) -> int:
        return self.shards * self.shares


def whole_at_least(images: Iterable[KeptImage]) -> int:
    """A step that is whole, or a later one is; -1: none."""
    there: dict[tuple[int, Cut], set[int]] = {}
    newest: dict[Cut, dict[int, int]] = {}
    for step, cut, part in _put_together(images):
        there.setdefault((step, cut), set()).add(part)
        parts = newest.setdefault(cut, {})
        parts[part] = max(parts.get(part, -1), step)
    named = (step for (step, cut), found in there.items() if len(found) >= cut.parts)
    by_the_rule = (min(parts.values()) for cut, parts in newest.items() if len(parts) >= cut.parts)
    return max((*named, *by_the_rule), default=-1)


def together(pacings: Iterable[Pacing]) -> Pacing:
    """Of several workers or nodes: the slowest counts, numbers are added up."""
    found = [one for one in pacings if one.every]
    if not found:
        return Pacing()
    slowest = max(found, key=lambda one: one.stall_s)
    return msgspec.structs.replace(
        slowest,
        taken=sum(one.taken for one in found),
        skipped=sum(one.skipped for one in found),
        spoiled=sum(one.spoiled for one in found),
    )


def safety(images: Images, storage: int) -> Safety:
    """What the steps are that nothing less than all workers, a node, the job can take away."""
    return Safety(whole_at_least(one for node in images.values() for one in node), _elsewhere(images), storage)


def _elsewhere(images: Images) -> int:
    """The highest step that is whole whichever single node is taken away. Per part: who has it; a part that one node
    alone has is lost with that node. Parity counts as one more: it is never with who has the image."""
    holders: dict[tuple[int, Cut], dict[int, int]] = {}
    alone = [_put_together(one for one in node if one.pieces == 1) for node in images.values()]
    together = _put_together(one for node in images.values() for one in node if one.pieces > 1)
    for found in (*alone, together):
        for step, cut, part in found:
            counts = holders.setdefault((step, cut), {})
            counts[part] = counts.get(part, 0) + 1
    safe = (
        step
        for (step, cut), counts in holders.items()
        if len(counts) >= cut.parts and min(counts.values()) >= 2
    )
    return max(safe, default=-1)


def _put_together(images: Iterable[KeptImage]) -> set[tuple[int, Cut, int]]:
    """(step, cut, part) of those that are there."""
    found = Counter((one.step, _cut(one), one.part, one.pieces) for one in images)
    return {(step, cut, part) for (step, cut, part, pieces), count in found.items() if count >= pieces}


def _cut(image: KeptImage) -> Cut:
    return Cut(image.view, image.shards, image.shares)
