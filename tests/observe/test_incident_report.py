"""An incident's report: the cause first, stacks once, what was decided and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from core.test_reload import keep_all, kill_all, training
from holdfast.cli.explain import lines
from holdfast.core import records as r
from holdfast.core.durability import JOURNAL_EVERY_S
from holdfast.core.events import CountersRead, SessionInfo, WorkerFailed
from holdfast.core.faults.failures import Exited, Signalled
from holdfast.core.faults.fault_table import typed
from holdfast.core.health.findings import CheckProblem, CheckResult
from holdfast.core.stacks import ranks_text
from holdfast.core.strategies import Strategy
from holdfast.journal import JournalEntry
from holdfast.observe.incident_report import Explanation, explain, incident_numbers
from support.clinic import Clinic
from support.world import World


def entries(world: World) -> list[JournalEntry]:
    durable = [record for record in world.history if r.is_durable(record)]
    return [JournalEntry(seq, record) for seq, record in enumerate(durable, start=1)]  # type: ignore[arg-type]


def told(world: World, number: int = 1) -> tuple[Explanation, str]:
    found = explain(entries(world), number)
    decoded = msgspec.json.decode(msgspec.json.encode(found), type=Explanation)
    assert decoded == found, "it can be read back"
    return found, "\n".join(lines(found))


def fails(world: World, node_id: str, local_rank: int = 0, **more: Any) -> WorkerFailed:
    event = world.failed(node_id, local_rank, end=Exited(1))
    return msgspec.structs.replace(event, failure=typed(msgspec.structs.replace(event.failure, **more)))


def test_a_failure_that_was_repaired() -> None:
    world = World(nodes=(2, 2), session=SessionInfo(), workers=2).train("a", "b")
    cause = fails(world, "b", 1, exception="ValueError", message="ValueError: boom", traceback="Traceback", step=8)
    world.do(world.stumbled("a", 0), world.stumbled("a", 1), cause)
    world.now += 0.1
    world.prove()
    found, text = told(world)
    assert found.fault and found.fault.name == "script-error"
    assert found.root and (found.root.rank, found.root.step) == (3, 8)
    assert found.collateral == 2 and found.others == ()
    assert [decision.strategy for decision in found.decisions] == [Strategy.RECOVER_IN_PLACE]
    assert sum(found.phases_s.values()) > 0
    first, second, third, *_ = text.splitlines()
    assert first == "job job, incident 1"
    assert second == "root cause: rank 3 on b exited with code 1: ValueError: boom"
    assert third.startswith("  fault: script-error: the script raised an exception (blame: user code, serious")
    assert "incident 1 closed after" in found.outcome
    kinds = [moment.kind for moment in found.timeline]
    assert kinds[:4] == ["step-interrupted", "step-interrupted", "worker-failed", "incident-opened"]
    assert kinds[-1] == "incident-closed" and "node-joined" not in kinds


def test_a_hang_shows_every_stack_once_and_who_is_behind() -> None:
    world = World(nodes=(2, 2), session=SessionInfo(), workers=2).train("a", "b")
    reports = [world.stalled("a", 9, 9), world.stalled("b", 9, 8)]
    for report in reports:
        stacks = tuple(
            msgspec.structs.replace(
                v,
                stack="in all_reduce" if v.step == 9 else "in load",
                log_file=f"rank-{v.rank}.log",
                log_tail=("reading", f"shard {v.rank}"),
            )
            for v in report.worker_progress
        )
        world.do(msgspec.structs.replace(report, worker_progress=stacks))
    found, text = told(world)
    assert found.fault and found.fault.name == "hang"
    assert [(group.ranks, group.stack) for group in found.stacks] == [((3,), "in load"), ((0, 1, 2), "in all_reduce")]
    assert [one.rank for one in found.progress if one.is_suspect] == [3]
    assert [(one.rank, one.node_id, one.log_tail) for one in found.suspects] == [(3, "b", ("reading", "shard 3"))]
    assert [note.node_id for note in found.nodes] == ["b"]
    assert "rank 3 (local 1) on b has come least far\n  log: rank-3.log\n  last lines of its log:\n    reading" in text
    assert "nodes:\n  b: machine host-b on host-b, known as good" in text and "shard 0" not in text
    assert "rank 3:\n  in load" in text and "ranks 0-2:\n  in all_reduce" in text and "← least far" in text
    assert found.outcome == "not over yet"


def test_a_node_that_was_sent_away() -> None:
    world = World(nodes=(1, 2), restarts=1).run("a", "b")
    event = world.failed("b", end=Exited(14))
    world.do(msgspec.structs.replace(event, failure=typed(event.failure)))
    found, text = told(world)
    notes = [note.text for note in found.nodes if note.node_id == "b"]
    assert notes[0] == "machine host-b on host-b, known as good"
    assert "inforom-corrupted" in notes[1] and "cordoned" in notes[1]
    assert "blame: node, critical" in text


def test_a_lost_node_and_the_end_of_the_job() -> None:
    world = World(nodes=(2, 2), restarts=0, join_timeout_s=10.0).run("a", "b")
    world.do(world.broke("b"))
    world.wait(20)
    found, _ = told(world)
    assert found.kind == "node" and found.fault and found.fault.name == "node-lost" and found.root is None
    assert found.outcome.startswith("the job failed: waited 10 s for 2 nodes")
    assert json.loads(msgspec.json.encode(found))["decisions"][0]["strategy"] == "wait"


def test_what_the_last_check_of_the_node_measured_and_its_counters_said() -> None:
    world = Clinic(nodes=(2, 2), restarts=1)
    world.come("a", "b")
    world.start_all()
    world.now += 10
    world.do(world.failed("b", end=Signalled(11, "SIGSEGV")))
    notes = [note.text for note in told(world)[0].nodes if note.node_id == "b"]
    assert notes[1].startswith("last check (before the job): b is fit: matmul 10 ms (expected 10 ms)")
    result = CheckResult(
        problems=(CheckProblem("device", "ecc-errors", "3 uncorrected ECC errors", 1),), store_port=29_900
    )
    while tasks := world.open_tasks():
        for node_id, task in tasks:
            world.answered.add((world.life(node_id), task.checkup, task.round))
            world.do(world.examined(node_id, result if node_id == "b" else world.result(node_id, task)))
    found, text = told(world)
    notes = [note.text for note in found.nodes if note.node_id == "b"]
    assert notes[1].startswith("last check (after a fault") and "b is unfit" in notes[1]
    assert notes[2] == "last check, counters, device 1: 3 uncorrected ECC errors (ecc-errors)"
    assert f"  b: {notes[2]}" in text


def test_what_its_counters_said_when_it_failed_also_if_they_were_slow_to_say_it() -> None:
    world = World(nodes=(2, 2), session=SessionInfo()).train("a", "b")
    counters = {
        name: CountersRead(node_id=name, incarnation=world.life(name), view=1, readings=(f"{name} has 3 ECC errors",))
        for name in "ab"
    }
    world.do(fails(world, "b"))
    world.prove()
    world.do(counters["a"], counters["b"])
    world.do(fails(world, "b"))
    notes = [note.text for note in told(world)[0].nodes]
    assert notes == ["machine host-b on host-b, known as good", "counters after the fault: b has 3 ECC errors"]
    assert len(told(world, 2)[0].nodes) == 1, "those were of the first incident"


def test_which_step_was_in_memory() -> None:
    world = training()
    keep_all(world, 8, 9)
    world.now += JOURNAL_EVERY_S
    keep_all(world, 9, 10)
    kill_all(world)
    found, text = told(world)
    assert found.decisions[0].reload == 10
    assert "all workers start from step 10 in the nodes' memory" in text
    assert found.durability.startswith("step ") and f"state that was safe: {found.durability}" in text


def test_each_incident_has_its_own_part_of_the_journal() -> None:
    world = World(nodes=(1, 1), restarts=3).run("a")
    for _ in range(3):
        world.now += 10
        world.do(fails(world, "a", exception="KeyError", message="KeyError: 7"))
        world.start_all()
    assert incident_numbers(entries(world)) == [1, 2, 3]
    assert [explain(entries(world), number).timeline[0].kind for number in (1, 2, 3)] == ["worker-failed"] * 3
    seqs = [[moment.seq for moment in explain(entries(world), number).timeline] for number in (1, 2, 3)]
    assert seqs[0][-1] < seqs[1][0] and seqs[1][-1] < seqs[2][0]


def test_ranks_in_stretches() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([5, 0, 1, 2]) == "ranks 0-2, 5"
    assert ranks_text(range(0, 64, 2)).endswith("and 16 more")


def test_the_command(tmp_path: Path) -> None:
    from holdfast.cli.main import run_app
    from support.scenario import BOOM, JobOnDisk

    job = JobOnDisk(tmp_path).join("a").start("a")
    assert run_app(["explain", "--state-dir", str(tmp_path)]) == 0
    job.fail("a", 1, **BOOM)
    assert run_app(["explain", "--state-dir", str(tmp_path)]) == 0
    assert run_app(["explain", "1", "-o", "json", "--state-dir", str(tmp_path)]) == 0
    assert run_app(["explain", "7", "--state-dir", str(tmp_path)]) == 1
