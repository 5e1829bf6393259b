"""Slots, plan and ledger: everything owned once, whoever the owners are."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data.sample_digest import chain, first_difference, planned_chain, prove_exactly_once
from holdfast.data.slots import loss_scale, slot_counts, slot_positions, slots_of
from holdfast.data.step_plan import LastBatch, make_plan
from holdfast.errors import UsageError


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 300))
def test_every_slot_has_one_owner_and_shares_are_even(world_size: int, slots: int) -> None:
    owned = [slots_of(rank, world_size, slots) for rank in range(world_size)]
    assert [slot for mine in owned for slot in mine] == list(range(slots))
    counts = [len(mine) for mine in owned]
    assert max(counts) - min(counts) <= 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=10), st.integers(1, 300))
def test_weights_are_followed_within_one_slot(weights: list[float], slots: int) -> None:
    weights = [*weights, 1.0]
    owned = [slots_of(rank, len(weights), slots, weights) for rank in range(len(weights))]
    assert [slot for mine in owned for slot in mine] == list(range(slots))
    for mine, weight in zip(owned, weights, strict=True):
        assert abs(len(mine) - slots * weight / sum(weights)) < 1 + 1e-6


def test_a_straggler_gets_less() -> None:
    assert slot_counts(4, 16, (1, 1, 1, 0.5)) == (5, 5, 4, 2)


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [0.0, 0.0], [1.0, float("nan")]])
def test_weights_that_cannot_be_are_refused(weights: Any) -> None:
    with pytest.raises(UsageError, match="weights"):
        slots_of(0, 2, 8, weights)


@settings(deadline=None)
@given(st.integers(0, 100), st.integers(1, 40), st.integers(1, 50))
def test_slots_divide_the_positions_of_a_step_evenly(count: int, slots: int, world_size: int) -> None:
    positions = range(1000, 1000 + count)
    cut = [slot_positions(positions, slots_of(rank, world_size, slots), slots) for rank in range(world_size)]
    assert [position for part in cut for position in part] == list(positions)


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 70), st.sampled_from(["short", "across"]))
def test_steps_follow_one_another_without_gap_or_overlap(size: int, batch: int, last_batch: LastBatch) -> None:
    plan = make_plan(size, global_batch_size=batch, seed=0, last_batch=last_batch)
    steps = range(plan.first_step(3) + 5)
    positions = [position for step in steps for position in plan.span(step)]
    assert positions == list(range(len(positions)))
    for step in steps:
        assert plan.step_at(plan.span(step).start) == step
        assert plan.first_step(plan.epoch_of(step)) <= step < plan.first_step(plan.epoch_of(step) + 1)


def test_dropping_leaves_out_other_samples_each_epoch() -> None:
    plan = make_plan(10, global_batch_size=4, seed=0, last_batch="drop")
    used = [set(plan.samples(2 * epoch)) | set(plan.samples(2 * epoch + 1)) for epoch in range(3)]
    assert all(len(samples) == 8 for samples in used)
    assert used[0] != used[1]
    assert plan.step_at(10) == 2


def test_the_mean_over_the_global_batch_is_what_ddp_s_average_becomes() -> None:
    shares = [[1.0, 2.0, 6.0], [4.0], []]
    scaled = [sum(s) / len(s) * loss_scale(len(s), 4, 3) if s else 0.0 for s in shares]
    assert sum(scaled) / 3 == pytest.approx(13 / 4)
    with pytest.raises(UsageError):
        loss_scale(0, 0, 1)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 200), st.integers(1, 50), st.sampled_from(["short", "across"]))
def test_an_epoch_s_steps_are_proved_exactly_once(size: int, batch: int, last_batch: LastBatch) -> None:
    plan = make_plan(size, global_batch_size=batch, seed=1, last_batch=last_batch)
    last = plan.first_step(2) if last_batch == "short" else plan.first_step(2) - 1
    flat = [int(s) for step in range(last + 1) for s in plan.samples(step)][: 2 * size]
    for epoch in (flat[:size], flat[size:]):
        assert prove_exactly_once([epoch], size).exactly_once


def test_a_broken_epoch_is_named() -> None:
    verdict = prove_exactly_once([[0, 1, 1], [3, 9]], 5)
    assert not verdict.exactly_once
    assert str(verdict) == "of 5 samples 2 missing, 1 repeated, 1 unknown; for example 9, 2, 4, 1"
    assert str(prove_exactly_once([[1, 0]], 2)) == "each of 2 samples exactly once"


def test_chains_say_where_two_runs_part() -> None:
    plan = make_plan(100, global_batch_size=7, seed=1)
    mine = planned_chain(plan, 0, 20)
    shuffled_within = chain((step, plan.samples(step)[::-1]) for step in range(20))
    other = chain((step, plan.samples(step if step != 12 else 0)) for step in range(20))
    assert first_difference(mine, shuffled_within) is None
    assert first_difference(mine, mine[:4]) is None
    assert first_difference(mine, other) == 12
    assert planned_chain(plan, 5, 20, mine[4]) == mine[5:]
