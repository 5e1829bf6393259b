"""The agent's part in keeping the workers' state: room for their snapshots, checkpoints from them, the end.

a worker needs room        the vault makes it, and the worker is told
a snapshot is sealed       if it is wanted as a checkpoint, it is written to storage in the background
a worker asks what is held when all start anew: their state is in this node's memory
the job ends               what is being written is waited for; a job that failed leaves its newest state behind
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import structlog

from holdfast.agent.config import AgentConfig
from holdfast.agent.persister import Persister
from holdfast.agent.replicas.blocks import unpack
from holdfast.agent.replicas.guests import Held as Guest
from holdfast.agent.replicas.replication import NoImages, Replication
from holdfast.agent.reports import Reports
from holdfast.agent.vault import Vault, clear_orphans
from holdfast.agent.vault_images import VaultImages
from holdfast.agent.workers import Worker
from holdfast.core.kept import KeptImage
from holdfast.core.orders import Serve
from holdfast.errors import HoldfastError
from holdfast.storage.catalogue import Catalogue
from holdfast.storage.stores import open_store
from holdfast.wire.bulk import Label
from holdfast.wire.session import Held, HeldImage, Sealed, Written
from holdfast.wire.slots import Record

COPIES_PATIENCE_S = 30.0
"""How long a snapshot waits for other nodes to have it before the next ones are taken without."""
SAY_EVERY_S = 1.0
"""How soon the master hears of a new snapshot. When a worker ends it hears at once."""

log = structlog.get_logger("agent")


class StateKeeper:
    """One for the life of an agent."""

    def __init__(self, config: AgentConfig, reports: Reports) -> None:
        self._config, self._reports = config, reports
        self._images: VaultImages | None = None
        self.replication: Replication | None = None
        """What this node holds for others, and others for it; None in an agent that is no node of a job."""
        self._said: tuple[KeptImage, ...] = ()
        self._saying: asyncio.TimerHandle | None = None
        self.is_on = config.snapshots.every >= 0 and bool(config.snapshot_dir)
        self.vault = Vault(Path(config.snapshot_dir or "/dev/shm"), config.node_id)
        self.persister = Persister(self.vault, config.checkpoint_keep, reports.checkpointed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._finding = asyncio.Lock()

    def open(self, job_id: str, checkpoint_url: str) -> None:
        """The job has a name."""
        if self.is_on and not self.vault.is_open:
            self.vault.open(job_id)
            clear_orphans(Path(self._config.snapshot_dir))  # not before: ours may be what an earlier life has left
        self.persister.open(job_id, checkpoint_url)

    def replicate(self) -> Replication:
        """Begin to copy snapshots to other nodes, and to hold theirs."""
        if self.is_on:
            self._images = VaultImages(self.vault)
        self.replication = Replication(self._config, self._images or NoImages(), self._is_elsewhere)
        return self.replication

    def _is_elsewhere(self, partner: str, seat: int, view: int, step: int) -> None:
        log.debug(f"step {step} of local rank {seat} is on {partner} too")
        self._note_copies()

    def serve(self, order: Serve) -> None:
        """Another view, or news of this one: other partners, perhaps."""
        if self.replication is not None:
            self.replication.serve(order)
            self._note_copies()

    def hold(self) -> None:
        """No part in the job for now."""
        if self.replication is not None:
            self.replication.hold()
            self._note_copies()

    def _note_copies(self) -> None:
        """Workers find on their pages how far the copies are. A partner that does not get on is not waited for for
        ever: then snapshots go on without it."""
        if self.replication is None:
            return
        newest = {kept.seat: kept.record for kept in reversed(self.vault.kept())}
        for number, page in self.vault.seats():
            safe, record = self.replication.safe_step(number), newest.get(number)
            waited_s = (time.time_ns() - record.created_ns) / 1e9 if record and record.step > safe else 0.0
            is_late = waited_s > COPIES_PATIENCE_S
            if is_late and page.get("partners"):
                has = f"step {safe}" if safe >= 0 else "nothing"
                log.warning(f"other nodes have {has} of local rank {number}, for {waited_s:.0f} s: going on without")
            page.put(partners=0 if is_late else self.replication.partners, safe=safe)
            if waited_s:
                self._say_soon()  # and look again

    def need_room(self, worker: Worker, size_bytes: int) -> None:
        """For a worker with a seat."""
        if worker.seat is not None:
            self._beside(self._make_room(worker, worker.seat, size_bytes))

    async def _make_room(self, worker: Worker, seat: int, size_bytes: int) -> None:
        room = await self.vault.grant(seat, size_bytes)
        self._note_copies()
        worker.tell(room)

    def sealed(self, worker: Worker, message: Sealed) -> None:
        """A snapshot is whole."""
        if message.wanted and worker.seat is not None:
            tell = (lambda why: worker.tell(Written(message.step, why))) if message.url else None
            self.persister.wanted(worker.seat, message, tell)
        if self._images is not None:
            self._images.note()
        self._say_soon()

    def _say_soon(self) -> None:
        if self._saying is None:
            self._saying = asyncio.get_running_loop().call_later(SAY_EVERY_S, self.say)

    def begin_from(self, step: int) -> None:
        """All workers have begun anew before this step."""
        self.vault.forget_after(step)
        if self.replication is not None:
            self.replication.begin_from(step)

    def say(self, again: bool = False) -> None:
        """Tell the master what is in memory, if it does not know; `again`: another master may not know anything."""
        if self._saying is not None:
            self._saying.cancel()
            self._saying = None
        self.vault.note_life()
        self._note_copies()
        ours, others = [kept.record for kept in self.vault.kept()], [guest.label for guest in self._guests()]
        images = (*(_kept(one) for one in ours), *(_kept(one, is_replica=True) for one in others))
        if images != self._said or (again and images):
            self._said = images
            self._reports.kept(images)

    def tell_held(self, worker: Worker, request: int) -> None:
        """What is here to start from: of this node's seats, and of other nodes."""
        self._beside(self._find_held(worker, request))

    async def _find_held(self, worker: Worker, request: int) -> None:
        if self.replication is not None:
            async with self._finding:  # the node's workers ask at the same time: it is done once
                await self.replication.rebuild_lost()
        worker.tell(Held(request, (*self.vault.held(), *map(_held, self._guests()))))

    def _guests(self) -> list[Guest]:
        return self.replication.held if self.replication is not None else []

    async def finish(self, is_success: bool, is_alone: bool) -> str:
        """The workers are gone, the job is over: where its last state is, in words; empty if there is none."""
        if is_success:
            await self.persister.drain()
        elif self.vault.is_open:
            await self.persister.rescue(is_alone)
        found = self.persister.newest
        if self.persister.lost < 0:
            self.vault.remove()
        else:
            step, where = self.persister.lost, self._config.snapshot_dir
            log.warning(f"step {step} could not be brought to storage and stays in memory, in {where}")
        return found.url if found is not None else ""

    async def close(self) -> None:
        if self._saying is not None:
            self._saying.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.replication is not None:
            await self.replication.close()
        await self.persister.close()
        if not self.vault.kept():
            self.vault.remove()  # nothing that anybody could come back for
        self.vault.close()

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _kept(one: Record | Label, is_replica: bool = False) -> KeptImage:
    return KeptImage(one.step, one.part, one.shards, one.shares, one.view, is_replica)


def _held(guest: Guest) -> HeldImage:
    label = guest.label
    return HeldImage(
        path=str(guest.path),
        step=label.step,
        part=label.part,
        shards=label.shards,
        shares=label.shares,
        size_bytes=label.size_bytes,
        seed=label.seed,
        first_step=label.first_step,
        view=label.view,
        checksums=tuple(unpack(label.checksums)),
    )


async def find_last_checkpoint(url: str) -> str:
    """The newest on storage, for a failed job's last words; empty where there is none, or nobody can look. Only the
    names are looked at: the next start reads and checks."""
    try:
        found = await asyncio.to_thread(lambda: Catalogue(open_store(url)).latest(is_deep=False))
    except (HoldfastError, OSError):
        return ""
    return found.url if found is not None else ""
