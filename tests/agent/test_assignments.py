"""Which device a worker has, and how it is told of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.assignments import (
    assignment_in,
    free_device,
    spare_environment,
    visible_devices,
    worker_environment,
)
from holdfast.agent.config import AgentConfig, Program
from holdfast.core.environment_variables import PRIVATE_DEVICE_VARIABLE, RANK_VARIABLES
from holdfast.errors import LaunchError
from holdfast.wire.worker_messages import Assignment
from support.worker_groups import agent_config, serve


def config(directory: Path, *, is_virtual: bool, **environment: str) -> AgentConfig:
    program = Program(kind="script", argv=("x",), clean=True, python="python", virtual_local_rank=is_virtual)
    return agent_config(directory, program=program, environment=environment)


def assignment(local_rank: int, **device: Any) -> Assignment:
    order = serve(1)
    return assignment_in(
        order, local_rank, newcomer=False, applied_step=-1, complete_version=-1, checkpoint_dir="", **device
    )


@pytest.mark.parametrize(
    ("taken", "local_rank", "expected"),
    [
        (set(), 2, 2),
        ({0, 1}, 2, 2),
        ({0, 2}, 2, 1),  # local rank 1 of before was lost, 2 closed up to 1; now there are three again
        ({1, 2}, 2, 0),
        ({0, 1, 2}, 2, 3),
    ],
)
def test_a_new_worker_does_not_get_the_device_of_one_that_lives(
    taken: set[int], local_rank: int, expected: int
) -> None:
    assert free_device(taken, local_rank) == expected


def test_the_script_finds_the_number_of_its_device_in_local_rank(tmp_path: Path) -> None:
    plain = config(tmp_path, is_virtual=False)
    assert worker_environment(plain, serve(1), 2, 1, "")["LOCAL_RANK"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in worker_environment(plain, serve(1), 2, 1, "")
    assert (assignment(2, device=1).local_rank, assignment(2, device=1).device_index) == (2, 1)
    assert assignment(2).device_index == 2


def test_a_virtual_local_rank_is_zero_and_sees_one_device(tmp_path: Path) -> None:
    divided = config(tmp_path, is_virtual=True, CUDA_VISIBLE_DEVICES="MIG-a, MIG-b")
    told = worker_environment(divided, serve(1), 1, 1, "")
    assert (told["LOCAL_RANK"], told["CUDA_VISIBLE_DEVICES"]) == ("0", "MIG-b")
    assert assignment(1, device=1, visible_devices="MIG-b").device_index == 0
    with pytest.raises(LaunchError, match="names only 2"):
        visible_devices(divided, 2)


def test_a_spare_learns_its_device_with_its_rank(tmp_path: Path) -> None:
    divided = config(tmp_path, is_virtual=True, CUDA_VISIBLE_DEVICES="4,5")
    told = spare_environment(divided, "job", 1, 0, "")
    assert told["CUDA_VISIBLE_DEVICES"] == "4,5" and PRIVATE_DEVICE_VARIABLE in told
    assert not told.keys() & set(RANK_VARIABLES)
