"""The flags about snapshots and checkpoints: what they give, and what is refused with its sentence."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from holdfast.cli.capabilities import capabilities, check_checkpoint_dir, checkpoint_dir, snapshot_settings
from holdfast.cli.run_flags import RunOptions, parse_run
from holdfast.errors import UsageError
from holdfast.wire.session import Snapshots


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
        ("", Snapshots()),
        ("--snapshots off", Snapshots(every=-1)),
        ("--checkpoint-dir /c", Snapshots(checkpoint_every_s=600.0, checkpoint_at_end=True)),
        ("--checkpoint-dir /c --checkpoint-every never", Snapshots(checkpoint_at_end=True)),
        ("--checkpoint-every never", Snapshots()),
        ("--checkpoint-every 5", Snapshots(checkpoint_every_steps=5, checkpoint_at_end=True)),
        ("--snapshots 7 --checkpoint-every 2m", Snapshots(every=7, checkpoint_every_s=120.0, checkpoint_at_end=True)),
    ],
)
def test_what_workers_are_told(words: str, settings: Snapshots) -> None:
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
