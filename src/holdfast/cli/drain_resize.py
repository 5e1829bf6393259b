"""`holdfast drain` and `holdfast resize`: planned changes of a running job, at a step boundary.

A request that got no answer because the master died is repeated; the second one changes nothing more.
"""

from __future__ import annotations

import socket
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.ask_master import MasterOfJob, ask_master, job_id_of, master_of, over_sentence
from holdfast.cli.options import JobTarget, job_command
from holdfast.cli.run_flag_values import COUNT_MAX
from holdfast.cli.terminal import refuse, run_to_end, user_name
from holdfast.core.events import DrainRequested, ResizeRequested
from holdfast.core.records import NodeDraining, NodeLeftRecord, NodeLost
from holdfast.observe.formatting import printable
from holdfast.observe.source import follow

if TYPE_CHECKING:
    from holdfast.wire.control_messages import OperatorAnswer


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command()(drain)
    app.command()(resize)


@job_command(job="option")
def drain(
    target: JobTarget,
    node: Annotated[str, typer.Argument(metavar="NODE", help="Id of the node, as `holdfast status` shows it.")],
    wait: Annotated[bool, typer.Option("--wait", help="Return when the node has left.")] = False,
) -> None:
    """Remove a node from a running job at the end of a step. No work is lost."""
    run_to_end(_drain(master_of(target), DrainRequested(node_id=node, why=_asked_by()), wait))


@job_command(job="option")
def resize(
    target: JobTarget,
    nodes: Annotated[int, typer.Argument(metavar="NODES", max=COUNT_MAX, help="The new number of nodes.")],
) -> None:
    """Change the number of nodes of a running job at the end of a step."""
    run_to_end(_resize(master_of(target), ResizeRequested(nodes=nodes, why=_asked_by())))


async def _drain(master: MasterOfJob, request: DrainRequested, wait: bool) -> None:
    answer = await _ask(master, request)
    if wait:
        print(printable(await _wait_until_gone(master, request.node_id, answer.seq)))


async def _resize(master: MasterOfJob, request: ResizeRequested) -> None:
    await _ask(master, request)


async def _ask(master: MasterOfJob, request: DrainRequested | ResizeRequested) -> OperatorAnswer:
    """Print the master's answer. A refusal ends the command."""
    from holdfast.wire.control_messages import OperatorRequest

    if over := over_sentence(master):
        refuse(over)
    _, answer = await ask_master(master, OperatorRequest(request, await job_id_of(master)))
    if not answer.accepted:
        refuse(answer.text)
    print(printable(answer.text), flush=True)
    return answer


def _asked_by() -> str:
    return f"asked for by {user_name()} on {socket.gethostname()}"


# --- waiting


async def _wait_until_gone(master: MasterOfJob, node_id: str, after_seq: int) -> str:
    """Return the sentence to end with.

    Only the incarnation that was asked to leave counts, the last one as of the answer: an earlier one may have left
    before, and a later one may have joined already.
    """
    leaving, gone = "", set()
    async with aclosing(follow(master.source)) as pages:
        async for page in pages:
            for record in (entry.record for entry in page):
                match record:
                    case NodeDraining(node_id=who, incarnation=incarnation) if who == node_id:
                        leaving = incarnation
                    case NodeLeftRecord(incarnation=incarnation) | NodeLost(incarnation=incarnation):
                        gone.add(incarnation)
            if leaving in gone and page[-1].seq >= after_seq:
                return f"node {node_id} has left"
    return f"node {node_id} has left: the job is over"
