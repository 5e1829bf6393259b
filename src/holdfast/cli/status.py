"""`holdfast status`: a job on one page."""

from __future__ import annotations

import sys
import time
from collections import Counter
from contextlib import aclosing
from typing import Annotated

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from holdfast.cli.check_table import check_table
from holdfast.cli.local_status import local_lines
from holdfast.cli.options import Format, JobTarget, Output, job_command
from holdfast.cli.terminal import Screen, make_table, print_json, run_to_end
from holdfast.core.durability import Durability
from holdfast.core.sentences import repeated_sentence, safe, unread
from holdfast.core.wording import counted
from holdfast.errors import UsageError
from holdfast.journal import JournalEntry
from holdfast.observe.formatting import format_duration, format_ranks, format_time, printable
from holdfast.observe.jobs import is_locked_here
from holdfast.observe.node_summary import NodeSummary
from holdfast.observe.source import JobSource, JournalSource, follow, read
from holdfast.observe.summary import StateSummary, Summary, summarise
from holdfast.util.node_status import NodeStatus, read_statuses
from holdfast.util.state_directory import state_directory

PIDS_SHOWN_MAX = 8
QUARANTINED_SHOWN_MAX = 10
GONE_SHOWN_MAX = 5


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(status)


@job_command()
def status(
    target: JobTarget,
    output: Output = Format.TEXT,
    watch: Annotated[bool, typer.Option("--watch", help="Show each change until the job is over.")] = False,
) -> None:
    """Show a job on one page: its phase, nodes, restarts and incidents, and how it ended."""
    try:
        source = target.open_source()
    except UsageError:
        if target.endpoint is None and (statuses := read_statuses(state_directory(target.state_dir), target.job)):
            _show_local(statuses, output)
            return
        raise
    run_to_end(_watch(source, output) if watch else _show(source, output))


def _show_local(statuses: list[NodeStatus], output: Format) -> None:
    if output is Format.JSON:
        print_json([status for status in statuses if status.job_id == statuses[0].job_id])
        return
    screen = Screen()
    for line in local_lines(statuses):
        screen.print(Text(printable(line)), soft_wrap=True)


async def _show(source: JobSource, output: Format) -> None:
    summary = _summary(source, await read(source))
    if output is Format.JSON:
        print_json(summary)
    else:
        Screen().print(render(summary))


async def _watch(source: JobSource, output: Format) -> None:
    if output is Format.TEXT and sys.stdout.isatty():
        return await _watch_live(source)
    entries: list[JournalEntry] = []
    async with aclosing(follow(source)) as pages:
        async for page in pages:
            entries += page
            summary = _summary(source, entries)
            if output is Format.JSON:
                print(msgspec.json.encode(summary).decode(), flush=True)
            else:
                Screen().print(render(summary), "")


async def _watch_live(source: JobSource) -> None:
    entries: list[JournalEntry] = []
    summary = _summary(source, entries)

    def now_rendered() -> RenderableType:
        return render(msgspec.structs.replace(summary, read_at=time.time(), master_seen=_sees_master(source)))

    with Live(get_renderable=now_rendered, console=Screen(), refresh_per_second=2, vertical_overflow="crop"):
        async with aclosing(follow(source)) as pages:
            async for page in pages:
                entries += page
                summary = _summary(source, entries)


def _summary(source: JobSource, entries: list[JournalEntry]) -> Summary:
    return summarise(entries, time.time(), master_seen=_sees_master(source))


def _sees_master(source: JobSource) -> bool:
    return is_locked_here(source.path) if isinstance(source, JournalSource) else True


# --- as text


def render(summary: Summary) -> RenderableType:
    """Return the page."""
    parts: list[RenderableType] = [_head(summary), Text(f"why: {printable(summary.why)}"), Text(_facts(summary))]
    if cause := _cause(summary):
        parts.append(Text(cause))
    if summary.ending is None and not summary.master_seen:
        age = format_duration(summary.read_at - summary.last_record_at)
        parts.append(
            Text(f"no master of this job runs on this machine: the journal's last record is {age} old", style="yellow")
        )
    if summary.open_incident:
        parts.append(Text(_open_incident(summary), style="yellow"))
    if summary.nodes:
        parts += ["", _node_table(summary)]
    if summary.check:
        parts += ["", *check_table(summary.check)]
    if summary.resumed:
        parts += ["", Text(f"resumed at step {summary.resumed.step} from {printable(summary.resumed.source)}")]
    if state := _state(summary):
        parts += ["", Text(state)]
        parts += [Text(_snapshots(summary.state))] if summary.state.snapshot_stats.every else []
    if summary.streams:
        parts += ["", *_streams(summary)]
    if summary.incidents:
        parts += ["", Text(f"{_recoveries(summary)}, the newest last")]
        parts += [Text(f"  {format_time(i.closed_at)}  {printable(i.receipt)}") for i in summary.incidents]
        parts += [Text(f"in all, {again}")] if (again := repeated_sentence(summary.repeated_steps)) else []
    if summary.retries:
        parts += ["", Text(f"connections broke between live processes: {summary.retries} collectives were run again")]
    return Group(*parts)


def _recoveries(summary: Summary) -> str:
    """Return how many incidents and planned changes there were; what is 0 is left out, but not both."""
    changes = f"changes: {summary.changes_total}" if summary.changes_total else ""
    incidents = f"incidents: {summary.incidents_total}" if summary.incidents_total or not changes else ""
    return ", ".join(part for part in (incidents, changes) if part)


def _head(summary: Summary) -> Text:
    age, job_id = format_duration(summary.read_at - summary.since), printable(summary.job_id) or "(not created yet)"
    if summary.ending is None:
        return Text(f"job {job_id}: {summary.phase} for {age}", style="bold")
    style = "bold green" if summary.ending.outcome == "succeeded" else "bold red"
    return Text(f"job {job_id}: {summary.ending.outcome} {age} ago, exit code {summary.ending.exit_code}", style=style)


def _cause(summary: Summary) -> str:
    cause = summary.ending.cause if summary.ending else None
    if cause is None:
        return ""
    log = f", log {cause.log_file}" if cause.log_file else ""
    return printable(
        f"root cause: rank {cause.rank} on {cause.node_id}{log}; `holdfast logs --failed` has its traceback"
    )


def _facts(summary: Summary) -> str:
    least, most = summary.nodes_min, summary.nodes_max
    span = f"{least}" if least == most else f"{least} to {most}"
    view = f"view {summary.view} of {counted(summary.world_size, 'rank')}" if summary.view else "no view yet"
    return (
        f"{view}, nodes wanted {span}, restarts {summary.restarts_used} of {summary.restarts_max} used,"
        f" term {summary.term}, up {format_duration(summary.uptime_s)}"
    )


def _open_incident(summary: Summary) -> str:
    incident = summary.open_incident
    assert incident is not None
    why = f": {incident.why}" if incident.why else ""
    decided = f"; {incident.strategy}{why}" if incident.strategy else "; not decided yet"
    age = format_duration(summary.read_at - incident.since)
    return printable(f"incident {incident.number} open for {age}: {incident.cause}{decided}")


def _state(summary: Summary) -> str:
    """Return which step survives which loss."""
    state = summary.state
    if max(state.memory, state.elsewhere, state.storage) < 0:
        return ""
    steps = safe(Durability(state.memory, state.elsewhere, state.storage))
    age = f" ({format_duration(summary.read_at - state.reported_at)} ago)" if state.reported_at else ""
    where = f"; {state.storage_url}" if state.storage_url else ""
    return printable(f"state: {steps}{age}{where}")


def _snapshots(state: StateSummary) -> str:
    """Return how often snapshots are taken, why, and how many there were."""
    snapshot_stats = state.snapshot_stats
    often = "after every step" if snapshot_stats.every == 1 else f"every {snapshot_stats.every} steps"
    counts = f"{snapshot_stats.taken:,} taken, {snapshot_stats.skipped:,} skipped, {snapshot_stats.spoiled:,} spoiled"
    return printable(f"snapshots: {often} ({state.interval_why}); {counts}")


def _streams(summary: Summary) -> list[Text]:
    lines = []
    for stream in summary.streams:
        counts = f"epoch {stream.epoch}, {stream.leases:,} shards leased, {stream.failures:,} failures"
        lines.append(Text(printable(f"stream {stream.name}: {counts}, {stream.quarantined_total:,} in quarantine")))
        for problem in stream.quarantined[-QUARANTINED_SHOWN_MAX:]:
            lines.append(Text(printable(f"  {unread(problem)}"), style="yellow"))
    return lines


def _node_table(summary: Summary) -> Table:
    table = make_table("node", "host", "standing", "group rank", "ranks", "workers", "pids", "joined")
    gone = [node for node in summary.nodes if node.standing in ("lost", "left")]
    for node in summary.nodes:
        if node not in gone[:-GONE_SHOWN_MAX]:
            table.add_row(*(printable(cell) for cell in _node_row(node, summary.read_at)))
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
        format_ranks([worker.rank for worker in node.workers]) or "-",
        ", ".join(f"{count} {state}" for state, count in states.items()) or waiting,
        " ".join(pids[:PIDS_SHOWN_MAX]) + more or "-",
        f"{format_duration(now - node.joined_at)} ago",
    ]
