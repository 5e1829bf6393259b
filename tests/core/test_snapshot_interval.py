"""How often to copy: the numbers, and their bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.snapshot_interval import DAY_S, EVERY_MAX, FREE_SHARE, advise, fault_rate


@pytest.mark.parametrize(
    ("step_s", "stall_s", "nodes", "every", "which"),
    [
        (1.0, 0.0, 1, 1, "after every step"),
        (1.0, 0.01, 1, 1, "after every step"),
        (1.0, 0.011, 1, 2, "what costs a hundredth"),
        (1.0, 0.5, 1, 50, "what costs a hundredth"),
        (0.0, 5.0, 1, 1, "after every step"),  # nothing is measured yet
        # 10,000 nodes at 0.004 faults a day: one in 2,160 s; the optimum is sqrt(2 · 20 · 2160) = 294 s
        (1.0, 20.0, 10_000, 294, "the optimum"),
        (0.5, 20.0, 10_000, 588, "the optimum"),
        (1.0, 20.0, 1_000, 930, "the optimum"),
        (1.0, 20.0, 10, 2_000, "what costs a hundredth"),
    ],
)
def test_the_interval(step_s: float, stall_s: float, nodes: int, every: int, which: str) -> None:
    advice = advise(step_s, stall_s, nodes)
    assert advice.every == every and which in advice.why


def test_copies_from_a_device_leave_the_bus_alone_most_of_the_time() -> None:
    assert advise(1.0, 0.0, 1, busy_s=0.2).every == 1
    assert advise(1.0, 0.0, 1, busy_s=2.0).every == 8
    assert "takes 2.00 s" in advise(1.0, 0.0, 1, busy_s=2.0).why
    assert advise(1.0, 0.5, 1, busy_s=2.0).every == 50, "the dearer of the two counts"


def test_the_reason_says_what_it_rests_on() -> None:
    assert advise(1.0, 20.0, 1_000).why == (
        "a copy costs 2000.0 % of a step, a fault is due every 6 h: one in 930 steps, the optimum"
    )
    assert advise(1.0, 0.001, 1).why == "a copy costs 0.1 % of a step: one after every step"


@given(st.floats(1e-4, 1e3), st.floats(0.0, 1e4), st.integers(0, 10**6), st.floats(0.0, 100.0))
def test_it_is_never_dearer_than_a_hundredth_unless_that_pays(
    step_s: float, stall_s: float, nodes: int, faults: float
) -> None:
    every = advise(step_s, stall_s, nodes, faults).every
    assert 1 <= every <= EVERY_MAX
    optimal = math.sqrt(2.0 * stall_s * DAY_S / (max(nodes, 1) * max(faults, 1e-9)))
    is_cheap = stall_s <= FREE_SHARE * step_s * every * (1 + 1e-9)
    assert is_cheap or every * step_s >= optimal * (1 - 1e-9) or every == EVERY_MAX
    assert every == 1 or stall_s > FREE_SHARE * step_s * (every - 1) * (1 - 1e-9), "more seldom than it need be"


def test_more_nodes_or_more_faults_never_make_it_more_seldom() -> None:
    intervals = [advise(0.1, 3.0, nodes).every for nodes in (1, 10, 100, 1_000, 10_000, 100_000)]
    assert intervals == sorted(intervals, reverse=True) and intervals[-1] < intervals[0]


@pytest.mark.parametrize(
    ("faults", "node_days", "rate"),
    [
        (0, 0.0, 0.004),  # what was published
        (1, 0.0, 0.008),
        (10, 0.1, 11.0 / 250.1),
        (0, 1_000.0, 0.0008),
        (1_000, 100_000.0, 0.01),  # by then it is the job's own, one in a hundred
    ],
)
def test_the_fault_rate_is_learnt_from_the_job(faults: int, node_days: float, rate: float) -> None:
    assert fault_rate(faults, node_days * DAY_S) == pytest.approx(rate, rel=3e-3)
