"""Neighbours are probed, and what is wrong with a link is reported: who cannot be reached when asked, who is slow when
it lasts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from holdfast.agent import link_watch
from holdfast.agent.link_watch import SLOW_IN_A_ROW, LinkWatch
from holdfast.agent.reports import Reports
from holdfast.core.events import Event, PeerLinkSlowed, PeerLinksProbed
from holdfast.core.orders import Peer


def peer(name: str) -> Peer:
    return Peer(node_id=name, address=name, bulk_port=7, workers=1)


class Net:
    """Links whose transfers take what the test says; None: the machine cannot be reached."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **taken_s: float | None) -> None:
        self.taken_s = taken_s
        self.rounds = 0
        self.events: list[Event] = []
        self.reports = Reports("a", lambda: "life", self.events.append)
        self.reports.view = 4
        self.links = LinkWatch(self.reports, token="t", tls=None, probe_every_s=0.001)
        monkeypatch.setattr(link_watch, "probe_link", self.probe)

    async def probe(self, host: str, port: int, **_: Any) -> float | None:
        self.rounds += 1
        return self.taken_s[host]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30.0):
            while not condition():
                await asyncio.sleep(0.001)

    def run(self, script: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            watching = asyncio.create_task(self.links.run())
            try:
                await script()
            finally:
                watching.cancel()

        asyncio.run(main())

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]


def test_who_was_reached_and_is_not_any_more_is_reported_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net(monkeypatch, b=0.001, c=None)
    neighbours = (peer("b"), peer("c"))

    async def script() -> None:
        net.links.follow(neighbours, is_asked=False)
        await net.until(lambda: net.rounds >= 6)
        assert net.events == [], "nobody asked"
        net.taken_s["b"] = None
        net.links.follow(neighbours, is_asked=True)
        await net.until(lambda: bool(net.events))

    net.run(script)
    asked = net.of(PeerLinksProbed)[0]
    assert asked == PeerLinksProbed(node_id="a", incarnation="life", view=4, unreachable=("b",)), "c was never reached"


def test_a_link_that_stays_slow_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net(monkeypatch, b=0.001, c=0.001, d=0.001)

    async def script() -> None:
        net.links.follow((peer("b"), peer("c"), peer("d")), is_asked=False)
        await net.until(lambda: net.rounds >= 9)
        net.taken_s["c"] = 0.5
        await net.until(lambda: bool(net.events))
        before = net.rounds
        await net.until(lambda: net.rounds >= before + 3 * 2 * SLOW_IN_A_ROW)

    net.run(script)
    assert net.events == [PeerLinkSlowed(node_id="a", incarnation="life", view=4, peer="c", taken_s=0.5, usual_s=0.001)]


def test_where_all_are_slow_the_machine_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net(monkeypatch, b=0.001, c=0.001, d=0.001)

    async def script() -> None:
        net.links.follow((peer("b"), peer("c"), peer("d")), is_asked=False)
        await net.until(lambda: net.rounds >= 9)
        net.taken_s = {"b": 0.5, "c": 0.6, "d": 0.7}
        before = net.rounds
        await net.until(lambda: net.rounds >= before + 3 * 2 * SLOW_IN_A_ROW)

    net.run(script)
    assert net.events == []


def test_the_only_neighbour_is_compared_with_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net(monkeypatch, b=0.001)

    async def script() -> None:
        net.links.follow((peer("b"),), is_asked=False)
        await net.until(lambda: net.rounds >= 3)
        net.taken_s["b"] = 0.4
        await net.until(lambda: bool(net.events))

    net.run(script)
    assert [type(event) for event in net.events] == [PeerLinkSlowed]
