"""Faults by their names, on real processes: what the tables say of real ends, lemons across jobs, bugs, everybody's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from holdfast.core.faults.fault_types import Blame
from holdfast.core.records import IncidentDecided, NodeCleared, NodeCordoned, NodeJoined, ViewFormed, WorkerFailedRecord
from holdfast.core.strategies import Strategy
from support.jobs import DEADLINE_S, SPAWN, STEPS, AgentProcess, Journal, Place, agent_environment, free_port, wait_for
from support.sessions import Run

BY_CODE = {
    14: ("inforom-corrupted", Blame.NODE),
    128: ("unknown-device", Blame.NODE),
    201: ("driver-error", Blame.NODE),
    202: ("residual-processes", Blame.PLATFORM),
    134: ("aborted", Blame.PROCESS),
    137: ("killed", Blame.PROCESS),
    139: ("crashed", Blame.PROCESS),
    143: ("terminated", Blame.PROCESS),
    77: ("licence-server", Blame.PLATFORM),
}
MINE = """
[[fault]]
name = "licence-server"
blame = "platform"
severity = "passing"
meaning = "the licence server did not answer"

[[rule]]
fault = "licence-server"
code = 77
"""


def command(state_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Another `holdfast` command, to its end."""
    all_words = [sys.executable, "-m", "holdfast", *words, "--state-dir", str(state_dir)]
    return subprocess.run(
        all_words, env=agent_environment(state_dir), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def join(job: Place, name: str, job_id: str, port: int, nnodes: str, *flags: str) -> AgentProcess:
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", job_id]
    words = [*meeting, "--nnodes", nnodes, "--node-id", name, *flags, *SPAWN, STEPS]
    return job.start(*words, env={"HOLDFAST_MACHINE": f"machine-{name}"})


def grades(state_dir: Path) -> dict[str, str]:
    listed = json.loads(command(state_dir, "nodes", "ls", "-o", "json").stdout)
    return {one["machine"]: one["grade"] for one in listed}


def in_view(view: int) -> Callable[[WorkerFailedRecord], bool]:
    return lambda lost: lost.failure.view == view


def test_every_exit_code_of_the_table_is_named_and_a_users_table_goes_first(tmp_path: Path) -> None:
    job = Place(tmp_path)
    (tmp_path / "mine.toml").write_text(MINE)
    table = ("--fault-table", str(tmp_path / "mine.toml"))
    agent = job.start("--standalone", "--max-restarts", str(len(BY_CODE)), *table, *SPAWN, STEPS)
    for number, code in enumerate(BY_CODE, start=1):
        job.journal.wait_for_workers(1, view=number)
        job.tell(0, f"exit {code}")
        job.journal.wait_for(WorkerFailedRecord, in_view(number))
    job.journal.wait_for_workers(1, view=len(BY_CODE) + 1)
    job.finish()
    assert agent.wait() == 0
    found = {lost.failure.exit_code: lost.failure.fault for lost in job.journal.of(WorkerFailedRecord)}
    assert {code: (fault.name, fault.blame) for code, fault in found.items() if fault} == BY_CODE
    whys = [decided.why for decided in job.journal.of(IncidentDecided)]
    assert "is not evicted though at fault (inforom-corrupted)" in whys[0], "a job's only node is not sent away"
    assert not job.journal.of(NodeCordoned)


def test_a_bad_table_is_refused_at_start(tmp_path: Path) -> None:
    job = Place(tmp_path)
    (tmp_path / "mine.toml").write_text('[[rule]]\nfault = "killd"\ncode = 3\n')
    agent = job.start("--standalone", "--fault-table", str(tmp_path / "mine.toml"), *SPAWN, STEPS)
    assert agent.wait() == 2
    assert "mine.toml, line 2: key fault: there is no fault 'killd', did you mean killed?" in agent.stderr


def test_a_lemon_that_keeps_failing_is_banned_and_kept_out_of_the_next_job(tmp_path: Path) -> None:
    job = Place(tmp_path)
    for number in range(3):
        job.journal = Journal(job.state_dir, f"try-{number}")
        port = free_port()
        good = join(job, "good", f"try-{number}", port, "2", "--max-restarts", "1")
        lemon = join(job, "lemon", f"try-{number}", port, "2", "--max-restarts", "1")
        pids = job.journal.wait_for_workers(2, view=1)
        members = job.journal.of(ViewFormed)[-1].view.members
        rank = next(m.first_rank for m in members if m.node_id == "lemon")
        job.wait_for_steps(*pids.values(), more=1)
        job.tell(rank, "exit 201")
        job.journal.wait_for_workers(2, view=2)
        job.finish()
        assert (good.wait(), lemon.wait()) == (0, 0)
        (job.work / "finish").unlink()
    listed = json.loads(command(job.state_dir, "nodes", "ls", "-o", "json").stdout)
    assert [(one["machine"], one["grade"], one["faults"]) for one in listed] == [("machine-lemon", "banned", 3)]

    job.journal, port = Journal(job.state_dir, "next"), free_port()
    lemon = join(job, "lemon", "next", port, "1:2", "--settle", "2")
    joined = job.journal.wait_for(NodeJoined)
    assert joined.reputation.grade == "banned" and "keeps failing" in joined.reputation.why
    good = join(job, "good", "next", port, "1:2", "--settle", "2")
    job.journal.wait_for_workers(1, view=1)
    assert [m.node_id for m in job.journal.of(ViewFormed)[-1].view.members] == ["good"]
    wait_for(lambda: "holdfast nodes uncordon machine-lemon" in lemon.stderr, what="the lemon's agent to say why")
    job.finish()
    assert (good.wait(), lemon.wait()) == (0, 0)

    assert "may join jobs again" in command(job.state_dir, "nodes", "uncordon", "machine-lemon").stdout
    assert command(job.state_dir, "nodes", "uncordon", "machine-lemon").returncode == 1
    history = command(job.state_dir, "nodes", "history", "machine-lemon").stdout
    assert [history.count(word) for word in ("fault driver-error", "cordoned: it keeps", "uncordoned")] == [3, 1, 1]


def test_the_same_fault_on_two_machines_within_moments_is_not_blamed_on_them(tmp_path: Path) -> None:
    job, port = Place(tmp_path), free_port()
    nodes = {name: join(job, name, "both", port, "1:2", "--max-restarts", "1", "--settle", "5") for name in "ab"}
    job.journal.wait_for_workers(2, view=1)
    members = {m.node_id: m.first_rank for m in job.journal.of(ViewFormed)[-1].view.members}
    away = next(name for name in "ab" if not nodes[name].master_pid())
    job.tell(members[away], "exit 14")
    assert nodes[away].wait() == 0, "it was asked to leave"
    assert [(c.node_id, c.lasting) for c in job.journal.of(NodeCordoned)] == [(away, True)]
    wait_for(lambda: grades(job.state_dir) == {f"machine-{away}": "cordoned"}, what="the machine to be cordoned")
    job.journal.wait_for_workers(1, view=2)
    job.tell(0, "exit 14")
    job.journal.wait_for(NodeCleared, lambda cleared: cleared.machine == f"machine-{away}")
    job.journal.wait_for_workers(1, view=3)
    job.finish()
    (other,) = {"a", "b"} - {away}
    assert nodes[other].wait() == 0
    assert grades(job.state_dir) == {f"machine-{away}": "good"}
    assert job.journal.job().incidents.restarts_used == 1, "the first was the node's, as far as was known"


def test_the_same_exception_at_the_same_step_twice_ends_the_job_with_restarts_left(tmp_path: Path) -> None:
    flags = ["--max-restarts", "3", "--spares", "1"]
    run = Run(tmp_path).start("ddp", ranks=2, faults=["forward:5:1:bug!"], flags=flags).finish(code=7)
    chosen = [decided.strategy for decided in run.place.journal.of(IncidentDecided)]
    repaired = [strategy for strategy in chosen if strategy is not Strategy.RETRY]
    assert repaired[-1] is Strategy.DUMP and len(repaired) == 2
    end = run.place.journal.finished()
    assert run.place.journal.job().incidents.restarts_used == 0
    assert end.cause is not None and end.cause.step == 5 and "a bug in the user's code" in end.cause.message
