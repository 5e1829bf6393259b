"""The job on one page."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from holdfast.cli.status import render
from holdfast.core import events as e
from holdfast.core.durability import ImageReport, SnapshotStats
from holdfast.core.records import Outcome, Strategy
from holdfast.observe.summary import INCIDENTS_SHOWN_MAX, Summary, summarise
from support.scenario import BOOM, START, JobOnDisk, hello, incarnation_of


def summary_of(job: JobOnDisk, *, later_s: float = 0.0) -> Summary:
    return summarise(job.entries(), job.now + later_s, master_seen=True)


def states(summary: Summary) -> list[str]:
    return [worker.state for node in summary.nodes for worker in node.workers]


@pytest.fixture
def job(tmp_path: Path) -> JobOnDisk:
    return JobOnDisk(tmp_path)


def test_before_the_first_record_nothing_is_claimed() -> None:
    summary = summarise([], START, master_seen=False)
    assert (summary.job_id, summary.phase, summary.nodes, summary.uptime_s) == ("", "gathering", (), 0.0)
    assert summary.since == START


def test_a_job_that_gathers_says_for_how_long_and_why(job: JobOnDisk) -> None:
    summary = summary_of(job.pass_s(7))
    assert (summary.phase, summary.view, summary.world_size) == ("gathering", 0, 0)
    assert summary.read_at - summary.since == 7
    assert "not enough nodes have joined yet" in summary.why
    assert (summary.nodes_min, summary.nodes_max, summary.restarts_used, summary.restarts_max) == (1, 1, 0, 3)


def test_workers_start_and_then_run_under_their_pids(job: JobOnDisk) -> None:
    assert states(summary_of(job.join("a"))) == ["starting", "starting"]
    assert [w.pid for w in summary_of(job).nodes[0].workers] == [None, None]
    summary = summary_of(job.pass_s(2).start("a"), later_s=1)
    assert states(summary) == ["running", "running"]
    assert [(w.rank, w.local_rank, w.pid) for w in summary.nodes[0].workers] == [(0, 0, 4_000), (1, 1, 4_001)]
    assert (summary.phase, summary.view, summary.world_size, summary.term) == ("serving", 1, 2, 1)
    assert (summary.since, summary.uptime_s, summary.last_record_at) == (START, 3.0, START + 2)


def test_pids_of_an_earlier_view_are_not_shown_as_those_of_the_new_one(job: JobOnDisk) -> None:
    job.join("a").start("a").fail("a", 1, **BOOM).offer("a")
    assert [w.pid for w in summary_of(job).nodes[0].workers] == [None, None]


def test_nodes_come_in_the_order_of_ranks_then_who_waits_then_who_is_gone(tmp_path: Path) -> None:
    job = JobOnDisk(tmp_path, nodes=(1, 2), workers=1)
    job.join("gone").pass_s(0.1).join("a").start("gone").start("a").pass_s(1).join("waits")
    job.do(e.NodeSilent(node_id="gone", incarnation=incarnation_of("gone"), silent_s=5.0))
    nodes = summary_of(job).nodes
    assert [(n.node_id, n.standing, n.group_rank) for n in nodes] == [
        ("waits", "present", 0),
        ("a", "present", 1),
        ("gone", "lost", None),
    ]
    assert "no heartbeat for 5.0 s" in nodes[2].why
    assert nodes[1].host == "host-a" and nodes[1].workers_max == 1


def test_an_incident_is_open_until_the_workers_are_back(job: JobOnDisk) -> None:
    job.join("a").start("a").pass_s(60).fail("a", 1, failed_at=job.now - 0.012, **BOOM)
    incident = summary_of(job).open_incident
    assert incident is not None and incident.strategy is None, "nothing is decided before there is a store for it"
    assert incident.cause == "rank 1 on a exited with code 1: ValueError: boom"
    assert (incident.number, incident.kind, incident.since) == (1, "worker", job.now)
    job.pass_s(0.015).offer("a")
    incident = summary_of(job).open_incident
    assert incident is not None and incident.strategy is Strategy.RESTART
    job.pass_s(0.403).start("a")
    assert summary_of(job).open_incident is None


def test_a_closed_incident_has_its_receipt_and_phases_that_add_up(job: JobOnDisk) -> None:
    job.join("a").start("a").restart_once()
    summary = summary_of(job)
    (incident,) = summary.incidents
    assert list(incident.phases_s) == ["detected", "decided", "rebuilt", "workers up"]
    assert incident.phases_s["workers up"] == pytest.approx(0.403, abs=1e-3)
    assert sum(incident.phases_s.values()) == pytest.approx(incident.total_s)
    assert "incident 1 closed after 430 ms" in incident.receipt
    assert (incident.view_before, incident.view_after, summary.restarts_used) == (1, 2, 1)


def test_a_recovery_that_kept_the_workers_is_told_up_to_its_first_step(job: JobOnDisk) -> None:
    job.join("a").start("a").settle("a").commit_step("a", 1).offer("a").pass_s(60)
    job.fail("a", 1, failed_at=job.now - 0.012, **BOOM)
    job.pass_s(0.04).start("a").settle("a").pass_s(0.03).commit_step("a", 42)
    summary = summary_of(job)
    (incident,) = summary.incidents
    assert list(incident.phases_s) == ["detected", "decided", "rebuilt", "restored", "first step"]
    assert incident.phases_s["restored"] == pytest.approx(0.04, abs=1e-3)
    assert incident.phases_s["first step"] == pytest.approx(0.03, abs=1e-3)
    assert sum(incident.phases_s.values()) == pytest.approx(incident.total_s)
    assert incident.strategy is Strategy.RECOVER_IN_PLACE and summary.restarts_used == 0
    assert "recover-in-place, view 1 → 2, step 42 committed" in incident.receipt


def test_only_the_last_incidents_are_listed_and_all_are_counted(tmp_path: Path) -> None:
    job = JobOnDisk(tmp_path, restarts=20).join("a").start("a")
    for _ in range(INCIDENTS_SHOWN_MAX + 2):
        job.restart_once()
    summary = summary_of(job)
    assert [i.number for i in summary.incidents] == list(range(3, INCIDENTS_SHOWN_MAX + 3))
    assert summary.incidents_total == INCIDENTS_SHOWN_MAX + 2
    assert summary.changes_total == 0


def test_success_stops_the_clock(job: JobOnDisk) -> None:
    summary = summary_of(job.join("a").start("a").pass_s(30).succeed("a"), later_s=1_000)
    assert summary.ending is not None
    assert (summary.phase, summary.ending.outcome, summary.ending.exit_code) == ("finished", Outcome.SUCCEEDED, 0)
    assert (summary.uptime_s, summary.ending.cause) == (30.0, None)
    assert states(summary) == ["succeeded", "succeeded"]


def test_failure_has_its_root_cause_and_nobody_is_said_to_run(tmp_path: Path) -> None:
    job = JobOnDisk(tmp_path, restarts=0).join("a").start("a")
    summary = summary_of(job.fail("a", 1, log_file="/logs/stderr.log", **BOOM))
    assert summary.ending is not None and summary.ending.cause is not None
    cause = summary.ending.cause
    assert (summary.ending.exit_code, cause.rank, cause.exit_code) == (1, 1, 1)
    assert (cause.exception, cause.log_file) == ("ValueError", "/logs/stderr.log")
    assert states(summary) == ["stopping", "failed"]
    assert summary.open_incident is None, "the incident ended with the job"


def test_workers_of_a_node_that_is_gone_are_not_said_to_run(tmp_path: Path) -> None:
    job = JobOnDisk(tmp_path, nodes=(2, 2), workers=1).join("a").join("b").start("a").start("b")
    job.do(e.LinkBroke(node_id="b", incarnation=incarnation_of("b")))
    assert states(summary_of(job)) == ["running", "running"], "a broken connection is not in the journal"
    lost = job.do(e.NodeSilent(node_id="b", incarnation=incarnation_of("b"), silent_s=5.0))
    summary = summary_of(lost)
    assert (summary.phase, states(summary)) == ("gathering", [])


def test_when_a_job_ends_without_a_node_its_workers_are_unknown(tmp_path: Path) -> None:
    job = JobOnDisk(tmp_path, nodes=(2, 2), workers=1, restarts=0).join("a").join("b").start("a").start("b")
    job.do(e.NodeSilent(node_id="b", incarnation=incarnation_of("b"), silent_s=5.0), job.failed("a", **BOOM))
    summary = summary_of(job)
    assert [(n.node_id, n.standing, n.group_rank) for n in summary.nodes] == [("a", "present", 0), ("b", "lost", 1)]
    assert (summary.phase, states(summary)) == ("finished", ["failed", "unknown"])


def test_the_next_life_of_a_node_does_not_inherit_the_place_of_the_last(tmp_path: Path) -> None:
    job = JobOnDisk(tmp_path, nodes=(2, 2), workers=1).join("a").join("b").start("a").start("b")
    again = hello("b", job.settings, store_port=0, workers=1)
    job.do(msgspec.structs.replace(again, incarnation="b.2", dead_incarnations=(incarnation_of("b"),)))
    summary = summary_of(job)
    assert summary.phase == "serving", "no store is offered, so the next view has to wait"
    assert [(n.node_id, n.group_rank, len(n.workers)) for n in summary.nodes] == [("a", 0, 1), ("b", None, 0)]


def test_the_summary_survives_json(tmp_path: Path) -> None:
    job = JobOnDisk(tmp_path, restarts=1).join("a").start("a").restart_once().pass_s(1).fail("a", 0, **BOOM)
    summary = summary_of(job)
    assert msgspec.json.decode(msgspec.json.encode(summary), type=Summary) == summary


@pytest.mark.parametrize(
    ("snapshot_stats", "shown"),
    [
        (
            SnapshotStats(1, False, 1.0, 0.001, 40, 2, 1),
            "snapshots: after every step (a copy costs 0.1 % of a step: one after every step); 40 taken, 2 skipped, 1"
            " spoiled",
        ),
        (
            SnapshotStats(5, False, 1.0, 0.05, 8, 0, 0),
            "snapshots: every 5 steps (a copy costs 5.0 % of a step, a fault is due every 6000 h: one in 5 steps, what"
            " costs a hundredth); 8 taken, 0 skipped, 0 spoiled",
        ),
        (
            SnapshotStats(3, True, 1.0, 0.05, 1_234, 0, 0),
            "snapshots: every 3 steps (as --snapshots says); 1,234 taken, 0 skipped, 0 spoiled",
        ),
    ],
)
def test_how_often_the_state_is_copied_is_shown_and_why(
    job: JobOnDisk, snapshot_stats: SnapshotStats, shown: str
) -> None:
    images = (ImageReport(7, 0, 1, 2, 1), ImageReport(7, 1, 1, 2, 1))
    job.join("a").start("a").do(
        e.ImagesReported(node_id="a", incarnation=incarnation_of("a"), images=images, snapshot_stats=snapshot_stats)
    )
    page = Console(width=1_000, file=io.StringIO(), record=True)
    page.print(render(summary_of(job)))
    assert shown in page.export_text().splitlines()
    assert summary_of(job.succeed("a")).state.snapshot_stats == SnapshotStats(), "memory goes with the job"
