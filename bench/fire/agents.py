"""Processes that do what an agent does for snapshots: own the memory, upload what is wanted, copy it to the next
node."""

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
from holdfast.agent.reports import Reports
from holdfast.agent.worker_logs import LogPlan
from holdfast.core.events import CheckpointPublished, Event, JobSpec
from holdfast.core.orders import Peer, Serve
from holdfast.snapshots.snapshot_manager import SnapshotManager
from holdfast.snapshots.snapshot_store import SnapshotStore
from holdfast.snapshots.uploader import CheckpointUploader
from holdfast.wire.worker_messages import SnapshotSealed, SnapshotSettings

MESSAGE = struct.Struct("=3q")
"""Local rank, step, whether it is to become a checkpoint."""
HOST = "127.0.0.1"
HERE = -1
LOST = -1_000
"""Instead of a local_rank: a node is lost. Other numbers below zero: where node 0, 1, … takes in images."""
TOKEN = "no other process is to connect"


def persist(root: Path, node: str, url: str, reader: int, writer: int) -> None:
    """Upload until killed. Steps that are published are written to a pipe, as an agent reports them to its master."""
    asyncio.run(_persist(root, node, url, reader, writer))


async def _persist(root: Path, node: str, url: str, reader: int, writer: int) -> None:
    snapshot_store = SnapshotStore(root, node)
    snapshot_store.open(JOB)
    assert snapshot_store.is_open, "another process owns the memory"
    uploader = CheckpointUploader(snapshot_store, "last:3", lambda step, _: write_number(writer, step))
    uploader.open(JOB, url)

    def heard(local_rank: int, step: int, is_wanted: int) -> None:
        if is_wanted:
            uploader.upload(local_rank, SnapshotSealed(step, True))

    listen(reader, heard)
    write_number(writer, HERE)
    await asyncio.Event().wait()


def replicate(root: Path, view: int, number: int, nodes: int, group: int, url: str, reader: int, writer: int) -> None:
    """Copy images until killed: to the next node, or with a `group` as parity among so many. Writes to the pipe at
    which port it accepts others' images, and reads the ports of all. With a `url`, what is wanted is uploaded too."""
    asyncio.run(_replicate(root, view, number, nodes, group, url, reader, writer))


async def _replicate(
    root: Path, view: int, number: int, nodes: int, group: int, url: str, reader: int, writer: int
) -> None:
    node, ports = f"node-{number}", dict[int, int]()

    def report(event: Event) -> None:
        if isinstance(event, CheckpointPublished):
            write_number(writer, event.step)

    manager = SnapshotManager(_config(root, node), Reports(node, lambda: node, report))
    manager.open(JOB, url)
    assert manager.snapshot_store.is_open, "another process owns the memory"

    replication = manager.replicate()

    def peers(numbers: Iterable[int]) -> tuple[Peer, ...]:
        return tuple(Peer(node_id=f"node-{n}", address=HOST, bulk_port=ports[n], workers=1) for n in numbers)

    def serve() -> None:
        if group:
            first = number - number % group
            manager.serve(_order(view, number, nodes, parity=peers(range(first, first + group))))
        else:
            after, before = (number + 1) % nodes, (number - 1) % nodes
            manager.serve(_order(view, number, nodes, partners=peers([after]), replica_owners=peers([before])))
        write_number(writer, HERE)

    async def rebuild(lost: int) -> None:
        manager.serve(_order(view + 1, number, nodes - 1, parity=peers(n for n in range(nodes) if n != lost)))
        await replication.rebuild_lost()
        write_number(writer, HERE)

    def heard(about: int, what: int, is_wanted: int) -> None:
        if about == LOST:
            tasks.append(asyncio.create_task(rebuild(what)))
        elif about < 0:
            ports[-1 - about] = what
            if len(ports) == nodes:
                serve()
        else:
            if is_wanted:
                manager.uploader.upload(about, SnapshotSealed(what, True))
            manager.sealed(None, SnapshotSealed(what, False))

    tasks: list[asyncio.Task[None]] = []
    listen(reader, heard)
    write_number(writer, replication.port)
    await asyncio.Event().wait()


def listen(reader: int, heard: Callable[[int, int, int], None]) -> None:
    os.set_blocking(reader, False)

    def hear() -> None:
        message = os.read(reader, MESSAGE.size)
        if not message:
            asyncio.get_running_loop().remove_reader(reader)
            return
        heard(*MESSAGE.unpack(message))

    asyncio.get_running_loop().add_reader(reader, hear)


class Agents:
    """The agents between two kills."""

    def __init__(self, works: Sequence[Callable[[int, int], None]]) -> None:
        self.pids, self._to_agents, self._from_agents = [], [], []
        for work in works:
            self._start(work)

    def _start(self, work: Callable[[int, int], None]) -> None:
        reader, to_agent = os.pipe()
        writer, from_agent = os.pipe()

        def live() -> None:
            os.close(to_agent)
            os.close(writer)
            work(reader, from_agent)

        self.pids.append(start(live))
        os.close(reader)
        os.close(from_agent)
        self._to_agents.append(to_agent)
        self._from_agents.append(writer)

    def pipe_to(self, rank: int) -> int | None:
        """Return the pipe from a rank to its agent."""
        return self._to_agents[rank % len(self._to_agents)] if self._to_agents else None

    def begin(self, are_partners: bool) -> None:
        """Wait until all are there."""
        ports = [read_number(writer) for writer in self._from_agents]
        if are_partners:
            for ear in self._to_agents:
                for number, port in enumerate(ports):
                    os.write(ear, MESSAGE.pack(-1 - number, port, 0))
            for writer in self._from_agents:
                read_number(writer)

    def rebuild(self, lost: int) -> None:
        """Have the survivors rebuild what a lost node had."""
        left = [number for number in range(len(self._to_agents)) if number != lost]
        for number in left:
            os.write(self._to_agents[number], MESSAGE.pack(LOST, lost, 0))
        for number in left:
            read_number(self._from_agents[number])

    def published(self) -> list[int]:
        """Return which steps were published until they were killed."""
        found: list[int] = []
        for ear in self._to_agents:
            os.close(ear)
        for writer in self._from_agents:
            found += [step for step in heard(writer) if step >= 0]
            os.close(writer)
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
        snapshots=SnapshotSettings(every=1),
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
        node_sizes=((1, nodes),),
        keeps_workers=False,
        planned=False,
        strategy=None,
        replaced=(),
        spares=0,
        session=None,
        **places,
    )


def write_number(writer: int, step: int) -> None:
    os.write(writer, step.to_bytes(8, "little", signed=True))


def read_number(writer: int) -> int:
    """Return the next number from a pipe."""
    return int.from_bytes(os.read(writer, 8), "little", signed=True)


def heard(writer: int) -> list[int]:
    """Return all numbers that were written before the writer was killed."""
    content = b""
    while more := os.read(writer, 65_536):
        content += more
    return [int.from_bytes(content[at : at + 8], "little", signed=True) for at in range(0, len(content), 8)]
