"""A sum whose rounding does not depend on who adds: the fixed binary tree over a step's slots.

Adding floating-point numbers in another order gives other bits. So the order is laid down: the slots are the leaves of
one binary tree, and two subtrees are added, left plus right, when they are neighbours in it.

                    (3, 0)
            (2, 0)          (2, 1)              node (level, place) covers the slots
        (1, 0)  (1, 1)  (1, 2)                  place · 2^level  up to  (place + 1) · 2^level
        0   1   2   3   4   5                   of those there are: here 6, so that (2, 1) is (1, 2) alone

A rank with a contiguous run of slots can add up the subtrees that lie inside it, and no more. The largest of them, at
most 2 · log2(slots), are what a rank has to give away; from all ranks' together, in order, the rest of the tree can be
added. Every addition is one that a single rank with all slots would have made, so the bits are the same.

A slot without samples is no number to add: its neighbour is the sum of both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

Value = TypeVar("Value")


class SumNode(NamedTuple):
    """A subtree. One without a neighbour to its right, for want of slots, is its own parent, and goes by that name."""

    level: int
    assignment: int

    def slots(self, slots_total: int) -> range:
        """The slots that the subtree covers."""
        return range(self.assignment << self.level, min((self.assignment + 1) << self.level, slots_total))


def root(slots_total: int) -> SumNode:
    """Return the root of the whole tree."""
    return SumNode((slots_total - 1).bit_length(), 0)


def largest_nodes(slots: range, slots_total: int) -> list[SumNode]:
    """Return the subtrees that a contiguous run of slots covers and that are in no larger such one, from left to
    right."""
    start, stop = slots.start, slots.stop
    if stop == slots_total:
        stop = 1 << root(slots_total).level  # there is nothing to the right
    found = []
    while start < min(stop, slots_total):
        level = min(_alignment(start, slots_total), (stop - start).bit_length() - 1)
        found.append(SumNode(level, start >> level))
        start += 1 << level
    return found


def _alignment(slot: int, slots_total: int) -> int:
    """Return the level of the largest subtree that begins with this slot."""
    return (slot & -slot).bit_length() - 1 if slot else root(slots_total).level


class TreeSum(Generic[Value]):
    """Takes subtrees from left to right, and adds what can be added. It holds a sum for each level at most, on either
    side of the way up."""

    def __init__(self, slots_total: int, add: Callable[[Value, Value], Value]) -> None:
        """`add` may reuse its left argument."""
        self._slots_total, self._add = slots_total, add
        self._root = root(slots_total)
        self._sums: list[tuple[SumNode, Value | None]] = []

    def push(self, node: SumNode, value: Value | None) -> None:
        """Add the next subtree; None, if none of its slots has samples."""
        while node != self._root:
            level, assignment = node
            if assignment % 2 and self._sums and self._sums[-1][0] == (level, assignment - 1):
                _, left = self._sums.pop()
                value = left if value is None else value if left is None else self._add(left, value)
            elif assignment % 2 or (assignment + 1) << level < self._slots_total:
                break  # its neighbour is another rank's, or is still to come
            node = SumNode(level + 1, assignment // 2)
        self._sums.append((node, value))

    def sums(self) -> list[tuple[SumNode, Value]]:
        """Return what there is by now, without what is nothing: the largest subtrees, from left to right."""
        return [(node, value) for node, value in self._sums if value is not None]

    def total(self) -> Value:
        """Return the sum, once all slots are there."""
        ((node, value),) = self.sums()
        assert node == self._root, "slots are missing"
        return value
