"""Processes that do what an agent does for snapshots: own the memory, bring what is wanted to storage, copy it to the
next node."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fire.failure import start
from fire.homes import JOB
from holdfast.agent.config import AgentConfig, Program
from holdfast.agent.logs import LogPlan
from holdfast.agent.memory.persister import Persister
from holdfast.agent.memory.state_keeper import StateKeeper
from holdfast.agent.memory.vault import Vault
from holdfast.agent.reports import Reports
from holdfast.core.events import CheckpointWritten, Event, JobSpec
from holdfast.core.orders import Peer, Serve
from holdfast.wire.session import Sealed
from holdfast.wire.session import Snapshots as Settings

MESSAGE = struct.Struct("=3q")
"""Seat, step, whether it is to become a checkpoint."""
HOST = "127.0.0.1"
HERE = -1
LOST = -1_000
"""Instead of a seat: a node is lost. Other numbers below zero: where node 0, 1, … takes in images."""
TOKEN = "nobody else is to connect"


def persist(root: Path, node: str, url: str, ears: int, mouth: int) -> None:
    """For ever. Steps that are published are said at the mouth, as an agent tells its master."""
    asyncio.run(_persist(root, node, url, ears, mouth))


async def _persist(root: Path, node: str, url: str, ears: int, mouth: int) -> None:
    vault = Vault(root, node)
    vault.open(JOB)
    assert vault.is_open, "the memory belongs to somebody else"
    persister = Persister(vault, "last:3", lambda step, _: say(mouth, step))
    persister.open(JOB, url)

    def heard(seat: int, step: int, is_wanted: int) -> None:
        if is_wanted:
            persister.wanted(seat, Sealed(step, True))

    listen(ears, heard)
    say(mouth, HERE)
    await asyncio.Event().wait()


def replicate(root: Path, view: int, number: int, nodes: int, group: int, url: str, ears: int, mouth: int) -> None:
    """For ever. Copies go to the next node, or with a `group` there is parity among so many. Says where it takes in
    others' images, and is told where they all do. With a `url`, what is wanted there goes to storage too."""
    asyncio.run(_replicate(root, view, number, nodes, group, url, ears, mouth))


async def _replicate(
    root: Path, view: int, number: int, nodes: int, group: int, url: str, ears: int, mouth: int
) -> None:
    node, ports = f"node-{number}", dict[int, int]()

    def report(event: Event) -> None:
        if isinstance(event, CheckpointWritten):
            say(mouth, event.step)

    keeper = StateKeeper(_config(root, node), Reports(node, lambda: node, report))
    keeper.open(JOB, url)
    assert keeper.vault.is_open, "the memory belongs to somebody else"

    replication = keeper.replicate()

    def peers(numbers: Iterable[int]) -> tuple[Peer, ...]:
        return tuple(Peer(node_id=f"node-{n}", address=HOST, bulk_port=ports[n], workers=1) for n in numbers)

    def serve() -> None:
        if group:
            first = number - number % group
            keeper.serve(_order(view, number, nodes, parity=peers(range(first, first + group))))
        else:
            after, before = (number + 1) % nodes, (number - 1) % nodes
            keeper.serve(_order(view, number, nodes, partners=peers([after]), guests=peers([before])))
        say(mouth, HERE)

    async def rebuild(lost: int) -> None:
        keeper.serve(_order(view + 1, number, nodes - 1, parity=peers(n for n in range(nodes) if n != lost)))
        await replication.rebuild_lost()
        say(mouth, HERE)

    def heard(about: int, what: int, is_wanted: int) -> None:
        if about == LOST:
            tasks.append(asyncio.create_task(rebuild(what)))
        elif about < 0:
            ports[-1 - about] = what
            if len(ports) == nodes:
                serve()
        else:
            if is_wanted:
                keeper.persister.wanted(about, Sealed(what, True))
            keeper.sealed(None, Sealed(what, False))

    tasks: list[asyncio.Task[None]] = []
    listen(ears, heard)
    say(mouth, replication.port)
    await asyncio.Event().wait()


def listen(ears: int, heard: Callable[[int, int, int], None]) -> None:
    os.set_blocking(ears, False)

    def hear() -> None:
        message = os.read(ears, MESSAGE.size)
        if not message:
            asyncio.get_running_loop().remove_reader(ears)
            return
        heard(*MESSAGE.unpack(message))

    asyncio.get_running_loop().add_reader(ears, hear)


class Staff:
    """The agents of one life."""

    def __init__(self, works: Sequence[Callable[[int, int], None]]) -> None:
        self.pids, self._ears, self._mouths = [], [], []
        for work in works:
            self._start(work)

    def _start(self, work: Callable[[int, int], None]) -> None:
        ears, to_agent = os.pipe()
        mouth, from_agent = os.pipe()

        def live() -> None:
            os.close(to_agent)
            os.close(mouth)
            work(ears, from_agent)

        self.pids.append(start(live))
        os.close(ears)
        os.close(from_agent)
        self._ears.append(to_agent)
        self._mouths.append(mouth)

    def ear(self, rank: int) -> int | None:
        """Where a rank tells its agent something."""
        return self._ears[rank % len(self._ears)] if self._ears else None

    def begin(self, are_partners: bool) -> None:
        """All are there."""
        said = [answer(mouth) for mouth in self._mouths]
        if are_partners:
            for ear in self._ears:
                for number, port in enumerate(said):
                    os.write(ear, MESSAGE.pack(-1 - number, port, 0))
            for mouth in self._mouths:
                answer(mouth)

    def rebuild(self, lost: int) -> None:
        """By those that are left."""
        left = [number for number in range(len(self._ears)) if number != lost]
        for number in left:
            os.write(self._ears[number], MESSAGE.pack(LOST, lost, 0))
        for number in left:
            answer(self._mouths[number])

    def said(self) -> list[int]:
        """Which steps were published, until their death."""
        found: list[int] = []
        for ear in self._ears:
            os.close(ear)
        for mouth in self._mouths:
            found += [step for step in heard(mouth) if step >= 0]
            os.close(mouth)
        return found


def _config(root: Path, node: str) -> AgentConfig:
    return AgentConfig(
        node_id=node,
        address=HOST,
        workers=1,
        role="default",
        requested_rank=None,
        spec=JobSpec(run_id=JOB, nodes_min=1, nodes_max=1, restarts_max=0),
        program=Program(kind="script", argv=(), clean=True, python=""),
        environment={},
        master_host=HOST,
        master_port=1,
        master=None,
        token=TOKEN,
        tls=None,
        logs=LogPlan(run_dir=root, redirects=0),
        signals=(signal.SIGTERM,),
        heartbeat_interval_s=1.0,
        silence_timeout_s=5.0,
        restart_grace_s=10.0,
        shutdown_timeout_s=10.0,
        join_timeout_s=10.0,
        snapshots=Settings(every=1),
        snapshot_dir=str(root),
    )


def _order(view: int, number: int, nodes: int, **places: Any) -> Serve:
    return Serve(
        view=view,
        job_id=JOB,
        group_rank=number,
        group_world_size=nodes,
        first_rank=number,
        world_size=nodes,
        role_first_rank=number,
        role_world_size=nodes,
        store_host=HOST,
        store_port=1,
        store_here=False,
        restart_count=0,
        restarts_max=0,
        workers=1,
        first_ranks=tuple(range(nodes)),
        kept=False,
        planned=False,
        strategy=None,
        replaced=(),
        spares=0,
        session=None,
        **places,
    )


def say(mouth: int, step: int) -> None:
    os.write(mouth, step.to_bytes(8, "little", signed=True))


def answer(mouth: int) -> int:
    """The next that is said."""
    return int.from_bytes(os.read(mouth, 8), "little", signed=True)


def heard(mouth: int) -> list[int]:
    """All that was said until the speaker's death."""
    said = b""
    while more := os.read(mouth, 65_536):
        said += more
    return [int.from_bytes(said[at : at + 8], "little", signed=True) for at in range(0, len(said), 8)]
