"""What the vendors' counters say of this node when something has failed. They are reported after the failure, which
does not wait for them: a tool takes a second, or ten if the driver hangs. Nothing is reported if they show no problem.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.checks.accelerators import registry
from holdfast.core.events import Event, WorkerFailed, WorkersStalled
from holdfast.core.faults.failures import is_collateral
from holdfast.errors import UserCodeError
from holdfast.util.logs import get_logger
from holdfast.util.user_code import UserCode

TIME_LIMIT_S = 30.0
"""The limit for the tools of all kinds of processors together; each has its own (checks/accelerators/base.py)."""

log = get_logger(__name__)


class Counters:
    """The devices' counters of this node, read once in a view: all workers of a node may fail in it."""

    def __init__(self, accelerator: str, report: Callable[[int, tuple[str, ...]], None]) -> None:
        self._accelerator, self._report = accelerator, report
        self._tools = UserCode("counters")
        self._view = 0

    def view_of(self, event: Event) -> int:
        """Return the view in which this event says that something failed; 0: none."""
        match event:
            case WorkerFailed(failure=failure) if not is_collateral(failure):
                return failure.view
            case WorkersStalled(view=view):
                return view
        return 0

    async def read(self, view: int) -> None:
        """Read the counters and report what is wrong."""
        if view == self._view:
            return
        self._view = view
        try:
            found = await self._tools.ask(lambda: readings(self._accelerator), TIME_LIMIT_S)
        except UserCodeError as error:
            log.debug("counters-unreadable", f"the devices' counters could not be read: {error}")
            return
        assert isinstance(found, tuple)
        if found:
            self._report(view, found)


def readings(accelerator: str = "") -> tuple[str, ...]:
    """Return a sentence for each problem of the devices of that kind, or of all kinds on this node."""
    kinds = [registry.load(accelerator)] if accelerator else registry.present()
    return tuple(
        f"{'' if one.device < 0 else f'device {one.device}: '}{one.text} ({one.fault})"
        for kind in kinds
        for one in kind.ailments()
    )
