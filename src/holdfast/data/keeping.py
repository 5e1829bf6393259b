"""Batches that were handed out, for the case that their step is repeated.

A repeated step must have the very same batch. The loop may have changed it in place; torch counts such changes for each
tensor, so a batch with a changed tensor is not given out again but fetched anew. So is one with anything in it whose
changes nobody counts (arrays, objects of one's own). Lists and dictionaries are made anew each time. What torch does
not count either: writing through `.data`, or through the array that `.numpy()` gives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from holdfast.data.fetching import Answer

UNCHANGING = (str, bytes, int, float, complex, bool, type(None))


class Kept:
    """An answer whose batch was handed out."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self._leaves, self._structure = tree_flatten(answer.batch)
        self._marks = _marks(self._leaves)

    def batch(self) -> Any:
        """As it was handed out; None if it is not known to be the same."""
        if self._marks is None or _marks(self._leaves) != self._marks:
            return None
        return tree_unflatten(self._leaves, self._structure)


def _marks(leaves: list[Any]) -> list[tuple[Any, ...]] | None:
    """What differs after a change. None where that cannot be told."""
    marks: list[tuple[Any, ...]] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if leaf.is_inference():
                return None
            marks.append((leaf._version, leaf.data_ptr(), leaf.requires_grad, leaf.grad is None))
        elif not isinstance(leaf, UNCHANGING):
            return None
    return marks
