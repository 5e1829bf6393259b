"""The agent's part in keeping the workers' state: room for their snapshots, checkpoints from them, the end.

a worker needs room        the vault makes it, and the worker is told; it keeps it when it changes seats
a snapshot is sealed       if it is wanted as a checkpoint, it is written to storage in the background
a worker asks what is held when all start anew: their state is in this node's memory
the job ends               what is being written is waited for; a job that failed leaves its newest state behind, on
                           storage, other nodes' parts of it too, or where that fails in memory
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import structlog

from holdfast.agent.config import AgentConfig
from holdfast.agent.memory.persister import Persister
from holdfast.agent.memory.pieces import Piece, guest
from holdfast.agent.memory.vault import Vault, clear_orphans
from holdfast.agent.memory.vault_images import VaultImages
from holdfast.agent.memory.verifier import Verifier
from holdfast.agent.replicas.guests import Held as Guest
from holdfast.agent.replicas.replication import NoImages, Replication
from holdfast.agent.reports import Reports
from holdfast.agent.workers import Worker
from holdfast.core.kept import KeptImage, Pacing, together
from holdfast.core.orders import Serve
from holdfast.errors import HoldfastError
from holdfast.storage.catalogue import Catalogue
from holdfast.storage.stores import open_store
from holdfast.wire.bulk import Label
from holdfast.wire.session import Held, Sealed, Written
from holdfast.wire.slots import Record, Seat, word

COPIES_PATIENCE_S = 30.0
"""How long a snapshot waits for other nodes to have it before the next ones are taken without."""
NEVER = (-1, -1)
"""The age of no image."""
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
        self._verifier = Verifier()
        self._tenants: dict[int, Worker] = {}
        """Who has which of the vault's rooms."""
        self._view, self._entered_ns = 0, 0
        self._stuck: dict[int, tuple[int, int] | None] = {}
        """By room: what other nodes had when they did not get on. They are not waited for again before they do."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._finding = asyncio.Lock()
        self._is_kept = False
        """Whether what is in memory is to outlive this agent, other nodes' images too."""

    def open(self, job_id: str, checkpoint_url: str, run: str = "") -> None:
        """The job has a name."""
        if self.is_on and not self.vault.is_open:
            self.vault.open(job_id)
            clear_orphans(Path(self._config.snapshot_dir))  # not before: ours may be what an earlier life has left
        self.persister.open(job_id, checkpoint_url, run)

    def replicate(self) -> Replication:
        """Begin to copy snapshots to other nodes, and to hold theirs."""
        if self.is_on:
            self._images = VaultImages(self.vault)
        self.replication = Replication(self._config, self._images or NoImages(), self._is_elsewhere)
        return self.replication

    def _is_elsewhere(self, where: str, seat: int, view: int, step: int) -> None:
        log.debug(f"step {step} of local rank {seat} is in {where} too")
        self._note_copies()

    def serve(self, order: Serve) -> None:
        """Another view, or news of this one: other partners, perhaps."""
        if order.view != self._view:
            self._view, self._entered_ns = order.view, time.time_ns()
            self._stuck.clear()
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
        ever: then snapshots go on without it, until it gets on again."""
        if self.replication is None:
            return
        partners = self.replication.partners
        newest = {kept.seat: kept.record for kept in reversed(self.vault.kept())}
        for number, page in self.vault.seats():
            safe, record = self.replication.safe_age(number), newest.get(number)
            is_behind = partners > 0 and record is not None and (safe is None or safe < (record.view, record.step))
            since_ns = max(record.created_ns if record else 0, self._entered_ns)
            waited_s = (time.time_ns() - since_ns) / 1e9 if is_behind else 0.0
            is_late = waited_s > COPIES_PATIENCE_S or (is_behind and self._stuck.get(number, NEVER) == safe)
            if is_late and number not in self._stuck:
                has = f"step {safe[1]}" if safe else "nothing"
                log.warning(f"other nodes have {has} of local rank {number}, for {waited_s:.0f} s: going on without")
            if is_late:
                self._stuck[number] = safe
            else:
                self._stuck.pop(number, None)
            page.put(partners=0 if is_late else partners, safe=word(*safe) if safe else -1)
            if waited_s:
                self._say_soon()  # and look again

    def need_room(self, worker: Worker, size_bytes: int) -> None:
        """For a worker with a seat."""
        if worker.seat is not None:
            self._beside(self._make_room(worker, self._room_of(worker, worker.seat), size_bytes))

    def _pacing(self, page: Seat) -> Pacing:
        every, cost_ns, step_ns, *counts = map(page.get, ("every", "cost_ns", "step_ns", "taken", "skipped", "spoiled"))
        return Pacing(every, self._config.snapshots.every > 0, step_ns / 1e9, cost_ns / 1e9, *counts)

    def _room_of(self, worker: Worker, seat: int) -> int:
        """The one it has; else that of its seat, or the first that nobody lives in: one who has closed up to a lower
        seat is still in the room of its old one."""
        self._tenants = {room: one for room, one in self._tenants.items() if not (one.ended or one.dismissed)}
        if (room := self._has_room(worker)) is None:
            room = next(room for room in (seat, *range(len(self._tenants) + 1)) if room not in self._tenants)
            self._tenants[room] = worker
        return room

    def _has_room(self, worker: Worker) -> int | None:
        return next((room for room, tenant in self._tenants.items() if tenant is worker), None)

    async def _make_room(self, worker: Worker, number: int, size_bytes: int) -> None:
        room = await self.vault.grant(number, size_bytes)
        self._note_copies()
        worker.tell(room)

    def sealed(self, worker: Worker, message: Sealed) -> None:
        """A snapshot is whole."""
        if message.wanted and (room := self._has_room(worker)) is not None:
            tell = (lambda why: worker.tell(Written(message.step, why, message.created_ns))) if message.url else None
            self.persister.wanted(room, message, tell)
        if self._images is not None:
            self._images.note()
        if self.vault.directory is not None:
            self._verifier.note(self.vault.directory)
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
        pieces = self.replication.parity_of() if self.replication is not None else []
        images = (
            *(_kept(one) for one in ours),
            *(_kept(one, is_replica=True) for one in others),
            *(_kept(one, is_replica=True, pieces=count) for one, count in pieces),
        )
        if images != self._said or (again and images):
            self._said = images
            self._reports.kept(images, together(self._pacing(page) for _, page in self.vault.seats()))

    def tell_held(self, worker: Worker, request: int) -> None:
        """What is here to start from: of this node's seats, and of other nodes."""
        self._beside(self._find_held(worker, request))

    async def _find_held(self, worker: Worker, request: int) -> None:
        if self.replication is not None:
            async with self._finding:  # the node's workers ask at the same time: it is done once
                await self.replication.rebuild_lost()
        worker.tell(Held(request, (*self.vault.held(), *(guest.image for guest in self._guests()))))

    def _guests(self) -> list[Guest]:
        return self.replication.held if self.replication is not None else []

    async def finish(self, is_success: bool, is_alone: bool) -> str:
        """The workers are gone, the job is over: where its last state is, in words; empty if there is none."""
        self._verifier.close()
        if is_success:
            await self.persister.drain()
        elif self.vault.is_open:
            await self.persister.rescue(is_alone, self._rescue_others)
        found = self.persister.newest
        if self.persister.lost < 0:
            self.vault.remove()
        else:
            self._is_kept = True
            log.warning(
                f"step {self.persister.lost} is not on storage: what this node has of it stays in memory, in"
                f" {self.vault.directory}. Start the job again with the same --rdzv-id and the same nodes to go on from"
                " it, or remove that directory"
            )
        return found.url if found is not None else ""

    async def _rescue_others(self) -> Sequence[Piece]:
        """What is held here of other nodes, with what can be made again of those that are gone."""
        if self.replication is None or (guests := self.replication.guests) is None:
            return ()
        await self.replication.rebuild_lost()
        return [guest(guests, held) for held in guests.held()]

    async def close(self) -> None:
        self._verifier.close()
        if self._saying is not None:
            self._saying.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.replication is not None:
            await self.replication.close(is_kept=self._is_kept)
        await self.persister.close()
        if not self.vault.kept():
            self.vault.remove()  # nothing that anybody could come back for
        self.vault.close()

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _kept(one: Record | Label, is_replica: bool = False, pieces: int = 1) -> KeptImage:
    return KeptImage(one.step, one.part, one.shards, one.shares, one.view, is_replica, pieces)


async def find_last_checkpoint(url: str) -> str:
    """The newest on storage, for a failed job's last words; empty where there is none, or nobody can look. Only the
    names are looked at: the next start reads and checks."""
    try:
        found = await asyncio.to_thread(lambda: Catalogue(open_store(url)).latest(is_deep=False))
    except (HoldfastError, OSError):
        return ""
    return found.url if found is not None else ""
