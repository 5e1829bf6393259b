"""Mixtures: exact shares, each source in its own exact order, and a past that no change of weights disturbs."""

from collections import Counter

import pytest

import holdfast as hf
from holdfast.data.mixture import BLOCK_DRAWS, Mixture
from holdfast.errors import UsageError


def sources(*sizes):
    return [[(source, sample) for sample in range(size)] for source, size in enumerate(sizes)]


def test_shares_are_exact_and_every_source_is_used_up_before_it_repeats():
    mixture = Mixture(sources(300, 5000), weights=[3, 1], draws=10 * BLOCK_DRAWS, seed=4)
    drawn = [mixture[draw] for draw in range(10 * BLOCK_DRAWS)]
    for block in range(10):
        counts = Counter(source for source, _ in drawn[block * BLOCK_DRAWS : (block + 1) * BLOCK_DRAWS])
        assert counts == {0: 768, 1: 256}
    small = Counter(sample for source, sample in drawn if source == 0)
    assert set(small.values()) <= {7680 // 300, 7680 // 300 + 1}
    assert len({sample for source, sample in drawn if source == 1}) == 2560


def test_changed_weights_leave_the_past_and_the_sources_order_alone():
    plain = Mixture(sources(10_000, 10_000), weights=[1, 1], draws=8 * BLOCK_DRAWS)
    change = 3 * BLOCK_DRAWS - 100
    changed = Mixture(sources(10_000, 10_000), weights=[1, 1], draws=8 * BLOCK_DRAWS, changes=[(change, [0, 1])])
    assert [plain[draw] for draw in range(3 * BLOCK_DRAWS)] == [changed[draw] for draw in range(3 * BLOCK_DRAWS)]
    later = [changed[draw] for draw in range(3 * BLOCK_DRAWS, 8 * BLOCK_DRAWS)]
    assert {source for source, _ in later} == {1}
    used = [changed[draw] for draw in range(8 * BLOCK_DRAWS)]
    assert len(set(used)) == len(used)


def test_a_far_draw_is_as_cheap_and_the_loader_takes_it():
    mixture = Mixture(sources(1000, 10), weights=[0.9, 0.1], draws=10**12)
    assert mixture.place(10**11) == Mixture(sources(1000, 10), weights=[0.9, 0.1], draws=10**12).place(10**11)
    loader = hf.Loader(
        mixture, global_batch_size=8, shuffle=False, seed_samples=False, collate_fn=list, rank=0, world_size=1
    )
    loader.load_state_dict(loader.state_dict() | {"position": 8 * 10**9})
    assert next(iter(loader)) == [mixture[draw] for draw in range(8 * 10**9, 8 * 10**9 + 8)]


def test_mixtures_that_cannot_be_are_refused():
    with pytest.raises(UsageError, match="weights"):
        Mixture(sources(3, 3), weights=[1], draws=10)
    with pytest.raises(UsageError, match="not a block after"):
        Mixture(sources(3), weights=[1], draws=10, changes=[(0, [1])])
    with pytest.raises(UsageError, match="draws"):
        Mixture(sources(3), weights=[1], draws=0)
    with pytest.raises(IndexError):
        Mixture(sources(3), weights=[1], draws=10)[10]
