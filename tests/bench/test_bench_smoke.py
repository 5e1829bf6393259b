"""Each benchmark runs in its smallest configuration, says what it should, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
TIME_LIMIT_S = 280
pytestmark = pytest.mark.timeout(300)  # they measure several things one after the other, on a busy machine


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """Where the benchmarks keep their runs."""
    directory = tmp_path / "runs"
    directory.mkdir()
    return directory


def run_bench(temporary: Path, name: str, *flags: str) -> dict[str, Any]:
    mark = secrets.token_hex(8)
    output = temporary.parent / "result.json"
    finished = subprocess.run(
        [sys.executable, str(BENCH / name), *flags, "-o", str(output)],
        env={**os.environ, "TMPDIR": str(temporary), "SMOKE": mark},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "load average at the end" in finished.stdout
    assert not list(temporary.iterdir()), "a run's directory was left behind"
    assert not running(f"SMOKE={mark}"), "a process was left behind"
    return json.loads(output.read_text())


def running(variable: str) -> list[str]:
    """Processes that have this in their environment."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if variable.encode() in environment.read_bytes().split(b"\0"):
                found.append(environment.parent.name)
        except OSError:
            continue
    return found


def test_restart_measures_a_cold_start_a_worker_s_death_and_where_the_time_went(temporary: Path) -> None:
    flags = ("--only", "worker", "--repetitions", "1", "--rehearsals", "0", "--peer", "none")
    result = run_bench(temporary, "restart.py", *flags)
    cold, worker = result["samples"]
    assert (cold["measure"], worker["measure"]) == ("cold", "worker")
    assert cold["launcher"] == worker["launcher"] == "holdfast"
    assert worker["seconds"] == pytest.approx(sum(worker["split_s"].values()), abs=0.05)
    assert 0.0 < worker["seconds"] < 60.0


def test_core_cost_measures_a_small_job(temporary: Path) -> None:
    result = run_bench(temporary, "core_cost.py", "--nodes", "20", "40")
    costs = {cost["what"]: cost for cost in result["costs"]}
    assert costs["largest order"]["values"][1] < 1_000
    assert len(costs["a worker is killed: decided, next view, all orders made"]["values"]) == 2


def test_control_plane_measures_a_small_fleet(temporary: Path) -> None:
    flags = ("--only", "agents", "--agents", "20", "--processes", "2", "--steady", "1")
    result = run_bench(temporary, "control_plane.py", *flags)
    values = {finding["what"]: finding["value"] for finding in result["findings"]}
    assert 0.0 < values["20 agents join: view served to all"] < 60.0
    assert 0.0 < values["2 agents are replaced: next view served to all"] < 60.0


def test_control_plane_measures_one_real_agent(temporary: Path) -> None:
    result = run_bench(temporary, "control_plane.py", "--only", "agent", "--steady", "1")
    values = {finding["what"]: finding["value"] for finding in result["findings"]}
    assert 0.0 < values["agent: from exec to its node in the journal"] < 60.0
    assert values["agent: memory"] > 1.0


def test_data_measures_resuming(temporary: Path) -> None:
    result = run_bench(temporary, "data.py", "--rounds", "1", "--size-max", "100000", "--only", "resume")
    resumed = {(row["size"], row["name"]) for row in result["resume"]}
    assert {(10**12, "hf.Sampler"), (10**12, "hf.Loader"), (10**5, "DataLoader, batches skipped")} <= resumed


def test_data_measures_indices(temporary: Path) -> None:
    few = ("--rounds", "1", "--batches", "8", "--size-max", "100000")
    result = run_bench(temporary, "data.py", *few, "--only", "index")
    assert {row["name"] for row in result["index"]} == {"hf.Sampler", "DistributedSampler"}


@pytest.mark.long
def test_data_measures_loading(temporary: Path) -> None:
    result = run_bench(temporary, "data.py", "--rounds", "1", "--batches", "4", "--only", "throughput")
    assert {row["name"] for row in result["throughput"]} >= {"hf.Loader", "DataLoader, DistributedSampler"}


@pytest.mark.long
def test_the_online_soak_ends_with_the_same_bits(temporary: Path) -> None:
    """Without those faults of which each takes the hang timeout's two seconds."""
    mark = secrets.token_hex(8)
    flags = ("--online", "--seconds", "10", "--seed", "11", "--ranks", "2", "--without", "hang,stop_stranger")
    finished = subprocess.run(
        [sys.executable, str(BENCH / "soak.py"), *flags],
        env={**os.environ, "TMPDIR": str(temporary), "SMOKE": mark},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "held: 200 steps, the same bits" in finished.stdout
    assert not list(temporary.iterdir()), "a run's directory was left behind"
    assert not running(f"SMOKE={mark}"), "a process was left behind"


@pytest.mark.long
def test_canonical_compares_both_reductions(temporary: Path) -> None:
    flags = ("--worlds", "2:3", "--rounds", "1", "--steps", "2", "--width", "16", "--batch", "12")
    (finding,) = run_bench(temporary, "canonical.py", *flags)["findings"]
    assert (finding["ranks"], finding["slots"]) == (2, 3)
    assert len(finding["average_s"]) == len(finding["canonical_s"]) == 1


def test_checkpoint_measures_saves_and_loads(temporary: Path) -> None:
    flags = ("--size-mb", "6", "--rows", "4", "--rounds", "1", "--disk-rounds", "1", "--steps", "1")
    names = ("session", "session-checkpoint", "checkpointer", "torch.save", "dcp.save")
    result = run_bench(temporary, "checkpoint.py", *flags, "--contenders", ",".join(names))
    assert not [sample for sample in result["samples"] if "error" in sample["found"]]
    stalls = {(one["contender"], one["threads"]) for one in result["samples"] if one["measure"] == "stall"}
    assert stalls == {(name, threads) for name in names for threads in (1, 2)}
    (persist,) = [one["found"] for one in result["samples"] if one["measure"] == "persist"]
    assert 0.0 < persist["persist_s"] < 60.0


def test_node_check_finds_a_wrong_product_on_one_of_two_nodes(temporary: Path) -> None:
    result = run_bench(temporary, "node_check.py", "--only", "wrong", "--repetitions", "1", "--peer", "none")
    (sample,) = result["samples"]
    assert "node-1 is unfit" in sample["found"] and "node-0" not in sample["found"]
    assert sample["check_s"] > 0


def test_the_hang_campaign_replaces_who_sleeps_in_a_step_or_in_a_recovery(temporary: Path) -> None:
    assert_hangs_end(temporary, "forward,settle", "sleep")


@pytest.mark.long
def test_the_hang_campaign_replaces_who_stops_in_a_recovery(temporary: Path) -> None:
    assert_hangs_end(temporary, "settle", "stop")


def assert_hangs_end(temporary: Path, points: str, action: str) -> None:
    flags = ("--models", "ddp", "--nodes", "1", "--only", points, "--actions", action, "--limit", "50")
    outcomes = run_bench(temporary, "hang_campaign.py", *flags)["outcomes"]
    assert [(one["point"], one["is_right"], one["is_exact"]) for one in outcomes] == [
        (point, True, True) for point in points.split(",")
    ]


@pytest.mark.long
def test_slow_ranks_are_not_taken_for_hung_ones(temporary: Path) -> None:
    result = run_bench(temporary, "false_alarms.py", "--minutes", "0.1", "--load", "4", "--nodes", "1")
    assert result["alarms"] == []


def test_agreements_are_measured_in_one_group_and_by_a_tree(temporary: Path) -> None:
    rows = run_bench(temporary, "agreement.py", "--ranks", "4", "--repetitions", "1", "--agreements", "3")["rows"]
    assert [(row["kind"], row["runs"][0]["sockets"]) for row in rows] == [("flat", 3), ("tree", 2)]


def run_fuzz(temporary: Path, *flags: str, timeout_s: float = TIME_LIMIT_S) -> dict[str, Any]:
    finished = subprocess.run(
        [sys.executable, str(BENCH / "fuzz.py"), *flags],
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert not list(temporary.iterdir()), "a run's directory was left behind"
    found: dict[str, Any] = json.loads(finished.stdout)
    return found


def test_harmful_frames_are_refused(temporary: Path) -> None:
    result = run_fuzz(temporary, "--frames", "12000", "--connections", "0")
    assert result["findings"] == []
    assert result["refused"] > 6_000


@pytest.mark.long
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_harmful_connections_do_nothing_to_a_live_job(temporary: Path) -> None:
    job = run_fuzz(temporary, "--frames", "0", "--connections", "2000", timeout_s=600)
    assert (job["incidents"], job["view"], job["tracebacks"]) == (0, 1, 0)
    assert job["log_lines"] < 50
