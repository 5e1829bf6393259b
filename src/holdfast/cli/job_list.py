"""`holdfast jobs`: the jobs of a state directory, and the removal of old ones (job_removal.py)."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from holdfast import exit_codes
from holdfast.cli.job_removal import Pruning, RemovedJob, check_removable, prune, remove_job
from holdfast.cli.options import STATE_DIR_DEFAULT, Format, Output, StateDir
from holdfast.cli.run_flag_values import COUNT_MAX, age
from holdfast.cli.terminal import Screen, make_table, print_error, print_json, run_to_end
from holdfast.core.wording import counted
from holdfast.errors import HoldfastError, UsageError
from holdfast.observe.formatting import format_size, format_time, printable
from holdfast.observe.stored_jobs import JobSize, JobStanding, StoredJob, job_directories, read_job, size_of
from holdfast.util.state_directory import state_directory

SHOWN_DEFAULT = 20
NAMES_SHOWN_MAX = 5
STYLES = {JobStanding.RUNNING: "green", JobStanding.FAILED: "red", JobStanding.UNREADABLE: "red"}

WithCheckpoints = Annotated[
    bool, typer.Option("--checkpoints", help="Remove the checkpoints too that are in the state directory.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")]


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """A job as `holdfast jobs -o json` prints it."""

    job_id: str
    standing: JobStanding
    why: str
    created_at: float | None
    last_active_at: float
    steps: int | None
    size: JobSize
    directory: str


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    group = typer.Typer(help="List the jobs of the state directory, and remove old ones.")
    group.callback(invoke_without_command=True)(jobs)
    group.command()(rm)
    group.command("prune")(prune_jobs)
    app.add_typer(group, name="jobs")


def jobs(
    context: typer.Context,
    output: Output = Format.TEXT,
    state_dir: StateDir = STATE_DIR_DEFAULT,
    number: Annotated[
        int, typer.Option("-n", "--number", metavar="N", min=0, max=COUNT_MAX, help="How many jobs to show; 0: all.")
    ] = SHOWN_DEFAULT,
) -> None:
    """List the jobs of the state directory, the newest first, and remove old ones."""
    if context.invoked_subcommand is not None:
        context.obj = state_dir
        return
    run_to_end(_list(state_directory(state_dir), output, number))


def rm(
    context: typer.Context,
    job_ids: Annotated[list[str], typer.Argument(metavar="JOB...", help="Ids of the jobs, in full.")],
    with_checkpoints: WithCheckpoints = False,
    force: Annotated[
        bool, typer.Option("--force", help="Remove jobs that have not ended, or whose journal cannot be read.")
    ] = False,
    state_dir: StateDir = STATE_DIR_DEFAULT,
) -> None:
    """Remove jobs: their journals and logs. Checkpoints stay unless asked for; a running job stays in any case."""
    root, failures = _root(context, state_dir), 0
    for job_id in dict.fromkeys(job_ids):
        try:
            job = read_job(_find(root, job_id))
            check_removable(job, force=force)
            done = remove_job(job, root, with_checkpoints=with_checkpoints)
        except HoldfastError as error:
            failures += 1
            print_error(str(error))
        else:
            for line in _removed(done, "removed"):
                print(printable(line))
    if failures:
        raise typer.Exit(exit_codes.WORKER_FAILED)


def prune_jobs(
    context: typer.Context,
    older_than: Annotated[
        float,
        typer.Option(
            "--older-than",
            metavar="AGE",
            parser=lambda text: _age(str(text)),
            help="Remove jobs that ended so long ago: 30d, 12h, 2w.",
        ),
    ],
    with_checkpoints: WithCheckpoints = False,
    with_unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Remove jobs too that have not ended and do not run on this machine.")
    ] = False,
    dry_run: DryRun = False,
    output: Output = Format.TEXT,
    state_dir: StateDir = STATE_DIR_DEFAULT,
) -> None:
    """Remove jobs that ended long ago, with their logs, and logs that belong to no job any more."""
    root = _root(context, state_dir)
    try:
        done = prune(
            root, older_than, with_checkpoints=with_checkpoints, with_unfinished=with_unfinished, dry_run=dry_run
        )
    except OSError as error:
        raise _unlisted(root, error) from None
    if output is Format.JSON:
        print_json(done)
    else:
        for line in pruning_lines(done, dry_run=dry_run):
            print(printable(line))
    for sentence in done.failed:
        print_error(sentence)
    if done.failed:
        raise typer.Exit(exit_codes.WORKER_FAILED)


# --- the list


async def _list(state_dir: Path, output: Format, number: int) -> None:
    try:
        directories = job_directories(state_dir)
    except OSError as error:
        raise _unlisted(state_dir, error) from None
    shown = directories[: number or None]
    rows = [_row(read_job(directory), state_dir) for directory in shown]
    if output is Format.JSON:
        print_json(rows)
        return
    if not rows:
        print_error(f"there is no job in {state_dir}: start one with `holdfast run`, or name another --state-dir")
        return
    table = make_table("job", "created", "last active", "state", "steps", "size", "checkpoints")
    for row in rows:
        table.add_row(*_cells(row))
    screen = Screen()
    screen.print(table)
    for row in rows:
        if row.why:
            screen.print(Text(printable(f"{row.job_id}: {row.why}")), soft_wrap=True)
    if len(directories) > len(shown):
        screen.print(f"and {len(directories) - len(shown)} older ones: `holdfast jobs -n 0` shows all")


def _row(job: StoredJob, state_dir: Path) -> JobRow:
    return JobRow(
        job_id=job.job_id,
        standing=job.standing,
        why=job.why,
        created_at=job.created_at,
        last_active_at=job.last_active_at,
        steps=job.steps,
        size=size_of(job, state_dir),
        directory=str(job.directory),
    )


def _cells(row: JobRow) -> list[str | Text]:
    size = row.size.journal_bytes + row.size.log_bytes
    return [
        printable(row.job_id),
        format_time(row.created_at)[:16] if row.created_at else "-",
        format_time(row.last_active_at)[:16],
        Text(row.standing.value, style=STYLES.get(row.standing, "")),
        f"{row.steps:,}" if row.steps else "-",
        format_size(size),
        format_size(row.size.checkpoint_bytes) if row.size.checkpoint_bytes else "-",
    ]


# --- removal


def pruning_lines(done: Pruning, *, dry_run: bool) -> list[str]:
    """Return what was removed and what stays, in lines."""
    verb = "would remove" if dry_run else "removed"
    lines = [line for job in done.removed for line in _removed(job, verb)]
    if done.logs_removed:
        directories = counted(done.logs_removed, "log directory").replace("directorys", "directories")
        lines.append(f"{verb} {directories} of jobs that are not here ({format_size(done.logs_bytes)})")
    if done.kept_unfinished:
        names = ", ".join(done.kept_unfinished[:NAMES_SHOWN_MAX])
        more = len(done.kept_unfinished) - NAMES_SHOWN_MAX
        names += f" and {more} more" if more > 0 else ""
        lines.append(
            f"kept, as they have not ended or cannot be read: {names}; `holdfast jobs rm --force JOB` removes one"
        )
    return [*lines, f"{verb} {counted(len(done.removed), 'job')}, {format_size(done.removed_bytes)} in all"]


def _removed(job: RemovedJob, verb: str) -> list[str]:
    lines = [f"{verb} job {job.job_id} ({format_size(job.removed_bytes)})"]
    if job.checkpoints_kept:
        size = format_size(job.checkpoint_bytes)
        lines.append(f"  kept its checkpoints ({size}) in {job.checkpoints_kept}: --checkpoints removes them too")
    return lines


def _find(state_dir: Path, job_id: str) -> Path:
    """Return the directory of a job by its full id: what is removed is named in full."""
    name = job_id.replace("/", "_")
    try:
        directories = job_directories(state_dir)
    except OSError as error:
        raise _unlisted(state_dir, error) from None
    for directory in directories:
        if directory.name == name:
            return directory
    near = [directory.name for directory in directories if directory.name.startswith(name)]
    hint = (
        f"; did you mean {', '.join(near[:NAMES_SHOWN_MAX])}?"
        if near
        else f": `holdfast jobs` lists those in {state_dir}"
    )
    raise UsageError(f"there is no job {job_id}{hint}")


def _root(context: typer.Context, state_dir: Path) -> Path:
    """Return the state directory: that of the command, or of `holdfast jobs --state-dir DIR COMMAND`."""
    given = state_dir if state_dir != STATE_DIR_DEFAULT or context.obj is None else context.obj
    return state_directory(given)


def _unlisted(state_dir: Path, error: OSError) -> UsageError:
    return UsageError(f"the jobs in {state_dir} cannot be listed: {error.strerror or error}")


def _age(text: str) -> float:
    try:
        return age(text)
    except ArgumentTypeError as error:
        raise UsageError(f"--older-than {text}: {error}") from None
