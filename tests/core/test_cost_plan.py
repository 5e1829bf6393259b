"""The arithmetic of docs/accelerators.md: 8B on 8 devices, 70B on 256."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.core.cost_plan import CostPlan, Model, Rates, plan
from holdfast.core.memory_plan import gib

DOCS = Path(__file__).parents[2] / "docs" / "accelerators.md"
BYTES_PER_PARAMETER = 12
"""A parameter in float32 with the two averages of Adam."""
SMALL = Model(state_bytes=8.03e9 * BYTES_PER_PARAMETER, ranks=8, ranks_per_node=8, shards=8, step_s=2.0)
LARGE = Model(state_bytes=70.6e9 * BYTES_PER_PARAMETER, ranks=256, ranks_per_node=8, shards=64, step_s=4.0)
FLAT = Model(state_bytes=70.6e9 * BYTES_PER_PARAMETER, ranks=256, ranks_per_node=8, shards=256, step_s=4.0)


def test_a_fully_sharded_model_costs_nothing_but_the_agreement_by_default() -> None:
    found = plan(SMALL, Rates())
    assert found.step_cost_s == Rates().commit_s
    assert 12.0e9 < SMALL.rank_bytes < 12.1e9
    assert [name for name, _ in found.recovery][-1] == "repeat steps, on average"


def test_copies_before_each_commit_take_longer_than_the_step() -> None:
    found = plan(SMALL, Rates(), copies=1)
    assert found.step_cost_s > 3 * SMALL.step_s
    assert found.node_memory_bytes > 2 * plan(SMALL, Rates()).node_memory_bytes
    assert plan(SMALL, Rates(gloo=50e9), copies=1).step_cost_s < found.step_cost_s / 10, "it is gloo that costs"


def test_ranks_with_twins_need_no_copies_and_share_the_snapshot() -> None:
    found = plan(LARGE, Rates(), copies=1)
    assert found.copies == 0 and LARGE.image_bytes * 4 == pytest.approx(LARGE.rank_bytes, rel=1e-6)
    assert dict(found.recovery)["state from another rank"] > dict(found.recovery)["build the model"]


def test_the_phases_add_up() -> None:
    for found in (plan(SMALL, Rates()), plan(FLAT, Rates(), 1), plan(LARGE, Rates())):
        assert found.recovery_s == pytest.approx(sum(seconds for _, seconds in found.recovery))
        assert all(seconds > 0 for _, seconds in found.recovery)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("8B, 8 devices, FSDP2", plan(SMALL, Rates())),
        ("the same, `--replicas 1`", plan(SMALL, Rates(), 1)),
        ("70B, 256 devices, HSDP 64 × 4", plan(LARGE, Rates())),
        ("70B, 256 devices, FSDP2", plan(FLAT, Rates())),
    ],
)
def test_the_table_of_the_docs_is_this_arithmetic(name: str, found: CostPlan) -> None:
    (line,) = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", DOCS.read_text(), re.MULTILINE)
    cells = [cell.strip() for cell in line.split("|")]
    assert cells == row(found)


def row(found: CostPlan) -> list[str]:
    every = "every step" if found.snapshot_every == 1 else f"every {found.snapshot_every} steps"
    return [gib(found.node_memory_bytes), f"{found.step_cost_s:.3f} s", every, f"{found.recovery_s:.0f} s"]
