"""The user's word on a node that had a fault: entry points of the group `holdfast.monitors`.

    # pyproject.toml of your package
    [project.entry-points."holdfast.monitors"]
    mine = "my_package.health:Mine"

    class Mine(holdfast.ErrorMonitor):
        def handle(self, fault, node):
            if fault.name == "link-down" and len(node.faults("link-down")) > 2:
                return holdfast.Verdict.CORDON
            return holdfast.Verdict.NORMAL

Monitors are asked by the job's master about every fault of a worker, before anything is decided about it, all at the
same time; in the order of their names, the first that answers anything but NORMAL is followed. They have TIME_LIMIT_S,
in the way of guests.py: what goes wrong in one is logged and means NORMAL, and says nothing about the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib.metadata import entry_points

import msgspec
import structlog

from holdfast.core.fault_types import Fault
from holdfast.core.health.reputation import Kind, NodeEvent, Repute
from holdfast.core.ladder import Verdict
from holdfast.guests import Guest, GuestError, reason

__all__ = ["ErrorMonitor", "Fault", "NodeFacts", "Panel", "Verdict", "load"]

ENTRY_POINTS = "holdfast.monitors"
TIME_LIMIT_S = 3.0
"""Everybody else waits for the answer: long enough to ask a monitoring system, short beside a restart from storage."""

log = structlog.get_logger("monitors")


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a monitor is told of the node."""

    node_id: str
    machine: str
    """The name by which it is known across jobs."""
    host: str
    repute: Repute
    history: tuple[NodeEvent, ...] = ()
    """Of the machine, across jobs, the oldest first."""

    def faults(self, name: str = "") -> tuple[NodeEvent, ...]:
        """Those of the history, or those of one kind."""
        return tuple(e for e in self.history if e.kind is Kind.FAULT and name in ("", e.fault))


class ErrorMonitor:
    """Subclass it and name the class in an entry point."""

    def handle(self, fault: Fault, node: NodeFacts) -> Verdict:
        """Whether the node is to blame for the fault."""
        return Verdict.NORMAL


def load() -> list[ErrorMonitor]:
    """All that are installed. One that cannot be made is logged and left out."""
    found = []
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        try:
            monitor = point.load()()
        except (Exception, SystemExit) as error:  # it is the user's code, which may raise anything
            log.error(f"the error monitor {point.name} cannot be made, the job goes on without it: {reason(error)}")
            continue
        if isinstance(monitor, ErrorMonitor):
            found.append(monitor)
        else:
            log.error(f"the error monitor {point.name} is no holdfast.ErrorMonitor: the job goes on without it")
    return found


class Panel:
    """The monitors of one master. Each is a guest of its own: one that hangs silences nobody else."""

    def __init__(self, monitors: Sequence[ErrorMonitor]) -> None:
        self._seats = [(monitor, Guest("error monitor")) for monitor in monitors]

    def __len__(self) -> int:
        return len(self._seats)

    async def ask(self, fault: Fault, node: NodeFacts, limit_s: float) -> Verdict:
        """What the monitors say, the first one that says anything. Takes `limit_s` at most; never raises."""
        asked = [_answer(monitor, guest, fault, node, limit_s) for monitor, guest in self._seats]
        for (monitor, _), verdict in zip(self._seats, await asyncio.gather(*asked), strict=True):
            if verdict is not Verdict.NORMAL:
                log.info(f"{type(monitor).__name__} says {verdict.value} of {node.machine}: {fault.name}")
                return verdict
        return Verdict.NORMAL


async def _answer(monitor: ErrorMonitor, guest: Guest, fault: Fault, node: NodeFacts, limit_s: float) -> Verdict:
    try:
        found = await guest.ask(lambda: monitor.handle(fault, node), limit_s)
        if not isinstance(found, Verdict):
            raise GuestError(f"it answered with a {type(found).__name__}, not a Verdict")
    except GuestError as error:
        log.error(f"the error monitor {type(monitor).__name__} has no say in what follows: {error} ({fault.name})")
        return Verdict.NORMAL
    return found
