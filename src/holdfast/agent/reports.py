"""What the master hears of this node's workers. Each is said under the newest view that was ordered, and once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.agent.autopsy import one_line
from holdfast.core.events import (
    CheckpointWritten,
    CountersRead,
    DataAnnounced,
    DataSource,
    Event,
    NumbersReported,
    Pace,
    PacesReported,
    Part,
    SamplesWitnessed,
    SessionBegan,
    SessionInfo,
    SparesChanged,
    StateKept,
    StepCommitted,
    StepInterrupted,
    StreamNews,
    StretchSkipped,
    Stumble,
    TrainingClosed,
    Vector,
    WorkerFailed,
    WorkersStalled,
    WorkersStarted,
    WorkerSucceeded,
)
from holdfast.core.faults import Failure
from holdfast.core.kept import KeptImage, Pacing
from holdfast.wire.session import Interrupted, Numbers, Shards, Skipped

SHARD_REPORTS_WAITING_MAX = 10_000
"""While the master is away, leases are not what the agent's memory is for."""


class Reports:
    """Turns what happens into events. `incarnation` is asked each time, as an agent may begin a new life."""

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
        self._began = 0

    @property
    def view(self) -> int:
        """The newest that was ordered; 0: none."""
        return self._view

    @view.setter
    def view(self, view: int) -> None:
        self._view, self._started = view, ()
        if not view:
            self._committed = self._began = 0  # a life that begins anew may be given numbers it has seen

    @property
    def waiting(self) -> int:
        """How many the master has not taken note of."""
        return self._waiting()

    def started(self, pids: tuple[int, ...], logs: tuple[str, ...]) -> None:
        """All workers of the view run; again only if they are others."""
        if pids == self._started:
            return
        self._started = pids
        self._send(
            WorkersStarted(
                node_id=self._node_id, incarnation=self._incarnation(), view=self._view, pids=pids, logs=logs
            )
        )

    def succeeded(self, local_rank: int) -> None:
        """A worker ended with exit code zero."""
        self._send(
            WorkerSucceeded(
                node_id=self._node_id, incarnation=self._incarnation(), view=self._view, local_rank=local_rank
            )
        )

    def counters(self, view: int, readings: tuple[str, ...]) -> None:
        """Something is wrong by the devices' counters."""
        self._send(
            CountersRead(node_id=self._node_id, incarnation=self._incarnation(), view=view, readings=readings)
        )

    def failed(self, failure: Failure) -> None:
        """A worker ended otherwise. Its view is that of its end, however long the user's extension thought about it."""
        self._send(
            WorkerFailed(node_id=self._node_id, incarnation=self._incarnation(), view=failure.view, failure=failure)
        )

    def began(self, session: SessionInfo) -> bool:
        """All workers are in the view; False if that was known."""
        if self._began == self._view:
            return False
        self._began = self._view
        self._send(
            SessionBegan(node_id=self._node_id, incarnation=self._incarnation(), view=self._view, session=session)
        )
        return True

    def committed(self, view: int, step: int) -> None:
        """A worker's first commit in a view; only the first worker's is news, and only in the newest view."""
        if view <= self._committed:
            return
        self._committed = view
        self._send(StepCommitted(node_id=self._node_id, incarnation=self._incarnation(), view=view, step=step))

    def closed(self, step: int) -> None:
        """A worker has made its last step; only the first worker's word is news."""
        if self._closed == self._view:
            return
        self._closed = self._view
        self._send(TrainingClosed(node_id=self._node_id, incarnation=self._incarnation(), view=self._view, step=step))

    def interrupted(self, message: Interrupted, rank: int, local_rank: int) -> None:
        """A worker's step failed; it lives."""
        stumble = Stumble(
            rank=rank,
            local_rank=local_rank,
            step=message.step,
            at=message.at,
            exception=message.exception,
            message=one_line(message.message),
            traceback=message.traceback,
            collateral=message.collateral,
        )
        self._send(
            StepInterrupted(node_id=self._node_id, incarnation=self._incarnation(), view=self._view, stumble=stumble)
        )

    def stalled(self, stalled_s: float, vectors: Sequence[Vector]) -> None:
        """Nothing moves on this node."""
        self._send(
            WorkersStalled(
                node_id=self._node_id,
                incarnation=self._incarnation(),
                view=self._view,
                stalled_s=stalled_s,
                vectors=tuple(vectors),
            )
        )

    def witnessed(self, parts: tuple[Part, ...]) -> None:
        """What workers were handed."""
        self._send(SamplesWitnessed(node_id=self._node_id, incarnation=self._incarnation(), parts=parts))

    def described(self, view: int, sources: tuple[DataSource, ...]) -> None:
        """What the samples of a view's steps follow from."""
        self._send(
            DataAnnounced(node_id=self._node_id, incarnation=self._incarnation(), view=view, sources=sources)
        )

    def kept(self, images: tuple[KeptImage, ...], pacing: Pacing) -> None:
        """What is in this node's memory."""
        self._send(StateKept(node_id=self._node_id, incarnation=self._incarnation(), images=images, pacing=pacing))

    def checkpointed(self, step: int, url: str) -> None:
        """A checkpoint is complete."""
        self._send(CheckpointWritten(node_id=self._node_id, incarnation=self._incarnation(), step=step, url=url))

    def skipped(self, message: Skipped) -> None:
        """A worker's loader passes over some steps."""
        self._send(
            StretchSkipped(
                node_id=self._node_id,
                incarnation=self._incarnation(),
                view=self._view,
                source=message.source,
                name=message.name,
                first_step=message.first_step,
                end_step=message.end_step,
                why=message.why,
            )
        )

    def shards(self, message: Shards) -> None:
        """A worker's commit granted leases, or a shard of its slots failed. What a master that is away for so long
        misses is told again in the next view; training does not depend on it."""
        if self.waiting > SHARD_REPORTS_WAITING_MAX:
            return
        self._send(
            StreamNews(
                node_id=self._node_id,
                incarnation=self._incarnation(),
                view=message.view,
                stream=message.stream,
                step=message.step,
                leases=message.leases,
                troubles=message.troubles,
            )
        )

    def paces(self, paces: tuple[Pace, ...]) -> None:
        """How fast the workers are. Old ones are of no use: while the master is away nothing is said."""
        if self.waiting == 0:
            self._send(
                PacesReported(node_id=self._node_id, incarnation=self._incarnation(), view=self._view, paces=paces)
            )

    def numbers(self, message: Numbers, rank: int) -> None:
        """A worker's step had odd numbers. Of many, as when a run has gone astray, the first ones are enough."""
        if self.waiting > SHARD_REPORTS_WAITING_MAX:
            return
        self._send(
            NumbersReported(
                node_id=self._node_id,
                incarnation=self._incarnation(),
                view=self._view,
                rank=rank,
                step=message.step,
                what=message.what,
                outcome=message.outcome,
            )
        )

    def spares(self, parked: int) -> None:
        """How many spares wait."""
        self._send(SparesChanged(node_id=self._node_id, incarnation=self._incarnation(), parked=parked))
