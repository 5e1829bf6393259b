"""Restarts: how many, in which views, and what the workers find in their environment."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.core.records import (
    IncidentClosed,
    IncidentDecided,
    Outcome,
    Strategy,
    ViewFormed,
    WorkerFailedRecord,
    WorkersStartedRecord,
)
from support.jobs import (
    DEADLINE_S,
    SCRIPTS,
    SPAWN,
    STEPS,
    Place,
    free_port,
    kill9,
    marked_processes,
    wait_until_gone,
)

ENVIRONMENT = str(SCRIPTS / "environment.py")


def read_environments(job: Place, view: int) -> list[dict[str, str]]:
    """Of all ranks of a view, in their order."""
    paths = job.work.glob(f"environment-{view}-*.json")
    return sorted((json.loads(path.read_text()) for path in paths), key=lambda env: int(env["RANK"]))


def in_view(view: int) -> Callable[[WorkerFailedRecord], bool]:
    return lambda lost: lost.failure.view == view


def test_restarts_are_used_up_and_the_job_ends_with_the_last_failure(tmp_path: Path) -> None:
    job = Place(tmp_path)
    agent = job.start("--standalone", "--max-restarts", "2", *SPAWN, STEPS)
    for view in (1, 2, 3):
        job.journal.wait_for_workers(1, view)
        job.tell(0, f"exit {10 + view}")
        job.journal.wait_for(WorkerFailedRecord, in_view(view))
    assert agent.wait() == 1
    end = job.journal.finished()
    assert end.outcome is Outcome.FAILED
    assert end.cause is not None and end.cause.exit_code == 13
    assert [formed.view.restart_count for formed in job.journal.of(ViewFormed)] == [0, 1, 2]
    assert [line.restart_count for line in job.ledger("start")] == [0, 1, 2]
    assert [decided.strategy for decided in job.journal.of(IncidentDecided)][-1] is Strategy.EXIT


def test_a_job_that_recovers_within_its_restarts_succeeds(tmp_path: Path) -> None:
    job = Place(tmp_path)
    agent = job.start("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", *SPAWN, STEPS)
    first = job.journal.wait_for_workers(2, view=1)
    kill9(first[0])
    second = job.journal.wait_for_workers(2, view=2)
    assert not set(first.values()) & set(second.values())  # an unchanged script starts again on every rank
    job.finish()
    assert agent.wait() == 0
    receipt = job.journal.of(IncidentClosed)[0]
    assert (receipt.view_before, receipt.view_after, receipt.restarts_used) == (1, 2, 1)


def test_a_worker_that_will_not_end_does_not_hold_up_a_restart(tmp_path: Path) -> None:
    job = Place(tmp_path)
    flags = ("--nproc-per-node", "2", "--max-restarts", "1", "--restart-grace", "0.2")
    agent = job.start("--standalone", *flags, *SPAWN, STEPS, "--ignore")
    first = job.journal.wait_for_workers(2, view=1)
    job.wait_for_steps(*first.values())
    kill9(first[0])
    job.journal.wait_for_workers(2, view=2)
    assert (job.work / "ignored-1").exists()
    wait_until_gone(*first.values())
    job.finish()
    assert agent.wait() == 0


def test_every_view_has_its_own_store_and_workers_know_their_restart(tmp_path: Path) -> None:
    job = Place(tmp_path)
    agent = job.start("--standalone", "--nproc-per-node", "2", "--max-restarts", "2", *SPAWN, ENVIRONMENT, "7")
    assert agent.wait() == 0
    views = [read_environments(job, view) for view in (1, 2, 3)]
    ports = [{env["MASTER_PORT"] for env in view} for view in views]
    assert all(len(in_view) == 1 for in_view in ports)
    assert len(set.union(*ports)) == 3
    assert [view[0]["TORCHELASTIC_RESTART_COUNT"] for view in views] == ["0", "1", "2"]


def test_workers_of_two_nodes_find_all_that_torchrun_promises(tmp_path: Path) -> None:
    job = Place(tmp_path)
    port = free_port()
    common: tuple[str, ...] = (
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-id",
        "env-test",
    )
    common += ("--rdzv-endpoint", f"127.0.0.1:{port}", "--max-restarts", "3", "--role", "trainer", *SPAWN, ENVIRONMENT)
    agents = [job.start("--node-id", name, *common) for name in ("a", "b")]
    assert [agent.wait() for agent in agents] == [0, 0]
    environments = read_environments(job, 1)
    assert [env["RANK"] for env in environments] == ["0", "1", "2", "3"]
    assert [env["LOCAL_RANK"] for env in environments] == ["0", "1", "0", "1"]
    assert [env["GROUP_RANK"] for env in environments] == ["0", "0", "1", "1"]
    assert [env["ROLE_RANK"] for env in environments] == ["0", "1", "2", "3"]
    expected = {
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_WORLD_SIZE": "4",
        "ROLE_NAME": "trainer",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "env-test",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
    }
    for env in environments:
        assert {name: env.get(name) for name in expected} == expected
        assert env["MASTER_PORT"] == environments[0]["MASTER_PORT"] != str(port)
        assert "HOLDFAST_TOKEN" not in env
    error_files = {env["TORCHELASTIC_ERROR_FILE"] for env in environments}
    assert len(error_files) == 4


def test_the_variables_are_those_of_torchrun_itself(tmp_path: Path) -> None:
    """Whatever torchrun sets, we set, under the same name; to the same value where it does not depend on the run."""
    ours, theirs = Place(tmp_path / "ours"), Place(tmp_path / "theirs")
    flags = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    agent = ours.start(*flags, *SPAWN, ENVIRONMENT)
    torchrun = theirs.torchrun(*flags, ENVIRONMENT, env={"HOLDFAST_VIEW": "1"})
    assert (agent.wait(), torchrun.wait()) == (0, 0)
    by_run = {"MASTER_PORT", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
    by_run |= {"WORK", "PWD", "HOLDFAST_STATE_DIR"}
    for mine, reference in zip(read_environments(ours, 1), read_environments(theirs, 1), strict=True):
        assert reference.keys() - mine.keys() == set()
        changed = {name for name in reference.keys() - by_run if mine[name] != reference[name]}
        assert changed == set()


@pytest.mark.parametrize("victim", [0, 1])
def test_real_training_starts_again_after_a_kill_and_ends_well(tmp_path: Path, victim: int) -> None:
    """DDP over gloo under the fork server: the store of the new view is there for the workers' rendezvous."""
    job = Place(tmp_path)
    agent = job.start("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", str(SCRIPTS / "trains.py"))
    first = job.journal.wait_for_workers(2, view=1)
    job.wait_for_steps(*first.values())
    kill9(first[victim])
    second = job.journal.wait_for_workers(2, view=2)
    job.wait_for_steps(*second.values())
    job.finish()
    assert agent.wait(DEADLINE_S) == 0
    receipt = job.journal.of(IncidentClosed)[0]
    assert f"rank {victim} " in receipt.cause and "SIGKILL" in receipt.cause
    assert len(job.journal.of(WorkersStartedRecord)) == 2


@pytest.mark.parametrize("helper", ["fork server", "store host"])
def test_a_helper_process_that_is_killed_costs_no_worker_and_no_restart(tmp_path: Path, helper: str) -> None:
    job = Place(tmp_path)
    agent = job.start("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", str(SCRIPTS / "trains.py"))
    first = job.journal.wait_for_workers(2, view=1)
    job.wait_for_steps(*first.values())
    (victim,) = [process.pid for process in marked_processes() if process.arguments == [f"holdfast: {helper}"]]
    kill9(victim)
    wait_until_gone(victim)
    job.wait_for_steps(*first.values())
    assert job.journal.pids() == first
    kill9(first[1])
    second = job.journal.wait_for_workers(2, view=2)
    job.wait_for_steps(*second.values())
    job.finish()
    assert agent.wait() == 0
    assert not set(first.values()) & set(second.values())
