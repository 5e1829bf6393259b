"""What of the state is in the nodes' memory and on storage, and what that is safe against. Pure.

Each node says which images it holds: its own workers', and those it keeps for other nodes. A step is whole if all parts
of one cut are there. From that follow three steps:

    in memory      whole on the nodes that are there: survives all workers
    elsewhere too  whole without any one of them: survives a node
    on storage     published: survives the job
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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


class Safety(msgspec.Struct, frozen=True):
    """Steps; -1: none."""

    memory: int = -1
    elsewhere: int = -1
    storage: int = -1


Images = Mapping[str, tuple[KeptImage, ...]]
"""By node."""


def whole_steps(images: Iterable[KeptImage]) -> set[int]:
    """The steps of which all parts are there."""
    parts: dict[tuple[int, int, int], set[int]] = {}
    for image in images:
        parts.setdefault((image.step, image.shards, image.shares), set()).add(image.part)
    return {step for (step, shards, shares), found in parts.items() if len(found) >= shards * shares}


def safety(images: Images, storage: int) -> Safety:
    """What the steps are that nothing less than all workers, a node, the job can take away."""
    memory = max(whole_steps(one for node in images.values() for one in node), default=-1)
    return Safety(memory, _elsewhere(images), storage)


def _elsewhere(images: Images) -> int:
    """The highest step that is whole whichever single node is taken away. Per part: who has it; a part that one node
    alone has is lost with that node."""
    holders: dict[tuple[int, int, int], dict[int, int]] = {}
    for node in images.values():
        for step, shards, shares, part in {(i.step, i.shards, i.shares, i.part) for i in node}:
            counts = holders.setdefault((step, shards, shares), {})
            counts[part] = counts.get(part, 0) + 1
    safe = (
        step
        for (step, shards, shares), counts in holders.items()
        if len(counts) >= shards * shares and min(counts.values()) >= 2
    )
    return max(safe, default=-1)
