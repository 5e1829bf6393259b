"""This node's part in copying snapshots: it sends its own to its partners, and holds those of the nodes assigned to it.

The master decides which nodes are partners, and each order to serve says so (core/replica_placement.py). The files are
in <snapshot_dir>/<job>/<node>/replicas and parity (directories.py). They stay when the agent is killed, so that the
agent that replaces it finds them; they are removed when the job is over for this node, unless its state could not be
uploaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from holdfast.core.image_info import ImageInfo, Version
from holdfast.core.orders import Peer, Serve
from holdfast.core.shard_map import lonely_shards
from holdfast.errors import ReplicaError, WireError
from holdfast.snapshots.directories import make_node_dir, node_dir, remove_empty
from holdfast.snapshots.parity.parity_store import ParityStore
from holdfast.snapshots.parity.rebuild import rebuild_lost
from holdfast.snapshots.parity.rounds import ParityRounds
from holdfast.snapshots.replica_store import ReplicaStore
from holdfast.snapshots.replicator import ImageSource, OnSafe, Replicator, describe_for_peers, find_image
from holdfast.snapshots.slot_file import SlotImage
from holdfast.snapshots.transfer import BlockSink, BulkClient, BulkServer
from holdfast.util.logs import get_logger
from holdfast.util.tasks import TaskSet
from holdfast.wire.bulk_messages import Contribute, ReadBlocks, StoredReplica
from holdfast.wire.tls import Tls

log = get_logger(__name__)


class ReplicationConfig(Protocol):
    """The settings of an agent that replication needs (agent.config.AgentConfig)."""

    @property
    def node_id(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def token(self) -> str: ...
    @property
    def tls(self) -> Tls | None: ...
    @property
    def snapshot_dir(self) -> str: ...


class Replication:
    """The replicas of one agent, sent and held. Nothing is opened before `port` is read or an order comes."""

    def __init__(
        self,
        config: ReplicationConfig,
        images: ImageSource,
        on_safe: OnSafe = lambda where, local_rank, version: None,
    ) -> None:
        self._config, self._images, self._on_safe = config, images, on_safe
        self._server: BulkServer | None = None
        self._directory: Path | None = None
        self._replicas: ReplicaStore | None = None
        self._parity: ParityStore | None = None
        self._rounds: ParityRounds | None = None
        self._wanted_group: tuple[Peer, ...] = ()
        """Whose rounds these are, or will be as soon as those of the last group are over."""
        self._changing = asyncio.Lock()
        self._changes = TaskSet()
        self._known_peers: dict[str, Peer] = {}
        """All members of parity groups so far: the parity of a lost image may be with the group before."""
        self.replicator = Replicator(config.node_id, images, token=config.token, tls=config.tls, on_safe=on_safe)

    @property
    def port(self) -> int:
        """The port to which other nodes send their snapshots."""
        if self._server is None:
            config = self._config
            self._server = BulkServer(config.address, token=config.token, tls=config.tls, receiver=self)
            self._server.start()
        return self._server.port

    @property
    def partners(self) -> int:
        """How many other nodes hold, or should hold, this node's images."""
        return 1 if self._wanted_group else self.replicator.partners

    def safe_version(self, local_rank: int) -> Version | None:
        """Return the version of the newest image of a worker that all of them have."""
        if self._wanted_group:
            return self.parity_sealed().get(local_rank)
        return self.replicator.safe_version(local_rank)

    def images(self) -> list[SlotImage]:
        """Return other nodes' images that are complete here."""
        return self._replicas.images() if self._replicas else []

    def serve(self, order: Serve) -> None:
        """Follow an order: another view, or a change of this one."""
        self._find_directory(order)
        if self._replicas is not None:
            self._replicas.assign({peer.node_id: peer.slot_files or peer.workers for peer in order.replica_owners})
        is_safe = _survives_a_node(order)
        self.replicator.follow(() if is_safe else order.partners)
        self._join_group(() if is_safe else order.parity)

    def _find_directory(self, order: Serve) -> None:
        """Make this node's directory of the job, once there is something to store in it or to find there. One that
        others could get at is not used, nor read."""
        root, node_id = Path(self._config.snapshot_dir), self._config.node_id
        found = node_dir(root, order.job_id, node_id)
        if self._directory is not None or not (order.replica_owners or order.parity or found.exists()):
            return
        try:
            self._directory = make_node_dir(root, order.job_id, node_id)
        except OSError as error:
            log.warning("replicas-off", f"no images are held for other nodes: {error.strerror or error}")
            return
        self._replicas = ReplicaStore(self._directory / "replicas")

    def discard_after(self, step: int) -> None:
        """Discard what is of later steps: all workers have restarted before this one."""
        if self._replicas is not None:
            self._replicas.discard_after(step)
        self.replicator.discard_after(step)
        if self._rounds is not None:
            self._rounds.discard_after(step)

    def pause(self) -> None:
        """Send and accept nothing: this node is not in the view. What is here of others stays: it may be needed."""
        self.replicator.follow(())
        self._join_group(())
        if self._replicas:
            self._replicas.assign({})

    async def rebuild(self, lost: str, local_rank: int) -> SlotImage:
        """Rebuild the images of a worker of a lost node from the parity of the group that it was in with this node, and
        hold them from then on. Return the newest. Raises ReplicaError if there is none."""
        known = [one.group for one in reversed(self._parities()) if lost in one.group]
        names = next(iter(known), ())
        survivors = [peer for name in names if name != lost and (peer := self._known_peers.get(name))]
        return await asyncio.to_thread(
            rebuild_lost,
            *(lost, local_rank, survivors, self._replica_store()),
            token=self._config.token,
            tls=self._config.tls,
        )

    async def rebuild_lost(self) -> None:
        """Rebuild all that can be of nodes that were in a parity group with this one and are lost, or are back without
        their memory. For each of them one of the survivors does it."""
        here = {self._config.node_id, *(peer.node_id for peer in self._wanted_group)}
        ours = [
            member
            for one in self._parities()
            for member in one.members
            if sorted(here.intersection(one.group) - {member.node_id})[:1] == [self._config.node_id]
        ]
        if not ours:
            return
        at_home = set().union(*await asyncio.gather(*map(self._images_of, self._wanted_group)))
        lost = [member for member in ours if (member.node_id, member.local_rank, member.version) not in at_home]
        for node_id, local_rank in dict.fromkeys((member.node_id, member.local_rank) for member in lost):
            try:
                await self.rebuild(node_id, local_rank)
            except ReplicaError as error:
                log.debug("rebuild-failed", str(error))

    async def _images_of(self, peer: Peer) -> set[tuple[str, int, Version]]:
        """Return (node, local rank, version) of the images that a member of the group has made and still has; nothing
        for this node itself. A node that is not in the group any more is not asked: it may be lost."""
        if peer.node_id == self._config.node_id:
            return set()
        client = BulkClient(peer.address, peer.bulk_port, token=self._config.token, tls=self._config.tls)
        try:
            found = await asyncio.to_thread(client.inventory)
        except (WireError, ReplicaError, OSError):
            return set()
        finally:
            client.disconnect()
        return {(peer.node_id, one.image.local_rank, one.version) for one in found if one.kind == "own"}

    def _parities(self) -> list[StoredReplica]:
        """Return the parities that are stored here, of all workers, the oldest first."""
        return sorted(self._parity.inventory() if self._parity else [], key=lambda one: one.version)

    async def close(self, is_preserved: bool = False) -> None:
        """End all transfers, and remove the files unless they are to survive this agent."""
        await self.replicator.close()
        if self._parity:
            self._parity.join({})  # frees the threads that wait for other members
        if self._server:
            await asyncio.to_thread(self._server.close)
        self._changes.start(self._change_rounds(()))
        await self._changes.drain()
        if is_preserved:
            return
        if self._parity:
            await asyncio.to_thread(self._parity.clear)
        if self._replicas:
            await asyncio.to_thread(self._replicas.clear)  # to free a lot of memory takes a while
            remove_empty(self._replicas.root.parent, Path(self._config.snapshot_dir))

    # --- what the bulk port asks for (transfer.ReplicaReceiver), from its threads

    def offer(self, image: ImageInfo, complete_step: int) -> BlockSink | None:
        """Return where an image of another node goes."""
        return self._replica_store().offer(image, complete_step)

    def contribute(self, contribution: Contribute) -> BlockSink | None:
        """Return where a piece of the group's parity goes."""
        return self._parity_store().contribute(contribution)

    def inventory(self) -> tuple[StoredReplica, ...]:
        """Return all images here: own ones, replicas and parity."""
        node_id = self._config.node_id
        own = [StoredReplica(kind="own", image=describe_for_peers(node_id, one)) for one in self._images.images()]
        replicas = [StoredReplica(kind="replica", image=one.info) for one in self.images()]
        return (*own, *replicas, *(self._parity.inventory() if self._parity else ()))

    @contextmanager
    def reading(self, wanted: ReadBlocks) -> Iterator[memoryview]:
        """Give the bytes of one of them."""
        rank, version = wanted.local_rank, (wanted.view, wanted.step)
        match wanted.kind:
            case "replica":
                with self._replica_store().reading(wanted.node_id, rank, *version) as content:
                    yield content
            case "parity":
                with self._parity_store().reading(rank, *version) as content:
                    yield content
            case "own":
                image = find_image(self._images, rank, version)
                if image is not None:
                    with image.reading() as found:
                        if found is not None:
                            yield found
                            return
                raise ReplicaError(f"this node has no image of step {wanted.step} of view {wanted.view}")

    # --- parity

    def _join_group(self, group: tuple[Peer, ...]) -> None:
        root = self._directory / "parity" if self._directory is not None else None
        if self._parity is None and root is not None and (group or root.exists()):
            loop = asyncio.get_running_loop()
            self._parity = ParityStore(root, self._config.node_id, lambda: loop.call_soon_threadsafe(self._wake_rounds))
        if self._parity:
            self._parity.join({peer.node_id: peer.workers for peer in group})
        self._known_peers |= {peer.node_id: peer for peer in group}
        self._wanted_group = group
        self._changes.start(self._change_rounds(group))

    async def _change_rounds(self, group: tuple[Peer, ...]) -> None:
        """Begin the rounds of another group. Those of the same group are not disturbed."""
        async with self._changing:
            if (self._rounds.group if self._rounds else ()) == group:
                return
            if self._rounds:
                await self._rounds.close()
                self._rounds = None
            if group and self._parity:
                self._rounds = ParityRounds(
                    *(self._config.node_id, group, self._images, self._parity),
                    token=self._config.token,
                    tls=self._config.tls,
                    on_safe=self._on_safe,
                )

    def _wake_rounds(self) -> None:
        if self._rounds:
            self._rounds.wake()

    def parity_sealed(self) -> dict[int, Version | None]:
        """Return the version of the newest round that is sealed on the whole group, by local rank."""
        return {rank: rounds.sealed for rank, rounds in enumerate(self._rounds.ranks)} if self._rounds else {}

    def rebuildable(self) -> list[tuple[ImageInfo, int]]:
        """Return other nodes' images that can be rebuilt with the parity stored here, and how many nodes that takes."""
        others = [(member, len(one.group) - 1) for one in self._parities() for member in one.members]
        return [(member, nodes) for member, nodes in others if member.node_id != self._config.node_id]

    def _parity_store(self) -> ParityStore:
        if self._parity is None:
            raise ReplicaError("this node stores no parity")
        return self._parity

    def _replica_store(self) -> ReplicaStore:
        if self._replicas is None:
            raise ReplicaError("no nodes are assigned to this node yet")
        return self._replicas


def _survives_a_node(order: Serve) -> bool:
    """Return whether the state is in several nodes' memory anyway, with the workers themselves."""
    if order.session is None or len(order.first_ranks) < 2 or not order.session.shard_map.fits(order.world_size):
        return False
    return not lonely_shards(order.session.shard_map, order.first_ranks, order.world_size)
