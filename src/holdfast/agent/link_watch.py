"""The links from this node to other nodes of the view: whether each can be reached, and how long a small transfer
takes.

A link between two nodes may break, or lose packets, while both of them reach the master: then no process is dead, the
collectives stand still or are slow, and nothing in them says where. So every few seconds this node probes some other
nodes of the view, its *neighbours*, which the master names (core/health/peer_links.py):

    unreachable   reported when the master asks, as something stands still; a neighbour that was never reached is not
                  reported, as a firewall may be the reason, and the workers have other ways
    slow          reported when it lasts: many times as long as the probes of the other neighbours, or, where there is
                  only one, as it took before
"""

from __future__ import annotations

import asyncio
from collections import deque
from statistics import median

from holdfast.agent.reports import Reports
from holdfast.core.events import PeerLinkSlowed, PeerLinksProbed
from holdfast.core.orders import Peer
from holdfast.errors import WireError
from holdfast.util.logs import get_logger
from holdfast.wire.link_probe import probe_link
from holdfast.wire.tls import Tls

PROBE_EVERY_REPORTS = 3
"""In intervals of step time reports: 15 seconds by default."""
TIMEOUT_S = 3.5
"""A kernel tries to connect at once, and after 1 and 3 seconds: three lost packets in a row are a broken link."""
ATTEMPTS = 2
"""At the same time, where it matters."""
READINGS_MAX = 16
SLOW_TIMES = 10.0
SLOW_FLOOR_S, SLOW_FLOOR_ALONE_S = 0.02, 0.1
"""A busy machine is as slow as this to anybody; where no other neighbour shows it, more is allowed for."""
SLOW_IN_A_ROW = 3
"""In how many probes one after the other: a machine may be busy for a moment."""

log = get_logger(__name__)


class NeighbourLink:
    """What is known of the link to one neighbour."""

    def __init__(self) -> None:
        self.readings: deque[float] = deque(maxlen=READINGS_MAX)
        """How long the transfers took, the newest last."""
        self.slow_in_a_row = 0
        self.was_reached = False

    def usual_s(self, others_s: list[float]) -> float:
        """Return how long a transfer should take."""
        return median(others_s) if others_s else min(self.readings, default=TIMEOUT_S)


class LinkWatch:
    """Probes the neighbours for as long as the agent runs. Nothing is done before an order names some."""

    def __init__(self, reports: Reports, *, token: str, tls: Tls | None, probe_every_s: float) -> None:
        self._reports, self._token, self._tls, self._probe_every_s = reports, token, tls, probe_every_s
        self._neighbours: tuple[Peer, ...] = ()
        self._is_asked = False
        self._asked = asyncio.Event()
        self._links: dict[tuple[str, str, int], NeighbourLink] = {}

    def follow(self, neighbours: tuple[Peer, ...], *, is_asked: bool) -> None:
        """Probe these nodes from now on. `is_asked`: report who cannot be reached, at once and after each round."""
        if neighbours != self._neighbours or (is_asked and not self._is_asked):
            self._asked.set()
        self._neighbours, self._is_asked = neighbours, is_asked
        known = {_key(peer) for peer in neighbours}
        self._links = {key: link for key, link in self._links.items() if key in known}

    async def run(self) -> None:
        """Probe and report until the task is cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._probe_every_s):
                    await self._asked.wait()
            except TimeoutError:
                pass
            self._asked.clear()
            await self._round()

    async def _round(self) -> None:
        neighbours, is_asked, view = self._neighbours, self._is_asked, self._reports.view
        attempts = ATTEMPTS if is_asked else 1
        readings = await asyncio.gather(*(self._probe(peer, attempts) for peer in neighbours))
        if neighbours != self._neighbours:
            return  # there was another order meanwhile
        unreachable = []
        for peer, reading_s in zip(neighbours, readings, strict=True):
            link = self._links.setdefault(_key(peer), NeighbourLink())
            if reading_s is not None:
                link.was_reached = True
                link.readings.append(reading_s)
            elif link.was_reached:
                unreachable.append(peer.node_id)
        if is_asked:
            self._reports.report(PeerLinksProbed, view=view, unreachable=tuple(unreachable))
        for peer, reading_s in zip(neighbours, readings, strict=True):
            if reading_s is not None:
                self._judge(peer, reading_s)

    async def _probe(self, peer: Peer, attempts: int) -> float | None:
        tries = [self._try(peer) for _ in range(attempts)]
        return min((taken_s for taken_s in await asyncio.gather(*tries) if taken_s is not None), default=None)

    async def _try(self, peer: Peer) -> float | None:
        try:
            return await probe_link(peer.address, peer.bulk_port, token=self._token, tls=self._tls, timeout_s=TIMEOUT_S)
        except WireError as error:
            log.debug("link-probe-refused", f"node {peer.node_id} refused a probe: {error}")
            return TIMEOUT_S  # it was reached

    def _judge(self, peer: Peer, reading_s: float) -> None:
        """Report a link that has become slow, once each time."""
        link = self._links[_key(peer)]
        others_s = [other.readings[-1] for key, other in self._links.items() if key != _key(peer) and other.readings]
        usual_s = link.usual_s(others_s)
        is_slow = reading_s > max(SLOW_TIMES * usual_s, SLOW_FLOOR_S if others_s else SLOW_FLOOR_ALONE_S)
        link.slow_in_a_row = link.slow_in_a_row + 1 if is_slow else 0
        if link.slow_in_a_row == SLOW_IN_A_ROW:
            fields = {"peer": peer.node_id, "taken_s": reading_s, "usual_s": usual_s}
            self._reports.report_optional(PeerLinkSlowed, **fields)


def _key(peer: Peer) -> tuple[str, str, int]:
    return peer.node_id, peer.address, peer.bulk_port
