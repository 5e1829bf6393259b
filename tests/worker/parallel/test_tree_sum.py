"""The tree's sum has the same bits whoever adds, and is made of the largest subtrees there are."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data.slots import slots_of
from holdfast.worker.parallel.tree_sum import SumNode, TreeSum, largest_nodes, root


def add(left: Any, right: Any) -> Any:
    return left + right


def whole(values: Any) -> Any:
    tree = TreeSum(len(values), add)
    for slot, value in enumerate(values):
        tree.push(SumNode(0, slot), value)
    return tree.total()


def in_parts(values: Any, parts: Any) -> Any:
    """Each part adds up its own, the rest is added from what they have."""
    rest = TreeSum(len(values), add)
    for part in parts:
        own = TreeSum(len(values), add)
        for slot in part:
            own.push(SumNode(0, slot), values[slot])
        assert [node for node, _ in own.sums()] == [
            node
            for node in largest_nodes(part, len(values))
            if any(values[slot] is not None for slot in node.slots(len(values)))
        ]
        sums = dict(own.sums())
        for node in largest_nodes(part, len(values)):
            rest.push(node, sums.get(node))
    return rest.total()


@st.composite
def partitions(draw: Any, slots_max: int = 70) -> Any:
    slots = draw(st.integers(1, slots_max))
    cuts = sorted(draw(st.lists(st.integers(0, slots), max_size=12)))
    edges = [0, *cuts, slots]
    return slots, [range(first, end) for first, end in pairwise(edges)]


def noise(seed: int, slots: int, size: int = 9) -> Any:
    generator = np.random.default_rng(seed)
    return list((generator.standard_normal((slots, size)) * 10.0 ** generator.integers(-6, 6)).astype(np.float32))


@settings(deadline=None, max_examples=300)
@given(partitions(), st.integers(0, 2**32 - 1))
def test_any_division_into_contiguous_parts_gives_the_same_bits(partition: Any, seed: int) -> None:
    slots, parts = partition
    values = noise(seed, slots)
    assert in_parts(values, parts).tobytes() == whole(values).tobytes()


@settings(deadline=None)
@given(partitions(slots_max=40), st.integers(0, 2**32 - 1), st.data())
def test_slots_without_samples_change_nothing_about_it(partition: Any, seed: int, data: Any) -> None:
    slots, parts = partition
    there = data.draw(st.sets(st.integers(0, slots - 1), min_size=1))
    values = [value if slot in there else None for slot, value in enumerate(noise(seed, slots))]
    assert in_parts(values, parts).tobytes() == whole(values).tobytes()


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 40))
def test_ranks_give_away_few_nodes_which_cover_all_slots_once(slots: int, world_size: int) -> None:
    covered = []
    for rank in range(world_size):
        nodes = largest_nodes(slots_of(rank, world_size, slots), slots)
        assert len(nodes) <= max(1, 2 * root(slots).level)
        covered += [slot for node in nodes for slot in node.slots(slots)]
    assert covered == list(range(slots))


def test_a_power_of_two_of_slots_each_is_one_node_each() -> None:
    assert [largest_nodes(slots_of(rank, 4, 16), 16) for rank in range(4)] == [[SumNode(2, rank)] for rank in range(4)]


@pytest.mark.parametrize(
    ("slots", "total", "nodes"),
    [
        (range(6), 6, [(3, 0)]),
        (range(4, 6), 6, [(2, 1)]),
        (range(4, 5), 5, [(2, 1)]),
        (range(5), 6, [(2, 0), (0, 4)]),
        (range(1, 7), 8, [(0, 1), (1, 1), (1, 2), (0, 6)]),
        (range(1), 1, [(0, 0)]),
        (range(3, 3), 8, []),
        (range(8, 8), 8, []),
    ],
)
def test_the_largest_subtrees_of_a_run(slots: range, total: int, nodes: Any) -> None:
    assert largest_nodes(slots, total) == nodes


def test_the_order_is_this_and_stays_so() -> None:
    """A golden value: another order would be another number."""
    tree = TreeSum(7, lambda left, right: f"({left}{right})")
    for slot, name in enumerate("abcdefg"):
        tree.push(SumNode(0, slot), name)
    assert tree.total() == "(((ab)(cd))((ef)g))"
