"""Streamed shards in real jobs: killed in the middle of a shard, shrunk and grown, each record counts once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.records import ShardFailed, ShardQuarantined, ShardsLeased
from support.jobs import DEADLINE_S, SCRIPTS, agent_environment
from support.references import made_once
from support.sessions import Run

STREAMED = str(SCRIPTS / "streamed.py")
SIZES = [90, 31, 64, 3, 77, 50, 12, 41, 88, 25, 60, 59]
RECORDS = sum(SIZES)
STEPS = 90
"""Of 12 records: more than an epoch, less than two."""


class StreamRun(Run):
    """A job of streamed.py."""

    def begin(self, ranks: int, *options: str, flags: tuple[str, ...] = ()) -> StreamRun:
        """With new shards."""
        directory = self.place.work / "shards"
        directory.mkdir()
        for number, size in enumerate(SIZES):
            lines = [json.dumps([number, record]) + "\n" for record in range(size)]
            (directory / f"{number:03}.jsonl").write_text("".join(lines))
        return self.launch(ranks, *options, flags=flags)

    def launch(self, ranks: int, *options: str, flags: tuple[str, ...]) -> StreamRun:
        """With those there are."""
        words = ("--nproc-per-node", str(ranks), *flags, STREAMED, str(STEPS), *options)
        self.agents.append(self.place.start(*words))
        return self


def status(run: Run, *flags: str) -> str:
    command = [sys.executable, "-m", "holdfast", "status", *flags, "--state-dir", str(run.place.state_dir)]
    environment = agent_environment(run.place.state_dir)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    return done.stdout


def assert_exactly_once(run: Run, lost: range = range(0)) -> None:
    """All steps full, and what was trained on is each record once an epoch: the first whole, the second and for some
    slots the third begun."""
    steps = run.trained
    assert sorted(steps) == list(range(STEPS))
    assert {len(records) for records in steps.values()} == {12}
    counts = Counter(record for records in steps.values() for record in records)
    every = {number * 1000 + record for number, size in enumerate(SIZES) for record in range(size)}
    assert set(counts) == every - set(lost)
    assert set(counts.values()) <= {1, 2, 3}
    assert not run.repeated()


def leases(run: Run) -> list[Any]:
    return [lease for record in run.place.journal.of(ShardsLeased) for lease in record.leases]


@pytest.fixture
def undisturbed(leak_guard: str) -> dict[int, list[int]]:
    """What each step is made of when nothing happens. Run once."""

    def make(directory: Path) -> None:
        assert_exactly_once(StreamRun(directory).begin(3).finish())

    return StreamRun(made_once("streams", make)).trained


def test_kills_in_the_middle_of_shards_change_nothing(tmp_path: Path, undisturbed: dict[int, list[int]]) -> None:
    faults = ["read:7:1", "forward:20:0", "read:33:2", "forward:48:1", "read:70:0"]
    words = ["--threads", "0", *(word for fault in faults for word in ("--fault", fault))]
    run = StreamRun(tmp_path).begin(3, *words, flags=("--spares", "1")).finish()
    assert run.fired == len(faults)
    assert run.trained == undisturbed
    numbers = [lease.number for lease in leases(run)]
    assert sorted(set(numbers)) == list(range(max(numbers) + 1)) and len(set(numbers)) == len(numbers)
    first_epoch = [lease.shard for lease in leases(run) if lease.epoch == 0]
    assert sorted(first_epoch) == sorted(str(path) for path in (run.place.work / "shards").iterdir())


def test_slots_move_when_the_world_shrinks_and_grows(tmp_path: Path, undisturbed: dict[int, list[int]]) -> None:
    words = ["--threads", "0", "--fault", "read:5:1", "--fault", "forward:40:2", "--pause", "0.03", "--until-hurry"]
    run = StreamRun(tmp_path).begin(3, *words, flags=("--recovery", "elastic-training,exit"))
    for closed in (2, 4):
        run.wait_until_calm(3, closed=closed)
    run.hurry().finish()
    assert [view.world_size for view in run.views()] == [3, 2, 3, 2, 3]
    assert run.trained == undisturbed


@pytest.mark.long
def test_a_sharded_model_s_stream_goes_back_with_it(tmp_path: Path, undisturbed: dict[int, list[int]]) -> None:
    words = ["--sharded", "--threads", "0", "--fault", "read:9:1", "--fault", "forward:30:0", "--fault", "read:50:2"]
    run = StreamRun(tmp_path).begin(3, *words).finish()
    assert run.fired == 3
    assert run.trained == undisturbed


@pytest.mark.long
def test_a_checkpoint_has_the_leases_in_it(tmp_path: Path, undisturbed: dict[int, list[int]]) -> None:
    """Another job goes on where one was cut off in the middle of its shards, on fewer ranks."""
    kept = ("--checkpoint-dir", str(tmp_path / "checkpoints"))
    first = StreamRun(tmp_path / "job")
    first.begin(3, "--fault", "forward:37:2", flags=("--recovery", "dump,exit", *kept)).finish(7)
    begun = first.trained
    second = StreamRun(tmp_path / "job")
    second.launch(2, flags=kept).finish()
    assert second.trained == undisturbed
    assert max(begun) < 37


def test_a_spoilt_shard_is_in_quarantine_in_the_journal_and_nothing_else_is_lost(tmp_path: Path) -> None:
    run = StreamRun(tmp_path).begin(2, "--spoilt", "4:30", "--threads", "0", "--fault", "read:12:1").finish()
    spoilt = str(run.place.work / "shards" / "004.jsonl")
    quarantined = run.place.journal.of(ShardQuarantined)[0].problem
    assert (quarantined.shard, quarantined.cursor) == (spoilt, 30)
    assert quarantined.why == "ValueError: record 30 is spoilt"
    assert len(run.place.journal.of(ShardFailed)) >= 2
    assert_exactly_once(run, lost=range(4030, 4077))
    (stream,) = json.loads(status(run, "-o", "json"))["streams"]
    assert stream["quarantined"][0]["shard"] == spoilt
    assert f"{spoilt} could not be read from record 30 on in epoch {quarantined.epoch}" in status(run)
