"""This node's part in keeping snapshots alive: it sends its own to its partners, and holds those of its guests.

Who is whose partner is the master's decision, and comes with each order to serve (core/placement.py). Files:

    <snapshot_dir>/<job>/<node>/guests/...      other nodes' images, see guests.py
    <snapshot_dir>/<job>/<node>/parity/...      of groups that keep parity instead, see parity_store.py

They stay when the agent is killed, so that its next life finds them; they go when the job is over for this node, unless
its state could not be brought to storage.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import structlog

from holdfast.agent.config import AgentConfig
from holdfast.agent.memory.directories import node_dir
from holdfast.agent.replicas.bulk import BulkClient, BulkServer, Sink
from holdfast.agent.replicas.guests import Guests, Held
from holdfast.agent.replicas.parity_rounds import ParityRounds
from holdfast.agent.replicas.parity_store import ParityLabel, ParityStore
from holdfast.agent.replicas.rebuilding import rebuild_lost
from holdfast.agent.replicas.replicator import Image, Images, Replicator, Safe, label_of
from holdfast.core.orders import Peer, Serve
from holdfast.core.placement import lives_elsewhere
from holdfast.errors import ReplicaError, WireError
from holdfast.wire.bulk import Contribute, Kept, Label, Read

log = structlog.get_logger("agent")


class NoImages:
    """Of a node that takes no snapshots."""

    def seats(self) -> Iterable[int]:
        return ()

    def newest(self, seat: int) -> Image | None:
        return None

    def all(self) -> Iterable[Image]:
        return ()

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
        self._config, self._images, self._on_safe = config, images, on_safe
        self._server: BulkServer | None = None
        self._guests: Guests | None = None
        self._store: ParityStore | None = None
        self._rounds: ParityRounds | None = None
        self._wanted_group: tuple[Peer, ...] = ()
        """Whose rounds these are, or will be as soon as those of the last group are over."""
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()
        self._known_peers: dict[str, Peer] = {}
        """Of parity groups: of what is lost, the parity may be with the group before."""
        self.replicator = Replicator(config.node_id, images, token=config.token, tls=config.tls, on_safe=on_safe)

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
        return 1 if self._wanted_group else self.replicator.partners

    def safe_age(self, seat: int) -> tuple[int, int] | None:
        """(view, step) of the newest image of a seat that all of them have."""
        return self.parity_sealed().get(seat) if self._wanted_group else self.replicator.safe_age(seat)

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
            self._guests = Guests(self._directory(order.job_id) / "guests")
        self._guests.promise({peer.node_id: peer.rooms or peer.workers for peer in order.guests})
        self.replicator.follow(() if _is_elsewhere(order) else order.partners)
        self._join_group(order.job_id, () if _is_elsewhere(order) else order.parity)

    def _directory(self, job_id: str) -> Path:
        return node_dir(Path(self._config.snapshot_dir), job_id, self._config.node_id)

    def begin_from(self, step: int) -> None:
        """All workers have begun anew before this step."""
        if self._guests is not None:
            self._guests.forget_after(step)
        self.replicator.forget_after(step)
        if self._rounds is not None:
            self._rounds.forget_after(step)

    def hold(self) -> None:
        """No part in the job for now. What is here of others stays: it may be needed."""
        self.replicator.follow(())
        self._join_group("", ())
        if self._guests:
            self._guests.promise({})

    async def rebuild(self, lost: str, seat: int) -> Held:
        """The images of a lost node's seat, made again from the parity of the group that it was in with us: held here
        from then on; the newest of them. ReplicaError if none can be had."""
        known = [one.group for one in reversed(self._parity()) if lost in one.group]
        names = next(iter(known), ())
        survivors = [peer for name in names if name != lost and (peer := self._known_peers.get(name))]
        return await asyncio.to_thread(
            rebuild_lost, lost, seat, survivors, self._open(), token=self._config.token, tls=self._config.tls
        )

    async def rebuild_lost(self) -> None:
        """All that can be had of nodes that were in a parity group with us and are gone, or are back without what they
        had in memory. Of each, one of those who are left does it."""
        here = {self._config.node_id, *(peer.node_id for peer in self._wanted_group)}
        ours = [
            member
            for one in self._parity()
            for member in one.members
            if sorted(here.intersection(one.group) - {member.node_id})[:1] == [self._config.node_id]
        ]
        if not ours:
            return
        at_home = set().union(*await asyncio.gather(*map(self._own_images, self._wanted_group)))
        lost = [member for member in ours if (member.node_id, member.seat, member.age) not in at_home]
        for node_id, seat in dict.fromkeys((member.node_id, member.seat) for member in lost):
            try:
                await self.rebuild(node_id, seat)
            except ReplicaError as error:
                log.debug(str(error))

    async def _own_images(self, peer: Peer) -> set[tuple[str, int, tuple[int, int]]]:
        """(node, seat, age) of those that a node of our group has made and has still; of itself nobody asks. Who is not
        in our group any more is not asked either: it may be gone."""
        if peer.node_id == self._config.node_id:
            return set()
        client = BulkClient(peer.address, peer.bulk_port, token=self._config.token, tls=self._config.tls)
        try:
            kept = await asyncio.to_thread(client.inventory)
        except (WireError, ReplicaError, OSError):
            return set()
        finally:
            client.hang_up()
        return {(peer.node_id, one.label.seat, one.label.age) for one in kept if one.kind == "own"}

    def _parity(self) -> list[ParityLabel]:
        """What is kept here, of all seats, the oldest first."""
        return sorted(self._store.inventory() if self._store else [], key=lambda one: one.age)

    async def close(self, is_kept: bool = False) -> None:
        """No more is sent or taken in, and nothing of it stays, unless it is to be kept for another life."""
        await self.replicator.close()
        if self._store:
            self._store.join({})  # frees who waits for others
        if self._server:
            await asyncio.to_thread(self._server.close)
        self._change(())
        await asyncio.gather(*self._changes)
        if is_kept:
            return
        if self._store:
            await asyncio.to_thread(self._store.clear)
        if self._guests:
            await asyncio.to_thread(self._guests.clear)  # giving back a lot of memory takes a while
            _remove_empty(self._guests.root.parent, Path(self._config.snapshot_dir))

    # --- what the bulk port asks of us (bulk.Keeper), from its threads

    def offer(self, label: Label, whole: int) -> Sink | None:
        return self._open().offer(label, whole)

    def contribute(self, piece: Contribute) -> Sink | None:
        return self._open_store().contribute(piece)

    def inventory(self) -> tuple[Kept, ...]:
        own = [Kept(kind="own", label=label_of(self._config.node_id, image)) for image in self._images.all()]
        guests = [Kept(kind="guest", label=held.label) for held in self.held]
        parity = [_kept(self._config.node_id, label) for label in self._store.inventory()] if self._store else []
        return (*own, *guests, *parity)

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
        root = self._directory(job_id) / "parity"
        if self._store is None and (group or root.exists()):
            loop = asyncio.get_running_loop()
            self._store = ParityStore(
                root,
                self._config.node_id,
                lambda: loop.call_soon_threadsafe(self._nudge),
            )
        if self._store:
            self._store.join({peer.node_id: peer.workers for peer in group})
        self._known_peers |= {peer.node_id: peer for peer in group}
        self._wanted_group = group
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
                await self._rounds.close()
                self._rounds = None
            if group and self._store:
                config = self._config
                self._rounds = ParityRounds(
                    config.node_id,
                    group,
                    self._images,
                    self._store,
                    token=config.token,
                    tls=config.tls,
                    on_safe=self._on_safe,
                )

    def _nudge(self) -> None:
        if self._rounds:
            self._rounds.nudge()

    def parity_sealed(self) -> dict[int, tuple[int, int] | None]:
        """By seat: (view, step) of the newest round that is sealed on the whole group."""
        return {number: seat.sealed for number, seat in enumerate(self._rounds.seats)} if self._rounds else {}

    def parity_of(self) -> list[tuple[Label, int]]:
        """The images that can be made again with the parity that is kept here, and how many nodes it takes."""
        known = self._store.inventory() if self._store else []
        others = [(member, len(one.group) - 1) for one in known for member in one.members]
        return [(member, nodes) for member, nodes in others if member.node_id != self._config.node_id]

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
