"""Scripts as people write them, with faults: right to the last bit, or refused in the first steps. See matrix.py.

python -m pytest tests/e2e/test_variations.py -k "batch_norm-kills-spare"
"""

from pathlib import Path

import pytest

from e2e.scripts.variations import ALL
from support.matrix import LIMIT_S, Case, all_cases, run_case

QUICK: set[str] = {
    "plain-kills-spare",
    "batch_norm-kills-no_spare",
    "scheduler_outside-kills-spare",
    "distributed_sampler_with_workers-kills-spare",
    "set_up_by_rank_0-kills-spare",
    "objects_before_the_steps-kills-no_spare",
    "told_once-errors-spare",
    "fsdp-kills-no_spare",
    "local_experts-start-no_spare",
    "fsdp_and_tensor_parallel-kills-no_spare",
    "pipeline_1f1b_and_ddp-kills-no_spare",
}
"""What `make test` has time for: most kinds of state, each plan, with a spare and without."""


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.id, marks=[] if case.id in QUICK else pytest.mark.long) for case in all_cases()],
)
def test_right_or_refused(case: Case, tmp_path: Path) -> None:
    run_case(case, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("name", [name for name, one in ALL.items() if one.build.__module__.endswith("layouts")])
def test_a_kill_in_the_middle_of_a_pass_is_repaired_in_every_layout(name: str, spares: int, tmp_path: Path) -> None:
    """Neighbours wait in a send, a gather or a reduction then."""
    if not ALL[name].refused and name != "experts_declared":  # which have no such point
        run_case(Case(ALL[name], "inside", spares), tmp_path)


def test_quick_cases_are_cases() -> None:
    assert {case.id for case in all_cases()} >= QUICK
