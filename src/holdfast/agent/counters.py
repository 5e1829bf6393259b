"""What the vendors' counters say of this node when something has gone wrong. Told after the failure, which does not
wait for it: a tool takes a second, or ten if the driver hangs. Nothing is told where nothing is wrong by them.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from holdfast.checks.accelerators import registry
from holdfast.core.events import Event, WorkerFailed, WorkersStalled
from holdfast.core.faults import is_collateral
from holdfast.guests import Guest, GuestError

TIME_LIMIT_S = 30.0
"""For all tools of all kinds of processors, each of which has its own (checks/accelerators/base.py)."""

log = structlog.get_logger("agent")


class Counters:
    """Read once a view: all workers of a node may fail in it."""

    def __init__(self, accelerator: str, tell: Callable[[int, tuple[str, ...]], None]) -> None:
        self._accelerator, self._tell = accelerator, tell
        self._guest = Guest("counters")
        self._view = 0

    def view_of(self, event: Event) -> int:
        """The view in which something went wrong by this report; 0: nothing did."""
        match event:
            case WorkerFailed(failure=failure) if not is_collateral(failure):
                return failure.view
            case WorkersStalled(view=view):
                return view
        return 0

    async def read(self, view: int) -> None:
        """Look, and tell if anything is wrong."""
        if view == self._view:
            return
        self._view = view
        try:
            found = await self._guest.ask(lambda: readings(self._accelerator), TIME_LIMIT_S)
        except GuestError as error:
            log.debug(f"the devices' counters could not be read: {error}")
            return
        assert isinstance(found, tuple)
        if found:
            self._tell(view, found)


def readings(accelerator: str = "") -> tuple[str, ...]:
    """A sentence for whatever is wrong with the devices of that kind, or of all kinds that are here."""
    kinds = [registry.load(accelerator)] if accelerator else registry.present()
    return tuple(
        f"{'' if one.device < 0 else f'device {one.device}: '}{one.text} ({one.fault})"
        for kind in kinds
        for one in kind.ailments()
    )
