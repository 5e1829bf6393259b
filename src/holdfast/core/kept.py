"""What of the state is in the nodes' memory and on storage, and what that is safe against. Pure.

Each node says which images it holds: its own workers', and those it keeps for other nodes. A step is whole if all parts
of one cut are there, copied in the same view. From that follow three steps:

    in memory      whole on the nodes that are there: survives all workers
    elsewhere too  whole without any one of them: survives a node
    on storage     published: survives the job

Nodes do not speak at the same moment, so that what they say together may name no step that all have: one is at steps
41 and 40, another was at 38 and 37. But every seat keeps the last step that is whole everywhere (wire/slots.py), so
there is one: not below the least of what is the newest of each part. (Replicas come later, and keep to no such rule.)
"""

from __future__ import annotations

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
    for image in images:
        cut = _cut(image)
        there.setdefault((image.step, cut), set()).add(image.part)
        if not image.is_replica:
            parts = newest.setdefault(cut, {})
            parts[image.part] = max(parts.get(image.part, -1), image.step)
    named = (step for (step, cut), found in there.items() if len(found) >= cut.parts)
    by_the_rule = (min(parts.values()) for cut, parts in newest.items() if len(parts) >= cut.parts)
    return max((*named, *by_the_rule), default=-1)


def safety(images: Images, storage: int) -> Safety:
    """What the steps are that nothing less than all workers, a node, the job can take away."""
    return Safety(whole_at_least(one for node in images.values() for one in node), _elsewhere(images), storage)


def _elsewhere(images: Images) -> int:
    """The highest step that is whole whichever single node is taken away. Per part: who has it; a part that one node
    alone has is lost with that node."""
    holders: dict[tuple[int, Cut], dict[int, int]] = {}
    for node in images.values():
        for step, cut, part in {(one.step, _cut(one), one.part) for one in node}:
            counts = holders.setdefault((step, cut), {})
            counts[part] = counts.get(part, 0) + 1
    safe = (
        step
        for (step, cut), counts in holders.items()
        if len(counts) >= cut.parts and min(counts.values()) >= 2
    )
    return max(safe, default=-1)


def _cut(image: KeptImage) -> Cut:
    return Cut(image.view, image.shards, image.shares)
