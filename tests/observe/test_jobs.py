"""Which job is meant."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.errors import UsageError
from holdfast.journal import SqliteJournal
from holdfast.observe.jobs import find_journal, is_locked_here
from support.scenario import JobOnDisk


def made(state_dir: Path, *job_ids: str) -> None:
    for job_id in job_ids:
        JobOnDisk(state_dir, job_id).close()


def age(job: JobOnDisk, at: float) -> None:
    """As if every file of the job had been written then."""
    for file in job.path.parent.iterdir():
        os.utime(file, (at, at))


def refusal(state_dir: Path, wanted: str | None) -> str:
    with pytest.raises(UsageError) as raised:
        find_journal(state_dir, wanted)
    return str(raised.value)


def test_without_any_job_the_sentence_says_where_was_looked_and_what_to_do(tmp_path: Path) -> None:
    sentence = refusal(tmp_path, None)
    assert f"there is no job in {tmp_path}" in sentence
    assert "--state-dir" in sentence and "--endpoint" in sentence


def test_the_newest_job_is_the_one_whose_journal_was_written_last(tmp_path: Path) -> None:
    old, new = JobOnDisk(tmp_path, "old").close(), JobOnDisk(tmp_path, "new").close()
    age(old, 1_000), age(new, 2_000)
    assert find_journal(tmp_path, None) == new.path
    age(old, 3_000)
    assert find_journal(tmp_path, None) == old.path


def test_a_running_job_is_newer_though_only_its_write_ahead_log_grows(tmp_path: Path) -> None:
    running, ended = JobOnDisk(tmp_path, "running"), JobOnDisk(tmp_path, "ended").close()
    age(running, 1_000), age(ended, 2_000)
    before = running.path.stat().st_mtime
    running.join("a")
    assert running.path.stat().st_mtime == before, "the record went into the main file: the test shows nothing"
    assert find_journal(tmp_path, None) == running.path
    running.close()


def test_looking_at_an_old_job_does_not_make_it_the_newest(tmp_path: Path) -> None:
    old, new = JobOnDisk(tmp_path, "old").close(), JobOnDisk(tmp_path, "new").close()
    age(old, 1_000), age(new, 2_000)
    assert old.entries()
    assert find_journal(tmp_path, None) == new.path


def test_a_job_is_found_by_its_id_and_by_the_beginning_of_it(tmp_path: Path) -> None:
    made(tmp_path, "train-1", "evaluate")
    assert find_journal(tmp_path, "train-1").parent.name == "train-1"
    assert find_journal(tmp_path, "ev").parent.name == "evaluate"


def test_a_whole_id_wins_over_being_the_beginning_of_another(tmp_path: Path) -> None:
    made(tmp_path, "train", "train-1")
    assert find_journal(tmp_path, "train").parent.name == "train"


def test_an_id_with_a_slash_is_found_where_the_master_keeps_it(tmp_path: Path) -> None:
    made(tmp_path, "team_train")
    assert find_journal(tmp_path, "team/train").parent.name == "team_train"


def test_an_ambiguous_beginning_names_the_candidates(tmp_path: Path) -> None:
    made(tmp_path, "train-1", "train-2", "evaluate")
    sentence = refusal(tmp_path, "train")
    assert "train-1" in sentence and "train-2" in sentence and "evaluate" not in sentence
    assert "give more of the id" in sentence


def test_an_unknown_id_names_the_jobs_there_are_the_newest_first_but_not_hundreds(tmp_path: Path) -> None:
    for number in range(12):
        age(JobOnDisk(tmp_path, f"job-{number:02}").close(), 1_000 + number)
    sentence = refusal(tmp_path, "other")
    assert "no job other" in sentence and "job-11, job-10" in sentence
    assert "job-01" not in sentence and "and 2 more" in sentence


def test_a_journal_that_was_put_aside_is_named_by_its_path(tmp_path: Path) -> None:
    job = JobOnDisk(tmp_path, "train").close()
    aside = job.path.rename(job.path.with_name("journal-20260101-1.sqlite"))
    assert find_journal(tmp_path, str(aside)) == aside
    assert "there is no journal" in refusal(tmp_path, str(job.path))


def test_a_master_is_seen_by_the_lock_it_holds_and_the_look_does_not_disturb_the_next_one(tmp_path: Path) -> None:
    job = JobOnDisk(tmp_path)
    assert is_locked_here(job.path)
    job.close()
    assert not is_locked_here(job.path)
    SqliteJournal(job.path).close()


def test_a_journal_without_its_lock_file_is_held_by_nobody(tmp_path: Path) -> None:
    job = JobOnDisk(tmp_path).close()
    job.path.with_suffix(".lock").unlink()
    assert not is_locked_here(job.path)
