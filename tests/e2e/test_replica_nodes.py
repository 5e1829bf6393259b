"""A node is lost with all that it remembered, and the other's workers too: what the other keeps for it is enough."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from holdfast import exit_codes
from holdfast.core.records import IncidentDecided
from holdfast.core.strategies import Strategy
from holdfast.snapshots.slot_file import SlotPage
from holdfast.storage.checkpoint_catalogue import CheckpointCatalogue
from holdfast.storage.stores import open_store
from support.jobs import kill9, snapshot_dir, wait_for
from support.sessions import Run, assert_same_bits, undisturbed

LONG = 200


def safe_steps() -> list[int]:
    """Return, by rank, the newest complete step, its copy on the other node included."""
    pages = [SlotPage.open(path.parent) for path in snapshot_dir().glob("*/*/rank-*/control")]
    return [page.get("complete") for page in pages if page.get("partners")]


@pytest.mark.parametrize("how", [["--replicas", "1"], ["--replicas", "0", "--replica-parity", "2"]], ids=str)
def test_a_lost_node_comes_back_from_the_memory_of_another(tmp_path: Path, how: list[str]) -> None:
    flags = ["--spare-nodes", "1", *how, "--snapshots", "1"]
    run = Run(tmp_path)
    for name in ("a", "b", "spare"):
        run.join(name, "fsdp", nnodes="2", steps=LONG, flags=flags, options=["--pause", "0.05", "--until-hurry"])
    run.wait_until_calm(2)
    run.wait_for_nodes("a", "b", "spare")
    lost = run.other_than_the_masters()
    (stays,) = {member.node_id for member in run.view().members} - {lost}
    wait_for(lambda: len(steps := safe_steps()) == 2 and min(steps) > 5, what="copies on the other node")
    survivors = {m.node_id: m.first_rank for m in run.view().members}
    worker = run.pid_of(survivors[stays])
    run.kill_node(lost)
    kill9(worker)
    shutil.rmtree(next(snapshot_dir().glob(f"*/{lost}")))  # as its memory would be
    run.wait_until_calm(2)
    run.hurry().finish()
    assert_same_bits(run, undisturbed("fsdp", ranks=2, steps=LONG), missing=2)
    chosen = [record for record in run.place.journal.of(IncidentDecided) if record.strategy is Strategy.RESTART]
    assert len(chosen) == 1 and chosen[0].reload > 5 and not chosen[0].counted


def test_every_checkpoint_that_is_due_is_made_while_snapshots_are_copied(tmp_path: Path) -> None:
    flags = ["--replicas", "1", "--snapshots", "1", "--checkpoint-every", "10", "--checkpoint-keep", "all"]
    flags += ["--checkpoint-dir", str(directory := tmp_path / "checkpoints")]
    run = Run(tmp_path)
    for name in ("a", "b"):
        run.join(name, "fsdp", nnodes="2", steps=40, flags=flags, options=["--pause", "0.05"])
    run.finish()
    found = CheckpointCatalogue(open_store(str(directory))).list()
    steps = sorted(one.step for one in found.found)
    assert [step // 10 for step in steps] == [1, 2, 3, 4] and steps[-1] == 40, "one without a free slot is a step late"
    assert not found.damaged


def test_a_job_that_ends_for_want_of_a_node_leaves_what_is_held_of_it_on_storage(tmp_path: Path) -> None:
    flags = ["--replicas", "1", "--snapshots", "1", "--checkpoint-dir", str(directory := tmp_path / "checkpoints")]
    flags += ["--rdzv-conf", "join_timeout=30", "--silence-timeout", "2", "--heartbeat-interval", "0.5"]
    run = Run(tmp_path)
    for name in ("a", "b"):
        run.join(name, "fsdp", nnodes="2", steps=LONG, flags=flags, options=["--pause", "0.05"])
    run.wait_until_calm(2)
    lost = run.other_than_the_masters()
    (first_rank,) = (m.first_rank for m in run.view().members if m.node_id != lost)
    wait_for(lambda: len(steps := safe_steps()) == 2 and min(steps) > 5, what="copies on the other node")
    worker = run.pid_of(first_rank)
    run.kill_node(lost)
    kill9(worker)
    shutil.rmtree(next(snapshot_dir().glob(f"*/{lost}")))  # as its memory would be
    run.finish(code=exit_codes.NODES_MISSING)
    catalogue = CheckpointCatalogue(open_store(str(directory)))
    (found,) = catalogue.list().found
    catalogue.verify(found)
    assert found.step > 5 and found.about.parts == 2
    assert not list(snapshot_dir().glob("*/*")), "what is on storage is not kept in memory"
