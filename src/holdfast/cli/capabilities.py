"""The means of recovery of a job: logged at start in one line, and refused at start if one of them cannot work on this
machine."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.cli.run_flags import RunOptions
from holdfast.core.strategies import LADDER, Strategy
from holdfast.core.wording import counted
from holdfast.errors import UsageError
from holdfast.storage.stores import check_url, is_remote, local_directory
from holdfast.wire.worker_messages import SnapshotSettings

JOB_ID_PLACEHOLDER = "{job_id}"
"""The placeholder of the job's id in --checkpoint-dir: only the master knows the id of a job without --rdzv-id."""


def checkpoint_dir(options: RunOptions, job_id: str) -> str:
    """Return an absolute path or a URL. While the job's id is unknown, its placeholder stays; the agent replaces it."""
    chosen = options.checkpoint_dir or str(Path(options.state_dir) / "jobs" / JOB_ID_PLACEHOLDER / "checkpoints")
    path = chosen if is_remote(chosen) else str(local_directory(chosen))
    return path.replace(JOB_ID_PLACEHOLDER, job_id.replace("/", "_")) if job_id else path


def check_checkpoint_dir(options: RunOptions, directory: str) -> None:
    """Raise UsageError if the flags ask for checkpoints that cannot be written. The directory is not created yet: most
    jobs never need it."""
    check_url(directory)
    is_asked_for = options.checkpoint_dir is not None or options.recovery != LADDER
    if Strategy.DUMP not in options.recovery or not is_asked_for:
        return
    if obstacle := _obstacle(directory):
        raise UsageError(
            f"dump cannot write a checkpoint to {directory}: {obstacle}. Name another directory with --checkpoint-dir,"
            " or leave dump out of --recovery"
        )


def capabilities(options: RunOptions, directory: str) -> str:
    """Return the line."""
    rungs = "; ".join(_rung(rung, options, directory) for rung in options.recovery)
    return (
        f"recovery: {rungs}. {_copies(options.replicas)} of each shard, snapshots"
        f" {_snapshots(options)}, hangs are detected {_hang_limit(options)}. Scripts that do not call hf.init() get"
        f" restarts only (--max-restarts {options.max_restarts})"
    )


def _rung(rung: Strategy, options: RunOptions, directory: str) -> str:
    match rung:
        case Strategy.RECOVER:
            spare_workers = counted(options.spares, "spare")
            spare_nodes = counted(options.spare_nodes, "spare node")
            return f"{rung} ({spare_workers} per node, {spare_nodes})"
        case Strategy.ELASTIC_TRAINING:
            return f"{rung} ({counted(options.nnodes_min, 'node')} at least)"
        case Strategy.DUMP:
            obstacle = _obstacle(directory)
            return f"{rung} (impossible: {directory}: {obstacle})" if obstacle else f"{rung} (to {directory})"
        case _:
            return str(rung)


CHECKPOINT_EVERY_S = 600.0
"""The default interval if --checkpoint-dir is given: short enough to lose little, long enough to cost nothing."""


def snapshot_settings(options: RunOptions) -> SnapshotSettings:
    """Return the settings of snapshots and checkpoints that workers get."""
    given = options.checkpoint_dir is not None
    steps, time_s = options.checkpoint_every or (0, CHECKPOINT_EVERY_S if given else 0.0)
    return SnapshotSettings(
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


def _copies(number: int) -> str:
    return f"{number} {'copy' if number == 1 else 'copies'}"


def _obstacle(directory: str) -> str:
    """Return why the directory cannot be written, as far as that can be seen without writing; else an empty text."""
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
