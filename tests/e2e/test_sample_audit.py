"""What the journal tells of the samples: exact after faults, told apart where it is not, skips included."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.records import (
    DataAnnouncedRecord,
    DataSkippedRecord,
    IncidentClosed,
    JobFinished,
    StepsAudited,
    TermBegan,
    ViewFormed,
)
from holdfast.data.sample_digest import prove_exactly_once
from holdfast.data.step_plan import make_plan
from support.jobs import DEADLINE_S, SCRIPTS, Place, agent_environment, free_port, kill9, wait_for

EXACT = str(SCRIPTS / "exact.py")


def run(place: Place, *words: str, ranks: int = 2, flags: tuple[str, ...] = (), code: int = 0) -> Place:
    agent = place.start("--nproc-per-node", str(ranks), *flags, EXACT, *words)
    assert agent.wait() == code, agent.stderr[-6000:]
    return place


def verify(place: Place, *words: str) -> tuple[int, dict[str, Any]]:
    """Exit code and answer of `holdfast data verify`."""
    command = [sys.executable, "-m", "holdfast", "data", "verify", "--state-dir", str(place.state_dir), "-o", "json"]
    done = subprocess.run(
        [*command, *words],
        env=agent_environment(place.state_dir),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def used(place: Place) -> dict[int, Counter[int]]:
    """By committed step of the job."""
    found: dict[int, Counter[int]] = {}
    for line in (place.work / "used").read_text().splitlines():
        step, _, *samples = map(int, line.split())
        found.setdefault(step, Counter()).update(samples)
    return found


def test_kills_in_the_middle_of_epochs_leave_an_exact_journal(tmp_path: Path) -> None:
    """Dead in the body, and right after a commit, which nobody is told of but by the record it left."""
    hurt, calm = Place(tmp_path / "hurt"), Place(tmp_path / "calm")
    faults = ["--fault", "forward:7:1", "--fault", "between:19:0", "--fault", "forward:33:0"]
    run(hurt, "40", *faults, ranks=3)
    assert len(hurt.journal.of(IncidentClosed)) == 3
    code, answer = verify(hurt)
    assert (code, answer["exact"], answer["findings"]) == (0, True, [])
    (source,) = answer["sources"]
    assert (source["first_step"], source["last_step"], source["unaudited"]) == (0, 39, [])
    assert source["samples"] == sum(12 if (step + 1) % 17 else 11 for step in range(40))
    # Another world, slots, no faults: the same samples, so the very same chain.
    run(calm, "40", "--slots", "4", ranks=2)
    code, answer = verify(calm, "--against", str(hurt.journal.path))
    assert (code, answer["findings"]) == (0, [])
    assert answer["sources"][0]["chain"] == source["chain"]


def test_four_three_two_and_again_four_ranks_use_each_sample_once_an_epoch(tmp_path: Path) -> None:
    """Killed in the middle of an epoch and of a step, with batches fetched ahead by workers: the world shrinks, shrinks
    again in the repeated step, and grows back. What counts is what the dataset handed out, by its own numbers."""
    place, steps = Place(tmp_path), 34
    faults = ["--fault", "middle:5:last", "--fault", "middle:5:last"]
    words = [str(steps), "--slots", "12", "--workers", "1", "--pause", "0.3", "--until-hurry", *faults]
    agent = place.start("--nproc-per-node", "4", "--recovery", "elastic-training,exit", EXACT, *words)

    def views() -> list[int]:
        return [formed.view.world_size for formed in place.journal.of(ViewFormed)]

    wait_for(lambda: views()[:3] == [4, 3, 2] and views()[-1] == 4, what="a world of four again")
    (place.work / "hurry").touch()
    assert agent.wait() == 0, agent.stderr[-6000:]
    plan = make_plan(203, global_batch_size=12, seed=0, slots=12)
    seen = used(place)
    assert seen == {step: Counter(plan.samples(step).tolist()) for step in range(steps)}
    for epoch in (range(17), range(17, 34)):
        assert prove_exactly_once([list(seen[step].elements()) for step in epoch], 203).exactly_once
    assert verify(place)[0] == 0
    reads = Counter(tuple(map(int, line.split())) for line in (place.work / "read").read_text().splitlines())
    assert {sample for _, sample in reads} == set(range(203))
    assert len({pid for pid, _ in reads}) >= 6, "four, and two that came later"
    assert max(reads.values()) <= 3, "nobody read anything twice an epoch: two, and some of the third ahead"


def test_a_slow_rank_gets_fewer_samples_of_each_step_and_every_sample_is_still_used_once(tmp_path: Path) -> None:
    place, steps = Place(tmp_path), 300
    flags = ["--straggler-action", "shift", "--straggler-interval", "0.5"]
    words = [str(steps), "--slots", "12", "--sample", "0.004:1:3"]
    agent = place.start("--nproc-per-node", "2", *flags, EXACT, *words)
    wait_for(lambda: place.journal.of(IncidentClosed), what="a view with other shares")
    (place.work / "hurry").touch()
    assert agent.wait() == 0, agent.stderr[-6000:]
    views = [formed.view for formed in place.journal.of(ViewFormed)]
    assert not views[0].weights and views[1].keeps_workers and views[1].planned
    assert views[1].weights[0] == 1.0 > views[1].weights[1]
    lines = [line.split() for line in (place.work / "used").read_text().splitlines()]
    shares = {(int(step), int(rank)): len(samples) for step, rank, *samples in lines}
    changed_at = place.journal.of(IncidentClosed)[0].step
    assert (shares[0, 0], shares[0, 1]) == (6, 6)
    assert shares[changed_at, 1] < 6 < shares[changed_at, 0]
    plan = make_plan(203, global_batch_size=12, seed=0, slots=12)
    assert used(place) == {step: Counter(plan.samples(step).tolist()) for step in range(steps)}
    assert verify(place)[0] == 0
    readers = {line.split()[0] for line in (place.work / "read").read_text().splitlines()}
    assert len(readers) == 2, "nobody was started anew"


@pytest.mark.long
def test_other_samples_are_told_apart(tmp_path: Path) -> None:
    one, other, wrong = Place(tmp_path / "one"), Place(tmp_path / "other"), Place(tmp_path / "wrong")
    run(one, "12")
    run(other, "12", "--seed", "5")
    assert verify(other)[0] == 0, "by its own plan it is exact"
    code, answer = verify(one, "--against", str(other.journal.path))
    assert code == 1
    assert [(f["kind"], f["first_step"]) for f in answer["findings"]] == [("differs", 0)]
    # A rank that leaves a batch out.
    run(wrong, "12", "--slots", "6", "--wrong", "8")
    code, answer = verify(wrong)
    assert code == 1
    (finding,) = answer["findings"]
    assert finding["kind"] == "differs" and finding["first_step"] <= 8 <= finding["last_step"]


def test_a_skipped_stretch_is_in_the_journal_and_survives_the_one_who_asked(tmp_path: Path) -> None:
    place = Place(tmp_path)
    run(place, "20", "--skip", "6:9:14", "--fault", "forward:8:0", "--fault", "forward:11:1")
    (skipped,) = place.journal.of(DataSkippedRecord)
    assert (skipped.name, skipped.first_step, skipped.end_step, skipped.why) == ("data", 9, 14, "the loss went up")
    code, answer = verify(place)
    assert (code, answer["findings"]) == (0, [])
    assert answer["sources"][0]["skipped"] == [[9, 13]]
    assert answer["sources"][0]["last_step"] == 24
    # As an undisturbed run of 25 steps without the five.
    whole = Place(tmp_path / "whole")
    run(whole, "25")
    expected = [samples for step, samples in sorted(used(whole).items()) if not 9 <= step < 14]
    seen = used(place)
    assert [seen[step] for step in sorted(seen) if step not in (8, 11)] == [
        samples for step, samples in enumerate(expected) if step not in (8, 11)
    ]
    code, answer = verify(place, "--against", str(whole.journal.path))
    assert code == 1 and answer["findings"][0]["first_step"] == 9


def test_a_skip_on_one_rank_only_is_refused(tmp_path: Path) -> None:
    place = Place(tmp_path)
    run(place, "20", "--skip", "6:9:14", "--skip-rank", "1", flags=("--max-restarts", "0"), code=1)
    cause = place.journal.of(JobFinished)[0].cause
    assert cause is not None and "skip different ones" in f"{cause.message}{cause.traceback}"


def test_a_master_that_is_killed_forgets_no_digest(tmp_path: Path) -> None:
    place = Place(tmp_path)
    agent = place.start("--nproc-per-node", "2", EXACT, "60", "--pause", "0.05", "--until-hurry")
    place.journal.wait_for(StepsAudited)
    lines = len((place.work / "used").read_text().splitlines())
    wait_for(lambda: len((place.work / "used").read_text().splitlines()) > lines + 12, what="some more steps")
    kill9(agent.master_pid())
    place.journal.wait_for(TermBegan, lambda began: began.term == 2)
    (place.work / "hurry").touch()
    assert agent.wait() == 0, agent.stderr[-4000:]
    code, answer = verify(place)
    assert (code, answer["findings"], answer["sources"][0]["last_step"]) == (0, [], 59)


def test_a_restart_from_the_beginning_is_a_chain_of_its_own(tmp_path: Path) -> None:
    place = Place(tmp_path)
    flags = ("--max-restarts", "2", "--snapshots", "off")
    run(place, "15", "--fault", "forward:9:0", "--fault", "forward:9:1", flags=flags)
    code, answer = verify(place)
    assert (code, answer["findings"]) == (0, [])
    assert [(s["first_step"], s["last_step"]) for s in answer["sources"]] == [(0, 8), (0, 14)]
    assert len(place.journal.of(DataAnnouncedRecord)) == 2


@pytest.mark.long
def test_another_dataset_is_refused_by_a_checkpoint_and_the_same_goes_on(tmp_path: Path) -> None:
    first, other, second = Place(tmp_path / "first"), Place(tmp_path / "other"), Place(tmp_path / "second")
    flags = ("--recovery", "dump,exit", "--max-restarts", "0", "--checkpoint-dir", str(tmp_path / "checkpoints"))
    run(first, "15", "--skip", "3:5:8", "--fault", "forward:9:1", flags=flags, code=7)
    assert verify(first)[0] == 0
    run(other, "15", "--size", "204", flags=flags, code=1)
    cause = other.journal.finished().cause
    assert cause is not None
    assert "the dataset's number of samples is 204 here and was 203 when the state was saved" in cause.message
    assert verify(other)[0] == 1, "nothing was handed out"
    run(second, "15", flags=flags)
    code, answer = verify(second)
    assert (code, answer["findings"]) == (0, [])
    assert (answer["sources"][0]["first_step"], answer["sources"][0]["last_step"]) == (12, 17)


@pytest.mark.long
def test_a_node_lost_with_its_memory_leaves_nothing_but_named_gaps(tmp_path: Path) -> None:
    place, port = Place(tmp_path), free_port()
    meeting = [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        "--rdzv-id",
        "fleet",
        "--settle",
        "0.1",
    ]
    nodes = {
        name: place.start(
            "--node-id", name, "--nnodes", "1:2", "--nproc-per-node", "1", *meeting, EXACT, "80", "--pause", "0.02"
        )
        for name in ("a", "b")
    }
    wait_for(lambda: (place.work / "used").exists() and len(used(place)) > 25, what="some steps")
    victim = next(agent for agent in nodes.values() if not agent.master_pid())
    kill9(victim.pid)  # its workers die with it
    survivor = next(agent for agent in nodes.values() if agent is not victim)
    assert survivor.wait() == 0, survivor.stderr[-4000:]
    code, answer = verify(place)
    assert {finding["kind"] for finding in answer["findings"]} <= {"unaudited"}
    assert code == (1 if answer["findings"] else 0)
    (source,) = answer["sources"]
    assert source["last_step"] == 79
    assert sum(last - first + 1 for first, last in source["unaudited"]) < 60
