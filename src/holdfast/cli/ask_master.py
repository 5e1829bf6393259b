"""How commands ask the master of a running job: whom, and until there is an answer.

The job's master is found by its address or, on its own machine, by the job. Both sides must prove that they know the
job's token. A request that got no answer because the master died is repeated.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.cli.master_address import MasterAddress, read_address
from holdfast.cli.options import JobTarget
from holdfast.cli.terminal import refuse
from holdfast.core.records import JobCreated, JobFinished
from holdfast.errors import AuthenticationError, WireError
from holdfast.journal import read_entries
from holdfast.observe.source import JobSource, read
from holdfast.observe.token_file import Token

if TYPE_CHECKING:
    from holdfast.wire.control_messages import AskStacks, NodeStacks, OperatorAnswer, OperatorRequest
    from holdfast.wire.tls import Tls

CONNECT_TIMEOUT_S = 5.0
"""A killed master is back in about a second."""
ANSWER_TIMEOUT_S = 30.0
"""A master may be waiting for a failover extension, or for its disk."""
RETRY_PAUSE_S = 0.1


class MasterOfJob(msgspec.Struct, frozen=True):
    """The master that is asked, and how it is reached."""

    token: Token
    tls: Tls | None
    source: JobSource
    address: MasterAddress | None
    """None: it is written in the job's directory."""
    journal: Path | None
    """None: only the address is known."""
    job: str
    """The id, with a journal; with an address, what the user gave. Empty: whichever job the master there has."""


def master_of(target: JobTarget) -> MasterOfJob:
    """Return the master of the job that a command is about."""
    source, token, tls = target.open_source(), target.token(), target.tls()
    if address := target.address:
        return MasterOfJob(token, tls, source, address, None, target.job or "")
    journal = target.journal()
    return MasterOfJob(token, tls, source, None, journal, journal.parent.name)


async def job_id_of(master: MasterOfJob) -> str:
    """Return the id of the job. With an address, its first record has it."""
    if not master.job or master.journal:
        return master.job
    created = [entry.record for entry in await read(master.source) if isinstance(entry.record, JobCreated)]
    return created[0].job_id if created else master.job


def over_sentence(master: MasterOfJob) -> str:
    """Return a sentence about the job's end, if its journal has one."""
    entries = read_entries(master.journal) if master.journal else []
    ended = [entry.record for entry in entries if isinstance(entry.record, JobFinished)]
    return f"job {master.job} is over, it has {ended[-1].outcome.value}: {ended[-1].why}" if ended else ""


async def ask_master(master: MasterOfJob, ask: OperatorRequest | AskStacks) -> tuple[list[NodeStacks], OperatorAnswer]:
    """Return the master's answer, and what it sent before. Refuses if the job is over."""
    give_up_at = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        address = master.address or read_address(master.journal.parent if master.journal else Path())
        try:
            return await _answers_from(address, master, ask)
        except AuthenticationError as error:
            raise AuthenticationError(
                f"the master did not let us in with the token from {master.token.place}: {error}"
            ) from error
        except WireError as error:
            if over := over_sentence(master):
                refuse(over)
            if time.monotonic() >= give_up_at:
                raise WireError(f"{error}: {_remedy(master)}") from error
        await asyncio.sleep(RETRY_PAUSE_S)  # a port that is closed says nothing when it opens


def _remedy(master: MasterOfJob) -> str:
    if master.journal is None:
        return "check the address and the TLS flags, or ask on the master's machine, without --endpoint"
    return (
        f"the master of job {master.job} does not run on this machine: run the command on the machine where it does, or"
        " name its address with --endpoint HOST:PORT"
    )


async def _answers_from(
    address: MasterAddress | None, master: MasterOfJob, ask: OperatorRequest | AskStacks
) -> tuple[list[NodeStacks], OperatorAnswer]:
    from holdfast.wire.control import connect  # slow to import
    from holdfast.wire.control_messages import NodeStacks, OperatorAnswer

    if address is None:
        raise WireError("no master has written its address beside the journal")
    connection = await connect(
        address.host,
        address.port,
        token=master.token.secret,
        role="watcher",
        tls=master.tls,
        timeout_s=CONNECT_TIMEOUT_S,
    )
    before: list[NodeStacks] = []
    try:
        await connection.send(ask)
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while isinstance(answer := await connection.receive(), NodeStacks):
                before.append(answer)
    except TimeoutError:
        raise WireError(f"no answer in {ANSWER_TIMEOUT_S:.0f} s") from None
    finally:
        await connection.close()
    if not isinstance(answer, OperatorAnswer):
        raise WireError("the master sent something that is not an answer")
    return before, answer
