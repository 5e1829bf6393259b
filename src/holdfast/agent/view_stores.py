"""The rendezvous stores of the views that this node hosts: on a port that was bound and offered ahead of time, and open
until the workers of the view have left it for a later one."""

from __future__ import annotations

import socket

from holdfast.agent.rendezvous_stores import RendezvousStores, StorePorts
from holdfast.core.orders import Serve
from holdfast.errors import LaunchError
from holdfast.util.logs import get_logger
from holdfast.util.tasks import TaskSet

STORES_OPEN_MAX = 4
"""How many stores of views stay open whose workers have not all left them for a later view."""

log = get_logger(__name__)


class ViewStores:
    """The stores of an agent, and the ports for those to come."""

    def __init__(self, address: str, stores: RendezvousStores, tasks: TaskSet) -> None:
        self.ports = StorePorts(address)
        self._stores, self._tasks = stores, tasks
        self._views: list[int] = []

    def open(self, order: Serve) -> None:
        """Open the store of the view that an order names, and close those that no worker needs any more."""
        listener = self.ports.claim(order.view)
        if listener is None:
            text = (
                f"view {order.view} wants a rendezvous store on port {order.store_port}, which this node did not offer"
            )
            log.error("store-port-unknown", text)
            return
        self._tasks.start(self._serve(order.view, order.store_host, listener))
        self._views.append(order.view)
        # Workers that are kept may need the store of their view until they have left it.
        self.close_before(self._views[-STORES_OPEN_MAX:][0] if order.keeps_workers else order.view)

    async def _serve(self, view: int, host: str, listener: socket.socket) -> None:
        """Open a view's store. If that fails its workers time out, and the master forms another view."""
        try:
            await self._stores.open(view, host, listener)
        except LaunchError as error:
            log.error("store-failed", f"the rendezvous store of view {view} could not be opened: {error}")

    def close_before(self, view: int) -> None:
        """Close the stores of views before this one."""
        for earlier in [number for number in self._views if number < view]:
            self._views.remove(earlier)
            self._tasks.start(self._close(earlier))

    async def _close(self, view: int) -> None:
        try:
            await self._stores.close(view)
        except LaunchError as error:
            log.warning("store-not-closed", f"the rendezvous store of view {view} could not be closed: {error}")

    async def watch(self) -> None:
        """Log when stores are lost. Workers that have met continue without; one that needs it fails and is
        restarted."""
        while True:
            views = ", ".join(map(str, sorted(await self._stores.lost())))
            text = f"the rendezvous store of view {views} was lost: the process that hosted it died"
            log.warning("store-lost", text)
