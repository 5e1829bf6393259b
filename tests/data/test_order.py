"""The order of samples: a bijection of any size, the same everywhere, and well mixed."""

import math
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data.order import Locality, Order, Permutation, round_keys
from holdfast.errors import UsageError


def epoch_of(order: Any, epoch: int) -> Any:
    return order.samples_at(range(epoch * order.size, (epoch + 1) * order.size))


@pytest.mark.parametrize("hundred", range(30))
def test_every_size_is_a_bijection(hundred: int) -> None:
    for size in range(100 * hundred + 1, 100 * hundred + 101):
        found = epoch_of(Order(size, seed=size), size % 3)
        assert np.array_equal(np.sort(found), np.arange(size))


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 400), st.integers(1, 60), st.integers(1, 9), st.integers(0, 5), st.integers())
def test_locality_is_a_bijection_whose_windows_hold_few_shards(
    size: int, shard: int, window: int, epoch: int, seed: int
) -> None:
    order = Order(size, seed, locality=Locality(shard, window))
    found = epoch_of(order, epoch)
    assert np.array_equal(np.sort(found), np.arange(size))
    shards = found // shard
    full = shard * window
    for first in range(0, size, full):
        # One short shard may shift the windows, so that a stretch of one window's length touches two.
        assert len(set(shards[first : first + full].tolist())) <= 2 * window


def test_locality_shuffles_within_windows_and_differs_between_them() -> None:
    order = Order(10_000, 1, locality=Locality(100, 10))
    found = epoch_of(order, 0).reshape(10, 1000)
    assert all(len(set((row // 100).tolist())) == 10 for row in found)
    inside = [np.argsort(row).tolist() for row in found]
    assert len({tuple(row) for row in inside}) == 10
    assert any(row != sorted(row) for row in inside)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 2**62 - 1), st.integers(), st.data())
def test_large_sizes_stay_inside_and_can_be_undone(size: int, seed: int, data: Any) -> None:
    values = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20))
    permutation = Permutation(size, round_keys(seed, 0, "samples"))
    images = permutation.apply(np.array(values, dtype=np.int64))
    assert all(0 <= image < size for image in images.tolist())
    assert [permutation.invert(image) for image in images.tolist()] == values


def test_random_access_agrees_with_ranges_across_epochs() -> None:
    order = Order(37, seed=5)
    whole = order.samples_at(range(200)).tolist()
    assert [int(order.samples_at(range(one, one + 1))[0]) for one in range(200)] == whole
    assert order.samples_at(range(30, 80)).tolist() == whole[30:80]
    assert order.place(80) == (2, 6)


def test_the_order_is_the_same_in_every_version() -> None:
    assert Order(10**12, seed=7).samples_at(range(10**9, 10**9 + 4)).tolist() == GOLDEN_LARGE
    assert Order(10, seed=7).samples_at(range(10, 20)).tolist() == GOLDEN_SMALL
    assert Order(20, seed=7, locality=Locality(3, 2)).samples_at(range(20)).tolist() == GOLDEN_LOCAL


GOLDEN_LARGE = [216690029845, 942716334579, 171170596331, 987565020379]
GOLDEN_SMALL = [4, 5, 6, 2, 0, 9, 3, 1, 7, 8]
GOLDEN_LOCAL = [13, 10, 14, 9, 11, 12, 8, 1, 6, 0, 7, 2, 16, 17, 15, 19, 18, 5, 3, 4]


def test_without_shuffling_it_is_the_identity() -> None:
    assert Order(5, shuffle=False).samples_at(range(3, 12)).tolist() == [3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(epoch_of(Order(50, seed), epoch).tolist()) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_a_far_place_costs_no_memory() -> None:
    tracemalloc.start()
    Order(10**15, seed=1).samples_at(range(10**14, 10**14 + 256))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 200_000


@pytest.mark.parametrize("size", [0, -1, 2**62])
def test_sizes_that_cannot_be_are_refused(size: int) -> None:
    with pytest.raises(UsageError, match="samples"):
        Order(size)


def normalised_chi_square(counts: Any, expected: Any) -> Any:
    """About normal with mean 0 and deviation 1 if the counts are as expected."""
    freedom = len(counts) - 1
    return (sum((count - expected) ** 2 / expected for count in counts) - freedom) / math.sqrt(2 * freedom)


def test_all_permutations_of_a_few_come_up_equally_often() -> None:
    family = Permutation(4, round_keys(1, 0, "test"))
    tries = 24_000
    images = family.apply(np.tile(np.arange(4), tries), np.repeat(np.arange(tries), 4)).reshape(tries, 4)
    counts = Counter(map(tuple, images.tolist()))
    assert len(counts) == 24
    assert normalised_chi_square(counts.values(), tries / 24) < 4


@pytest.mark.parametrize("size", [5, 13, 100, 1000])
def test_every_place_sees_every_sample_equally_often(size: int) -> None:
    epochs = 200
    cells = min(size, 10)
    table = np.zeros((cells, cells))
    for epoch in range(epochs):
        found = epoch_of(Order(size, seed=3), epoch)
        np.add.at(table, (np.arange(size) * cells // size, found * cells // size), 1)
    widths = np.bincount(np.arange(size) * cells // size, minlength=cells)
    expected = epochs * np.outer(widths, widths) / size
    freedom = (cells - 1) ** 2
    score = (((table - expected) ** 2 / expected).sum() * (size - 1) / size - freedom) / math.sqrt(2 * freedom)
    assert abs(score) < 4


@pytest.mark.parametrize("size", [1000, 4096, 100_003])
def test_neighbours_are_not_correlated(size: int) -> None:
    found = epoch_of(Order(size, seed=11), 2).astype(float)
    for lag in (1, 2, 16):
        correlation = np.corrcoef(found[:-lag], found[lag:])[0, 1]
        assert abs(correlation) < 4.5 / math.sqrt(size)
    parity = (found % 2)[:-1] == (found % 2)[1:]
    assert abs(parity.mean() - 0.5) < 3 / math.sqrt(size)


def test_two_epochs_agree_as_often_as_chance_would_have_it() -> None:
    size = 10_000
    agreements = [int((epoch_of(Order(size, 4), e) == epoch_of(Order(size, 4), e + 1)).sum()) for e in range(0, 40, 2)]
    assert 6 <= sum(agreements) <= 40
