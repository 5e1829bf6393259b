"""The flags about snapshots and checkpoints: what they give, and what is refused with its sentence."""

from __future__ import annotations

import pwd
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.capabilities import capabilities, check_checkpoint_dir, checkpoint_dir, snapshot_settings
from holdfast.cli.run_flags import RunOptions, parse_run
from holdfast.errors import UsageError
from holdfast.storage.stores import open_store
from holdfast.wire.worker_messages import SnapshotSettings


def parsed(words: str, **environ: str) -> RunOptions:
    return parse_run([*shlex.split(words), "train.py"], {"HOME": "/home/ada", **environ})


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--snapshots auto", "snapshots", 0),
        ("--snapshots off", "snapshots", -1),
        ("--snapshots 1", "snapshots", 1),
        ("--snapshots 250", "snapshots", 250),
        ("--snapshot-dir ~/memory", "snapshot_dir", "/home/ada/memory"),
        ("--checkpoint-every 500", "checkpoint_every", (500, 0.0)),
        ("--checkpoint-every 90s", "checkpoint_every", (0, 90.0)),
        ("--checkpoint-every 1.5m", "checkpoint_every", (0, 90.0)),
        ("--checkpoint-every 2h", "checkpoint_every", (0, 7_200.0)),
        ("--checkpoint-every never", "checkpoint_every", (0, 0.0)),
        ("--checkpoint-every ''", "checkpoint_every", None),
        ("--checkpoint-keep all", "checkpoint_keep", "all"),
        ("--checkpoint-keep last:2,every:1000,best:loss:min:2", "checkpoint_keep", "last:2,every:1000,best:loss:min:2"),
        ("--checkpoint-dir s3://bucket/runs/{job_id}", "checkpoint_dir", "s3://bucket/runs/{job_id}"),
    ],
)
def test_values(words: str, field: str, value: Any) -> None:
    assert getattr(parsed(words), field) == value


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--snapshots 0", "--snapshots 0: give auto, off, or a number of steps like 10"),
        ("--snapshots -3", "--snapshots -3: give auto, off, or a number of steps like 10"),
        ("--snapshots often", "--snapshots often: give auto, off, or a number of steps like 10"),
        ("--checkpoint-every 0", "--checkpoint-every 0: give steps like 500, a time like 90s, 10m or 2h, or never"),
        ("--checkpoint-every 10d", "--checkpoint-every 10d: give steps like 500, a time like 90s, 10m or 2h, or never"),
        ("--checkpoint-every s", "--checkpoint-every s: give steps like 500, a time like 90s, 10m or 2h, or never"),
        ("--checkpoint-every=-5m", "--checkpoint-every -5m: give steps like 500, a time like 90s, 10m or 2h, or never"),
        ("--checkpoint-every nans", "--checkpoint-every nans: give steps like 500, a time"),
        ("--checkpoint-every infh", "--checkpoint-every infh: give steps like 500, a time"),
        ("--checkpoint-keep last:0", "--checkpoint-keep last:0: "),
        ("--checkpoint-keep newest:3", "--checkpoint-keep newest:3: "),
        ("--checkpoint-keep best:loss:3", "--checkpoint-keep best:loss:3: "),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(words: str, sentence: str) -> None:
    with pytest.raises(UsageError, match="^" + re.escape(sentence)) as refused:
        parsed(words)
    assert "\n" not in str(refused.value) and len(str(refused.value)) > len(sentence) - 1


def test_variables_do_the_same() -> None:
    options = parsed("", HOLDFAST_SNAPSHOTS="off", HOLDFAST_CHECKPOINT_EVERY="5", HOLDFAST_CHECKPOINT_KEEP="all")
    assert (options.snapshots, options.checkpoint_every, options.checkpoint_keep) == (-1, (5, 0.0), "all")


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("", SnapshotSettings()),
        ("--snapshots off", SnapshotSettings(every=-1)),
        ("--checkpoint-dir /c", SnapshotSettings(checkpoint_every_s=600.0, checkpoint_at_end=True)),
        ("--checkpoint-dir /c --checkpoint-every never", SnapshotSettings(checkpoint_at_end=True)),
        ("--checkpoint-every never", SnapshotSettings()),
        ("--checkpoint-every 5", SnapshotSettings(checkpoint_every_steps=5, checkpoint_at_end=True)),
        (
            "--snapshots 7 --checkpoint-every 2m",
            SnapshotSettings(every=7, checkpoint_every_s=120.0, checkpoint_at_end=True),
        ),
    ],
)
def test_what_workers_are_told(words: str, settings: SnapshotSettings) -> None:
    assert snapshot_settings(parsed(words)) == settings


def test_the_line_at_the_start_says_it() -> None:
    assert "snapshots off, hangs" in capabilities(parsed("--snapshots off"), "/")
    assert "snapshots every 3 steps, a checkpoint every 5 steps, hangs" in capabilities(
        parsed("--snapshots 3 --checkpoint-every 5"), "/"
    )


def test_urls_stay_what_they_are_and_are_not_looked_for_on_this_machine() -> None:
    options = parsed("--checkpoint-dir s3://bucket/{job_id}/all --recovery dump")
    url = checkpoint_dir(options, "team/7")
    assert url == "s3://bucket/team_7/all"
    check_checkpoint_dir(options, url)
    assert "dump (to s3://bucket/team_7/all)" in capabilities(options, url)
    assert checkpoint_dir(parsed("--checkpoint-dir file:///shared/runs"), "x") == "/shared/runs"


@pytest.mark.parametrize("name", ["file://localhost{}/a%20b/x", "{}/a%20b"])
def test_a_directory_is_the_one_that_other_commands_find_under_its_name(tmp_path: Path, name: str) -> None:
    url = name.format(tmp_path)
    assert Path(checkpoint_dir(parsed(f"--checkpoint-dir '{url}'"), "")) == open_store(url).local


def test_a_url_of_another_machines_directory_is_refused() -> None:
    with pytest.raises(UsageError, match="does not name a directory of this machine"):
        checkpoint_dir(parsed("--checkpoint-dir file://elsewhere/runs"), "x")


@pytest.mark.parametrize("flag", ["state-dir", "checkpoint-dir", "snapshot-dir", "token-file"])
def test_homes_of_users(flag: str) -> None:
    field = flag.replace("-", "_")
    root = pwd.getpwnam("root").pw_dir
    assert getattr(parsed(f"--{flag}=~root/runs"), field) == f"{root}/runs"
    with pytest.raises(UsageError, match=f"--{flag} ~nouser-of-that-name/runs: no home directory is known"):
        parsed(f"--{flag}=~nouser-of-that-name/runs")


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        (
            "s4://bucket/run",
            r"no store is known for s4://bucket/run \(Protocol not known: s4\): it may be a directory,",
        ),
        ("simplecache::s4://bucket", "no store is known for simplecache::s4://bucket"),
    ],
)
@pytest.mark.parametrize("more", ["", " --recovery exit"])
def test_a_url_of_no_store_is_refused_at_the_start(url: str, sentence: str, more: str) -> None:
    """Not when the first checkpoint is written, which may be hours later."""
    options = parsed(f"--checkpoint-dir {url}{more}")
    with pytest.raises(UsageError, match=sentence):
        check_checkpoint_dir(options, checkpoint_dir(options, "demo"))


@pytest.mark.parametrize("url", ["memory://run", "simplecache::memory://run", "dir::/data", "s3://bucket/run"])
def test_a_url_of_a_known_store_is_not(url: str) -> None:
    options = parsed(f"--checkpoint-dir {url}")
    check_checkpoint_dir(options, checkpoint_dir(options, "demo"))


def test_a_url_whose_package_is_not_installed_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    options = parsed("--checkpoint-dir s3://bucket/run")
    with pytest.raises(UsageError, match="s3://bucket/run needs the package obstore: pip install obstore"):
        check_checkpoint_dir(options, checkpoint_dir(options, "demo"))
