"""`holdfast drain` and `holdfast resize`: planned changes of a running job, at a step boundary.

The master of the job is found by its address or, on its own machine, by the job; it must prove that it knows the job's
token, as we must. A request that got no answer because the master died is repeated: asked twice, it changes nothing
more.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
import sys
import time
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import msgspec
import typer

from holdfast.cli import exit_codes
from holdfast.cli.master_address import MasterAddress, read_address
from holdfast.cli.run_flag_values import endpoint as parse_endpoint
from holdfast.cli.status import (
    PORT_DEFAULT,
    STATE_DIR_DEFAULT,
    Endpoint,
    StateDir,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
    open_source,
    tls_files,
    work,
)
from holdfast.core.events import DrainAsked, ResizeAsked
from holdfast.core.records import JobCreated, JobFinished, NodeDraining, NodeLeft, NodeLost
from holdfast.errors import AuthenticationError, WireError
from holdfast.journal import read_entries
from holdfast.observe.jobs import find_journal
from holdfast.observe.source import Source, follow, read
from holdfast.observe.tokens import Token, find_token
from holdfast.observe.words import plain

if TYPE_CHECKING:
    from holdfast.wire.channel import Tls
    from holdfast.wire.messages import Answer, Ask

CONNECT_TIMEOUT_S = 5.0
"""A killed master is back in about a second."""
ANSWER_TIMEOUT_S = 30.0
"""A master may be waiting for a failover extension, or for its disk."""
RETRY_PAUSE_S = 0.1

JobOption = Annotated[
    str | None,
    typer.Option("--job", metavar="JOB", help="Id of the job or the beginning of it; the newest one if not given."),
]


class Target(msgspec.Struct, frozen=True):
    """Whose master is asked, and how it is reached."""

    token: Token
    tls: Tls | None
    source: Source
    address: MasterAddress | None
    """None: it is in the job's directory."""
    journal: Path | None
    """None: only the address is known."""
    job: str
    """As the user named it, with an address; its id, with a journal. Empty: whichever job the address has."""


def register(app: typer.Typer) -> None:
    """Make them commands of the program."""
    app.command()(drain)
    app.command()(resize)


def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="As `holdfast status` shows it.")],
    job: JobOption = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the node has left.")] = False,
    state_dir: StateDir = STATE_DIR_DEFAULT,
    endpoint: Endpoint = None,
    token_file: TokenFile = None,
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_ca: TlsCa = "",
) -> None:
    """Have a node leave a running job at a step boundary, with nothing lost."""
    target = _target(job, state_dir, endpoint, token_file, (tls_cert, tls_key, tls_ca))
    work(_drain(target, DrainAsked(node_id=node, why=_who()), wait))


def resize(
    nodes: Annotated[int, typer.Argument(metavar="NODES", help="How many nodes the job is to have.")],
    job: JobOption = None,
    state_dir: StateDir = STATE_DIR_DEFAULT,
    endpoint: Endpoint = None,
    token_file: TokenFile = None,
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_ca: TlsCa = "",
) -> None:
    """Give a running job another number of nodes, at a step boundary."""
    target = _target(job, state_dir, endpoint, token_file, (tls_cert, tls_key, tls_ca))
    work(_resize(target, ResizeAsked(nodes=nodes, why=_who())))


async def _drain(target: Target, request: DrainAsked, wait: bool) -> None:
    answer = await _ask(target, request)
    if wait:
        print(plain(await _wait_until_gone(target, request.node_id, answer.seq)))


async def _resize(target: Target, request: ResizeAsked) -> None:
    await _ask(target, request)


async def _ask(target: Target, request: DrainAsked | ResizeAsked) -> Answer:
    """Print what the master says; a refusal ends the command."""
    from holdfast.wire.messages import Ask

    if over := _over(target):
        _refuse(over)
    answer = await _answer(target, Ask(request, await _job_id(target)))
    if not answer.accepted:
        _refuse(answer.text)
    print(plain(answer.text), flush=True)
    return answer


def _refuse(why: str) -> NoReturn:
    print(f"holdfast: {plain(why)}", file=sys.stderr)
    raise typer.Exit(exit_codes.WORKER_FAILED)


# --- whom to ask


def _target(
    job: str | None, state_dir: Path, endpoint: str | None, token_file: Path | None, tls: tuple[str, str, str]
) -> Target:
    source = open_source(job, state_dir, endpoint, token_file, tls)
    state_dir = state_dir.expanduser()
    token = find_token(os.environ, token_file.expanduser() if token_file else None, state_dir)
    if endpoint is not None:
        address = MasterAddress(*parse_endpoint(endpoint, PORT_DEFAULT))
        return Target(token, tls_files(*tls), source, address, None, job or "")
    journal = find_journal(state_dir, job)
    return Target(token, tls_files(*tls), source, None, journal, journal.parent.name)


async def _job_id(target: Target) -> str:
    """With an address, the source knows by the first record whether that is the job that was named."""
    if not target.job or target.journal:
        return target.job
    created = [entry.record for entry in await read(target.source) if isinstance(entry.record, JobCreated)]
    return created[0].job_id if created else target.job


def _over(target: Target) -> str:
    """The end of the job, where its journal tells of one."""
    entries = read_entries(target.journal) if target.journal else []
    ended = [entry.record for entry in entries if isinstance(entry.record, JobFinished)]
    return f"job {target.job} is over, it has {ended[-1].outcome.value}: {ended[-1].why}" if ended else ""


def _who() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # containers often run as a user that no password file knows
        user = f"user {os.getuid()}"
    return f"asked for by {user} on {socket.gethostname()}"


# --- asking


async def _answer(target: Target, ask: Ask) -> Answer:
    give_up_at = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        address = target.address or read_address(target.journal.parent if target.journal else Path())
        try:
            return await _answer_from(address, target, ask)
        except AuthenticationError as error:
            raise AuthenticationError(
                f"the master did not let us in with the token from {target.token.place}: {error}"
            ) from error
        except WireError as error:
            if over := _over(target):
                _refuse(over)
            if time.monotonic() >= give_up_at:
                raise WireError(f"{error}: {_remedy(target)}") from error
        await asyncio.sleep(RETRY_PAUSE_S)  # a port that is closed says nothing when it opens


def _remedy(target: Target) -> str:
    if target.journal is None:
        return "check the address and the TLS flags, or ask on the master's machine, without --endpoint"
    return (
        f"the master of job {target.job} does not run on this machine; where it does it can be found by the job, from"
        " here with --endpoint HOST:PORT"
    )


async def _answer_from(address: MasterAddress | None, target: Target, ask: Ask) -> Answer:
    from holdfast.wire.channel import connect  # gRPC is slow to import
    from holdfast.wire.messages import Answer

    if address is None:
        raise WireError("no address of a master is written down")
    line = await connect(
        address.host,
        address.port,
        token=target.token.secret,
        role="watcher",
        tls=target.tls,
        timeout_s=CONNECT_TIMEOUT_S,
    )
    try:
        await line.send(ask)
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            answer = await line.receive()
    except TimeoutError:
        raise WireError(f"no answer in {ANSWER_TIMEOUT_S:.0f} s") from None
    finally:
        await line.close()
    if not isinstance(answer, Answer):
        raise WireError("the master sent something that is no answer")
    return answer


# --- waiting


async def _wait_until_gone(target: Target, node_id: str, after_seq: int) -> str:
    """The sentence to end with. Only the life that was asked to leave counts, the last one as of the answer: another
    one may have left before, or be back already."""
    life, gone = "", set()
    async with aclosing(follow(target.source)) as pages:
        async for page in pages:
            for record in (entry.record for entry in page):
                match record:
                    case NodeDraining(node_id=who, incarnation=incarnation) if who == node_id:
                        life = incarnation
                    case NodeLeft(incarnation=incarnation) | NodeLost(incarnation=incarnation):
                        gone.add(incarnation)
            if life in gone and page[-1].seq >= after_seq:
                return f"node {node_id} has left"
    return f"node {node_id} has left: the job is over"
