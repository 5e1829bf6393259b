"""State that each rank has for itself, beside what all ranks with the same shard share.

`job.track_local(meter=meter)` names it; the inner state of an optimizer that gives every rank another part
(ZeroRedundancyOptimizer) belongs to it, and so do gradients that are accumulated over steps and differ between ranks.

In the tree of a state it is one branch, the last, so that the numbers of all other tensors are the same on every rank:

    "@local" → "rank1-of-4" → name → what the object's state_dict() says

The rank and the size of its world are part of the path: no two ranks' tensors have the same name in a checkpoint, and
no rank is ever given another's. A world of another size has no use for it: it is refused with a sentence.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Any

from holdfast.errors import StateError

LOCAL = "@local"
"""The branch of what belongs to one rank alone. No object can have this name."""


class StatePart(enum.Enum):
    """A selection: which part of a rank's state is meant."""

    ALL = "all"
    SHARED = "shared"
    """The state that every rank with the same shard has alike."""
    LOCAL = "local"


def owner_key(owner: tuple[int, int]) -> str:
    """Return the name under which a rank's own state is stored: `owner` is the rank and the size of its world."""
    return f"rank{owner[0]}-of-{owner[1]}"


def own_branches(tree: dict[str, Any], owner: tuple[int, int], names: Collection[str]) -> dict[str, Any]:
    """Return what a tree has of this rank's own state; StateError if it has only other ranks', or none where `names`
    are needed."""
    saved = tree.get(LOCAL, {})
    if not isinstance(saved, dict):
        raise StateError("what was saved as the ranks' own state is not readable")
    if (found := saved.get(owner_key(owner))) is not None:
        return dict(found)
    if saved:
        what = ", ".join(sorted(names)) or "gradients in accumulation"
        raise StateError(
            f"each rank has state of its own ({what}), and what was saved is of {', '.join(sorted(saved))}, not of"
            f" {owner_key(owner)}: start with as many workers as when it was saved"
        )
    if names:
        raise StateError(
            f"nothing was saved of this rank's own {', '.join(sorted(names))}: track what was tracked when it was saved"
        )
    return {}
