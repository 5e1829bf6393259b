"""`holdfast logs`: what the workers wrote, and the failures of workers."""

from __future__ import annotations

import re
import sys
from contextlib import aclosing
from typing import Annotated

import msgspec
import typer

from holdfast.cli.options import Follow, Format, JobTarget, Output, job_command
from holdfast.cli.run_flag_values import COUNT_MAX
from holdfast.cli.terminal import print_error, run_to_end
from holdfast.core.faults.failures import Failure, describe
from holdfast.errors import UsageError
from holdfast.observe.failures import ViewFailures, failures_by_view, rows
from holdfast.observe.formatting import format_ranks, format_time, printable
from holdfast.observe.log_locations import LogLocations
from holdfast.observe.log_reader import LogFilter, LogLine, LogNote, Stream, follow_output, read_output
from holdfast.observe.source import JobSource, read

BOTH: tuple[Stream, ...] = ("stdout", "stderr")
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch's, before each line of a traceback


class PrintedLogLine(msgspec.Struct, frozen=True):
    """One line for programs, without its end."""

    view: int
    rank: int
    node_id: str
    stream: Stream
    text: str


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(logs)


@job_command()
def logs(
    target: JobTarget,
    follow: Follow = False,
    rank: Annotated[int | None, typer.Option(min=0, max=COUNT_MAX, help="Show only this rank.")] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Show failures with their tracebacks, the root cause first.")
    ] = False,
    view: Annotated[
        int | None, typer.Option(min=1, max=COUNT_MAX, help="Show this view instead of the newest.")
    ] = None,
    stdout: Annotated[bool | None, typer.Option("--stdout/--stderr", help="Show only one of the two streams.")] = None,
    output: Output = Format.TEXT,
    tail: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=COUNT_MAX, help="Show only the last N lines of each file.")
    ] = None,
) -> None:
    """Show what the workers wrote. By default: all ranks of the newest view."""
    if failed and follow:
        raise UsageError("--failed shows failures of the past, --follow shows what comes: give one of them")
    source = target.open_source()
    streams = BOTH if stdout is None else BOTH[:1] if stdout else BOTH[1:]
    log_filter = LogFilter(view=view, rank=rank, streams=streams, lines_max=tail)
    if failed:
        run_to_end(_show_failures(source, log_filter, output))
    else:
        run_to_end(_follow(source, log_filter, output) if follow else _show(source, log_filter, output))


async def _show(source: JobSource, log_filter: LogFilter, output: Format) -> None:
    locations = LogLocations()
    locations.add(await read(source))
    if not locations.newest:
        print_error("no workers have been started yet: `holdfast status` shows what the job waits for")
    for item in read_output(locations, log_filter):
        _print(item, output)


async def _follow(source: JobSource, log_filter: LogFilter, output: Format) -> None:
    async with aclosing(follow_output(source, log_filter)) as items:
        async for item in items:
            _print(item, output)
            sys.stdout.flush()


def _print(item: LogLine | LogNote, output: Format) -> None:
    """Print a worker's bytes unchanged; notes go to stderr."""
    if isinstance(item, LogNote):
        print_error(item.sentence)
    elif output is Format.JSON:
        text = item.text.rstrip(b"\r\n").decode("utf-8", "replace")
        line = PrintedLogLine(item.view, item.rank, item.node_id, item.stream, text)
        sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    else:
        prefix = b"" if item.is_only_rank else f"[rank {item.rank}] ".encode()
        end = b"" if item.text.endswith((b"\n", b"\r")) else b"\n"
        sys.stdout.buffer.write(prefix + item.text + end)


# --- failures


async def _show_failures(source: JobSource, log_filter: LogFilter, output: Format) -> None:
    by_view = failures_by_view(await read(source), view=log_filter.view, rank=log_filter.rank)
    if not by_view:
        narrowed = log_filter.view is not None or log_filter.rank is not None
        print_error("no failure of a worker is recorded" + (" for that view or rank" if narrowed else ""))
    for failures in by_view:
        if output is Format.JSON:
            for row in rows(failures):
                print(msgspec.json.encode(row).decode())
        else:
            print(printable("\n".join(_report(failures))))


def _report(failures: ViewFailures) -> list[str]:
    lines = [f"view {failures.view}"]
    for failure in failures.shown:
        lines += [f"  {line}".rstrip() for line in _failure(failure)]
    if failures.folded:
        ranks = format_ranks([failure.rank for failure in failures.folded])
        lines.append(f"  collateral, shown with --rank: {ranks}")
    return [*lines, ""]


def _failure(failure: Failure) -> list[str]:
    facts = [
        ("at", f"{format_time(failure.failed_at)}, process {failure.pid}, local rank {failure.local_rank}"),
        ("log", failure.log_file),
        ("error file", failure.error_file),
    ]
    lines = [describe(failure), *(f"  {name}: {value}" for name, value in facts if value)]
    traceback = failure.traceback.rstrip().splitlines()
    lines += [f"    {line}" for line in traceback]
    if rest := [line for line in failure.log_tail if _RANK_PREFIX.sub("", line) not in traceback]:
        lines += ["  last lines of its log:", *(f"    {line}" for line in rest)]
    return lines
