"""This node's part in keeping snapshots alive: it sends its own to its partners, and holds those of its guests.

Who is whose partner is the master's decision, and comes with each order to serve (core/placement.py). Files:

    <snapshot_dir>/<job>/<node>/guests/...      other nodes' images, see guests.py
    <snapshot_dir>/<job>/<node>/parity/...      of groups that keep parity instead, see parity_store.py

They stay when the agent is killed, so that its next life finds them; they go when the job is over for this node.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

import structlog

from holdfast.agent.config import AgentConfig
from holdfast.agent.replicas.bulk import BulkServer, Sink
from holdfast.agent.replicas.guests import Guests, Held, directory_name
from holdfast.agent.replicas.parity_rounds import ParityRounds
from holdfast.agent.replicas.parity_store import ParityLabel, ParityStore
from holdfast.agent.replicas.rebuilding import rebuild_lost
from holdfast.agent.replicas.replicator import Image, Images, Replicator, Safe
from holdfast.core.orders import Peer, Serve
from holdfast.core.placement import lives_elsewhere
from holdfast.errors import ReplicaError
from holdfast.wire.bulk import Contribute, Kept, Label, Read

log = structlog.get_logger("agent")

GROUPS_KNOWN_MAX = 8
"""Parity groups this node was in lately: of what is lost, the parity is with the group before."""


class NoImages:
    """Of a node that takes no snapshots."""

    def seats(self) -> Iterable[int]:
        return ()

    def newest(self, seat: int) -> Image | None:
        return None

    def at(self, seat: int, view: int, step: int) -> Image | None:
        return None

    @property
    def sealed_count(self) -> int:
        return 0

    async def changed(self, sealed_count: int) -> None:
        await asyncio.Event().wait()


class Replication:
    """One for the life of an agent. Nothing is opened before `port` is asked for or an order comes."""

    def __init__(
        self, config: AgentConfig, images: Images, on_safe: Safe = lambda partner, seat, view, step: None
    ) -> None:
        self._config, self._images = config, images
        self._server: BulkServer | None = None
        self._guests: Guests | None = None
        self._store: ParityStore | None = None
        self._rounds: ParityRounds | None = None
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()
        self._pins: dict[int, ExitStack] = {}
        """Images of parity rounds that are over, while the next ones are made."""
        self._groups: deque[tuple[Peer, ...]] = deque(maxlen=GROUPS_KNOWN_MAX)
        self.replicator = Replicator(
            config.node_id, images, token=config.token, tls=config.tls, on_safe=on_safe
        )

    @property
    def port(self) -> int:
        """Where other nodes bring their snapshots."""
        if self._server is None:
            config = self._config
            self._server = BulkServer(config.address, token=config.token, tls=config.tls, keeper=self)
            self._server.start()
        return self._server.port

    @property
    def partners(self) -> int:
        """How many other nodes have, or should have, a part in keeping this node's images."""
        if self._rounds is not None:
            return 1
        return len(self.replicator.progress())

    def safe_step(self, seat: int) -> int:
        """The newest step of a seat that all of them have; -1: none."""
        if self._rounds is not None:
            sealed = self.parity_sealed().get(seat)
            return sealed[1] if sealed else -1
        found = [seats[seat].step if seat in seats else -1 for seats in self.replicator.progress().values()]
        return min(found, default=-1)

    @property
    def held(self) -> list[Held]:
        """Other nodes' images that are whole here."""
        return self._guests.held() if self._guests else []

    @property
    def guests(self) -> Guests | None:
        """What is held for others; None before the first order."""
        return self._guests

    def serve(self, order: Serve) -> None:
        """Another view, or news of this one."""
        if self._guests is None:
            self._guests = Guests(node_dir(self._config, order.job_id) / "guests")
        self._guests.promise({peer.node_id: peer.workers for peer in order.guests})
        self.replicator.follow(() if _is_elsewhere(order) else order.partners)
        self._join_group(order.job_id, () if _is_elsewhere(order) else order.parity)

    def begin_from(self, step: int) -> None:
        """All workers have begun anew before this step."""
        if self._guests is not None:
            self._guests.forget_after(step)

    def hold(self) -> None:
        """No part in the job for now. What is here of others stays: it may be needed."""
        self.replicator.follow(())
        self._join_group("", ())
        if self._guests:
            self._guests.promise({})

    async def rebuild(self, lost: str, seat: int) -> Held:
        """The newest image of a lost node's seat, made again from the parity of the group that it was in with us: held
        here from then on. ReplicaError if it cannot be had."""
        group = next((g for g in reversed(self._groups) if any(peer.node_id == lost for peer in g)), ())
        survivors = [peer for peer in group if peer.node_id != lost]
        return await asyncio.to_thread(
            rebuild_lost, lost, seat, survivors, self._open(), token=self._config.token, tls=self._config.tls
        )

    async def rebuild_lost(self) -> None:
        """All that can be had of nodes that were in a parity group with us and are not any more. Of each, one of those
        who are left does it."""
        newest = {peer.node_id for peer in self._groups[-1]} if self._groups else set()
        for group in list(self._groups)[:-1]:
            left = sorted({peer.node_id for peer in group} & newest)
            if not left or left[0] != self._config.node_id:
                continue
            for peer in (one for one in group if one.node_id not in newest):
                for seat in range(peer.workers):
                    try:
                        await self.rebuild(peer.node_id, seat)
                    except ReplicaError as error:
                        log.debug(str(error))

    async def close(self) -> None:
        """No more is sent or taken in, and nothing of it stays."""
        await self.replicator.close()
        if self._store:
            self._store.join({})  # frees who waits for others
        if self._server:
            await asyncio.to_thread(self._server.close)
        self._change(())
        await asyncio.gather(*self._changes)
        for pins in self._pins.values():
            pins.close()
        if self._store:
            await asyncio.to_thread(self._store.clear)
        if self._guests:
            await asyncio.to_thread(self._guests.clear)  # giving back a lot of memory takes a while
            _remove_empty(self._guests.root.parent, Path(self._config.snapshot_dir))

    # --- what the bulk port asks of us (bulk.Keeper), from its threads

    def offer(self, label: Label) -> Sink | None:
        return self._open().offer(label)

    def contribute(self, piece: Contribute) -> Sink | None:
        return self._open_store().contribute(piece)

    def inventory(self) -> tuple[Kept, ...]:
        guests = [Kept(kind="guest", label=held.label) for held in self.held]
        parity = [_kept(self._config.node_id, label) for label in self._store.inventory()] if self._store else []
        return (*guests, *parity)

    def reading(self, wanted: Read) -> AbstractContextManager[memoryview]:
        match wanted.kind:
            case "guest":
                return self._open().reading(wanted.node_id, wanted.seat, wanted.view, wanted.step)
            case "parity":
                return self._open_store().reading(wanted.seat, wanted.view, wanted.step)
            case "own":
                return _reading_own(self._images, wanted)

    # --- parity

    def _join_group(self, job_id: str, group: tuple[Peer, ...]) -> None:
        if group and self._store is None:
            loop = asyncio.get_running_loop()
            self._store = ParityStore(
                node_dir(self._config, job_id) / "parity",
                self._config.node_id,
                lambda: loop.call_soon_threadsafe(self._nudge),
            )
        if self._store:
            self._store.join({peer.node_id: peer.workers for peer in group})
        if group and (not self._groups or self._groups[-1] != group):
            self._groups.append(group)
        self._change(group)

    def _change(self, group: tuple[Peer, ...]) -> None:
        task = asyncio.create_task(self._change_rounds(group))
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)

    async def _change_rounds(self, group: tuple[Peer, ...]) -> None:
        """Whoever stays with the same others goes on undisturbed."""
        async with self._changing:
            if (self._rounds.group if self._rounds else ()) == group:
                return
            if self._rounds:
                self._pins |= await self._rounds.close()
                self._rounds = None
            if group and self._store:
                config = self._config
                self._rounds = ParityRounds(
                    config.node_id, group, self._images, self._store, self._pins, token=config.token, tls=config.tls
                )

    def _nudge(self) -> None:
        if self._rounds:
            self._rounds.nudge()

    def parity_sealed(self) -> dict[int, tuple[int, int] | None]:
        """By seat: (view, step) of the newest round that is sealed on the whole group."""
        return {number: seat.sealed for number, seat in enumerate(self._rounds.seats)} if self._rounds else {}

    def _open_store(self) -> ParityStore:
        if self._store is None:
            raise ReplicaError("this node keeps no parity")
        return self._store

    def _open(self) -> Guests:
        if self._guests is None:
            raise ReplicaError("this node has not been told yet for whom it holds anything")
        return self._guests


def _kept(node_id: str, label: ParityLabel) -> Kept:
    """As others ask for it."""
    shown = Label(
        node_id=node_id,
        seat=label.seat,
        part=0,
        shards=0,
        shares=0,
        view=label.view,
        step=label.step,
        size_bytes=label.size_bytes,
    )
    return Kept(kind="parity", label=shown, group=label.group, members=label.members)


@contextmanager
def _reading_own(images: Images, wanted: Read) -> Iterator[memoryview]:
    image = images.at(wanted.seat, wanted.view, wanted.step)
    with image.pinned() if image else nullcontext() as content:
        if content is None:
            raise ReplicaError(f"step {wanted.step} of view {wanted.view} is not here")
        yield content


def node_dir(config: AgentConfig, job_id: str) -> Path:
    """Where this node's memory of a job is."""
    return Path(config.snapshot_dir) / directory_name(job_id) / directory_name(config.node_id)


def _remove_empty(directory: Path, top: Path) -> None:
    """A directory and those above it, as far as they are ours and empty."""
    while directory.is_relative_to(top):
        try:
            directory.rmdir()
        except FileNotFoundError:
            pass
        except OSError:
            return  # somebody else's are there
        directory = directory.parent


def _is_elsewhere(order: Serve) -> bool:
    """Whether the state is in several nodes' memory anyway, and survives with the workers themselves."""
    return order.session is not None and lives_elsewhere(order.first_ranks, order.world_size, order.session.shards)
