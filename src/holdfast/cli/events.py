"""`holdfast events`: a job's journal, one line an event."""

from __future__ import annotations

from contextlib import aclosing
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from holdfast.cli.status import (
    STATE_DIR_DEFAULT,
    Endpoint,
    Format,
    JobName,
    Output,
    Screen,
    StateDir,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
    open_source,
    work,
)
from holdfast.core.records import DurableRecord
from holdfast.core.sentences import sentence
from holdfast.journal import Entry
from holdfast.observe.source import Source, follow, read
from holdfast.observe.words import moment, plain

STYLES = {
    "worker-lost": "red",
    "node-lost": "red",
    "node-suspected": "yellow",
    "incident-opened": "yellow",
    "incident-decided": "yellow",
    "incident-closed": "green",
    "job-finished": "bold",
}


class EventLine(msgspec.Struct, frozen=True):
    """One event for programs."""

    seq: int
    at: float
    kind: str
    sentence: str
    record: DurableRecord


def register(app: typer.Typer) -> None:
    """Make it a command of the program."""
    app.command()(events)


def events(
    job: JobName = None,
    follow_on: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job is over.")] = False,
    output: Output = Format.TEXT,
    after: Annotated[int, typer.Option(metavar="SEQ", min=0, help="Only events after this number.")] = 0,
    state_dir: StateDir = STATE_DIR_DEFAULT,
    endpoint: Endpoint = None,
    token_file: TokenFile = None,
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_ca: TlsCa = "",
) -> None:
    """List what happened in a job and what was decided, in order."""
    source = open_source(job, state_dir, endpoint, token_file, (tls_cert, tls_key, tls_ca))
    work(_follow(source, output, after) if follow_on else _list(source, output, after))


async def _list(source: Source, output: Format, after: int) -> None:
    _print(await read(source), output, after)


async def _follow(source: Source, output: Format, after: int) -> None:
    async with aclosing(follow(source)) as pages:
        async for page in pages:
            _print(page, output, after)


def _print(page: list[Entry], output: Format, after: int) -> None:
    screen = Screen()
    for entry in page:
        if entry.seq <= after:
            continue
        if output is Format.JSON:
            print(msgspec.json.encode(_line(entry)).decode(), flush=True)
        else:
            screen.print(_text(_line(entry)), soft_wrap=True)


def _line(entry: Entry) -> EventLine:
    record = entry.record
    return EventLine(entry.seq, record.at, str(record.__struct_config__.tag), sentence(record), record)


def _text(line: EventLine) -> Text:
    text = Text(f"{moment(line.at)}  ", style="dim")
    text.append(f"{line.seq:>5}  {line.kind:<16}  ", style=f"not dim {STYLES.get(line.kind, '')}")
    text.append(plain(line.sentence), style="not dim")
    return text
