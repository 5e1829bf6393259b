"""What this node reports to the master: events with this agent's node id and incarnation, under the newest view that
was ordered. What every worker says is reported once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.core.durability import ImageReport, SnapshotStats
from holdfast.core.events import (
    CheckpointPublished,
    Event,
    ImagesReported,
    SessionInfo,
    SessionRevised,
    StepCommitted,
    TrainingClosed,
    ViewJoined,
    WorkersStarted,
)

UNSENT_REPORTS_MAX = 10_000
"""Above this number, reports on which training does not depend are dropped: they are made again in the next view."""


class Reports:
    """Makes events and sends them. `incarnation` is called each time, because an agent may get a new one; `waiting`
    returns how many events the master has not confirmed."""

    def __init__(
        self,
        node_id: str,
        incarnation: Callable[[], str],
        send: Callable[[Event], None],
        waiting: Callable[[], int] = lambda: 0,
    ) -> None:
        self._node_id, self._incarnation, self._send, self._waiting = node_id, incarnation, send, waiting
        self._view = 0
        self._started: tuple[int, ...] = ()
        self._closed = 0
        self._committed = 0
        self._joined = 0
        self._session: SessionInfo | None = None
        """The session that was reported last."""

    @property
    def view(self) -> int:
        """The newest view that was ordered; 0: none."""
        return self._view

    @view.setter
    def view(self, view: int) -> None:
        self._view, self._started = view, ()
        if not view:
            self._committed = self._joined = 0  # the next incarnation may be given numbers that this one has seen

    @property
    def waiting(self) -> int:
        """How many events the master has not confirmed."""
        return self._waiting()

    def report(self, kind: type[msgspec.Struct], **fields: Any) -> None:
        """Send an event of this class. The node id, the incarnation and the view are added."""
        if "view" in kind.__struct_fields__:
            fields.setdefault("view", self._view)
        event: Any = kind(node_id=self._node_id, incarnation=self._incarnation(), **fields)
        self._send(event)

    def report_optional(self, kind: type[msgspec.Struct], **fields: Any) -> None:
        """Send an event on which training does not depend, unless very many wait for a master that is away."""
        if self.waiting <= UNSENT_REPORTS_MAX:
            self.report(kind, **fields)

    # --- reported once

    def report_started(self, pids: tuple[int, ...], logs: tuple[str, ...]) -> None:
        """Report that all workers of the view run; again only if they are others."""
        if pids != self._started:
            self._started = pids
            self.report(WorkersStarted, pids=pids, logs=logs)

    def report_joined(self, session: SessionInfo, step: int = -1, source: str = "") -> bool:
        """Report that all workers are in the view, and where the state of a start comes from; return False if that was
        reported before."""
        if self._joined == self._view:
            return False
        self._joined, self._session = self._view, session
        self.report(ViewJoined, session=session, step=step, source=source)
        return True

    def report_revised(self, session: SessionInfo) -> None:
        """Report that the workers' state is of another kind, once, and only after they have joined the view."""
        if self._joined == self._view and session != self._session:
            self._session = session
            self.report(SessionRevised, session=session)

    def report_committed(self, view: int, step: int) -> None:
        """Report the first commit of the first worker in a view, and only in the newest view."""
        if view > self._committed:
            self._committed = view
            self.report(StepCommitted, view=view, step=step)

    def report_closed(self, step: int) -> None:
        """Report that the first worker has made its last step."""
        if self._closed != self._view:
            self._closed = self._view
            self.report(TrainingClosed, step=step)

    # --- for agent/snapshot_manager.py

    def report_images(self, images: tuple[ImageReport, ...], snapshot_stats: SnapshotStats) -> None:
        """Report the images in this node's memory."""
        self.report(ImagesReported, images=images, snapshot_stats=snapshot_stats)

    def report_checkpoint(self, step: int, url: str) -> None:
        """Report that a checkpoint is complete."""
        self.report(CheckpointPublished, step=step, url=url)
