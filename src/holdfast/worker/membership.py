"""A worker's part in the views: leaving one that is over, waiting for the next, joining it with the others.

    hold      tell the agent what broke (unless a newer view is known already) and wait for a place
    switch    the group's communicators are re-made under the new view's own store
    settle    one small all-gather, after which every member knows which step is next (settling.py)

A fault in the middle starts the same again with the view after it; nothing is kept from a join that failed.
"""

from __future__ import annotations

import os
import time
import traceback
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from holdfast.errors import RetryableError, UsageError
from holdfast.wire.progress import Phase, ProgressPage
from holdfast.wire.session import Interrupted, Place, Released
from holdfast.worker import elastic
from holdfast.worker.collectives import groups
from holdfast.worker.line import Line
from holdfast.worker.settling import Settlement, Standing, settle

CONNECT_TRY_S = 3.0
"""How long one attempt to reach a view's store may take before a newer view is looked for."""
CONNECT_PATIENCE_S = 6.0
"""How long a view's store may be out of reach before another view is asked for."""
MESSAGE_CHARS_MAX = 2_000
TRACEBACK_CHARS_MAX = 8_000

TRACEBACK_NOTE = "_holdfast_traceback"

RETRYABLE = (RetryableError, ConnectionError, TimeoutError)
"""Errors of a step's own that are worth a second try, beside those of the communication."""


class Membership:
    """Who we are in which view."""

    def __init__(
        self, line: Line, page: ProgressPage, place: Place | None, timeout: timedelta, *, is_newcomer: bool
    ) -> None:
        self._line, self._page, self._timeout = line, page, timeout
        self.place = place
        """Ours in the newest view we have tried to join, or build for; None: a spare without one."""
        self.view = place.view if place and not is_newcomer else 0
        """The newest view we have tried to join; 0 for those who only build as yet."""
        self.built_for: tuple[int, int] | None = None
        """The rank and the size of the world that the objects are made for; None: they do for any."""

    @property
    def is_called_away(self) -> bool:
        """Whether a newer view is known: an error is then no news."""
        return self._line.told_view > self.view

    def can_hold(self, error: BaseException) -> bool:
        """Whether the error is one after which the step can be repeated in this process."""
        return isinstance(error, RETRYABLE) or groups.is_communication_error(error)

    def join_next(self, standing: Standing, error: BaseException | None = None) -> Settlement:
        """Hold until there is a view that we have not tried, and join it; if that breaks, the one after it."""
        while True:
            self._hold(error, standing.next_step)
            settlement, error = self._join(standing)
            if settlement is not None:
                return settlement

    def join_present(self, standing: Standing) -> Settlement:
        """For those who built under this place with a real group: the others of the first view are here too."""
        settlement, error = self._try_to_settle(standing)
        return settlement if settlement is not None else self.join_next(standing, error)

    def _hold(self, error: BaseException | None, step: int) -> None:
        if error is not None and not self.is_called_away:
            self._line.tell(describe(error, self.view, step))
        self._page.move(phase=Phase.HOLDING)
        place = self._line.wait_for_place(self.view)
        if place is None:
            self.leave(step)
        self.place = place
        announce(place)
        if not self._is_built_for(place):
            raise elastic.Reenter
        self.view = place.view

    def _is_built_for(self, place: Place) -> bool:
        if place.dump or self.built_for in (None, (place.rank, place.world_size)):
            return True
        if not elastic.is_inside():
            raise UsageError(
                f"this process is rank {place.rank} of {place.world_size} now, and its model is sharded for another"
                " world: put the training into a function with @hf.elastic, so that it can be built anew"
            )
        return False

    def start_over(self) -> None:
        """Build anew, alone, under the place we have got."""
        assert self.place is not None
        self._page.move(view=self.place.view, phase=Phase.STARTING)
        elastic.start_over(self.place.rank, self.place.world_size, self._timeout)

    def leave(self, step: int) -> NoReturn:
        """The next view has no place for us: go, as asked. What the script has after its loop is not for us to do."""
        self._page.move(phase=Phase.ENDED)
        self._line.tell(Released(self.view, step))
        raise SystemExit(0)

    def _join(self, standing: Standing) -> tuple[Settlement | None, BaseException | None]:
        place = self.place
        assert place is not None
        self._page.move(view=place.view, phase=Phase.JOINING)
        try:
            store = self._connect(place)
            if store is None:
                return None, None
            groups.switch(store, place.rank, place.world_size, view=place.view)
        except Exception as error:
            if not self.can_hold(error):
                raise
            return None, bare(error)
        return self._try_to_settle(standing)

    def _try_to_settle(self, standing: Standing) -> tuple[Settlement | None, BaseException | None]:
        assert self.place is not None
        known = standing._replace(begun=max(standing.begun, self.place.begun))
        try:
            rows = groups.gather(known)
        except Exception as error:
            if not self.can_hold(error):
                raise
            return None, bare(error)
        return settle([Standing(*row) for row in rows]), None

    def _connect(self, place: Place) -> Store | None:
        """None if a newer view came before this one's store could be reached."""
        give_up_at = time.monotonic() + CONNECT_PATIENCE_S
        while not self._line.told_view > place.view:
            try:
                return connect(place, min(self._timeout, timedelta(seconds=CONNECT_TRY_S)), self._timeout)
            except dist.DistError as error:
                if time.monotonic() > give_up_at:  # its keeper is gone: a view with another store is needed
                    raise ConnectionError(f"the store of view {place.view} cannot be reached: {error}") from None
        return None


def connect(place: Place, patience: timedelta, timeout: timedelta) -> Store:
    """A client of the view's store."""
    store = TCPStore(
        place.store_host, place.store_port, is_master=False, wait_for_workers=False, timeout=patience
    )
    store.set_timeout(timeout)
    return store


def announce(place: Place) -> None:
    """torchrun's variables, for code that looks at them later."""
    os.environ |= {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.group_rank),
        "GROUP_WORLD_SIZE": str(place.group_world_size),
        "HOLDFAST_VIEW": str(place.view),
    }


def describe(error: BaseException, view: int, step: int) -> Interrupted:
    """An error of a step, for the agent."""
    text: str = getattr(bare(error), TRACEBACK_NOTE)
    return Interrupted(
        view=view,
        step=step,
        at=time.time(),
        exception=type(error).__name__,
        message=str(error)[:MESSAGE_CHARS_MAX],
        traceback=text,
        collateral=not isinstance(error, RETRYABLE) or groups.is_communication_error(error),
    )


def bare(error: BaseException) -> BaseException:
    """The error without the frames it came through, which hold the old group's sockets open; what they say is noted."""
    if not hasattr(error, TRACEBACK_NOTE):
        setattr(error, TRACEBACK_NOTE, "".join(traceback.format_exception(error))[-TRACEBACK_CHARS_MAX:])
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
