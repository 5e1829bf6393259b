"""What a script learns from other ranks while it builds is told to its replacements too, though they build alone."""

import signal
from pathlib import Path

import pytest

from holdfast.core.records import IncidentClosed, StepCommittedRecord
from support.jobs import SCRIPTS, Place, free_port
from support.references import made_once
from support.sessions import Run

SCRIPT = str(SCRIPTS / "talks_while_building.py")
RANKS, STEPS = 3, 12


def finals(place: Place) -> dict[str, str]:
    return {path.name: path.read_text() for path in place.work.glob("final-*")}


def learnt(place: Place, rank: int) -> list[str]:
    """What each process of a rank has learnt."""
    return [path.read_text() for path in place.work.glob(f"learnt-{rank}-*")]


def reference() -> Place:
    def make(directory: Path) -> None:
        assert Place(directory).start("--nproc-per-node", str(RANKS), SCRIPT, str(STEPS)).wait() == 0

    return Place(made_once("talks-while-building", make))


@pytest.mark.parametrize(("victim", "spares"), [(0, 0), (1, 1), pytest.param(2, 0, marks=pytest.mark.long)])
def test_a_replacement_learns_what_its_rank_learnt_at_the_start(tmp_path: Path, victim: int, spares: int) -> None:
    place = Place(tmp_path)
    flags = ("--nproc-per-node", str(RANKS), "--spares", str(spares))
    agent = place.start(*flags, SCRIPT, str(STEPS), str(victim))
    assert agent.wait() == 0, agent.stderr[-4000:]
    texts = learnt(place, victim)
    assert len(texts) == 2 and len(set(texts)) == 1, "the replacement has learnt something else"
    assert [len(learnt(place, rank)) for rank in range(RANKS) if rank != victim] == [1] * (RANKS - 1)
    assert finals(place) == finals(reference())


def test_a_replacement_on_another_node_learns_it_from_those_who_train(tmp_path: Path) -> None:
    run = Run(tmp_path)
    port = free_port()
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "fleet", "--nnodes", "2"]
    for name in ("a", "b", "c"):
        flags = ["--node-id", name, *meeting, "--spare-nodes", "1", "--settle", "0.1", "--nproc-per-node", "1"]
        run.nodes[name] = run.place.start(*flags, SCRIPT, "3000", "-1", "common")
        run.agents.append(run.nodes[name])
    run.wait_for_nodes("a", "b", "c")
    run.place.journal.wait_for(StepCommittedRecord)
    lost = run.other_than_the_masters()
    rank = next(m.first_rank for m in run.view().members if m.node_id == lost)
    run.kill_node(lost)
    run.place.journal.wait_for(IncidentClosed)
    texts = learnt(run.place, rank)
    assert len(texts) == 2 and len(set(texts)) == 1, "the replacement has learnt something else"
    assert len(learnt(run.place, 1 - rank)) == 1
    for agent in run.agents:
        agent.send(signal.SIGTERM)
    for agent in run.agents:
        agent.wait()
