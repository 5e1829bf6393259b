"""Faults on real devices: all ranks end with the bits of an undisturbed run, and only what is broken is replaced.

None of these has been run on a device by this project, which has none.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpu.conftest import devices
from holdfast.core.records import IncidentClosed, WorkerFailedRecord
from holdfast.core.strategies import Strategy
from support.jobs import AgentProcess, Place, is_alive, wait_for
from support.references import made_once
from support.soft_device import install_soft_device

SCRIPT = str(Path(__file__).parent / "scripts" / "on_device.py")
STEPS = 30
FIXED = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "HCCL_DETERMINISTIC": "true",
}
SOCKETS_ONLY = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
"""So that NCCL itself sees the death of a peer, as it does across nodes."""
WATCHDOG_S = 90.0
"""torch's watchdog ends survivors up to a minute after a fault that it has seen."""
DEADLINE_S = 240.0
KEPT_BYTES_MAX = 50 * 2**20
"""Less than one communicator takes."""


def start(place: Place, faults: Sequence[str] = (), *flags: str, **variables: str) -> AgentProcess:
    steps, ranks = variables.pop("steps", str(STEPS)), variables.pop("ranks", "2")
    kind = devices()[0]
    env = {**FIXED, "GPU_SUITE_DEVICE": kind, **variables}
    if kind == "soft":
        env |= {**install_soft_device(place.directory), "SOFT_LATE_S": "0.01"}
    return place.start("--nproc-per-node", ranks, "--snapshots", "2", *flags, SCRIPT, steps, *faults, env=env)


def finish(place: Place, agent: AgentProcess) -> dict[str, str]:
    assert agent.wait(DEADLINE_S) == 0, agent.stderr[-6000:]
    return {path.name: path.read_text() for path in place.work.glob("final-*")}


def run(directory: Path, faults: Sequence[str] = (), *flags: str, **variables: str) -> tuple[Place, dict[str, str]]:
    place = Place(directory)
    found = finish(place, start(place, faults, *flags, **variables))
    assert len(list(place.work.glob("fired-*"))) == len(faults)
    return place, found


def undisturbed(**variables: str) -> dict[str, str]:
    directory = made_once(f"on device {variables}", lambda directory: run(directory, **variables))
    return {path.name: path.read_text() for path in Place(directory).work.glob("final-*")}


def pids(place: Place, rank: int) -> list[str]:
    return (place.work / f"pids-{rank}").read_text().split()


@pytest.mark.parametrize("model", ["ddp", "fsdp2"])
@pytest.mark.parametrize("point", ["backward", "update", "between"])
def test_a_rank_is_killed_while_its_peers_device_is_in_a_collective(tmp_path: Path, point: str, model: str) -> None:
    place, found = run(tmp_path, [f"{point}:12:1:kill"], MODEL=model)
    assert found == undisturbed(MODEL=model)
    if model == "ddp":
        assert len(pids(place, 0)) == 1 and len(pids(place, 1)) == 2


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_kills_at_random_points(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    steps = sorted(chance.sample(range(3, STEPS - 2), 4))
    faults = [f"{chance.choice(['backward', 'update', 'between'])}:{step}:{chance.randrange(2)}:kill" for step in steps]
    assert run(tmp_path, faults)[1] == undisturbed()


def test_shards_that_are_copied_before_each_commit(tmp_path: Path) -> None:
    place, found = run(tmp_path, ["update:12:1:kill"], "--replicas", "1", MODEL="fsdp2")
    assert found == undisturbed(MODEL="fsdp2")
    assert len(pids(place, 0)) == 1, "only the killed process was replaced"


def test_a_script_that_communicates_after_its_update(tmp_path: Path) -> None:
    """Its copy from before the update is on the device."""
    assert run(tmp_path, ["update:12:1:kill"], LOSS_FOR_LOG="1")[1] == undisturbed(LOSS_FOR_LOG="1")


@pytest.mark.parametrize(
    "flags", [["--spares", "1"], ["--spares", "1", "--virtual-local-rank"], ["--virtual-local-rank"]]
)
def test_a_replacement_has_a_device_of_its_own(tmp_path: Path, flags: list[str]) -> None:
    assert run(tmp_path, ["between:20:1:kill"], *flags)[1] == undisturbed()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_script_that_chooses_its_device_itself(tmp_path: Path, when: str) -> None:
    assert run(tmp_path, ["between:20:1:kill"], "--spares", "1", SET_DEVICE=when)[1] == undisturbed()


def test_all_die_and_go_on_from_what_was_copied_from_their_devices(tmp_path: Path) -> None:
    place, found = run(tmp_path, ["between:13:0:kill", "between:13:1:kill"])
    assert found == undisturbed()
    assert all(len(pids(place, rank)) > 1 for rank in range(2))


def test_a_second_fault_while_all_connect_again(tmp_path: Path) -> None:
    assert run(tmp_path, ["backward:12:1:kill", "backward:12:0:kill"], "--spares", "1")[1] == undisturbed()


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.cuda_only
def test_the_watchdog_does_not_end_survivors_later(tmp_path: Path) -> None:
    place = Place(tmp_path)
    agent = start(place, ["backward:12:1:kill"], steps=str(10**7), **SOCKETS_ONLY)
    wait_for(lambda: place.journal.of(IncidentClosed), what="the recovery")
    survivor = int(pids(place, 0)[0])
    give_up_at = time.monotonic() + WATCHDOG_S
    while time.monotonic() < give_up_at:
        assert is_alive(survivor), "the survivor was ended after its recovery"
        time.sleep(1.0)
    agent.send(15)
    agent.wait(60.0)


@pytest.mark.cuda_or_soft
def test_an_illegal_access_ends_the_process_that_made_it(tmp_path: Path) -> None:
    place, found = run(tmp_path, ["between:12:1:illegal"])
    assert found == undisturbed()
    assert len(pids(place, 0)) == 1 and len(pids(place, 1)) == 2
    assert place.journal.of(WorkerFailedRecord)


@pytest.mark.cuda_or_soft
@pytest.mark.timeout(300)
def test_a_kernel_that_does_not_end_has_its_process_replaced(tmp_path: Path) -> None:
    """All hosts wait, none is behind: the device that does not come to rest after the abort is the one."""
    place, found = run(tmp_path, ["backward:12:1:spin"])
    assert found == undisturbed()
    assert len(pids(place, 0)) == 1 and len(pids(place, 1)) == 2


def test_a_stopped_rank_is_replaced(tmp_path: Path) -> None:
    place, found = run(tmp_path, ["backward:12:1:stop"])
    assert found == undisturbed()
    (incident,) = place.journal.of(IncidentClosed)
    assert incident.strategy is Strategy.RECOVER_IN_PLACE


@pytest.mark.cuda_only
def test_an_update_in_a_captured_graph_is_refused(tmp_path: Path) -> None:
    place = Place(tmp_path)
    agent = start(place, ["never:0:0:graph"])
    assert agent.wait(DEADLINE_S) == 1
    assert "captured" in place.journal.finished().why


@pytest.mark.cuda_only
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model(tmp_path: Path, mode: str) -> None:
    assert run(tmp_path, ["update:12:1:kill"], COMPILE=mode)[1] == undisturbed(COMPILE=mode)


@pytest.mark.parametrize(
    "variables",
    [
        {"CHECKPOINTING": "1"},
        {"OPTIMIZER": "fused"},
        {"OPTIMIZER": "foreach"},
        {"SCALER": "1"},
        {"ATTENTION": "1"},
        pytest.param({"GRAPHED": "1"}, marks=pytest.mark.cuda_only),
    ],
    ids=lambda variables: "-".join(*variables.items()),
)
def test_a_repeated_step_of_other_kinds(tmp_path: Path, variables: dict[str, str]) -> None:
    assert run(tmp_path, ["backward:12:1:kill", "update:20:0:kill"], **variables)[1] == undisturbed(**variables)


@pytest.mark.parametrize("point", ["backward", "between"])
def test_ranks_that_send_each_other_large_tensors_at_once(tmp_path: Path, point: str) -> None:
    """Told one after another, both would wait in the first; told together, an abort must not leave the end open."""
    assert run(tmp_path, [f"{point}:12:1:kill"], EXCHANGE="1")[1] == undisturbed(EXCHANGE="1")


@pytest.mark.devices(4)
def test_a_rank_of_a_model_that_is_sharded_and_copied_is_killed(tmp_path: Path) -> None:
    place, found = run(tmp_path, ["backward:12:1:kill"], MODEL="hsdp", ranks="4")
    assert found == undisturbed(MODEL="hsdp", ranks="4")
    assert [len(pids(place, rank)) for rank in range(4)] == [1, 2, 1, 1]


@pytest.mark.long
@pytest.mark.cuda_only
def test_recoveries_leave_no_memory_on_the_device(tmp_path: Path) -> None:
    place, _ = run(tmp_path, [f"backward:{step}:1:kill" for step in range(4, STEPS - 2, 3)])
    lines = [line.split() for line in (place.work / "free-0").read_text().splitlines()]
    assert len({pid for pid, _ in lines}) == 1, "rank 0 has survived all"
    free = [int(number) for _, number in lines]
    assert free[4] - free[-1] < KEPT_BYTES_MAX, free


@pytest.mark.parametrize("words", [["doctor", "--device"], ["check"]], ids=lambda words: words[0])
def test_the_devices_pass(tmp_path: Path, words: list[str]) -> None:
    kind = devices()[0]
    env = os.environ | install_soft_device(tmp_path) if kind == "soft" else dict(os.environ)
    words = [sys.executable, "-m", "holdfast", *words, *(["--accelerator", kind] if words == ["check"] else [])]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
