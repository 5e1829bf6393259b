"""A worker's part in the views: leaving one that is over, waiting for the next, joining it with the others.

    hold      tell the agent what broke (unless a newer view is known already) and wait for an assignment
    switch    the group's communicators are re-made under the new view's own store
    settle    one small all-gather, after which every member knows which step is next (resume_point.py)

A fault in the middle starts the same again with the view after it; nothing is kept from a join that failed.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NoReturn, Protocol

import torch
import torch.distributed as dist

from holdfast.errors import HoldfastError, Reenter, RetryableError, UsageError
from holdfast.torch_compat import Store, TCPStore
from holdfast.wire.progress_page import ProgressPage, WorkerPhase
from holdfast.wire.worker_messages import (
    Assignment,
    FromWorker,
    StepInterruptedMessage,
    WorkerFailingMessage,
    WorkerReleased,
)
from holdfast.worker import elastic
from holdfast.worker.collectives import groups
from holdfast.worker.collectives.waits import waits
from holdfast.worker.resume_point import RankStatus, ResumePoint, find_resume_point

CONNECT_TRY_S = 3.0
"""How long one attempt to reach a view's store may take before a newer view is looked for."""
CONNECT_PATIENCE_S = 6.0
"""How long a view's store may be out of reach before another view is asked for."""
ANSWERS_KEY = "answers"
ANSWERS_PATIENCE_S = 20.0
"""How long a newcomer waits for what only the others know, before its script is told that there is no answer."""
MESSAGE_CHARS_MAX = 2_000
TRACEBACK_CHARS_MAX = 8_000

TRACEBACK_NOTE = "_holdfast_traceback"

RETRYABLE = (RetryableError, ConnectionError, TimeoutError)
"""Errors of a step's own that are worth a second try, beside those of the communication."""


class ViewCollectives(Protocol):
    """The process groups of this worker, as far as a change of views concerns them. The module `groups` is one."""

    def revoke(self, why: str, view: int | None = None) -> None: ...

    def switch(self, store: Store | None, rank: int, world_size: int, *, view: int) -> None: ...

    def gather(self, values: Sequence[int]) -> list[list[int]]: ...


class ViewAgent(Protocol):
    """The connection to the agent, as far as a change of views concerns it. `AgentConnection` is one."""

    answers: bytes

    @property
    def newest_view(self) -> int: ...

    def tell(self, message: FromWorker) -> None: ...

    def wait_for_assignment(self, after_view: int) -> Assignment | None: ...


Connect = Callable[[Assignment, timedelta, timedelta], Store]
"""Makes a client of a view's store: the assignment, how long connecting may take, how long its calls may take."""


class Membership:
    """Who we are in which view."""

    def __init__(
        self,
        agent: ViewAgent,
        page: ProgressPage,
        assignment: Assignment | None,
        timeout: timedelta,
        *,
        is_newcomer: bool,
        collectives: ViewCollectives = groups,
        connect_to: Connect | None = None,
    ) -> None:
        self._agent, self._page, self._timeout = agent, page, timeout
        self._groups, self._connect_to = collectives, connect_to or connect
        self.assignment = assignment
        """Ours in the newest view we have tried to join, or build for; None: a spare without one."""
        self.view = assignment.view if assignment and not is_newcomer else 0
        """The newest view we have tried to join; 0 for those who only build as yet."""
        self.answers = b""
        """What the script's collectives answered while we were built together with all others."""
        self.runs_on_device = False
        """Whether the state is on a device that runs behind the host (device_wait.py)."""
        self.settle_device: Callable[[], None] = lambda: None
        """Waits until the device has come to rest after an abort; raises DeviceError if it does not."""
        self.is_assignment_pending = False
        """Whether `assignment` is of a view that we have not tried to join yet, as something was to be done before."""
        self.built_for: tuple[int, int] | None = None
        """The rank and the size of the world that the objects are made for; None: they do for any."""

    def report_failing(self) -> None:
        """Tell the agent that the script has failed, before the interpreter comes down and breaks connections that
        others would take for the cause."""
        if self.assignment is not None:
            self._agent.tell(WorkerFailingMessage(self.assignment.view))

    def assigned(self, assignment: Assignment) -> None:
        """Build for this assignment from now on: a spare has got its rank."""
        self.assignment = assignment
        self.replay_answers()

    def replay_answers(self) -> None:
        """Let the script's collectives be answered as they were when the job started, until our first step."""
        groups.replay_answers(self._agent.answers, self._fetch_answers)

    def _fetch_answers(self) -> bytes:
        """Return what the members of the view have put into its store; empty if that does not come in time. They do so
        as soon as they know of the view, and then wait in it for us."""
        give_up_at = time.monotonic() + ANSWERS_PATIENCE_S
        while time.monotonic() < give_up_at:
            assignment = self._agent.wait_for_assignment(0)
            if assignment is None:
                return b""
            try:
                with waits:
                    store = connect(assignment, timedelta(seconds=CONNECT_TRY_S), self._timeout)
                    store.wait([ANSWERS_KEY], timedelta(seconds=CONNECT_TRY_S))
                return store.get(ANSWERS_KEY)
            except dist.DistError:
                continue  # another view may have taken its place
        return b""

    def _publish_answers(self, store: Store) -> None:
        """Put what we know into the view's store, for newcomers on nodes that have no record of their rank."""
        if self.answers and store.add(f"{ANSWERS_KEY}/claims", 1) == 1:
            store.set(ANSWERS_KEY, self.answers)  # type: ignore[arg-type]

    @property
    def timeout_s(self) -> float:
        """The timeout of a collective, in seconds."""
        return self._timeout.total_seconds()

    @property
    def is_called_away(self) -> bool:
        """Return whether a newer view is known: an error is then no news."""
        return self._agent.newest_view > self.view

    def can_hold(self, error: BaseException) -> bool:
        """Return whether the error is one after which the step can be repeated in this process: never one of the
        device."""
        if any(map(groups.is_device_error, groups.chain_of(error))):
            return False
        if isinstance(error, RETRYABLE) or groups.is_communication_error(error):
            return True
        return self.runs_on_device and groups.is_revoked() and is_excusable(error)

    def join_next(
        self,
        status: RankStatus,
        error: BaseException | None = None,
        on_assignment: Callable[[Assignment], None] = lambda assignment: None,
    ) -> ResumePoint:
        """Hold until there is a view that we have not tried, and join it; if that breaks, the one after it.
        `on_assignment`
        is called before each is joined, which may take until newcomers are built; it may raise FinishAlone."""
        while True:
            if not self.is_assignment_pending or self.is_called_away:
                self._hold(error, status.next_step)
            assert self.assignment is not None
            self.is_assignment_pending = True
            on_assignment(self.assignment)
            self.is_assignment_pending = False
            resume, error = self._join(status)
            if resume is not None:
                return resume

    def join_present(self, status: RankStatus) -> ResumePoint:
        """Join the view in which this process was built with a real group: the others of the first view are here
        too."""
        resume, error = self._agree_on_step(status)
        return resume if resume is not None else self.join_next(status, error)

    def _hold(self, error: BaseException | None, step: int) -> None:
        if error is not None and not self.is_called_away:
            self._agent.tell(describe(error, self.view, step))
        self._page.move(phase=WorkerPhase.HOLDING, collectives=0)  # those of the attempt that broke do not count
        with waits:
            assignment = self._agent.wait_for_assignment(self.view)
        if assignment is None:
            self.leave(step)
        self.assignment = assignment
        if error is not None or not assignment.planned:
            # The side thread does the same, a moment later: what the old view's kernels hang in must be aborted before
            # the device can come to rest.
            self._groups.revoke(f"view {assignment.view} replaces it ({assignment.strategy})", assignment.view - 1)
        announce(assignment)
        if not self._is_built_for(assignment):
            self.settle_device()  # what it still does is done to objects that go now
            raise Reenter
        self.view = assignment.view

    def _is_built_for(self, assignment: Assignment) -> bool:
        if assignment.dump or self.built_for in (None, (assignment.rank, assignment.world_size)):
            return True
        if not elastic.is_inside():
            raise UsageError(
                f"this process is rank {assignment.rank} of {assignment.world_size} now, and its model is sharded, or"
                " its loader's mesh made, for another world: put the training into a function with @hf.elastic, so that"
                " it can be built again"
            )
        return False

    def start_over(self) -> None:
        """Build again, alone, for the assignment we have got."""
        assert self.assignment is not None
        self._page.move(view=self.assignment.view, phase=WorkerPhase.STARTING)
        elastic.start_over(self.assignment.rank, self.assignment.world_size, self._timeout)
        groups.replay_answers(b"", lambda: self.answers)  # of another rank by now: what is the same on all

    def leave(self, step: int) -> NoReturn:
        """End this process as asked: the next view has no rank for it. What the script has after its loop is not for it
        to do."""
        self._page.move(phase=WorkerPhase.ENDED)
        self._agent.tell(WorkerReleased(self.view, step))
        raise SystemExit(0)

    def _join(self, status: RankStatus) -> tuple[ResumePoint | None, BaseException | None]:
        assignment = self.assignment
        assert assignment is not None
        self._page.move(view=assignment.view, phase=WorkerPhase.JOINING)
        self.settle_device()
        try:
            with waits:
                store = self._connect(assignment)
            if store is None:
                return None, None
            self._publish_answers(store)
            self._groups.switch(store, assignment.rank, assignment.world_size, view=assignment.view)
        except Exception as error:
            if not self.can_hold(error):
                raise
            return None, without_frames(error)
        return self._agree_on_step(status)

    def _agree_on_step(self, status: RankStatus) -> tuple[ResumePoint | None, BaseException | None]:
        assert self.assignment is not None
        known = status._replace(applied_step=max(status.applied_step, self.assignment.applied_step))
        try:
            rows = self._groups.gather(known)
        except Exception as error:
            if not self.can_hold(error):
                raise
            return None, without_frames(error)
        return find_resume_point([RankStatus(*row) for row in rows]), None

    def _connect(self, assignment: Assignment) -> Store | None:
        """Connect to the view's store; None if a newer view came before the store could be reached."""
        give_up_at = time.monotonic() + CONNECT_PATIENCE_S
        while not self._agent.newest_view > assignment.view:
            try:
                return self._connect_to(assignment, min(self._timeout, timedelta(seconds=CONNECT_TRY_S)), self._timeout)
            except dist.DistError as error:
                if time.monotonic() > give_up_at:  # its host is gone: a view with another store is needed
                    raise ConnectionError(f"the store of view {assignment.view} cannot be reached: {error}") from None
        return None


def is_excusable(error: BaseException) -> bool:
    """Return whether an error that a script raised on a device, after its view was over, is no evidence against it: an
    aborted collective leaves partial sums, from which the host may read a loss that is not a number. If the script is
    at fault all the same, it will raise again in the next view. On the CPU this is not so: there a collective has ended
    when it returns, and raises if it was broken."""
    return isinstance(error, Exception) and not isinstance(error, HoldfastError | torch.OutOfMemoryError | MemoryError)


def connect(assignment: Assignment, patience: timedelta, timeout: timedelta) -> Store:
    """Return a client of the view's store."""
    store = TCPStore(
        assignment.store_host, assignment.store_port, is_master=False, wait_for_workers=False, timeout=patience
    )
    store.set_timeout(timeout)
    return store


def announce(assignment: Assignment) -> None:
    """Set torchrun's variables, for code that reads them later. LOCAL_RANK is the number of the process's device, which
    it keeps when the local ranks of its node close up."""
    if assignment.visible_devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = assignment.visible_devices  # a spare's was not known yet
    os.environ |= {
        "RANK": str(assignment.rank),
        "WORLD_SIZE": str(assignment.world_size),
        "LOCAL_RANK": str(assignment.device_index),
        "LOCAL_WORLD_SIZE": str(assignment.local_world_size),
        "GROUP_RANK": str(assignment.group_rank),
        "GROUP_WORLD_SIZE": str(assignment.group_world_size),
        "ROLE_RANK": str(assignment.role_rank),
        "ROLE_WORLD_SIZE": str(assignment.role_world_size),
        "MASTER_ADDR": assignment.store_host,
        "MASTER_PORT": str(assignment.store_port),
        "HOLDFAST_VIEW": str(assignment.view),
    }


def describe(error: BaseException, view: int, step: int) -> StepInterruptedMessage:
    """Return the message that tells the agent of an error of a step."""
    text: str = getattr(without_frames(error), TRACEBACK_NOTE)
    return StepInterruptedMessage(
        view=view,
        step=step,
        at=time.time(),
        exception=type(error).__name__,
        message=str(error)[:MESSAGE_CHARS_MAX],
        traceback=text,
        collateral=not isinstance(error, RETRYABLE) or groups.is_communication_error(error),
    )


def without_frames(error: BaseException) -> BaseException:
    """Return the error without the frames it came through, which hold the old group's sockets open; their text is kept
    in an attribute."""
    if not hasattr(error, TRACEBACK_NOTE):
        setattr(error, TRACEBACK_NOTE, "".join(traceback.format_exception(error))[-TRACEBACK_CHARS_MAX:])
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
