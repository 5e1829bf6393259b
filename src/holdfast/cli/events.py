"""`holdfast events`: a job's journal, one line per event."""

from __future__ import annotations

from contextlib import aclosing
from typing import Annotated, get_args

import msgspec
import typer
from rich.text import Text

from holdfast.cli.options import Follow, Format, JobTarget, Output, job_command
from holdfast.cli.run_flag_values import COUNT_MAX
from holdfast.cli.terminal import Screen, run_to_end
from holdfast.core.records import DurableRecord
from holdfast.core.sentences import sentence
from holdfast.journal import JournalEntry
from holdfast.observe.formatting import format_time, printable
from holdfast.observe.source import JobSource, follow, read

STYLES = {
    "worker-failed": "red",
    "node-lost": "red",
    "node-suspected": "yellow",
    "incident-opened": "yellow",
    "incident-decided": "yellow",
    "incident-closed": "green",
    "job-finished": "bold",
}
KIND_WIDTH = max(len(str(record.__struct_config__.tag)) for record in get_args(DurableRecord))
"""Of the column with the kinds of events, so that the sentences begin below one another."""


class EventLine(msgspec.Struct, frozen=True):
    """One event for programs."""

    seq: int
    at: float
    kind: str
    sentence: str
    record: DurableRecord


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(events)


@job_command()
def events(
    target: JobTarget,
    follow_on: Follow = False,
    output: Output = Format.TEXT,
    after: Annotated[
        int, typer.Option(metavar="SEQ", min=0, max=COUNT_MAX, help="Show only events after this number.")
    ] = 0,
) -> None:
    """List what happened in a job and what was decided, in order."""
    source = target.open_source()
    run_to_end(_follow(source, output, after) if follow_on else _list(source, output, after))


async def _list(source: JobSource, output: Format, after: int) -> None:
    _print(await read(source), output, after)


async def _follow(source: JobSource, output: Format, after: int) -> None:
    async with aclosing(follow(source)) as pages:
        async for page in pages:
            _print(page, output, after)


def _print(page: list[JournalEntry], output: Format, after: int) -> None:
    screen = Screen()
    for entry in page:
        if entry.seq <= after:
            continue
        if output is Format.JSON:
            print(msgspec.json.encode(_line(entry)).decode(), flush=True)
        else:
            screen.print(_text(_line(entry)), soft_wrap=True)


def _line(entry: JournalEntry) -> EventLine:
    record = entry.record
    return EventLine(entry.seq, record.at, str(record.__struct_config__.tag), sentence(record), record)


def _text(line: EventLine) -> Text:
    text = Text(f"{format_time(line.at)}  ", style="dim")
    text.append(f"{line.seq:>5}  {line.kind:<{KIND_WIDTH}}  ", style=f"not dim {STYLES.get(line.kind, '')}")
    text.append(printable(line.sentence), style="not dim")
    return text
