"""State that outlives its processes: in the agents' memory, and on storage, without a worker's help."""

from __future__ import annotations

import contextlib
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.records import CheckpointPublishedRecord, IncidentDecided
from holdfast.core.strategies import Strategy
from holdfast.errors import CheckpointError
from holdfast.snapshots.directories import directory_name
from holdfast.snapshots.slot_file import SlotPage
from holdfast.storage.checkpoint_catalogue import CheckpointCatalogue
from holdfast.storage.stores import open_store
from support.jobs import SCRIPTS, Place, kill9, snapshot_dir, wait_for
from support.sessions import Run, assert_same_bits, descendants, undisturbed

EVERY_STEP = ["--snapshots", "1"]
PAUSE = ["--pause", "0.03", "--until-hurry"]
LONG = 200
"""Steps of a job that is hurt from outside: it pauses after each until the test lets it hurry."""


def steps_in_memory(*, at_least: int) -> list[int]:
    """The newest complete step of each rank, once all of them have one that is so late."""

    def found() -> list[int]:
        pages = [SlotPage.open(path.parent) for path in snapshot_dir().glob("*/*/rank-*/control")]
        steps = [page.get("complete") for page in pages]
        return steps if steps and min(steps) >= at_least else []

    return wait_for(found, what=f"step {at_least} in memory")


def checkpoints(directory: Path) -> list[int]:
    """Steps, the newest first; each is read and found good."""
    catalogue = CheckpointCatalogue(open_store(str(directory)))
    listing = catalogue.list()
    for found in listing.found:
        catalogue.verify(found)
    assert not listing.damaged and not listing.unfinished
    return sorted((found.step for found in listing.found), reverse=True)


def decisions(run: Run) -> list[IncidentDecided]:
    return run.place.journal.of(IncidentDecided)


def assert_reloaded(run: Run, times: int) -> None:
    """So often all workers started from memory; no restart was counted, and nothing came from storage."""
    assert len(run.incidents) == times
    chosen = [one for one in decisions(run) if one.strategy is Strategy.RESTART]
    assert all(one.reload > 0 and not one.counted for one in chosen)
    assert run.place.journal.job().incidents.restarts_used == 0 and not run.place.journal.of(CheckpointPublishedRecord)


@pytest.mark.parametrize("model", [pytest.param("ddp", marks=pytest.mark.long), "fsdp"])
def test_all_workers_die_at_once_and_then_in_the_middle_of_a_copy(tmp_path: Path, model: str) -> None:
    """At step 9 both die in a forward; at step 15 one dies while it copies, and the other in the same step. Steps take
    so long that by then there has been room for copies for a while."""
    faults = ["forward:9:0:kill", "forward:9:1:kill", "copy:15:0:kill", "forward:15:1:kill"]
    run = Run(tmp_path).start(model, ranks=2, faults=faults, flags=EVERY_STEP, options=["--pause", "0.1", "--together"])
    wait_for(lambda: run.fired == 4, what="all faults")
    run.hurry().finish()
    assert_same_bits(run, undisturbed(model, ranks=2))
    assert_reloaded(run, 2)
    repeated = {step for step, _ in run.repeated()}
    assert repeated <= {8, 13, 14}, "it went further back than the last whole step"


def test_a_killed_agent_goes_on_from_memory_and_one_that_is_told_to_end_leaves_a_checkpoint(tmp_path: Path) -> None:
    """Three lives of one job: the first is killed with its agent, the second gets a SIGTERM, the third ends well."""
    flags = [*EVERY_STEP, "--rdzv-id", "mine", "--node-id", "here"]
    run = Run(tmp_path).start("fsdp", ranks=2, flags=flags, options=PAUSE)
    run.wait_for_step(6)
    step = min(steps_in_memory(at_least=4))
    run.agents.pop().kill()
    before = {line.pid for line in run.ledger}  # and at once again: its master has not seen yet that it is alone

    run.start("fsdp", ranks=2, flags=flags, options=PAUSE)
    run.wait_for_step(12)
    assert min(line.step for line in run.ledger if line.pid not in before) >= step, "it went further back than memory"
    told = run.agents.pop()
    told.send(signal.SIGTERM)
    assert told.wait() == 128 + signal.SIGTERM
    (left,) = checkpoints(run.place.state_dir / "jobs" / "mine" / "checkpoints")
    assert left - max(line.step for line in run.ledger) in (0, 1), "not the last step"
    assert not list(snapshot_dir().rglob("*")), "what is on storage stays in memory too"
    before = {line.pid for line in run.ledger}

    (run.place.state_dir / "jobs" / "mine" / "journal.sqlite").unlink()  # the job has ended: this is another one
    run.hurry().start("fsdp", ranks=2, flags=flags, options=PAUSE).finish()
    assert min(line.step for line in run.ledger if line.pid not in before) == left
    assert_same_bits(run, undisturbed("fsdp", ranks=2))


def images_of(run: Run) -> list[Path]:
    """The images of a job that are in memory."""
    return sorted(snapshot_dir().glob(f"{directory_name(run.place.journal.job().job_id)}/*/rank-*/image-*"))


def test_the_next_agent_collects_what_a_killed_standalone_job_has_left_and_nothing_else(tmp_path: Path) -> None:
    """Three jobs: one that cannot be started again by its id and one that can are killed with everything they started;
    one goes on. Then a fourth starts."""
    dead, resumable, alive, last = (Run(tmp_path / name) for name in ("dead", "resumable", "alive", "last"))
    dead.start("ddp", ranks=2, steps=LONG, flags=EVERY_STEP, options=PAUSE)
    alive.start("ddp", ranks=1, steps=LONG, flags=[*EVERY_STEP, "--standalone"], options=PAUSE)
    again = [*EVERY_STEP, "--rdzv-id", "mine", "--node-id", "here"]
    resumable.start("ddp", ranks=1, steps=LONG, flags=again, options=PAUSE)
    jobs = (dead, resumable, alive)
    for run in jobs:
        run.wait_for_step(4)
        wait_for(partial(images_of, run), what="images in memory")
    for run in (dead, resumable):
        agent = run.agents.pop()
        victims = [agent.pid, *descendants(agent.pid)]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            kill_all(victims, number)
        agent.wait()
    kept = [images_of(run) for run in jobs]
    assert [len(images) for images in kept] == [4, 2, 2]

    last.start("ddp", ranks=1, steps=5, flags=["--standalone", "--snapshots", "off"]).finish()
    assert [images_of(run) for run in jobs] == [[], kept[1], kept[2]]
    assert last.agents[0].stderr.count("that killed agents had left") == 1

    before = {line.pid for line in resumable.ledger}
    resumable.hurry().start("ddp", ranks=1, steps=LONG, flags=again).finish()
    assert min(line.step for line in resumable.ledger if line.pid not in before) > 2, "it did not find its memory"
    alive.hurry().finish()
    assert not list(snapshot_dir().rglob("*"))


def kill_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@pytest.mark.long
def test_two_nodes_lose_all_workers_and_then_one_of_them_is_lost(tmp_path: Path) -> None:
    """Both go on from memory. Then all die again, with a node, and half of what was in memory: the other goes on alone,
    from the last checkpoint of the two, with the same samples."""
    flags = ["--snapshots", "1", "--checkpoint-every", "10", "--max-restarts", "1"]
    choices: dict[str, Any] = {"features": "loader", "options": [*PAUSE, "--slots", "6"], "steps": LONG}
    run = Run(tmp_path)
    for name in ("a", "b"):
        run.join(name, "ddp", nnodes="1:2", flags=flags, **choices)
    run.wait_until_calm(2)
    before, step = len(run.incidents), min(steps_in_memory(at_least=4))
    kill9(run.pid_of(0), run.pid_of(1))
    run.wait_until_calm(2, closed=before + 1)
    assert not any(one.counted for one in decisions(run)) and len(run.pids[0] | run.pids[1]) >= 4
    assert min(line.step for line in run.ledger if line.view == run.view().number) >= step

    stored = run.place.journal.wait_for(CheckpointPublishedRecord).step
    lost = run.other_than_the_masters()
    last = next(run.pid_of(1 - member.first_rank) for member in run.view().members if member.node_id == lost)
    run.kill_node(lost)
    kill9(last)
    run.wait_until_calm(1, closed=before + 2)
    run.hurry().finish()
    alone = {line.step: float.fromhex(line.loss) for line in run.ledger if line.world_size == 1}
    alone = {step: loss for step, loss in alone.items() if step >= stored}  # node a may have begun before b came
    assert sorted(alone)[-1] == LONG - 1 and len(alone) >= LONG - stored - 40
    reference = undisturbed("ddp", ranks=2, steps=LONG, features="loader", options=["--slots", "6"])
    assert all(abs(loss - reference.loss_sums[step]) < 1e-3 * abs(loss) for step, loss in alone.items())


def test_an_optimizer_of_which_each_rank_has_another_part_is_in_checkpoints_too(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    flags = ["--standalone", "--nproc-per-node", "2", "--checkpoint-dir", str(directory), "--checkpoint-every", "2"]
    agent = Place(tmp_path).start(*flags, str(SCRIPTS / "zero.py"))
    assert agent.wait() == 0, agent.stderr
    assert checkpoints(directory)[0] == 6


def test_checkpoints_come_when_asked_for_a_bug_leaves_one_and_a_damaged_one_is_passed_over(tmp_path: Path) -> None:
    """Every 5 steps, and the last state of a job that fails, which its last words name; the last two stay. The next
    start finds the newest damaged, says so, and goes on from the one before, on all ranks; then its final state."""
    directory = tmp_path / "checkpoints"
    flags = ["--checkpoint-dir", str(directory), "--checkpoint-every", "5", "--checkpoint-keep", "last:2", *EVERY_STEP]
    first = Run(tmp_path / "first")
    bug: dict[str, Any] = {"faults": ["forward:13:0:bug"], "flags": [*flags, "--recovery", "exit"]}
    first.start("ddp", ranks=2, options=["--pause", "0.03"], **bug).finish(1)
    newest, older = checkpoints(directory)
    assert newest in (12, 13) and older == 10
    assert f"the last checkpoint is {directory}/step-{newest}" in first.agents[0].stderr
    assert not list(snapshot_dir().rglob("*"))
    published = [record.step for record in first.place.journal.of(CheckpointPublishedRecord)]
    assert published[:2] == [5, 10]

    found = CheckpointCatalogue(open_store(str(directory))).open(newest)
    part = directory / found.name(found.manifest.parts[1])
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 4
    part.write_bytes(content)
    with pytest.raises(CheckpointError, match=part.name):
        CheckpointCatalogue(open_store(str(directory))).verify(found)
    second = Run(tmp_path / "second").start("ddp", ranks=2, flags=flags).finish()
    assert second.finals == undisturbed("ddp", ranks=2).finals
    assert {step for step, _ in second.losses} == set(range(10, 30))
    said = second.agents[0].stderr + second.agents[0].stdout
    assert f"checkpoint of step {newest} skipped" in said and part.name in said
    assert CheckpointCatalogue(open_store(str(directory))).open(30).step == 30


def test_without_snapshots_there_are_none(tmp_path: Path) -> None:
    faults, flags = ["forward:9:0:kill", "forward:9:1:kill"], ["--snapshots", "off", "--max-restarts", "1"]
    run = Run(tmp_path).start("ddp", ranks=2, faults=faults, flags=flags, options=["--together"]).finish()
    assert run.finals == undisturbed("ddp", ranks=2).finals
    assert run.place.journal.job().incidents.restarts_used == 1 and decisions(run)[0].reload == -1
    assert not snapshot_dir().exists()
