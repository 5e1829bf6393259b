"""torch's own watchdogs: off in a session, as torchrun has them elsewhere, and never against the user's will."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from holdfast.core.environment_variables import AGENT_DEFAULTS_VARIABLE, with_agent_defaults
from holdfast.worker.collectives.watchdogs import HARMFUL, SESSION_VALUES, silence

HEADERS = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "distributed" / "c10d"


def test_a_script_without_a_session_keeps_torchruns_value() -> None:
    assert with_agent_defaults({"A": "b"}) == {
        "A": "b",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        AGENT_DEFAULTS_VARIABLE: "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    }


def test_a_session_takes_the_aborts_over_without_a_word() -> None:
    environment = with_agent_defaults({})
    assert silence(environment) == []
    assert {name: environment[name] for name in SESSION_VALUES} == SESSION_VALUES
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert silence(environment) == [], "a second time too"


def test_what_the_user_has_set_stays_and_is_warned_of() -> None:
    environment = with_agent_defaults({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_BLOCKING_WAIT": "1"})
    problems = silence(environment)
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert [problem.split("=")[0] for problem in problems] == [
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "TORCH_NCCL_BLOCKING_WAIT",
    ]
    assert "set TORCH_NCCL_ASYNC_ERROR_HANDLING=0" in problems[0]


def test_the_users_own_zero_is_no_problem() -> None:
    environment = with_agent_defaults({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "0"})
    assert silence(environment) == []


def test_the_old_name_of_a_variable_is_the_users_too() -> None:
    environment = with_agent_defaults({"NCCL_BLOCKING_WAIT": "1"})
    assert silence(environment) == [
        "NCCL_BLOCKING_WAIT=1 is set: each collective then blocks the host until its own time-out. Unset it"
    ]


@pytest.mark.parametrize(
    ("name", "value", "is_harmful"),
    [
        ("TORCH_NCCL_DESYNC_DEBUG", "1", True),
        ("NCCL_DESYNC_DEBUG", "true", True),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", True),
        ("TORCH_DISTRIBUTED_DEBUG", "INFO", False),
        ("TORCH_DISTRIBUTED_DEBUG", "OFF", False),
        ("TORCH_NCCL_DESYNC_DEBUG", "False", False),
    ],
)
def test_debugging_that_turns_torchs_handling_of_errors_on_again_is_warned_of(
    name: str, value: str, is_harmful: bool
) -> None:
    """With it ProcessGroupNCCL takes 0 for 3, and its watchdog ends the process."""
    problems = silence(with_agent_defaults({name: value}))
    assert [problem.partition(" ")[0] for problem in problems] == [f"{name}={value}"] * is_harmful
    assert not silence({name: value}, has_device=False)


def test_the_names_are_those_of_torchs_headers() -> None:
    text = (HEADERS / "ProcessGroupNCCL.hpp").read_text()
    known = set(re.findall(r'"(TORCH_NCCL_\w+)"', text))
    elsewhere = {"TORCH_NCCL_NONBLOCKING_TIMEOUT", "TORCH_DISTRIBUTED_DEBUG"}  # read in C++ that a wheel has not
    ours = {name for name in {*SESSION_VALUES, *HARMFUL} if name.startswith("TORCH_")}
    assert ours - elsewhere <= known
