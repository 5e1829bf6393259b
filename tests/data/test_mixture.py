"""Mixtures: exact shares, each source in its own exact order, and a past that no change of weights disturbs."""

from collections import Counter
from typing import Any

import pytest

import holdfast as hf
from holdfast.data.mixture import BLOCK_DRAWS, Mixture
from holdfast.errors import UsageError


def sources(*sizes: Any) -> Any:
    return [[(source, sample) for sample in range(size)] for source, size in enumerate(sizes)]


def test_shares_are_exact_and_every_source_is_used_up_before_it_repeats() -> None:
    mixture = Mixture(sources(300, 5000), weights=[3, 1], draws=10 * BLOCK_DRAWS, seed=4)
    drawn = [mixture[draw] for draw in range(10 * BLOCK_DRAWS)]
    for block in range(10):
        counts = Counter(source for source, _ in drawn[block * BLOCK_DRAWS : (block + 1) * BLOCK_DRAWS])
        assert counts == {0: 768, 1: 256}
    small = Counter(sample for source, sample in drawn if source == 0)
    assert set(small.values()) <= {7680 // 300, 7680 // 300 + 1}
    assert len({sample for source, sample in drawn if source == 1}) == 2560


def test_changed_weights_leave_the_past_and_the_sources_order_alone() -> None:
    plain = Mixture(sources(10_000, 10_000), weights=[1, 1], draws=8 * BLOCK_DRAWS)
    change = 3 * BLOCK_DRAWS - 100
    changed = Mixture(sources(10_000, 10_000), weights=[1, 1], draws=8 * BLOCK_DRAWS, changes=[(change, [0, 1])])
    assert [plain[draw] for draw in range(3 * BLOCK_DRAWS)] == [changed[draw] for draw in range(3 * BLOCK_DRAWS)]
    later = [changed[draw] for draw in range(3 * BLOCK_DRAWS, 8 * BLOCK_DRAWS)]
    assert {source for source, _ in later} == {1}
    used = [changed[draw] for draw in range(8 * BLOCK_DRAWS)]
    assert len(set(used)) == len(used)


def test_weights_change_in_a_run_that_goes_on() -> None:
    """A state that was saved with the old weights is good for a mixture that changes them from a step on."""
    settings: dict[str, Any] = {
        "global_batch_size": 64,
        "shuffle": False,
        "collate_fn": list,
        "rank": 0,
        "world_size": 1,
    }
    plain = Mixture(sources(900, 900), weights=[1, 1], draws=5 * BLOCK_DRAWS)
    before, first_changed = hf.Loader(plain, **settings), 2 * BLOCK_DRAWS // 64
    whole = []
    for batch in before:
        whole.append(batch)
        before.commit()
        if before.step == first_changed - 7:
            break
    changed = Mixture(
        sources(900, 900), weights=[1, 1], draws=5 * BLOCK_DRAWS, changes=[(first_changed * 64, [0.25, 0.75])]
    )
    after = hf.Loader(changed, **settings)
    after.load_state_dict(before.state_dict())
    for batch in after:
        whole.append(batch)
        after.commit()
    assert whole[:first_changed] == [[plain[64 * s + k] for k in range(64)] for s in range(first_changed)]
    shares = Counter(source for batch in whole[first_changed:] for source, _ in batch)
    assert shares == {0: 3 * BLOCK_DRAWS // 4, 1: 9 * BLOCK_DRAWS // 4}


def test_a_far_draw_is_as_cheap_and_the_loader_takes_it() -> None:
    mixture = Mixture(sources(1000, 10), weights=[0.9, 0.1], draws=10**12)
    assert mixture.place(10**11) == Mixture(sources(1000, 10), weights=[0.9, 0.1], draws=10**12).place(10**11)
    loader = hf.Loader(
        mixture, global_batch_size=8, shuffle=False, seed_samples=False, collate_fn=list, rank=0, world_size=1
    )
    loader.load_state_dict(loader.state_dict() | {"position": 8 * 10**9})
    assert next(iter(loader)) == [mixture[draw] for draw in range(8 * 10**9, 8 * 10**9 + 8)]


def test_mixtures_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="weights"):
        Mixture(sources(3, 3), weights=[1], draws=10)
    with pytest.raises(UsageError, match="not a block after"):
        Mixture(sources(3), weights=[1], draws=10, changes=[(0, [1])])
    with pytest.raises(UsageError, match="draws"):
        Mixture(sources(3), weights=[1], draws=0)
    with pytest.raises(IndexError):
        Mixture(sources(3), weights=[1], draws=10)[10]
