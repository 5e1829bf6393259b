"""Changes by request: nodes are drained, come later, or another number of them is wanted. Nothing is lost for it."""

from __future__ import annotations

from pathlib import Path

from holdfast.core.records import WorkerFailedRecord
from holdfast.core.strategies import Strategy
from support.sessions import Run, assert_same_bits, assert_same_samples, undisturbed

STEPS = 200
SLOTS = ["--slots", "6"]
PAUSE = ["--pause", "0.03", "--until-hurry"]


def assert_nothing_was_lost(run: Run, incidents: int) -> None:
    """Every change closed by a committed step, none of them a fault, and no step committed twice."""
    assert [incident.kind for incident in run.incidents] == ["planned"] * incidents
    assert all(incident.step >= 0 for incident in run.incidents)
    assert not run.place.journal.of(WorkerFailedRecord) and not run.repeated()
    assert run.place.journal.job().incidents.restarts_used == 0


def join(run: Run, name: str, nnodes: str, *flags: str, features: str = "loader") -> None:
    options = [*SLOTS, *PAUSE]
    run.join(name, "ddp", nnodes=nnodes, steps=STEPS, flags=list(flags), features=features, options=options)


def test_a_drained_nodes_ranks_go_to_the_spare_node(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for name in ("a", "b", "spare"):
        run.join(name, "ddp", nnodes="2", steps=STEPS, flags=["--spare-nodes", "1"], options=PAUSE)
    run.wait_until_calm(2)
    run.wait_for_nodes("a", "b", "spare")
    drained = run.other_than_the_masters()
    rank = next(m.first_rank for m in run.view().members if m.node_id == drained)
    survivor = run.pid_of(1 - rank)
    run.operate("drain", drained, "--wait")
    assert run.nodes[drained].wait() == 0
    run.wait_until_calm(2, closed=1)
    run.hurry().finish()
    assert_same_bits(run, undisturbed("ddp", ranks=2, steps=STEPS))
    assert_nothing_was_lost(run, 1)
    assert run.incidents[0].strategy is Strategy.RECOVER
    assert run.pids[1 - rank] == {survivor}


def test_a_job_grows_and_shrinks_as_it_is_asked_to(tmp_path: Path) -> None:
    run = Run(tmp_path)
    join(run, "first", "1:3")
    run.wait_until_calm(1)
    join(run, "second", "1:3")
    run.wait_until_calm(2, closed=1)  # it came later
    run.operate("resize", "1")
    run.wait_until_calm(1, closed=2)
    run.operate("resize", "2")
    run.wait_until_calm(2, closed=3)
    run.operate("drain", "second", "--wait")
    assert run.nodes["second"].wait() == 0
    run.wait_until_calm(1, closed=4)
    join(run, "third", "1:3")
    run.wait_until_calm(2, closed=5)
    run.hurry().finish()
    assert_same_samples(run, undisturbed("ddp", ranks=2, steps=STEPS, features="loader", options=SLOTS))
    assert_nothing_was_lost(run, 5)
    assert [view.world_size for view in run.views()] == [1, 2, 1, 2, 1, 2]
    first = {line.pid for line in run.ledger if line.step == 0}
    assert len(first) == 1 and first < {line.pid for line in run.ledger if line.step == STEPS - 1}
