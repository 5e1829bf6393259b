"""The lines that an agent shows of a job: start, progress, end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.config import MasterPlan
from holdfast.agent.console import JobConsole, JobProgress, progress_line, started_line
from holdfast.agent.worker_logs import LogPlan
from holdfast.core.records import Outcome
from support.worker_groups import agent_config, serve

HERE = MasterPlan(arguments=(), journal=Path("journal.sqlite"), listen_host="127.0.0.1", job_id="demo", required=True)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({}, "step 0"),
        ({"total": 400}, "step 0 of 400"),
        (
            {"done": 120, "total": 400, "per_s": 8.26, "loss": 2.31049},
            "step 120 of 400 | 8.3 steps/s | loss 2.31 | 34 s left",
        ),
        ({"done": 1_200, "total": 100_000, "per_s": 0.4}, "step 1,200 of 100,000 | 2.5 s a step | 2 d 20 h left"),
        (
            {"done": 5, "incidents": 1, "last_incident": "rank 1 on a killed by SIGKILL", "since_incident_s": 41.0},
            "step 5 | 1 incident, 41 s ago: rank 1 on a killed by SIGKILL",
        ),
        (
            {"done": 5, "incidents": 3, "last_incident": "x" * 500, "since_incident_s": 3_700.0},
            f"step 5 | 3 incidents, last 1 h 1 min ago: {'x' * 100}",
        ),
        ({"loss": float("nan")}, "step 0 | loss nan"),
    ],
)
def test_progress_has_what_is_known(fields: dict[str, Any], line: str) -> None:
    nothing: dict[str, Any] = {
        "done": 0,
        "total": 0,
        "per_s": 0.0,
        "loss": None,
        "incidents": 0,
        "last_incident": "",
        "since_incident_s": 0.0,
    }
    assert progress_line(JobProgress(**(nothing | fields))) == line


def test_the_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_STATE_DIR", str(tmp_path))
    logs = LogPlan(run_dir=Path("/runs/logs/a_1"))
    alone = agent_config(tmp_path, master=HERE, state_dir=str(tmp_path), logs=logs)
    order = serve(1, job_id="demo", workers=2, world_size=2)
    assert (
        started_line(alone, order)
        == "job demo: 2 workers on 1 node; output in /runs/logs/a_1; `holdfast status` shows more"
    )
    single = serve(1, job_id="demo", workers=1, world_size=1)
    elsewhere = agent_config(tmp_path, master=HERE, state_dir="/other", logs=LogPlan(run_dir=Path("/dev/null")))
    assert (
        started_line(elsewhere, single)
        == "job demo: 1 worker on 1 node; `holdfast status --state-dir /other` shows more"
    )
    guest = agent_config(tmp_path, node_id="b", master_host="10.0.0.1", master_port=29400, logs=logs)
    second = serve(1, job_id="demo", workers=2, world_size=4, first_rank=2, group_world_size=2)
    assert started_line(guest, second) == (
        "job demo: 4 workers on 2 nodes, ranks 2 to 3 on this one (b); output in /runs/logs/a_1;"
        " `holdfast status --endpoint 10.0.0.1:29400` shows more"
    )


@pytest.mark.parametrize(
    ("outcome", "steps", "incidents", "line"),
    [
        (Outcome.SUCCEEDED, 40, 0, "job demo succeeded: 40 steps, 0.0 s, no incidents"),
        (Outcome.SUCCEEDED, 1, 1, "job demo succeeded: 1 step, 0.0 s, 1 incident"),
        (Outcome.SUCCEEDED, 0, 0, "job demo succeeded: 0.0 s, no incidents"),
        (Outcome.FAILED, 5, 2, "job demo failed (5 steps, 0.0 s, 2 incidents): why"),
        (None, 0, 0, "job demo failed (0.0 s, no incidents): why"),
    ],
)
def test_the_end_is_one_line(tmp_path: Path, outcome: Outcome | None, steps: int, incidents: int, line: str) -> None:
    console = JobConsole(agent_config(tmp_path), list, lambda: steps)
    console.obey(serve(1, job_id="demo"))
    assert console.ended_line(outcome, "why", incidents) == line


@pytest.mark.parametrize(
    ("outcome", "line"),
    [
        (None, "the job did not start on this node (0.0 s): why"),
        (Outcome.SUCCEEDED, "the job succeeded elsewhere: this node stood by for 0.0 s and ran no workers"),
        (Outcome.FAILED, "the job failed (0.0 s, no incidents): why"),
    ],
)
def test_the_end_of_a_node_that_had_no_workers_claims_no_more(
    tmp_path: Path, outcome: Outcome | None, line: str
) -> None:
    assert JobConsole(agent_config(tmp_path), list, lambda: 0).ended_line(outcome, "why", 0) == line
