"""Every rung of the ladder by itself, and as what is left when the one above cannot help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.core.records import IncidentDecided, NodesAwaited, Outcome
from holdfast.core.settings import Settings
from holdfast.core.strategies import Strategy
from support.jobs import kill9, wait_for
from support.sessions import Run, assert_same_bits, assert_same_samples, undisturbed

PAUSE = ["--pause", "0.03", "--until-hurry"]
SLOTS = ["--slots", "6"]
LONG = 200
"""Steps of a job that is hurt from outside: it pauses after each until the test lets it hurry."""


def recovery(*rungs: str) -> list[str]:
    return ["--recovery", ",".join(rungs)]


def strategies(run: Run) -> list[Strategy]:
    """Of the incidents, each of which was closed by a committed step."""
    assert all(incident.step >= 0 for incident in run.incidents)
    return [incident.strategy for incident in run.incidents]


def decisions(run: Run) -> list[Strategy]:
    return [decided.strategy for decided in run.place.journal.of(IncidentDecided)]


def fleet(directory: Path, model: str, nnodes: str, flags: list[str], *names: str, **choices: Any) -> Run:
    """Nodes of one worker each, at work; what is beyond the maximum stands by."""
    run = Run(directory)
    choices = {"steps": LONG, "options": PAUSE, **choices}
    for name in names:
        run.join(name, model, nnodes=nnodes, flags=flags, **choices)
    run.wait_until_calm(int(nnodes.split(":")[-1]))
    run.wait_for_nodes(*names)
    return run


# --- retry


def test_retry_is_for_broken_connections_and_no_more(tmp_path: Path) -> None:
    faults, flags = ["forward:5:1:cut", "forward:10:1:kill"], recovery("retry", "exit")
    run = Run(tmp_path).start("ddp", ranks=2, faults=faults, flags=flags, options=["--apart"]).finish(1)
    assert strategies(run) == [Strategy.RETRY]
    assert {len(pids) for pids in run.pids.values()} == {1}
    end = run.place.journal.finished()
    assert end.cause is not None and (end.cause.rank, end.cause.exit_code) == (1, -9)
    reference = undisturbed("ddp", ranks=2).losses
    assert all(reference[key] == found for key, found in run.losses.items())
    assert max(step for step, _ in run.losses) == 9


# --- recover-in-place


@pytest.mark.long
def test_recover_in_place_is_also_for_steps_that_may_not_be_retried(tmp_path: Path) -> None:
    faults, flags = ["forward:5:1:kill", "forward:10:0:raise"], recovery("recover-in-place", "exit")
    run = Run(tmp_path).start("ddp", ranks=3, faults=faults, flags=flags, options=["--apart"]).finish()
    assert_same_bits(run, undisturbed("ddp", ranks=3))
    assert strategies(run) == [Strategy.RECOVER_IN_PLACE] * 2
    assert [len(run.pids[rank]) for rank in range(3)] == [2, 2, 1]


@pytest.mark.long
def test_recover_in_place_gives_way_to_a_spare_node_where_nothing_lives(tmp_path: Path) -> None:
    """On one of the nodes every new process dies at once."""
    run = fleet(tmp_path, "ddp", "2", ["--spare-nodes", "1"], "a", "b", "spare")
    survivor, bad = run.pid_of(0), run.view().members[1].node_id
    (run.place.work / f"stillborn-{bad}").touch()
    kill9(run.pid_of(1))
    run.wait_until_calm(2, closed=1)
    run.hurry().finish()
    assert decisions(run)[0] is Strategy.RECOVER_IN_PLACE
    assert strategies(run) == [Strategy.RECOVER]
    assert bad not in [member.node_id for member in run.view().members]
    assert_same_bits(run, undisturbed("ddp", ranks=2, steps=LONG), missing=1)
    assert run.pids[0] == {survivor}


# --- recover


def test_spares_take_the_ranks_and_others_take_their_place(tmp_path: Path) -> None:
    flags = [*recovery("recover", "exit"), "--spares", "1"]
    run = Run(tmp_path).start("ddp", ranks=2, steps=LONG, flags=flags, options=PAUSE)
    run.wait_until_calm(2)
    for index, rank in enumerate((1, 0)):
        (spare,) = run.wait_for_spares(1)
        survivor = run.pid_of(1 - rank)
        kill9(run.pid_of(rank))
        run.wait_until_calm(2, closed=index + 1)
        assert (run.pid_of(rank), run.pid_of(1 - rank)) == (spare, survivor)
    run.hurry().finish()
    assert_same_bits(run, undisturbed("ddp", ranks=2, steps=LONG), missing=2)
    assert strategies(run) == [Strategy.RECOVER] * 2


@pytest.mark.long
@pytest.mark.parametrize("model", ["ddp", "fsdp"])
def test_a_spare_node_takes_the_ranks_of_a_node_that_is_lost(tmp_path: Path, model: str) -> None:
    flags = [*recovery("recover", "exit"), "--spare-nodes", "1"]
    run = fleet(tmp_path, model, "2", flags, "a", "b", "spare")
    lost = run.other_than_the_masters()
    rank = next(m.first_rank for m in run.view().members if m.node_id == lost)
    survivor, (new,) = run.pid_of(1 - rank), run.nodes.keys() - {m.node_id for m in run.view().members}
    run.kill_node(lost)
    run.wait_until_calm(2, closed=1)
    run.hurry().finish()
    assert_same_bits(run, undisturbed(model, ranks=2, steps=LONG), missing=1)
    assert strategies(run) == [Strategy.RECOVER] and run.incidents[0].kind == "node"
    assert run.pids[1 - rank] == {survivor}
    assert {m.node_id: m.first_rank for m in run.view().members}[new] == rank


@pytest.mark.thorough
def test_survivors_hold_their_state_until_a_replacement_is_started(tmp_path: Path) -> None:
    flags = ["--wait-for-nodes", "120"]
    run = fleet(tmp_path, "ddp", "2", flags, "a", "b")
    lost = run.other_than_the_masters()
    rank = next(m.first_rank for m in run.view().members if m.node_id == lost)
    survivor = run.pid_of(1 - rank)
    run.kill_node(lost)
    wait_for(lambda: run.place.journal.of(NodesAwaited), what="a record that the survivor waits")
    run.join("replacement", "ddp", nnodes="2", flags=flags, steps=LONG, options=PAUSE)
    run.wait_until_calm(2, closed=1)
    run.hurry().finish()
    assert_same_bits(run, undisturbed("ddp", ranks=2, steps=LONG), missing=1)
    assert strategies(run) == [Strategy.RECOVER] and run.pids[1 - rank] == {survivor}
    assert {m.node_id: m.first_rank for m in run.view().members}["replacement"] == rank


# --- elastic-training


@pytest.mark.long
def test_the_world_shrinks_and_grows_back_again_and_again(tmp_path: Path) -> None:
    flags = recovery("elastic-training", "exit")
    faults = ["forward:5:1:kill", "backward:60:2:kill", "forward:100:0:kill"]
    choices: dict[str, Any] = {"features": "loader,double", "options": [*SLOTS, *PAUSE]}
    run = Run(tmp_path).start("ddp", ranks=3, steps=LONG, faults=faults, flags=flags, **choices)
    for closed in (2, 4, 6):
        run.wait_until_calm(3, closed=closed)
    run.hurry().finish()
    assert run.fired == len(faults)
    assert_same_samples(run, undisturbed("ddp", ranks=3, steps=LONG, features="loader,double", options=SLOTS))
    assert strategies(run) == [Strategy.ELASTIC_TRAINING] * 6
    assert [incident.kind for incident in run.incidents] == ["worker", "planned"] * 3
    assert [view.world_size for view in run.views()] == [3, 2, 3, 2, 3, 2, 3]
    assert not run.repeated() and len({line.pid for line in run.ledger}) == 6


def test_a_lost_node_is_done_without_until_it_is_back(tmp_path: Path) -> None:
    flags = recovery("elastic-training", "exit")
    choices: dict[str, Any] = {"features": "loader", "options": [*SLOTS, *PAUSE]}
    run = fleet(tmp_path, "ddp", "1:2", flags, "a", "b", **choices)
    lost = run.other_than_the_masters()
    (stays,) = run.nodes.keys() - {lost}
    survivor = next(run.pid_of(m.first_rank) for m in run.view().members if m.node_id == stays)
    before = len(run.incidents)
    run.kill_node(lost)
    run.wait_until_calm(1, closed=before + 1)
    run.join(lost, "ddp", nnodes="1:2", steps=LONG, flags=flags, **choices)
    run.wait_until_calm(2, closed=before + 2)
    run.hurry().finish()
    reference = undisturbed("ddp", ranks=2, steps=LONG, features="loader", options=SLOTS)
    different = [step for step, samples in reference.trained.items() if run.trained[step] != samples]
    assert len(different) <= 1  # a node that is killed right after a commit cannot tell what it had
    assert all(set(run.trained[step]) < set(reference.trained[step]) for step in different)
    lost_and_back = run.incidents[before:]
    assert [incident.kind for incident in lost_and_back] == ["node", "planned"]
    assert [incident.strategy for incident in lost_and_back] == [Strategy.ELASTIC_TRAINING] * 2
    assert all(incident.step >= 0 for incident in lost_and_back)
    assert survivor in run.pids[0] | run.pids[1] and len({line.pid for line in run.ledger}) == 3


# --- dump and exit


@pytest.mark.parametrize("model", [pytest.param("ddp", marks=pytest.mark.long), "fsdp"])
def test_a_dump_is_where_the_next_start_goes_on(tmp_path: Path, model: str) -> None:
    flags = [*recovery("dump", "exit"), "--checkpoint-dir", str(tmp_path / "checkpoints")]
    first = Run(tmp_path / "first").start(model, ranks=3, faults=["forward:10:1:kill"], flags=flags).finish(7)
    end = first.place.journal.finished()
    assert (end.outcome, end.exit_code) == (Outcome.FAILED, 7) and end.cause is not None and end.cause.rank == 1
    assert max(step for step, _ in first.losses) == 9
    second = Run(tmp_path / "second").start(model, ranks=3, flags=flags).finish()
    reference = undisturbed(model, ranks=3)
    assert second.finals == reference.finals
    assert min(step for step, _ in second.losses) == 10
    assert first.losses | second.losses == reference.losses


def test_exit_names_the_cause(tmp_path: Path) -> None:
    run = Run(tmp_path).start("ddp", ranks=2, faults=["forward:5:1:kill"], flags=recovery("exit")).finish(1)
    end = run.place.journal.finished()
    assert end.cause is not None and (end.cause.rank, end.cause.exit_code) == (1, -9)
    assert "rank 1" in end.why and "SIGKILL" in end.why


def test_a_bug_ends_the_job_with_its_traceback(tmp_path: Path) -> None:
    """One rank fails each time it gets there: every rung is tried once for it, and then the job ends. In between there
    may be retries, as the others' broken connections are heard of before the exception's end."""
    flags = ["--recovery", "retry,recover-in-place,recover,elastic-training,exit", "--spares", "1"]
    run = Run(tmp_path).start("ddp", ranks=3, faults=["forward:5:0:bug!"], flags=flags).finish(1)
    assert decisions(run).count(Strategy.RETRY) <= Settings().rung_tries_max
    chosen = [strategy for strategy in decisions(run) if strategy is not Strategy.RETRY]
    assert chosen[-1] is Strategy.EXIT and len(chosen) <= 4 and len(set(chosen)) == len(chosen)
    end = run.place.journal.finished()
    assert end.cause is not None and "ValueError: a bug in the user's code" in end.cause.traceback
    assert max(line.step for line in run.ledger) == 4


@pytest.mark.long
def test_a_bug_of_all_ranks_is_restarted_as_often_as_allowed(tmp_path: Path) -> None:
    faults = [f"forward:5:{rank}:bug!" for rank in range(2)]
    run = Run(tmp_path).start("ddp", ranks=2, faults=faults, flags=["--max-restarts", "1"]).finish(1)
    end = run.place.journal.finished()
    assert end.cause is not None and "ValueError: a bug in the user's code" in end.cause.traceback
    assert run.place.journal.job().incidents.restarts_used <= 1
    assert max(line.step for line in run.ledger) == 4


def test_rungs_that_cannot_work_are_refused_at_start(tmp_path: Path) -> None:
    run = Run(tmp_path).start("ddp", ranks=2, flags=["--spares", "1", *recovery("retry", "exit")]).finish(2)
    assert not run.ledger and run.place.journal.path is None


@pytest.mark.long
def test_a_job_of_one_worker(tmp_path: Path) -> None:
    """There is nobody to ask for the state, and none in memory: what dies starts again from the beginning."""
    flags = ["--max-restarts", "1", "--snapshots", "off"]
    run = Run(tmp_path).start("ddp", ranks=1, faults=["forward:5:0:kill"], flags=flags).finish()
    assert run.finals == undisturbed("ddp", ranks=1).finals
    assert [i.strategy for i in run.incidents] == [
        Strategy.RESTART
    ] and run.place.journal.job().incidents.restarts_used == 1


# --- the user's word


def extension(directory: Path, answer: str) -> list[str]:
    """A module beside the job, whose class answers this to everything."""
    directory.mkdir(exist_ok=True)
    (directory / "my_failover.py").write_text(
        "from holdfast.failover import DynamicFailoverExtension, FailoverStrategy\n"
        "class Mine(DynamicFailoverExtension):\n"
        "    def get_user_failover_strategy(self, failure_info):\n"
        f"        return FailoverStrategy.{answer}\n"
    )
    return ["--dynamic-failover-extension", "my_failover::Mine"]


def test_an_extension_can_end_the_job(tmp_path: Path) -> None:
    flags = extension(tmp_path, "ABORTION_FAILOVER")
    run = Run(tmp_path).start("ddp", ranks=2, faults=["forward:5:1:kill"], flags=flags).finish(1)
    assert decisions(run) == [Strategy.EXIT]
    assert "extension" in run.place.journal.finished().why


@pytest.mark.long
def test_an_extension_can_have_all_start_anew(tmp_path: Path) -> None:
    flags = [*extension(tmp_path, "GLOBAL_FAILOVER"), "--max-restarts", "1"]
    run = Run(tmp_path).start("ddp", ranks=2, faults=["forward:5:1:kill"], flags=flags).finish()
    assert_same_bits(run, undisturbed("ddp", ranks=2))
    assert [i.strategy for i in run.incidents] == [Strategy.RESTART]
    assert run.place.journal.job().incidents.restarts_used == 1
    assert [len(run.pids[rank]) for rank in range(2)] == [2, 2]


def test_an_extension_can_blame_a_node(tmp_path: Path) -> None:
    """It is left at once, though a new process could have started on it."""
    flags = ["--spare-nodes", "1", *extension(tmp_path, "NODE_FAILOVER")]
    run = fleet(tmp_path, "ddp", "2", flags, "a", "b", "spare")
    blamed = run.view().members[1].node_id
    kill9(run.pid_of(1))
    run.wait_until_calm(2, closed=1)
    run.hurry().finish()
    assert_same_bits(run, undisturbed("ddp", ranks=2, steps=LONG), missing=1)
    assert strategies(run) == [Strategy.RECOVER]
    assert blamed not in [member.node_id for member in run.view().members]


# --- hangs


def test_who_hangs_is_replaced_alone_and_who_pauses_is_not(tmp_path: Path) -> None:
    flags, options = ["--hang-timeout", "2"], ["--evaluate", "5:4"]
    run = Run(tmp_path).start("ddp", ranks=3, faults=["forward:10:1:stop"], flags=flags, options=options).finish()
    assert_same_bits(run, undisturbed("ddp", ranks=3))
    assert strategies(run) == [Strategy.RECOVER_IN_PLACE] and "rank 1" in run.incidents[0].cause
    assert [len(run.pids[rank]) for rank in range(3)] == [1, 2, 1]
