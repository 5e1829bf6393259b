"""Faults from a rate."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import msgspec
import pytest

from holdfast.sim.fault_models import BURST_S, Arrivals, FaultModel, generate
from holdfast.sim.outages import DAY_S, HOUR_S, OutageKind

MODEL = FaultModel(per_node_day=0.02, repair_median_s=HOUR_S, repair_mean_s=HOUR_S)


def test_regular_faults_come_at_regular_times() -> None:
    found = generate(msgspec.structs.replace(MODEL, arrivals=Arrivals.REGULAR), 100, DAY_S, seed=1)
    assert [one.start_s for one in found] == pytest.approx([0.5 * DAY_S])


@pytest.mark.parametrize("shape", [1.0, 0.62])
@pytest.mark.parametrize("burst_share", [0.0, 0.27])
def test_the_rate_is_kept_whatever_the_shape(shape: float, burst_share: float) -> None:
    model = msgspec.structs.replace(MODEL, shape=shape, burst_share=burst_share)
    found = sum(len(generate(model, 500, 300 * DAY_S, seed)) for seed in range(4))
    assert found == pytest.approx(4 * 3000, rel=0.08)


def test_bursts_and_lemons_have_their_shares() -> None:
    model = msgspec.structs.replace(
        MODEL, burst_share=0.3, lemon_nodes=0.05, lemon_share=0.25, repair_median_s=0.0, repair_mean_s=0.0
    )
    found = generate(model, 1_000, 300 * DAY_S, seed=1)
    counts = Counter(one.node for one in found)
    assert sum(count for _, count in counts.most_common(50)) / len(found) == pytest.approx(0.25, abs=0.05)
    starts = [one.start_s for one in found]
    gaps = [after - before for before, after in pairwise(starts)]
    alone = generate(msgspec.structs.replace(model, burst_share=0.0), 1_000, 300 * DAY_S, seed=1)
    others = [after.start_s - before.start_s for before, after in pairwise(alone)]
    close, by_chance = (sum(gap < BURST_S for gap in some) / len(some) for some in (gaps, others))
    assert close - by_chance == pytest.approx(0.3 * 0.75, abs=0.07), "three of four in a burst of four follow another"


def test_repairs_have_their_median_and_mean() -> None:
    model = msgspec.structs.replace(MODEL, repair_median_s=20 * HOUR_S, repair_mean_s=133 * HOUR_S)
    found = generate(model, 20_000, 60 * DAY_S, seed=1)
    lasted = sorted(one.end_s - one.start_s for one in found)
    assert lasted[len(lasted) // 2] == pytest.approx(20 * HOUR_S, rel=0.1)
    assert sum(lasted) / len(lasted) == pytest.approx(133 * HOUR_S, rel=0.3)


def test_a_process_that_fails_takes_no_machine_away() -> None:
    model = msgspec.structs.replace(MODEL, kinds={OutageKind.PROCESS: 1.0})
    assert all(one.start_s == one.end_s for one in generate(model, 100, 100 * DAY_S, seed=1))
