"""Each process takes its own device, and only when it knows which: the first workers, newcomers and spares.

The accelerator is make-believe (lab/holdfast_sim.py): it has devices and generators, and no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from e2e.test_spares import parked
from holdfast.core.records import IncidentClosed
from holdfast.core.strategies import Strategy
from support.jobs import SCRIPTS, AgentProcess, Place, wait_for
from support.plug_ins import install_simulated_accelerator

SCRIPT = str(SCRIPTS / "takes_device.py")
STEPS, KILLED_STEP = 8, 4


def start(place: Place, flags: Sequence[str] = (), **variables: str) -> AgentProcess:
    env = {**install_simulated_accelerator(place.directory), "FLAGS": " ".join(flags), **variables}
    words = ("--nproc-per-node", "2", "--snapshots", "off", *flags, SCRIPT, str(STEPS), str(KILLED_STEP))
    return place.start(*words, env=env)


def noted(place: Place) -> dict[int, list[str]]:
    """By process: rank, local rank, LOCAL_RANK before and after init, CUDA_VISIBLE_DEVICES, device."""
    return {int(path.name.split("-")[1]): path.read_text().split(" ") for path in place.work.glob("device-*")}


def drawn(place: Place) -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}
    for line in (place.work / "drawn").read_text().splitlines():
        step, rank, number = line.split()
        assert found.setdefault((step, rank), number) == number, "a step was committed with other numbers"
    return found


@pytest.mark.parametrize(
    ("flags", "visible", "variables"),
    [
        (["--spares", "1", "--virtual-local-rank"], ["GPU-5", "GPU-7"], {"CUDA_VISIBLE_DEVICES": "GPU-5, GPU-7"}),
        pytest.param(["--spares", "1"], ["all", "all"], {"ASK": "1", "SIM_BUSY": "2"}, marks=pytest.mark.thorough),
        pytest.param(["--virtual-local-rank"], ["0", "1"], {}, marks=pytest.mark.thorough),
    ],
)
def test_a_replacement_takes_the_device_of_its_rank(
    tmp_path: Path, flags: list[str], visible: list[str], variables: dict[str, str]
) -> None:
    place = Place(tmp_path)
    agent = start(place, flags, **variables)
    spare = 0
    if "--spares" in flags:
        spare = wait_for(lambda: parked(agent.pid), what="a parked spare")
        (place.work / "go").touch()
    assert agent.wait() == 0, agent.stderr[-4000:]
    is_virtual = "--virtual-local-rank" in flags
    found = noted(place)
    assert sorted(row[0] for row in found.values()) == ["0", "1", "1"]
    for rank, local_rank, before, after, devices, device in found.values():
        own = "0" if is_virtual else rank
        assert (local_rank, after, devices, device) == (rank, own, visible[int(rank)], own)
        assert before in (own, "unasked")
    assert [closed.strategy for closed in place.journal.of(IncidentClosed)] == [
        Strategy.RECOVER if spare else Strategy.RECOVER_IN_PLACE
    ]
    assert not spare or spare in found, "the spare has taken the rank"
    numbers = drawn(place)
    assert len(numbers) == len(set(numbers.values())) == 2 * STEPS, "each step and rank draws its own, from the device"


def test_a_spare_that_has_used_a_device_too_early_is_refused_with_the_reason(tmp_path: Path) -> None:
    place = Place(tmp_path)
    agent = start(place, ["--spares", "1", "--virtual-local-rank"], TOUCH="1")
    wait_for(lambda: "starting no more" in agent.stderr, what="no more spares")
    (place.work / "go").touch()
    assert agent.wait() == 0, agent.stderr[-4000:]
    assert "used a device before it had a rank" in agent.stderr
    assert "hf.init()" in agent.stderr
