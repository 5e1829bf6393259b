"""Scripts as people write them, with faults: right to the last bit, or refused in the first steps. See matrix.py.

python -m pytest tests/e2e/test_variations.py -k "batch_norm-kills-spare"
"""

from pathlib import Path

import pytest

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
}
"""What `make test` has time for: most kinds of state, each plan, with a spare and without."""


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.id, marks=[] if case.id in QUICK else pytest.mark.long) for case in all_cases()],
)
def test_right_or_refused(case: Case, tmp_path: Path) -> None:
    run_case(case, tmp_path)


def test_quick_cases_are_cases() -> None:
    assert {case.id for case in all_cases()} >= QUICK
