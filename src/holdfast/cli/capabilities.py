"""What a job may do about faults and what it has to do it with: said at start in one line, and refused at start where
a part of it cannot work on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.cli.run_flags import RunOptions
from holdfast.core.ladder import LADDER, Strategy
from holdfast.errors import UsageError
from holdfast.storage.stores import is_remote
from holdfast.wire.session import Snapshots

JOB_ID_MARK = "{job_id}"
"""Stands for the job's id in --checkpoint-dir: only the master knows the id of a job that was given none."""


def checkpoint_dir(options: RunOptions, job_id: str) -> str:
    """An absolute path. The mark stays in it while the id is not known here: the agent replaces it by what the master
    says."""
    chosen = options.checkpoint_dir or str(Path(options.state_dir) / "jobs" / JOB_ID_MARK / "checkpoints")
    path = chosen if is_remote(chosen) else str(Path(chosen.removeprefix("file://")).absolute())
    return path.replace(JOB_ID_MARK, job_id.replace("/", "_")) if job_id else path


def check_checkpoint_dir(options: RunOptions, directory: str) -> None:
    """UsageError if a checkpoint is asked for in so many words and cannot be written. Nothing is made yet: most jobs
    never need it."""
    in_so_many_words = options.checkpoint_dir is not None or options.recovery != LADDER
    if Strategy.DUMP not in options.recovery or not in_so_many_words:
        return
    if obstacle := _obstacle(directory):
        raise UsageError(
            f"dump cannot write a checkpoint to {directory}: {obstacle}. Name another directory with --checkpoint-dir,"
            " or leave dump out of --recovery"
        )


def capabilities(options: RunOptions, directory: str) -> str:
    """The line."""
    rungs = "; ".join(_rung(rung, options, directory) for rung in options.recovery)
    return (
        f"recovery: {rungs}. {_count(options.replicas, 'copy', 'copies')} of each shard, snapshots"
        f" {_snapshots(options)}, hangs are noticed {_hang_limit(options)}. Scripts that do not call hf.init() get"
        f" restarts only (--max-restarts {options.max_restarts})"
    )


def _rung(rung: Strategy, options: RunOptions, directory: str) -> str:
    match rung:
        case Strategy.RECOVER:
            spare_workers = _count(options.spares, "spare", "spares")
            spare_nodes = _count(options.spare_nodes, "spare node", "spare nodes")
            return f"{rung} ({spare_workers} per node, {spare_nodes})"
        case Strategy.ELASTIC_TRAINING:
            return f"{rung} ({_count(options.nnodes_min, 'node', 'nodes')} at least)"
        case Strategy.DUMP:
            obstacle = _obstacle(directory)
            return f"{rung} (impossible: {directory}: {obstacle})" if obstacle else f"{rung} (to {directory})"
        case _:
            return str(rung)


CHECKPOINT_EVERY_S = 600.0
"""Where a directory is given and nothing else is said: often enough to lose little, seldom enough to cost nothing."""


def snapshot_settings(options: RunOptions) -> Snapshots:
    """What workers are told of it."""
    given = options.checkpoint_dir is not None
    steps, time_s = options.checkpoint_every or (0, CHECKPOINT_EVERY_S if given else 0.0)
    return Snapshots(
        every=options.snapshots,
        checkpoint_every_steps=steps,
        checkpoint_every_s=time_s,
        checkpoint_at_end=given or bool(steps or time_s),
    )


def _snapshots(options: RunOptions) -> str:
    settings = snapshot_settings(options)
    often = {0: "as often as they cost nothing", -1: "off"}.get(settings.every, f"every {settings.every} steps")
    if settings.checkpoint_every_steps:
        return f"{often}, a checkpoint every {settings.checkpoint_every_steps} steps"
    return f"{often}, a checkpoint every {settings.checkpoint_every_s:g} s" if settings.checkpoint_every_s else often


def _hang_limit(options: RunOptions) -> str:
    if options.hang_timeout_s is None:
        return "by the job's own step times"
    return f"after {options.hang_timeout_s:g} s" if options.hang_timeout_s else "never"


def _count(number: int, one: str, more: str) -> str:
    return f"{number} {one if number == 1 else more}"


def _obstacle(directory: str) -> str:
    """Why nothing can be written there; empty if something can, as far as looking tells."""
    if is_remote(directory):
        return ""
    path = Path(directory)
    while True:
        try:
            path.stat()
            break
        except (FileNotFoundError, NotADirectoryError):
            path = path.parent
        except OSError as error:
            return f"{path}: {error.strerror}"
    if not path.is_dir():
        return f"{path} is not a directory"
    return "" if os.access(path, os.W_OK | os.X_OK) else f"{path} cannot be written by this user"
