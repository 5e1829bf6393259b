"""The user's verdict on a node that had a fault: entry points of the group `holdfast.monitors`.

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
by util/user_code.py: an error in one of them is logged and means NORMAL, and does not affect the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib.metadata import entry_points

import msgspec

from holdfast.core.faults.fault_types import Fault
from holdfast.core.health.reputation import MachineEventKind, NodeEvent, Reputation
from holdfast.core.strategies import Verdict
from holdfast.errors import UserCodeError
from holdfast.util.logs import get_logger
from holdfast.util.user_code import UserCode, reason

__all__ = ["ErrorMonitor", "Fault", "MonitorPanel", "NodeFacts", "Verdict", "load"]

ENTRY_POINTS = "holdfast.monitors"
TIME_LIMIT_S = 3.0
"""The whole job waits for the answer: long enough to ask a monitoring system, short beside a restart from storage."""

log = get_logger(__name__)


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The argument of a monitor: what is known of the node."""

    node_id: str
    machine: str
    """The name by which it is known across jobs."""
    host: str
    reputation: Reputation
    history: tuple[NodeEvent, ...] = ()
    """The machine's history across jobs, the oldest first."""

    def faults(self, name: str = "") -> tuple[NodeEvent, ...]:
        """Return the faults of the history, or those of one kind."""
        return tuple(e for e in self.history if e.kind is MachineEventKind.FAULT and name in ("", e.fault))


class ErrorMonitor:
    """Base class of a monitor. Name your subclass in an entry point."""

    def handle(self, fault: Fault, node: NodeFacts) -> Verdict:
        """Return whether the node is to blame for the fault."""
        return Verdict.NORMAL


def load() -> list[ErrorMonitor]:
    """Return all monitors that are installed. One that fails to load is logged and left out."""
    found = []
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        try:
            monitor = point.load()()
        except (Exception, SystemExit) as error:  # it is the user's code, which may raise anything
            text = f"the error monitor {point.name} failed to load, continuing without it: {reason(error)}"
            log.error("monitor-not-loaded", text)
            continue
        if isinstance(monitor, ErrorMonitor):
            found.append(monitor)
        else:
            text = f"the error monitor {point.name} is not a holdfast.ErrorMonitor: continuing without it"
            log.error("monitor-not-loaded", text)
    return found


class MonitorPanel:
    """The monitors of one master. One that hangs does not affect the others."""

    def __init__(self, monitors: Sequence[ErrorMonitor]) -> None:
        self._monitors = [(monitor, UserCode("error monitor")) for monitor in monitors]

    def __len__(self) -> int:
        return len(self._monitors)

    async def ask(self, fault: Fault, node: NodeFacts, limit_s: float) -> Verdict:
        """Return the first verdict that is not NORMAL, in the order of the names. Takes `limit_s` at most; never
        raises."""
        asked = [_answer(monitor, code, fault, node, limit_s) for monitor, code in self._monitors]
        for (monitor, _), verdict in zip(self._monitors, await asyncio.gather(*asked), strict=True):
            if verdict is not Verdict.NORMAL:
                text = (
                    f"the error monitor {type(monitor).__name__} says {verdict.value} of {node.machine}: {fault.name}"
                )
                log.info("monitor-verdict", text)
                return verdict
        return Verdict.NORMAL


async def _answer(monitor: ErrorMonitor, code: UserCode, fault: Fault, node: NodeFacts, limit_s: float) -> Verdict:
    try:
        found = await code.ask(lambda: monitor.handle(fault, node), limit_s)
        if not isinstance(found, Verdict):
            raise UserCodeError(f"it answered with a {type(found).__name__}, not a Verdict")
    except UserCodeError as error:
        text = f"the error monitor {type(monitor).__name__} failed, using NORMAL: {error} ({fault.name})"
        log.error("monitor-failed", text)
        return Verdict.NORMAL
    return found
