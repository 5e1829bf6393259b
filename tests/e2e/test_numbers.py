"""Numbers that go wrong while training: repeated once, then by the policy; and bits that flip unseen."""

from __future__ import annotations

from pathlib import Path

from holdfast.core.records import AnomalyFound, WorkerFailedRecord
from support.jobs import SCRIPTS, Place

NUMBERS = str(SCRIPTS / "odd_numbers.py")


def lines(job: Place) -> list[list[str]]:
    return [line.split() for line in (job.work / "steps").read_text().splitlines()]


def test_a_bad_number_is_repeated_then_skipped_and_a_flipped_bit_is_found_where_it_is(tmp_path: Path) -> None:
    job = Place(tmp_path)
    agent = job.start("--standalone", "--nproc-per-node", "3", NUMBERS, "skip", "20")
    assert agent.wait() == 0, agent.stderr[-3000:]
    odd = [(o.step, o.rank, o.outcome) for o in job.journal.of(AnomalyFound)]
    assert (4, 1, "repeated") in odd and (4, 1, "passed") in odd, "it was not so the second time"
    seventh = [(rank, outcome) for step, rank, outcome in odd if step == 7]
    assert {outcome for _, outcome in seventh} == {"repeated", "skipped"}
    lost = [(record.failure.rank, record.failure.fault) for record in job.journal.of(WorkerFailedRecord)]
    assert [(rank, fault.name) for rank, fault in lost if fault] == [(1, "silent-corruption")]
    digests = {int(step): {line[3] for line in lines(job) if line[0] == step} for step, *_ in lines(job)}
    assert sorted(digests) == list(range(20)) and all(len(found) == 1 for found in digests.values()), "replicas agree"
    assert digests[7] == digests[6] != digests[8], "the step was committed without its update"


def test_stop_leaves_a_checkpoint_of_the_last_good_step(tmp_path: Path) -> None:
    job = Place(tmp_path)
    agent = job.start("--standalone", "--nproc-per-node", "2", "--max-restarts", "3", NUMBERS, "stop", "20")
    assert agent.wait() == 7, agent.stderr[-3000:]
    end = job.journal.finished()
    assert end.cause is not None and end.cause.fault is not None and end.cause.fault.name == "numeric-fault"
    assert "in step 7 the loss is inf" in end.cause.message
    assert max(int(line[0]) for line in lines(job)) == 6


def test_what_may_be_wrong_is_neither_kept_nor_started_from_when_two_replicas_differ(tmp_path: Path) -> None:
    job = Place(tmp_path)

    def run(name: str) -> tuple[int, dict[int, set[str]]]:
        """Its exit code, and the digests of each step."""
        (job.work / "steps").unlink(missing_ok=True)
        kept = ("--snapshots", "1", "--checkpoint-dir", str(tmp_path / name))
        agent = job.start("--standalone", "--nproc-per-node", "2", *kept, NUMBERS, "skip", "20", "12", "0")
        code = agent.wait()
        return code, {int(step): {line[3] for line in lines(job) if line[0] == step} for step, *_ in lines(job)}

    code, first = run("flipped")
    cause = job.journal.finished().cause
    assert code == 1 and cause is not None and cause.fault is not None and cause.fault.name == "replicas-differ"
    code, again = run("flipped")
    assert code == 0
    code, undisturbed = run("undisturbed")
    assert code == 0 and all(undisturbed[step] == again[step] for step in again)
    assert len(first[12]) == 2 and min(again) <= 12 and max(again) == 19, "it went on from before the fault"
