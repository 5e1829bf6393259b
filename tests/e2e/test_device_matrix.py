"""The matrix of scripts and faults on a device that runs behind its host: right to the last bit, or refused in the
first steps. See support/matrix.py and lab/soft_device.cpp.

python -m pytest tests/e2e/test_device_matrix.py -k "fsdp-kills-spare"
"""

from pathlib import Path

import pytest

from support.matrix import DEVICE, LIMIT_S, Case, Outcome, all_cases, run_case
from support.soft_device import why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

THOROUGH = {"fsdp-kills-no_spare-soft"}
"""What `make thorough` has time for, as the device must be built first: it has most that is special about one."""
MOVED = {"plain-kills-spare-soft", "fsdp-kills-no_spare-soft", "hsdp-errors-no_spare-soft"}
"""Those that show that a newcomer's state goes from device to device: each kind of wrapper."""


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.id, marks=pytest.mark.thorough if case.id in THOROUGH else pytest.mark.long)
        for case in all_cases(DEVICE)
    ],
)
def test_right_or_refused_on_a_device(case: Case, tmp_path: Path) -> None:
    run_case(case, tmp_path)
    if case.id in MOVED:
        assert (Outcome(tmp_path).place.work / "transfers").exists(), "no newcomer's state came from device to device"


def test_named_cases_are_cases() -> None:
    assert {case.id for case in all_cases(DEVICE)} >= THOROUGH | MOVED
