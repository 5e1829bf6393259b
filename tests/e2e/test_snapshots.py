"""State that outlives its processes: in the agents' memory, and on storage, without a worker's help."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.jobs import kill9, snapshot_dir, wait_for, wait_until_nothing_left
from e2e.sessions import Run, assert_same_bits, undisturbed
from holdfast.core.ladder import Strategy
from holdfast.core.records import CheckpointPublished, IncidentDecided
from holdfast.errors import CheckpointError
from holdfast.storage.catalogue import Catalogue
from holdfast.storage.stores import open_store
from holdfast.wire.slots import Seat

EVERY_STEP = ["--snapshots", "1"]
PAUSE = ["--pause", "0.03"]
LONG = 200
"""Steps of a job that is hurt from outside: it pauses after each until the test lets it hurry."""


def steps_in_memory(*, at_least: int) -> list[int]:
    """The last whole step of each seat, once all of them have one that is so late."""

    def found() -> list[int]:
        seats = [Seat.open(path.parent) for path in snapshot_dir().glob("*/*/seat-*/control")]
        steps = [seat.get("whole") for seat in seats]
        return steps if steps and min(steps) >= at_least else []

    return wait_for(found, what=f"step {at_least} in memory")


def checkpoints(directory: Path) -> list[int]:
    """Steps, the newest first; each is read and found good."""
    catalogue = Catalogue(open_store(str(directory)))
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
    assert run.place.journal.job().restarts_used == 0 and not run.place.journal.of(CheckpointPublished)


@pytest.mark.parametrize("model", ["ddp", "fsdp"])
def test_all_workers_die_at_once_and_then_in_the_middle_of_a_copy(tmp_path: Path, model: str) -> None:
    """At step 9 both die in a forward; at step 18 one dies while it copies, and the other in the same step."""
    faults = ["forward:9:0:kill", "forward:9:1:kill", "copy:18:0:kill", "forward:18:1:kill"]
    run = Run(tmp_path).start(model, ranks=2, faults=faults, flags=EVERY_STEP).finish()
    assert run.fired == 4
    assert_same_bits(run, undisturbed(model, ranks=2))
    assert_reloaded(run, 2)
    repeated = {step for step, _ in run.repeated()}
    assert repeated <= {8, 16, 17}, "it went further back than the last whole step"


def test_a_killed_agent_started_again_goes_on_from_memory(tmp_path: Path) -> None:
    flags = [*EVERY_STEP, "--rdzv-id", "mine", "--node-id", "here"]
    run = Run(tmp_path).start("fsdp", ranks=2, flags=flags, options=PAUSE)
    run.wait_for_step(10)
    step = min(steps_in_memory(at_least=8))
    run.agents.pop().kill()
    wait_until_nothing_left()  # its master keeps the journal until it sees that nobody comes back
    run.hurry().start("fsdp", ranks=2, flags=flags, options=PAUSE).finish()
    assert_same_bits(run, undisturbed("fsdp", ranks=2))
    first = {line.pid: line.step for line in reversed(run.ledger)}
    assert sorted(first.values())[-1] >= step, "the second life began before what was in memory"


def test_two_nodes_lose_all_workers_and_then_one_of_them_is_lost(tmp_path: Path) -> None:
    """Both go on from memory. Then all die again, with a node, and half of what was in memory: the other goes on alone,
    from the last checkpoint of the two, with the same samples."""
    flags = ["--snapshots", "1", "--checkpoint-every", "10", "--max-restarts", "1"]
    choices = {"features": "loader", "options": [*PAUSE, "--slots", "6"], "steps": LONG}
    run = Run(tmp_path)
    for name in ("a", "b"):
        run.join(name, "ddp", nnodes="1:2", flags=flags, **choices)
    run.wait_until_calm(2)
    before, step = len(run.incidents), min(steps_in_memory(at_least=4))
    kill9(run.pid_of(0), run.pid_of(1))
    run.wait_until_calm(2, closed=before + 1)
    assert not any(one.counted for one in decisions(run)) and len(run.pids[0] | run.pids[1]) >= 4
    assert min(line.step for line in run.ledger if line.view == run.view().number) >= step

    stored = run.place.journal.wait_for(CheckpointPublished).step
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


def test_what_sigterm_leaves_is_where_the_next_start_goes_on(tmp_path: Path) -> None:
    flags = [*EVERY_STEP, "--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "never"]
    first = Run(tmp_path / "first").start("fsdp", ranks=2, flags=flags, options=PAUSE)
    first.wait_for_step(10)
    first.agents[0].send(15)
    assert first.agents[0].wait() == 128 + 15
    (left,) = checkpoints(tmp_path / "checkpoints")
    last = max(line.step for line in first.ledger)
    assert last <= left <= last + 1, "not the last step"
    second = Run(tmp_path / "second").start("fsdp", ranks=2, flags=flags).finish()
    reference = undisturbed("fsdp", ranks=2)
    assert second.finals == reference.finals and min(step for step, _ in second.losses) == left
    assert first.losses | second.losses == reference.losses


def test_a_bug_leaves_a_checkpoint_and_its_last_words_name_it(tmp_path: Path) -> None:
    flags = [*EVERY_STEP, "--recovery", "exit"]
    run = Run(tmp_path).start("ddp", ranks=2, faults=["forward:9:0:bug"], flags=flags)
    run.finish(1)
    (directory,) = run.place.state_dir.glob("jobs/*/checkpoints")
    (left,) = checkpoints(directory)
    assert left in (8, 9)
    assert f"the last checkpoint is {directory}/step-{left}" in run.agents[0].stderr
    assert not list(snapshot_dir().rglob("image-*"))


def test_checkpoints_come_when_asked_for_and_a_damaged_one_is_passed_over(tmp_path: Path) -> None:
    """Every 5 steps, and the final state; the last two stay. The next start finds the newest damaged, says so, and goes
    on from the one before, on all ranks."""
    directory = tmp_path / "checkpoints"
    flags = ["--checkpoint-dir", str(directory), "--checkpoint-every", "5", "--checkpoint-keep", "last:2"]
    first = Run(tmp_path / "first").start("ddp", ranks=2, steps=14, flags=flags, options=PAUSE).finish()
    assert checkpoints(directory) == [14, 10]
    published = [record.step for record in first.place.journal.of(CheckpointPublished)]
    assert published[-2:] == [10, 14]
    found = Catalogue(open_store(str(directory))).open(14)
    part = directory / found.name(found.manifest.parts[1])
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 4
    part.write_bytes(content)
    with pytest.raises(CheckpointError, match=part.name):
        Catalogue(open_store(str(directory))).verify(found)
    second = Run(tmp_path / "second").start("ddp", ranks=2, flags=flags).finish()
    assert second.finals == undisturbed("ddp", ranks=2).finals
    assert {step for step, _ in second.losses} == set(range(10, 30))
    said = second.agents[0].stderr + second.agents[0].stdout
    assert "checkpoint of step 14 passed over" in said and part.name in said


def test_without_snapshots_there_are_none(tmp_path: Path) -> None:
    faults, flags = ["forward:9:0:kill", "forward:9:1:kill"], ["--snapshots", "off", "--max-restarts", "1"]
    run = Run(tmp_path).start("ddp", ranks=2, faults=faults, flags=flags).finish()
    assert run.finals == undisturbed("ddp", ranks=2).finals
    assert run.place.journal.job().restarts_used == 1 and decisions(run)[0].reload == -1
    assert not snapshot_dir().exists()
