"""`holdfast stacks`: what every rank of a running job is doing now, ranks that do the same shown once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import typer
from rich.text import Text

from holdfast.cli.ask_master import MasterOfJob, ask_master, job_id_of, master_of, over_sentence
from holdfast.cli.options import Format, JobTarget, Output, job_command
from holdfast.cli.terminal import Screen, print_json, refuse, run_to_end
from holdfast.core.stacks import group_stacks, ranks_text
from holdfast.observe.formatting import printable
from holdfast.observe.incident_report import StackGroup

if TYPE_CHECKING:
    from holdfast.wire.control_messages import NodeStacks


class JobStacks(msgspec.Struct, frozen=True, kw_only=True):
    """The stacks of all ranks of a job, as `-o json` shows them."""

    job_id: str
    groups: tuple[StackGroup, ...]
    notes: dict[str, str]
    """By node, why there are no stacks of it."""
    problem: str
    """Which nodes have not answered; empty: all have."""


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(stacks)


@job_command()
def stacks(target: JobTarget, output: Output = Format.TEXT) -> None:
    """Show what every rank of a running job is doing: the Python stacks of its threads, equal ones once.

    Works for any script, also before its first step: in an import, in the build of an extension, in a call that never
    returns. Nothing needs to be installed or called in the script.
    """
    run_to_end(_stacks(master_of(target), output))


async def _stacks(master: MasterOfJob, output: Format) -> None:
    if over := over_sentence(master):
        refuse(over)
    found = await live_stacks(master)
    if output is Format.JSON:
        print_json(found)
    else:
        screen = Screen()
        for line in stack_lines(found):
            screen.print(Text(printable(line)), soft_wrap=True)
    if found.problem:
        refuse(found.problem)


async def live_stacks(master: MasterOfJob) -> JobStacks:
    """Return what all ranks are doing now. Refuses if the job is over or another one."""
    from holdfast.wire.control_messages import AskStacks

    job_id = await job_id_of(master)
    nodes, answer = await ask_master(master, AskStacks(job_id))
    if not answer.accepted and not nodes:
        refuse(answer.text)
    return job_stacks(job_id, nodes, answer.text)


def job_stacks(job_id: str, nodes: Sequence[NodeStacks], problem: str) -> JobStacks:
    """Return the stacks of all nodes, those of ranks that do the same together."""
    by_rank = [(rank, group.stack) for node in nodes for group in node.groups for rank in group.ranks]
    return JobStacks(
        job_id=job_id,
        groups=tuple(StackGroup(ranks, stack) for ranks, stack in group_stacks(by_rank)),
        notes={node.node_id: node.note for node in nodes if node.note},
        problem=problem,
    )


def stack_lines(found: JobStacks) -> Iterator[str]:
    """Yield the lines for people."""
    for index, group in enumerate(found.groups):
        if index:
            yield ""
        yield f"{ranks_text(group.ranks)}:"
        yield from (f"  {line}" for line in group.stack.rstrip().splitlines())
    yield from (f"{node_id}: {note}" for node_id, note in sorted(found.notes.items()))
