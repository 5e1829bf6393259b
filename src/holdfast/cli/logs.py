"""`holdfast logs`: what the workers wrote, and what is known of those that failed."""

from __future__ import annotations

import re
import sys
from contextlib import aclosing
from typing import Annotated

import msgspec
import typer

from holdfast.cli.status import (
    STATE_DIR_DEFAULT,
    Endpoint,
    Format,
    JobName,
    Output,
    StateDir,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
    open_source,
    work,
)
from holdfast.core.faults import Failure, describe
from holdfast.errors import UsageError
from holdfast.observe.failures import ViewFailures, failures_by_view, rows
from holdfast.observe.lines import Choice, Line, Note, Stream, follow_output, read_output
from holdfast.observe.outputs import Outputs, listed
from holdfast.observe.source import Source, read
from holdfast.observe.words import moment, plain

BOTH: tuple[Stream, ...] = ("stdout", "stderr")
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch's, before each line of a traceback


class LogLine(msgspec.Struct, frozen=True):
    """One line for programs, without its end."""

    view: int
    rank: int
    node_id: str
    stream: Stream
    text: str


def register(app: typer.Typer) -> None:
    """Make it a command of the program."""
    app.command()(logs)


def logs(
    job: JobName = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on, over restarts, until the job ends.")] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Failures with their tracebacks, the cause first.")] = False,
    view: Annotated[int | None, typer.Option(min=1, help="This view instead of the newest.")] = None,
    stdout: Annotated[bool | None, typer.Option("--stdout/--stderr", help="Only one of the two streams.")] = None,
    output: Output = Format.TEXT,
    tail: Annotated[int | None, typer.Option(metavar="N", min=0, help="Only the last lines of each file.")] = None,
    state_dir: StateDir = STATE_DIR_DEFAULT,
    endpoint: Endpoint = None,
    token_file: TokenFile = None,
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_ca: TlsCa = "",
) -> None:
    """Show the workers' output, of the newest view and all ranks if nothing else is asked for."""
    if failed and follow:
        raise UsageError("--failed tells what has happened, --follow what will: give one of them")
    source = open_source(job, state_dir, endpoint, token_file, (tls_cert, tls_key, tls_ca))
    streams = BOTH if stdout is None else BOTH[:1] if stdout else BOTH[1:]
    choice = Choice(view=view, rank=rank, streams=streams, lines_max=tail)
    if failed:
        work(_show_failures(source, choice, output))
    else:
        work(_follow(source, choice, output) if follow else _show(source, choice, output))


async def _show(source: Source, choice: Choice, output: Format) -> None:
    outputs = Outputs()
    outputs.take(await read(source))
    if not outputs.newest:
        _note("no workers have been started yet: `holdfast status` says what the job waits for")
    for item in read_output(outputs, choice):
        _print(item, output)


async def _follow(source: Source, choice: Choice, output: Format) -> None:
    async with aclosing(follow_output(source, choice)) as items:
        async for item in items:
            _print(item, output)
            sys.stdout.flush()


def _print(item: Line | Note, output: Format) -> None:
    """A worker's bytes as they are; what we have to say goes elsewhere."""
    if isinstance(item, Note):
        _note(item.sentence)
    elif output is Format.JSON:
        text = item.text.rstrip(b"\r\n").decode("utf-8", "replace")
        line = LogLine(item.view, item.rank, item.node_id, item.stream, text)
        sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    else:
        prefix = b"" if item.alone else f"[rank {item.rank}] ".encode()
        end = b"" if item.text.endswith((b"\n", b"\r")) else b"\n"
        sys.stdout.buffer.write(prefix + item.text + end)


def _note(sentence: str) -> None:
    sys.stdout.flush()
    print(f"holdfast: {plain(sentence)}", file=sys.stderr)


# --- failures


async def _show_failures(source: Source, choice: Choice, output: Format) -> None:
    by_view = failures_by_view(await read(source), view=choice.view, rank=choice.rank)
    if not by_view:
        narrowed = choice.view is not None or choice.rank is not None
        _note("no failure of a worker is recorded" + (" for that view or rank" if narrowed else ""))
    for failures in by_view:
        if output is Format.JSON:
            for row in rows(failures):
                print(msgspec.json.encode(row).decode())
        else:
            print(plain("\n".join(_report(failures))))


def _report(failures: ViewFailures) -> list[str]:
    lines = [f"view {failures.view}"]
    for failure in failures.shown:
        lines += [f"  {line}".rstrip() for line in _failure(failure)]
    if failures.folded:
        ranks = listed([failure.rank for failure in failures.folded])
        lines.append(f"  collateral, shown with --rank: {ranks}")
    return [*lines, ""]


def _failure(failure: Failure) -> list[str]:
    facts = [
        ("at", f"{moment(failure.failed_at)}, process {failure.pid}, local rank {failure.local_rank}"),
        ("log", failure.log_file),
        ("error file", failure.error_file),
    ]
    lines = [describe(failure), *(f"  {name}: {value}" for name, value in facts if value)]
    traceback = failure.traceback.rstrip().splitlines()
    lines += [f"    {line}" for line in traceback]
    if rest := [line for line in failure.log_tail if _RANK_PREFIX.sub("", line) not in traceback]:
        lines += ["  last lines of its log:", *(f"    {line}" for line in rest)]
    return lines
