"""`optimizer.add_param_group` in the loop: a repeated step adds the group once, and replacements have it."""

from pathlib import Path

import pytest

from e2e.scripts.variations import ALL
from support.matrix import Case, run_case


@pytest.mark.parametrize(
    ("name", "faults", "spares"),
    [
        ("group_added", "before:3:1:kill after:7:0:kill body:12:1:kill between:17:0:kill", 1),
        pytest.param(
            "group_of_another_module", "added:3:0:kill body:9:1:kill end:15:0:kill", 0, marks=pytest.mark.long
        ),
    ],
)
def test_groups_are_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, faults: str, spares: int
) -> None:
    monkeypatch.setenv("FAULTS", faults)
    run_case(Case(ALL[name], "kills", spares), tmp_path)


def test_a_group_that_a_replacement_would_not_have_is_refused(tmp_path: Path) -> None:
    run_case(Case(ALL["group_of_an_untracked_module"], "start", 0), tmp_path)
