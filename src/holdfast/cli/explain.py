"""`holdfast explain`: what happened in an incident, the root cause first, and why it was dealt with as it was."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from holdfast.cli import exit_codes
from holdfast.cli.status import (
    STATE_DIR_DEFAULT,
    Endpoint,
    Format,
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
from holdfast.core.diagnosis import ranks_text
from holdfast.core.fault_types import describe_fault
from holdfast.observe.explain import Explanation, explain, incident_numbers
from holdfast.observe.source import Source, read
from holdfast.observe.words import moment, plain

PROGRESS_LINES_MAX = 32


def register(app: typer.Typer) -> None:
    """Make it a command of the program."""
    app.command("explain")(explain_incident)


def explain_incident(
    incident: Annotated[
        int | None, typer.Argument(metavar="INCIDENT", help="Its number; the last one if not given.", min=1)
    ] = None,
    job: Annotated[
        str | None,
        typer.Option("--job", metavar="JOB", help="Id of the job or the beginning of it; the newest one if not given."),
    ] = None,
    output: Output = Format.TEXT,
    state_dir: StateDir = STATE_DIR_DEFAULT,
    endpoint: Endpoint = None,
    token_file: TokenFile = None,
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_ca: TlsCa = "",
) -> None:
    """Explain an incident: its root cause, what each rank was doing, what was decided and why."""
    source = open_source(job, state_dir, endpoint, token_file, (tls_cert, tls_key, tls_ca))
    work(_explain(source, incident, output))


async def _explain(source: Source, number: int | None, output: Format) -> None:
    entries = await read(source)
    known = incident_numbers(entries)
    if not known and number is None:
        print("null" if output is Format.JSON else "nothing has gone wrong in this job")
        return
    if number is not None and number not in known:
        there_are = f"there are 1 to {known[-1]}" if known else "there are none"
        print(f"holdfast: there is no incident {number} in this job: {there_are}", file=sys.stderr)
        raise typer.Exit(exit_codes.WORKER_FAILED)
    found = explain(entries, known[-1] if number is None else number)
    if output is Format.JSON:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    screen = Screen()
    for line in lines(found):
        screen.print(Text(plain(line)), soft_wrap=True)


def lines(found: Explanation) -> Iterator[str]:
    """The report for a person."""
    yield f"job {found.job_id}, incident {found.number}"
    yield f"root cause: {found.cause}"
    if found.fault:
        yield f"  fault: {describe_fault(found.fault)}"
    yield from _root(found) if found.root else _hung(found)
    if found.others or found.collateral:
        yield ""
        yield f"also: {found.collateral} collateral" if not found.others else "also:"
        yield from (f"  {other}" for other in found.others)
        if found.others and found.collateral:
            yield f"  and {found.collateral} that are echoes of others"
    if found.nodes:
        yield ""
        yield "nodes:"
        yield from (f"  {note.node_id}: {note.text}" for note in found.nodes)
    if found.kept:
        yield ""
        yield f"kept of the state: {found.kept}"
    yield from _progress(found)
    for group in found.stacks:
        yield ""
        yield f"{ranks_text(group.ranks)}:"
        yield from (f"  {line}" for line in group.stack.rstrip().splitlines())
    yield ""
    yield "decided:"
    for decision in found.decisions:
        counted = ", uses up a restart" if decision.counted else ""
        yield f"  {moment(decision.at)}  {decision.strategy.value}{counted}: {decision.why}"
        if decision.reload >= 0:
            yield f"    all workers start from step {decision.reload} in the nodes' memory, or a later one"
    if not found.decisions:
        yield "  nothing yet"
    yield f"outcome: {found.outcome}"
    yield ""
    yield "timeline:"
    yield from (f"  {moment(one.at)}  {one.seq:>5}  {one.sentence}" for one in found.timeline)
    if found.timeline_left_out:
        yield f"  and {found.timeline_left_out} more: `holdfast events` has them"


def _root(found: Explanation) -> Iterator[str]:
    root = found.root
    if root is None:
        return
    step = f", step {root.step}" if root.step >= 0 else ""
    yield f"  rank {root.rank} (local {root.local_rank}) on {root.node_id}, process {root.pid}, view {root.view}{step}"
    if root.log_file:
        yield f"  log: {root.log_file}"
    if root.traceback:
        yield ""
        yield from (f"  {line}" for line in root.traceback.rstrip().splitlines())
    elif root.log_tail:
        yield "  last lines of its log:"
        yield from (f"    {line}" for line in root.log_tail)


def _hung(found: Explanation) -> Iterator[str]:
    for one in found.hung:
        yield f"  rank {one.rank} (local {one.local_rank}) on {one.node_id} has come least far"
        if one.log_file:
            yield f"  log: {one.log_file}"
        if one.log_tail:
            yield "  last lines of its log:"
            yield from (f"    {line}" for line in one.log_tail)


def _progress(found: Explanation) -> Iterator[str]:
    if not found.progress:
        return
    yield ""
    yield "how far each rank had come:"
    for one in found.progress[:PROGRESS_LINES_MAX]:
        waits = "waits for others" if one.is_waiting else "does not wait for others"
        mark = "  ← least far" if one.is_suspect else ""
        where = f"step {one.step}, {one.phase}, {one.collectives} collectives, {waits}"
        yield f"  rank {one.rank} on {one.node_id}: {where}{mark}"
    if len(found.progress) > PROGRESS_LINES_MAX:
        yield f"  and {len(found.progress) - PROGRESS_LINES_MAX} more: -o json has them"
