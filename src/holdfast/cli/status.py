"""`holdfast status`: a job on one page. The flags that say which job is meant are the same for every view of a job;
events.py and logs.py take them from here."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Coroutine
from contextlib import aclosing
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from holdfast.cli.check_table import check_table
from holdfast.cli.run_flag_values import endpoint as parse_endpoint
from holdfast.core.kept import Safety
from holdfast.core.sentences import safe, unread
from holdfast.errors import UsageError
from holdfast.journal import Entry
from holdfast.observe.jobs import find_journal, is_held_here
from holdfast.observe.nodes import NodeSummary
from holdfast.observe.outputs import listed
from holdfast.observe.source import JournalSource, Source, follow, read
from holdfast.observe.summary import StateSummary, Summary, summarise
from holdfast.observe.words import duration, moment, plain

if TYPE_CHECKING:
    from holdfast.wire.channel import Tls

PORT_DEFAULT = 29400
PIPE_WIDTH_CHARS = 10_000
"""Lines for another program are not wrapped."""
PIDS_SHOWN_MAX = 8
QUARANTINED_SHOWN_MAX = 10
GONE_SHOWN_MAX = 5

# --- what status, events and logs have in common


class Format(StrEnum):
    """Of the output."""

    TEXT = "text"
    JSON = "json"


JobName = Annotated[
    str | None,
    typer.Argument(metavar="JOB", help="Id of the job or the beginning of it; the newest one if not given."),
]
Output = Annotated[Format, typer.Option("-o", "--output", help="For people or for programs.")]
StateDir = Annotated[
    Path, typer.Option("--state-dir", metavar="DIR", envvar="HOLDFAST_STATE_DIR", help="Where the journals are.")
]
Endpoint = Annotated[
    str | None,
    typer.Option("--endpoint", metavar="HOST:PORT", help="Ask a live master instead of reading its journal."),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file", metavar="FILE", envvar="HOLDFAST_TOKEN_FILE", help="The job's secret; or HOLDFAST_TOKEN."
    ),
]
TlsCert = Annotated[
    str, typer.Option("--tls-cert", metavar="FILE", envvar="HOLDFAST_TLS_CERT", help="As given to `holdfast run`.")
]
TlsKey = Annotated[
    str, typer.Option("--tls-key", metavar="FILE", envvar="HOLDFAST_TLS_KEY", help="The certificate's key.")
]
TlsCa = Annotated[
    str, typer.Option("--tls-ca", metavar="FILE", envvar="HOLDFAST_TLS_CA", help="The root of the certificates.")
]

STATE_DIR_DEFAULT = Path("~/.holdfast")


def open_source(
    job: str | None, state_dir: Path, endpoint: str | None, token_file: Path | None, tls: tuple[str, str, str]
) -> Source:
    """The records of the job that the flags mean."""
    state_dir = state_dir.expanduser()
    if endpoint is None:
        return JournalSource(find_journal(state_dir, job))
    from holdfast.observe.remote import MasterSource  # gRPC is slow to import and seldom needed
    from holdfast.observe.tokens import find_token

    try:
        host, port = parse_endpoint(endpoint, PORT_DEFAULT)
    except ArgumentTypeError as error:
        raise UsageError(f"--endpoint {endpoint}: {error}") from None
    token = find_token(os.environ, token_file.expanduser() if token_file else None, state_dir)
    return MasterSource(host, port, token, tls_files(*tls), wanted=job)


def tls_files(cert: str, key: str, ca: str) -> Tls | None:
    """As the flags name them."""
    from holdfast.wire.channel import Tls

    if not cert and not key and not ca:
        return None
    if not cert or not key:
        raise UsageError("TLS needs a certificate and its key: give both --tls-cert FILE and --tls-key FILE")
    return Tls(cert, key, ca)


def work(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a command to its end. A reader of ours that went away (`| head`) ends it too, quietly."""
    try:
        asyncio.run(coroutine)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains when it flushes at exit
        raise typer.Exit(0) from None


class Screen(Console):
    """Standard output. Nothing in a text is markup; lines for another program stay whole."""

    def __init__(self) -> None:
        width = None if sys.stdout.isatty() else PIPE_WIDTH_CHARS
        super().__init__(markup=False, highlight=False, emoji=False, width=width)

    def on_broken_pipe(self) -> None:
        """Called while the error is handled: let `work` have it."""
        raise


# --- the command


def register(app: typer.Typer) -> None:
    """Make it a command of the program."""
    app.command()(status)


def status(
    job: JobName = None,
    output: Output = Format.TEXT,
    watch: Annotated[bool, typer.Option("--watch", help="Show each change until the job is over.")] = False,
    state_dir: StateDir = STATE_DIR_DEFAULT,
    endpoint: Endpoint = None,
    token_file: TokenFile = None,
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_ca: TlsCa = "",
) -> None:
    """Show a job on one page: its phase, nodes, restarts and incidents, and how it ended."""
    source = open_source(job, state_dir, endpoint, token_file, (tls_cert, tls_key, tls_ca))
    work(_watch(source, output) if watch else _show(source, output))


async def _show(source: Source, output: Format) -> None:
    summary = _summary(source, await read(source))
    if output is Format.JSON:
        print(msgspec.json.format(msgspec.json.encode(summary), indent=2).decode())
    else:
        Screen().print(render(summary))


async def _watch(source: Source, output: Format) -> None:
    if output is Format.TEXT and sys.stdout.isatty():
        return await _watch_live(source)
    entries: list[Entry] = []
    async with aclosing(follow(source)) as pages:
        async for page in pages:
            entries += page
            summary = _summary(source, entries)
            if output is Format.JSON:
                print(msgspec.json.encode(summary).decode(), flush=True)
            else:
                Screen().print(render(summary), "")


async def _watch_live(source: Source) -> None:
    entries: list[Entry] = []
    summary = _summary(source, entries)

    def now_rendered() -> RenderableType:
        return render(msgspec.structs.replace(summary, read_at=time.time(), master_seen=_sees_master(source)))

    with Live(get_renderable=now_rendered, console=Screen(), refresh_per_second=2, vertical_overflow="crop"):
        async with aclosing(follow(source)) as pages:
            async for page in pages:
                entries += page
                summary = _summary(source, entries)


def _summary(source: Source, entries: list[Entry]) -> Summary:
    return summarise(entries, time.time(), master_seen=_sees_master(source))


def _sees_master(source: Source) -> bool:
    return is_held_here(source.path) if isinstance(source, JournalSource) else True


# --- as text


def render(summary: Summary) -> RenderableType:
    """The page."""
    parts: list[RenderableType] = [_head(summary), Text(f"why: {plain(summary.why)}"), Text(_facts(summary))]
    if cause := _cause(summary):
        parts.append(Text(cause))
    if summary.ending is None and not summary.master_seen:
        age = duration(summary.read_at - summary.last_record_at)
        parts.append(
            Text(f"no master of this job runs on this machine: the journal's last word is {age} old", style="yellow")
        )
    if summary.open_incident:
        parts.append(Text(_open_incident(summary), style="yellow"))
    if summary.nodes:
        parts += ["", _node_table(summary)]
    if summary.check:
        parts += ["", *check_table(summary.check)]
    if state := _state(summary):
        parts += ["", Text(state)]
        parts += [Text(_pacing(summary.state))] if summary.state.pacing.every else []
    if summary.streams:
        parts += ["", *_streams(summary)]
    if summary.incidents:
        parts += ["", Text(f"incidents: {summary.incidents_total}, the newest last")]
        parts += [Text(f"  {moment(i.closed_at)}  {plain(i.receipt)}") for i in summary.incidents]
    return Group(*parts)


def _head(summary: Summary) -> Text:
    age, job_id = duration(summary.read_at - summary.since), plain(summary.job_id) or "(not created yet)"
    if summary.ending is None:
        return Text(f"job {job_id}: {summary.phase} for {age}", style="bold")
    style = "bold green" if summary.ending.outcome == "succeeded" else "bold red"
    return Text(f"job {job_id}: {summary.ending.outcome} {age} ago, exit code {summary.ending.exit_code}", style=style)


def _cause(summary: Summary) -> str:
    cause = summary.ending.cause if summary.ending else None
    if cause is None:
        return ""
    log = f", log {cause.log_file}" if cause.log_file else ""
    return plain(f"root cause: rank {cause.rank} on {cause.node_id}{log}; `holdfast logs --failed` has its traceback")


def _facts(summary: Summary) -> str:
    least, most = summary.nodes_min, summary.nodes_max
    span = f"{least}" if least == most else f"{least} to {most}"
    view = f"view {summary.view} of {summary.world_size} ranks" if summary.view else "no view yet"
    return (
        f"{view}, nodes wanted {span}, restarts {summary.restarts_used} of {summary.restarts_max} used,"
        f" term {summary.term}, up {duration(summary.uptime_s)}"
    )


def _open_incident(summary: Summary) -> str:
    incident = summary.open_incident
    assert incident is not None
    decided = f"; {incident.strategy}, as {incident.why}" if incident.strategy else "; not decided yet"
    age = duration(summary.read_at - incident.since)
    return plain(f"incident {incident.number} open for {age}: {incident.cause}{decided}")


def _state(summary: Summary) -> str:
    """Which step is safe against what."""
    state = summary.state
    if max(state.memory, state.elsewhere, state.storage) < 0:
        return ""
    said = safe(Safety(state.memory, state.elsewhere, state.storage))
    age = f" ({duration(summary.read_at - state.said_at)} ago)" if state.said_at else ""
    where = f"; {state.storage_url}" if state.storage_url else ""
    return plain(f"state: {said}{age}{where}")


def _pacing(state: StateSummary) -> str:
    """How often the state is copied, why, and what came of it."""
    pacing = state.pacing
    often = "after every step" if pacing.every == 1 else f"every {pacing.every} steps"
    counts = f"{pacing.taken:,} taken, {pacing.skipped:,} skipped, {pacing.spoiled:,} spoiled"
    return plain(f"snapshots: {often} ({state.pacing_why}); {counts}")


def _streams(summary: Summary) -> list[Text]:
    lines = []
    for stream in summary.streams:
        counts = f"epoch {stream.epoch}, {stream.leases:,} shards leased, {stream.failures:,} failures"
        lines.append(Text(plain(f"stream {stream.name}: {counts}, {stream.quarantined_total:,} in quarantine")))
        for trouble in stream.quarantined[-QUARANTINED_SHOWN_MAX:]:
            lines.append(Text(plain(f"  {unread(trouble)}"), style="yellow"))
    return lines


def _node_table(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("node", "host", "standing", "group rank", "ranks", "workers", "pids", "joined"):
        table.add_column(column, overflow="fold")
    gone = [node for node in summary.nodes if node.standing in ("lost", "left")]
    for node in summary.nodes:
        if node not in gone[:-GONE_SHOWN_MAX]:
            table.add_row(*(plain(cell) for cell in _node_row(node, summary.read_at)))
    if len(gone) > GONE_SHOWN_MAX:
        table.add_row(f"and {len(gone) - GONE_SHOWN_MAX} gone before")
    return table


def _node_row(node: NodeSummary, now: float) -> list[str]:
    states = Counter(worker.state for worker in node.workers)
    waiting = f"{node.workers_max} waiting" if node.standing == "present" else "-"
    pids = [str(worker.pid) for worker in node.workers if worker.pid]
    more = f" and {len(pids) - PIDS_SHOWN_MAX} more" if len(pids) > PIDS_SHOWN_MAX else ""
    return [
        node.node_id,
        node.host,
        f"{node.standing}: {node.why}" if node.why else node.standing,
        "-" if node.group_rank is None else str(node.group_rank),
        listed([worker.rank for worker in node.workers]) or "-",
        ", ".join(f"{count} {state}" for state, count in states.items()) or waiting,
        " ".join(pids[:PIDS_SHOWN_MAX]) + more or "-",
        f"{duration(now - node.joined_at)} ago",
    ]
