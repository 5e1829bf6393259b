"""Faults in the middle of a recovery: whoever dies then, the run ends with the same bits, or with a clear word."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from holdfast.core.records import IncidentOpened
from holdfast.core.strategies import Strategy
from support.jobs import kill9
from support.sessions import Run, assert_same_bits, undisturbed

PAUSE = ["--pause", "0.03", "--until-hurry"]
LONG = 300


def assert_recovered(run: Run, deaths: int, incidents: int = 0) -> None:
    """Every incident is closed, by a committed step, and nobody started anew who did not have to."""
    journal = run.place.journal
    assert len(run.incidents) == len(journal.of(IncidentOpened)) >= max(incidents, 1)
    assert all(incident.step >= 0 for incident in run.incidents)
    assert journal.job().incidents.restarts_used == 0
    ranks = len(run.pids)
    assert len({line.pid for line in run.ledger}) <= ranks + deaths


FAULTS = {
    "two at once": ["forward:5:0:kill", "forward:5:1:kill"],
    "another while they agree": ["forward:10:1:kill", "settle:10:0:kill"],
    "the source of the state": ["forward:15:1:kill", "restore:15:0:kill"],
    "the newcomer": ["forward:20:2:kill", "restore:20:2:exit"],
    "the newcomer, when it has the state": ["forward:25:1:kill", "restored:25:1:exit"],
    "the source, when it has sent it": ["backward:30:2:kill", "restored:30:0:kill"],
}
"""By what dies second. A newcomer dies otherwise than who was there before it: what dies again in the same way is
answered by the next rung."""


@pytest.mark.parametrize(
    ("model", "spares"),
    [
        ("ddp", "0"),
        pytest.param("fsdp", "1", marks=pytest.mark.long),
        pytest.param("ddp", "1", marks=pytest.mark.long),
        pytest.param("fsdp", "0", marks=pytest.mark.long),
    ],
)
def test_a_second_death_in_the_middle_of_a_recovery(tmp_path: Path, model: str, spares: str) -> None:
    faults = [fault for pair in FAULTS.values() for fault in pair]
    flags = ["--spares", spares, "--replicas", "2"]
    run = Run(tmp_path).start(model, ranks=3, steps=40, faults=faults, flags=flags).finish()
    assert run.fired == len(faults)
    assert_same_bits(run, undisturbed(model, ranks=3, steps=40), missing=len(faults))
    assert_recovered(run, len(faults), len(FAULTS))


@pytest.mark.long
def test_kills_of_workers_spares_and_masters_close_together(tmp_path: Path) -> None:
    """Several rounds in one job; each begins when the one before is over."""
    run = Run(tmp_path).start("ddp", ranks=3, steps=LONG, flags=["--spares", "1"], options=PAUSE)
    agent, dice = run.agents[0], random.Random(7)
    run.wait_until_calm(3)
    for _ in range(2):
        closed, victims = len(run.incidents), [run.pid_of(rank) for rank in dice.sample(range(3), 2)]
        kill9(victims[0])
        time.sleep(dice.uniform(0.005, 0.05))  # how far apart the two are is what is tested
        kill9(victims[1])
        run.wait_until_calm(3, closed + 1)
    closed, (spare,), view = len(run.incidents), run.wait_for_spares(1), run.view().number
    kill9(run.pid_of(1))
    run.wait_for_view(view + 1)
    kill9(spare)  # it has just been given the rank
    run.wait_until_calm(3, closed + 1)
    closed, master = len(run.incidents), agent.master_pid()
    kill9(master, run.pid_of(2))
    run.wait_until_calm(3, closed + 1)
    closed, view, master = len(run.incidents), run.view().number, agent.master_pid()
    kill9(run.pid_of(0))
    run.wait_for_view(view + 1)
    kill9(master)
    run.wait_until_calm(3, closed + 1)
    run.hurry().finish()
    assert_same_bits(run, undisturbed("ddp", ranks=3, steps=LONG), missing=8)
    assert_recovered(run, 8)
    assert run.place.journal.term() == 3


def test_whole_nodes_die_in_the_middle_of_a_recovery(tmp_path: Path) -> None:
    """The node of the worker that died; then, likewise, the node with the master and the store of the view."""
    run = Run(tmp_path)
    for name in "abcd":
        run.join(name, "ddp", nnodes="2", steps=LONG, flags=["--spare-nodes", "2"], options=PAUSE)
    run.wait_until_calm(2)
    run.wait_for_nodes(*"abcd")
    masters = next(name for name, agent in run.nodes.items() if agent.master_pid())
    for is_masters_turn in (False, True):
        closed, view = len(run.incidents), run.view()
        members = sorted(view.members, key=lambda member: member.node_id == masters)
        lost = members[-1 if is_masters_turn else 0].node_id  # the master's own, if it has a part
        kill9(run.pid_of(next(m.first_rank for m in view.members if m.node_id == lost)))
        run.wait_for_view(view.number + 1)
        run.kill_node(lost)
        run.wait_until_calm(2, closed + 1)
        assert lost not in [m.node_id for m in run.view().members]
    run.hurry().finish()
    assert_same_bits(run, undisturbed("ddp", ranks=2, steps=LONG), missing=4)
    assert_recovered(run, 4)


@pytest.mark.long
def test_when_no_copy_is_left_the_last_checkpoint_is_named_and_gone_on_from(tmp_path: Path) -> None:
    folder = ["--checkpoint-dir", str(tmp_path / "checkpoints"), "--snapshots", "off"]
    dumping = [*folder, "--recovery", "dump,exit"]
    Run(tmp_path / "first").start("fsdp", ranks=2, faults=["forward:5:1:kill"], flags=dumping).finish(7)
    faults = ["forward:8:0:kill", "forward:8:1:kill"]
    ended = Run(tmp_path / "second").start("fsdp", ranks=2, faults=faults, flags=folder).finish(1)
    assert str(tmp_path / "checkpoints" / "step-5") in ended.agents[0].stderr
    flags = [*folder, "--max-restarts", "1"]
    run = Run(tmp_path / "third").start("fsdp", ranks=2, faults=faults, flags=flags).finish()
    reference = undisturbed("fsdp", ranks=2)
    assert run.finals == reference.finals
    assert all(reference.losses[key] == found for key, found in run.losses.items())
    assert [incident.strategy for incident in run.incidents] == [Strategy.RESTART]
