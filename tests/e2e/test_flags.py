"""What a body switches besides numbers (eval mode, frozen layers, hooks, settings of the process) is switched back when
its step is repeated, and handed to a replacement where it was switched for good."""

from pathlib import Path

import pytest

from e2e.scripts.variations import ALL
from support.matrix import Case, run_case


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("evaluation", "evaluating:3:1:kill evaluating:12:0:kill"),
        pytest.param("evaluation_first", "evaluating:3:1:kill evaluating:12:0:kill", marks=pytest.mark.long),
        pytest.param(
            "evaluation_to_the_end", "body:4:1:kill end:9:0:kill after:12:1:kill body:16:0:kill", marks=pytest.mark.long
        ),
        pytest.param("partly_in_evaluation", "before:5:1:kill body:9:0:kill between:14:1:kill", marks=pytest.mark.long),
        ("frozen_for_a_moment", "frozen:4:1:kill frozen:11:0:kill"),
        pytest.param("unfrozen", "before:3:1:kill body:8:0:kill after:14:1:kill", marks=pytest.mark.long),
        pytest.param("hook_for_a_moment", "hooked:4:1:kill hooked:9:0:kill", marks=pytest.mark.long),
        pytest.param("default_dtype_changed", "changed:4:1:kill changed:9:0:kill", marks=pytest.mark.long),
        pytest.param("gradients_turned_off", "changed:4:1:kill changed:9:0:kill", marks=pytest.mark.long),
        pytest.param("deterministic_for_a_moment", "changed:4:1:kill changed:9:0:kill", marks=pytest.mark.long),
    ],
)
def test_switched_back_and_handed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, faults: str) -> None:
    monkeypatch.setenv("FAULTS", faults)
    run_case(Case(ALL[name], "kills", 0), tmp_path)


@pytest.mark.parametrize("name", ["unfrozen_behind_ddp", "submodule_replaced"])
def test_what_cannot_be_handed_over_is_refused(tmp_path: Path, name: str) -> None:
    run_case(Case(ALL[name], "start", 0), tmp_path)
