"""`holdfast explain`: what happened in an incident, the root cause first, and what was decided and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer
from rich.text import Text

from holdfast.cli.options import Format, JobTarget, Output, job_command
from holdfast.cli.run_flag_values import COUNT_MAX
from holdfast.cli.terminal import Screen, print_json, refuse, run_to_end
from holdfast.core.faults.fault_types import describe_fault
from holdfast.core.sentences import repeated_sentence
from holdfast.core.stacks import ranks_text
from holdfast.core.wording import counted
from holdfast.errors import HoldfastError
from holdfast.observe.formatting import format_time, printable
from holdfast.observe.incident_report import (
    Explanation,
    explain,
    incident_numbers,
    is_before_first_step,
    is_closed,
    is_running,
)
from holdfast.observe.source import read

PROGRESS_LINES_MAX = 32


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("explain")(explain_incident)


@job_command(job="option")
def explain_incident(
    target: JobTarget,
    incident: Annotated[
        int | None,
        typer.Argument(
            metavar="INCIDENT", help="Number of the incident; the last one if not given.", min=1, max=COUNT_MAX
        ),
    ] = None,
    output: Output = Format.TEXT,
) -> None:
    """Explain an incident: its root cause, what each rank was doing, what was decided and why."""
    run_to_end(_explain(target, incident, output))


async def _explain(target: JobTarget, number: int | None, output: Format) -> None:
    entries = await read(target.open_source())
    known = incident_numbers(entries)
    if not known and number is None:
        print("null" if output is Format.JSON else "this job has had no incidents")
        if output is Format.TEXT and is_before_first_step(entries):
            await _show_live_stacks(target, "it has not made a step yet; what its ranks are doing now:")
        return
    if number is not None and number not in known:
        there_are = f"there are 1 to {known[-1]}" if known else "there are none"
        refuse(f"there is no incident {number} in this job: {there_are}")
    found = explain(entries, known[-1] if number is None else number)
    if output is Format.JSON:
        print_json(found)
        return
    screen = Screen()
    for line in lines(found):
        screen.print(Text(printable(line)), soft_wrap=True)
    if found.number == known[-1] and not found.stacks and is_running(entries) and not is_closed(entries, found.number):
        await _show_live_stacks(target, "what the ranks are doing now:")


async def _show_live_stacks(target: JobTarget, heading: str) -> None:
    """Show what all ranks are doing, if the job's master answers: an explanation does not depend on it."""
    from holdfast.cli.ask_master import master_of
    from holdfast.cli.job_stacks import live_stacks, stack_lines

    screen = Screen()
    try:
        found = await live_stacks(master_of(target))
    except HoldfastError as error:
        screen.print(Text(printable(f"what its ranks are doing is not known: {error}")), soft_wrap=True)
        return
    for line in ["", heading, *stack_lines(found), *([found.problem] if found.problem else [])]:
        screen.print(Text(printable(line)), soft_wrap=True)


def lines(found: Explanation) -> Iterator[str]:
    """Yield the lines of the report."""
    yield f"job {found.job_id}, incident {found.number}"
    yield f"root cause: {found.cause}"
    if found.fault:
        yield f"  fault: {describe_fault(found.fault)}"
    yield from _root(found) if found.root else _suspects(found)
    if found.others or found.collateral:
        yield ""
        yield f"also: {counted(found.collateral, 'collateral failure')}" if not found.others else "also:"
        yield from (f"  {other}" for other in found.others)
        if found.others and found.collateral:
            yield f"  and {counted(found.collateral, 'collateral failure')}"
    if found.nodes:
        yield ""
        yield "nodes:"
        yield from (f"  {note.node_id}: {note.text}" for note in found.nodes)
    if found.durability:
        yield ""
        yield f"state that was safe: {found.durability}"
    yield from _progress(found)
    for group in found.stacks:
        yield ""
        yield f"{ranks_text(group.ranks)}:"
        yield from (f"  {line}" for line in group.stack.rstrip().splitlines())
    yield ""
    yield "decided:"
    for decision in found.decisions:
        cost = ", uses up a restart" if decision.counted else ""
        why = f": {decision.why}" if decision.why else ""
        yield f"  {format_time(decision.at)}  {decision.strategy.value}{cost}{why}"
        if decision.reload >= 0:
            yield f"    all workers start from step {decision.reload} in the nodes' memory, or a later one"
    if not found.decisions:
        yield "  nothing yet"
    yield f"outcome: {found.outcome}"
    if found.repeats:
        yield f"lost: {repeated_sentence(found.repeats)}"
    yield ""
    yield "timeline:"
    yield from (f"  {format_time(one.at)}  {one.seq:>5}  {one.sentence}" for one in found.timeline)
    if found.timeline_omitted:
        yield f"  and {found.timeline_omitted} more: `holdfast events` has them"


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


def _suspects(found: Explanation) -> Iterator[str]:
    for one in found.suspects:
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
        waits = "asleep" if one.is_asleep else "in a collective" if one.is_waiting else "not in a collective"
        mark = "  ← least far" if one.is_suspect else ""
        where = f"step {one.step}, {one.phase}, {counted(one.collectives, 'collective')}, {waits}"
        yield f"  rank {one.rank} on {one.node_id}: {where}{mark}"
    if len(found.progress) > PROGRESS_LINES_MAX:
        yield f"  and {len(found.progress) - PROGRESS_LINES_MAX} more: -o json has them"
