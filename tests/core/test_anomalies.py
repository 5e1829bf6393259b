"""Which numbers are odd."""

from __future__ import annotations

import math

import pytest

from holdfast.core.anomalies import SEEN_MIN, AnomalyHistory


def seen(numbers: list[float], *, is_norm: bool = False, **more: float) -> AnomalyHistory:
    history = AnomalyHistory(is_norm=is_norm, **more)
    for number in numbers:
        history.add(number)
    return history


STEADY = [2.0 + 0.01 * (i % 5) for i in range(32)]
FALLING = [4.0 * 0.98**i for i in range(64)]


@pytest.mark.parametrize(
    ("history", "value", "is_odd"),
    [
        ([], math.nan, True),
        ([], math.inf, True),
        ([], 1e30, False),  # nothing to compare with
        (STEADY[: SEEN_MIN - 1], 1e9, False),
        (STEADY, 2.5, False),
        (STEADY, 3.5, True),
        (STEADY, -5.0, False),  # good news
        (FALLING, 1.1, False),
        (FALLING, 40.0, True),
        ([0.0] * 32, 1.0, True),
        ([-2.0] * 32, -0.5, True),
    ],
)
def test_losses(history: list[float], value: float, is_odd: bool) -> None:
    assert bool(seen(history).judge(value)) is is_odd


@pytest.mark.parametrize(("value", "is_odd"), [(1.0, False), (6.0, False), (8.0, True), (1e-9, False)])
def test_norms_differ_by_factors(value: float, is_odd: bool) -> None:
    assert bool(seen([1.0] * 32, is_norm=True).judge(value)) is is_odd


def test_what_is_odd_is_said_with_what_is_usual() -> None:
    assert seen(STEADY).judge(9.0) == "is 9, against 2.02 in the last 32 steps"
    assert seen(STEADY).judge(math.nan) == "is nan"


def test_deviations_of_zero_leave_only_what_is_not_finite() -> None:
    history = seen(STEADY, deviations=0.0)
    assert not history.judge(1e9) and history.judge(math.nan)


def test_what_is_not_finite_teaches_nothing() -> None:
    history = seen([*STEADY, math.nan, math.inf])
    assert not history.judge(2.0) and history.judge(9.0)


def test_it_follows_a_run_that_changes() -> None:
    history = seen(STEADY)
    for i in range(200):
        value = 2.0 + 0.02 * i
        assert not history.judge(value), value
        history.add(value)
