"""The loss that all ranks take for the job's, where some have none."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.worker.shown_loss import loss_mark, loss_of


@given(st.lists(st.none() | st.floats(width=32, allow_nan=False), min_size=1, max_size=5))
def test_it_is_that_of_the_lowest_rank_that_has_one(losses: list[float | None]) -> None:
    marks = [loss_mark(rank, {} if loss is None else {"loss": loss}) for rank, loss in enumerate(losses)]
    assert all(-(2**63) <= mark < 2**63 for mark in marks)
    assert loss_of(max(marks)) == next((loss for loss in losses if loss is not None), None)


@pytest.mark.parametrize(("loss", "shown"), [(1e300, math.inf), (-1e300, -math.inf), (math.inf, math.inf)])
def test_what_is_too_large_is_shown_as_infinite(loss: float, shown: float) -> None:
    assert loss_of(loss_mark(2**31 - 1, {"loss": loss})) == shown


def test_a_loss_that_is_no_number_stays_so() -> None:
    assert math.isnan(loss_of(loss_mark(0, {"loss": math.nan, "other": 1.0})) or 0.0)
