"""This node's part in keeping snapshots alive: it sends its own to its partners, and holds those of its guests.

Who is whose partner is the master's decision, and comes with each order to serve (core/placement.py). Files:

    <memory_dir>/<job>/<node>/guests/...      see guests.py

They stay when the agent is killed, so that its next life finds them; they go when the job is over for this node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from holdfast.agent.bulk import BulkServer, Sink
from holdfast.agent.config import AgentConfig
from holdfast.agent.guests import Guests, Held, directory_name
from holdfast.agent.replicator import Image, Images, Replicator, Safe
from holdfast.core.orders import Serve
from holdfast.core.placement import lives_elsewhere
from holdfast.errors import ReplicaError
from holdfast.wire.bulk import Contribute, Kept, Label, Read


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

    def hold(self) -> None:
        """No part in the job for now. What is here of others stays: it may be needed."""
        self.replicator.follow(())
        if self._guests:
            self._guests.promise({})

    async def close(self) -> None:
        """No more is sent or taken in, and nothing of it stays."""
        await self.replicator.close()
        if self._server:
            await asyncio.to_thread(self._server.close)
        if self._guests:
            self._guests.clear()
            _remove_empty(self._guests.root.parent, Path(self._config.memory_dir))

    # --- what the bulk port asks of us (bulk.Keeper), from its threads

    def offer(self, label: Label) -> Sink | None:
        return self._open().offer(label)

    def contribute(self, piece: Contribute) -> Sink | None:
        raise ReplicaError("this node keeps no parity")

    def inventory(self) -> tuple[Kept, ...]:
        return tuple(Kept(kind="guest", label=held.label) for held in self.held)

    def reading(self, wanted: Read) -> AbstractContextManager[memoryview]:
        return self._open().reading(wanted.node_id, wanted.seat, wanted.view, wanted.step)

    def _open(self) -> Guests:
        if self._guests is None:
            raise ReplicaError("this node has not been told yet for whom it holds anything")
        return self._guests


def node_dir(config: AgentConfig, job_id: str) -> Path:
    """Where this node's memory of a job is."""
    return Path(config.memory_dir) / directory_name(job_id) / directory_name(config.node_id)


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
