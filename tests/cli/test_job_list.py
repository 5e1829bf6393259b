"""`holdfast jobs`: the list, and what is removed and what is not."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import pytest

from holdfast.cli.job_removal import remove_old_jobs
from holdfast.cli.main import main
from holdfast.journal.sqlite import SCHEMA_VERSION
from holdfast.util.node_status import NodeStatus, status_path, write_status
from support.scenario import JobOnDisk, write_output

DAY_S = 86_400.0


def run(capsys: pytest.CaptureFixture[str], state_dir: Path, *words: str) -> tuple[int, str, str]:
    """Run `holdfast jobs …` as a shell would; return exit code, output and errors."""
    with pytest.raises(SystemExit) as ended:
        main(["jobs", *words, "--state-dir", str(state_dir)])
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def rows(capsys: pytest.CaptureFixture[str], state_dir: Path) -> dict[str, dict[str, object]]:
    code, out, _ = run(capsys, state_dir, "-o", "json")
    assert code == 0
    return {row["job_id"]: row for row in json.loads(out)}


def make_job(state_dir: Path, job_id: str, *, ended: bool = True, age_days: float = 0.0, steps: int = 0) -> JobOnDisk:
    """A job with a journal, a log of three bytes, and no master."""
    logs = state_dir / "logs" / f"a_{job_id}"
    job = JobOnDisk(state_dir, job_id, start=time.time()).join("a", log_dir=str(logs)).start("a")
    write_output(logs, 1, 0, b"out")
    if steps:
        job.settle("a").commit_step("a", steps - 1)
    if ended:
        job.succeed("a")
    job.close()
    make_older(job, age_days)
    return job


def make_older(job: JobOnDisk, age_days: float) -> None:
    at = time.time() - age_days * DAY_S
    for top in (job.path.parent, job.state_dir / "logs" / f"a_{job.job_id}"):
        for path in [*top.rglob("*"), top]:
            os.utime(path, (at, at))


def logs_of(state_dir: Path) -> set[str]:
    return {path.name for path in (state_dir / "logs").iterdir()}


def test_the_list_has_the_newest_first_with_what_each_is_and_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_job(tmp_path, "old", age_days=3)
    make_job(tmp_path, "new", ended=False, steps=1_200)
    running = JobOnDisk(tmp_path, "running", start=time.time())
    code, out, _ = run(capsys, tmp_path)
    lines = [line.split() for line in out.splitlines()]
    assert code == 0 and [line[0] for line in lines[1:]] == ["running", "new", "old"]
    assert "unfinished  1,200" in out and "succeeded" in out
    found = rows(capsys, tmp_path)
    assert {name: row["standing"] for name, row in found.items()} == {
        "running": "running",
        "new": "unfinished",
        "old": "succeeded",
    }
    assert msgspec.convert(found["old"]["size"], dict[str, int])["log_bytes"] >= 3
    running.close()


def test_without_jobs_the_list_says_so_and_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, tmp_path / "nowhere")
    assert (code, out) == (0, "") and "there is no job in" in err and "holdfast run" in err
    assert rows(capsys, tmp_path / "nowhere") == {}


def test_a_long_list_is_cut_and_says_how_to_see_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(5):
        make_job(tmp_path, f"job-{number}", age_days=number)
    out = run(capsys, tmp_path, "-n", "2")[1]
    assert "job-1" in out and "job-2" not in out and "and 3 older ones: `holdfast jobs -n 0` shows all" in out
    assert "job-4" in run(capsys, tmp_path, "-n", "0")[1]


def test_journals_that_cannot_be_read_are_rows_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_job(tmp_path, "sound")
    make_job(tmp_path, "damaged").path.write_bytes(b"no database at all" * 100)
    later = make_job(tmp_path, "later")
    with sqlite3.connect(later.path) as db:
        db.execute("PRAGMA user_version=99")
    changed = make_job(tmp_path, "changed")
    with sqlite3.connect(changed.path) as db:
        db.execute("UPDATE records SET body = '{' WHERE kind = 'job-finished'")
    (tmp_path / "jobs/checkpoints-only/checkpoints").mkdir(parents=True)
    found = rows(capsys, tmp_path)
    assert {name: row["standing"] for name, row in found.items()} == {
        **dict.fromkeys(("damaged", "later", "changed"), "unreadable"),
        "sound": "succeeded",
        "checkpoints-only": "no journal",
    }
    out = run(capsys, tmp_path)[1]
    assert "is damaged: " in out and f"has format 99, this Holdfast reads {SCHEMA_VERSION}" in out


def test_rm_takes_the_journal_and_the_logs_of_one_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_job(tmp_path, "one"), make_job(tmp_path, "two")
    code, out, _ = run(capsys, tmp_path, "rm", "one")
    assert code == 0 and out.startswith("removed job one (")
    assert set(rows(capsys, tmp_path)) == {"two"} and logs_of(tmp_path) == {"a_two"}


def test_rm_takes_a_full_id_only_and_goes_on_after_one_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_job(tmp_path, "train-1"), make_job(tmp_path, "train-2")
    code, out, err = run(capsys, tmp_path, "rm", "train", "ghost", "train-2")
    assert code == 1 and "removed job train-2" in out
    assert "there is no job train; did you mean train-" in err and "there is no job ghost: `holdfast jobs` lists" in err
    assert set(rows(capsys, tmp_path)) == {"train-1"}


def test_rm_leaves_a_running_job_alone_whatever_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = JobOnDisk(tmp_path, "busy", start=time.time())
    assert "job busy is running: stop it first" in run(capsys, tmp_path, "rm", "busy", "--force")[2]
    job.close()
    status = NodeStatus(job_id="busy", node_id="a", agent_pid=os.getpid(), master="here:1")
    write_status(status_path(tmp_path, "busy", "a"), status)
    code, _, err = run(capsys, tmp_path, "rm", "busy", "--force")
    assert code == 1 and "is running" in err, "its master is gone, its agent trains on"
    assert job.path.exists()


def test_rm_of_a_job_that_has_not_ended_must_be_meant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_job(tmp_path, "half", ended=False)
    make_job(tmp_path, "damaged").path.write_bytes(b"no database at all" * 100)
    code, _, err = run(capsys, tmp_path, "rm", "half", "damaged")
    assert code == 1 and "job half has not ended: `holdfast run` with --rdzv-id half goes on with it" in err
    assert "whether job damaged has ended is not known" in err and set(rows(capsys, tmp_path)) == {"half", "damaged"}
    assert run(capsys, tmp_path, "rm", "half", "damaged", "--force")[0] == 0
    assert rows(capsys, tmp_path) == {}


def test_checkpoints_stay_unless_they_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = make_job(tmp_path, "one").path.parent / "checkpoints"
    directory.mkdir()
    (directory / "weights").write_bytes(b"w" * 10_000)
    out = run(capsys, tmp_path, "rm", "one")[1]
    assert f"kept its checkpoints (12.3 kB) in {directory}: --checkpoints removes them too" in out
    assert [path.name for path in directory.parent.iterdir()] == ["checkpoints"] and (directory / "weights").exists()
    assert run(capsys, tmp_path, "rm", "one", "--checkpoints", "--force")[0] == 0
    assert not directory.parent.exists()


def test_prune_takes_what_ended_long_ago_and_says_what_it_leaves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_job(tmp_path, "old", age_days=40), make_job(tmp_path, "new", age_days=10)
    make_job(tmp_path, "half", ended=False, age_days=40)
    before = run(capsys, tmp_path)[1]
    out = run(capsys, tmp_path, "prune", "--older-than", "30d", "--dry-run")[1]
    assert "would remove job old" in out and "would remove 1 job" in out and run(capsys, tmp_path)[1] == before
    out = run(capsys, tmp_path, "prune", "--older-than", "30d")[1]
    assert "removed 1 job" in out and "kept, as they have not ended or cannot be read: half; `holdfast jobs rm" in out
    assert set(rows(capsys, tmp_path)) == {"new", "half"} and logs_of(tmp_path) == {"a_new", "a_half"}
    assert run(capsys, tmp_path, "prune", "--older-than", "30d", "--unfinished")[0] == 0
    assert set(rows(capsys, tmp_path)) == {"new"}


def test_prune_takes_old_logs_of_jobs_that_are_not_here_but_not_those_of_a_living_agent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = time.time() - 40 * DAY_S
    for name in ("b_00000000", "c_00000000"):
        path = write_output(tmp_path / "logs" / name, 1, 0, b"out")
        for one in [*path.iterdir(), path, path.parent, path.parent.parent]:
            os.utime(one, (at, at))
    status = NodeStatus(job_id="elsewhere", node_id="c", agent_pid=os.getpid(), master="there:1")
    write_status(status_path(tmp_path, "elsewhere", "c"), status)
    out = run(capsys, tmp_path, "prune", "--older-than", "30d")[1]
    assert "removed 1 log directory of jobs that are not here" in out and logs_of(tmp_path) == {"c_00000000"}


@pytest.mark.parametrize("age", ["30", "-1d", "1y", "", "1e9d", "nan"])
def test_an_age_that_is_none_is_refused(age: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, tmp_path, "prune", f"--older-than={age}")
    assert (code, err) == (
        2,
        f"holdfast: --older-than {age}: give an age as a number with its unit: 30d, 12h, 2w, 90min\n",
    )


def test_links_are_removed_and_not_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_job(tmp_path, "one")
    elsewhere = tmp_path / "precious"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    (job.path.parent / "link").symlink_to(elsewhere)
    logs = tmp_path / "logs/a_one"
    for path in sorted(logs.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    logs.rmdir()
    logs.symlink_to(elsewhere)
    assert run(capsys, tmp_path, "rm", "one")[0] == 0
    assert (elsewhere / "file").exists() and not job.path.parent.exists()


def test_a_file_system_that_cannot_be_written_is_listed_and_refuses_to_remove(tmp_path: Path) -> None:
    make_job(tmp_path, "one", age_days=40)
    command = f"{sys.executable} -m holdfast jobs"
    script = (
        f"mount --bind {tmp_path} {tmp_path} && mount -o remount,bind,ro {tmp_path} || exit 99\n"
        f"{command} --state-dir {tmp_path} && ! {command} rm one --state-dir {tmp_path}\n"
        f"! {command} prune --older-than 1d --state-dir {tmp_path}"
    )
    done = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, timeout=60)
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip("mounting needs root")
    assert done.returncode == 0, done.stderr
    assert "succeeded" in done.stdout and done.stderr.count("Read-only file system") == 2, done.stderr


def test_without_a_home_the_remedy_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["jobs", "--state-dir", "~no-such-user/x"])
    assert ended.value.code == 2 and "no home directory is known for that user" in capsys.readouterr().err


def test_the_end_of_a_job_removes_old_ones_and_leaves_what_it_must(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_job(tmp_path, "old", age_days=100), make_job(tmp_path, "half", ended=False, age_days=100)
    kept = make_job(tmp_path, "kept").path.parent / "checkpoints"
    kept.mkdir()
    (kept / "weights").write_bytes(b"w")
    for path in kept.parent.iterdir():
        os.utime(path, (time.time() - 100 * DAY_S,) * 2)
    make_job(tmp_path, "new", age_days=80)
    remove_old_jobs(tmp_path, 90 * DAY_S)
    assert set(rows(capsys, tmp_path)) == {"half", "new", "kept"} and (kept / "weights").exists()
    remove_old_jobs(tmp_path / "nowhere", 90 * DAY_S)


def test_logs_among_the_temporary_files_belong_to_jobs_of_the_default_state_directory_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    home.mkdir(), temporary.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.delenv("HOLDFAST_STATE_DIR", raising=False)
    logs = temporary / f"holdfast-{os.geteuid()}" / "logs"
    for name in ("a_mine", "a_orphan"):
        path = write_output(logs / name, 1, 0, b"out")
        for one in [*path.iterdir(), path, path.parent, path.parent.parent]:
            os.utime(one, (1_000, 1_000))
    job = JobOnDisk(home / ".holdfast", "mine").join("a", log_dir=str(logs / "a_mine")).start("a").succeed("a").close()
    other = tmp_path / "other"
    assert run(capsys, other, "prune", "--older-than", "30d")[1].startswith("removed 0 jobs")
    assert {path.name for path in logs.iterdir()} == {"a_mine", "a_orphan"}
    with pytest.raises(SystemExit):
        main(["jobs", "prune", "--older-than", "30d"])
    assert "removed 1 log directory" in capsys.readouterr().out
    assert [path.name for path in logs.iterdir()] == ["a_mine"] and job.path.exists()
    with pytest.raises(SystemExit):
        main(["jobs", "rm", "mine"])
    assert list(logs.iterdir()) == [] and not job.path.exists()
