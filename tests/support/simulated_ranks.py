"""Ranks of a job in threads of one process: simulated collectives, agents and state around real engines.

A `World` plays master, agents and network. A `Twin` is one worker: an `Engine` with its real `Membership` and
`StepTransaction`, the loop of `Job.steps`, and a state that is one number. A step adds its number + 1 to it, so the
value after n committed steps is known whatever was repeated.

Faults come from `Twin.at`: by (point, step), a function that is called once when this rank gets there. Points: `body`,
`update` (right after the barrier where no copy is kept), `tail` (after the update), `vote` (in the barrier's exchange,
before this rank takes part), `voted` (this rank has the answer), `fill` (while newcomers get the state), `close`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

import torch

from holdfast.core.events import DataSource, SessionInfo
from holdfast.core.shard_map import ShardMap
from holdfast.errors import ViewOverError
from holdfast.state.tracked import Tracked
from holdfast.torch_compat import Store
from holdfast.wire.progress_page import ProgressPage
from holdfast.wire.worker_messages import Assignment, FromWorker, StreamReportedMessage, ViewJoinedMessage
from holdfast.worker.commit_vote import CommitVote
from holdfast.worker.engine import Engine
from holdfast.worker.engine_interfaces import EngineCollectives
from holdfast.worker.membership import Membership
from holdfast.worker.replica_check import Due
from holdfast.worker.restore.restore_source import RestorePoint
from holdfast.worker.resume_point import RankStatus, ResumePoint
from holdfast.worker.transaction import StepTransaction

TIMEOUT_S = 60.0
NO_SNAPSHOTS = (0, 0)


class Killed(BaseException):
    """Ends a twin as SIGKILL ends a process."""


class SimulatedView:
    """The exchanges of one view: the n-th of each rank is one with the n-th of all others."""

    def __init__(self, view: int, size: int) -> None:
        self.view, self.size = view, size
        self.is_over = False
        self.rows: dict[int, dict[int, list[int]]] = {}


class World:
    """The master, the agents and the network of some twins."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.views: dict[int, SimulatedView] = {}
        self.assignments: dict[str, Assignment] = {}
        self.released: dict[str, int] = {}
        self.twins: dict[str, Twin] = {}
        self.newest = 0
        self.checkpoint: tuple[int, int] | None = None
        """Step and value of what can be restored."""

    def form(self, *names: str, planned: bool = False, applied: int = -1, is_last_holder: bool = False) -> int:
        """Make a view of these twins, by rank, and end the one before unless the change is planned. `applied`: the
        newest step that a dead worker had begun to apply."""
        with self.changed:
            self.newest += 1
            self.views[self.newest] = SimulatedView(self.newest, len(names))
            for rank, name in enumerate(names):
                self.assignments[name] = assignment(
                    self.newest, rank, len(names), planned=planned, applied_step=applied, is_last_holder=is_last_holder
                )
            for name in set(self.twins) - set(names):
                self.released[name] = self.newest
            if not planned:
                self._end(self.newest - 1)
            self.changed.notify_all()
            return self.newest

    def end_view(self) -> None:
        """Break the newest view, without another as yet: a connection was lost."""
        with self.changed:
            self._end(self.newest)
            self.changed.notify_all()

    def _end(self, view: int) -> None:
        for number, one in self.views.items():
            one.is_over |= number <= view

    def start(
        self, *names: str, total: int, is_newcomer: bool = False, keeps_copy: bool | None = None, **at: Any
    ) -> None:
        """Start twins, in threads of their own."""
        made = [Twin(self, name, total, is_newcomer=is_newcomer) for name in names]
        self.twins |= {twin.name: twin for twin in made}
        for twin in made:
            twin.at |= at.get(twin.name, {})
            twin.keeps_copy = keeps_copy
        for twin in made:
            twin.thread.start()
            twin.started.set()

    def join(self) -> None:
        """Wait until all twins have ended, those included that are started meanwhile."""
        ended: set[str] = set()
        while waiting := set(self.twins) - ended:
            for name in waiting:
                twin = self.twins[name]
                assert twin.started.wait(TIMEOUT_S)
                twin.thread.join(TIMEOUT_S)
                assert not twin.thread.is_alive(), f"{name} hangs: {twin.trace}"
            ended |= waiting

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until something is so."""
        with self.changed:
            assert self.changed.wait_for(condition, TIMEOUT_S)


def assignment(view: int, rank: int, size: int, first_ranks: tuple[int, ...] = (0,), **more: Any) -> Assignment:
    return Assignment(
        view=view,
        rank=rank,
        world_size=size,
        local_rank=rank,
        local_world_size=size,
        group_rank=0,
        group_world_size=1,
        store_host="simulated",
        store_port=0,
        first_ranks=first_ranks,
        strategy="replace" if view > 1 else "",
        **more,
    )


class SimulatedAgent:
    """A worker's connection to its agent."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name
        self.answers = b""
        self.messages: list[FromWorker] = []

    @property
    def newest_view(self) -> int:
        found = self._world.assignments.get(self._name)
        return max(found.view if found else 0, self._world.released.get(self._name, 0))

    def tell(self, message: FromWorker) -> None:
        if isinstance(message, ViewJoinedMessage):
            self._world.twins[self._name].state.check_device()
        with self._world.changed:
            self.messages.append(message)
            self._world.changed.notify_all()

    def wait_for_assignment(self, after_view: int) -> Assignment | None:
        with self._world.changed:
            assert self._world.changed.wait_for(lambda: self.newest_view > after_view, TIMEOUT_S), "no view came"
            found = self._world.assignments.get(self._name)
            return found if found is not None and found.view == self.newest_view else None


class SimulatedCollectives:
    """A worker's process groups."""

    def __init__(self, world: World, twin: Twin) -> None:
        self._world, self._twin = world, twin
        self._view: SimulatedView | None = None
        self._rank, self._done = 0, 0

    def rank(self) -> int:
        return self._rank

    def world_size(self) -> int:
        return self._view.size if self._view is not None else 1

    def on_collective(self, callback: Callable[[], None] | None) -> None:
        return None

    def has_unanswered(self) -> bool:
        return False

    def end_answers(self, tracked: Sequence[torch.Tensor]) -> bytes:
        return b""

    def switch(self, store: Any, rank: int, world_size: int, *, view: int) -> None:
        self._view, self._rank, self._done = self._world.views[view], rank, 0
        self.gather((rank,))

    def revoke(self, why: str, view: int | None = None) -> None:
        return None  # the world has done so

    def agree(self, values: Sequence[int]) -> list[int]:
        is_vote = len(values) == len(CommitVote._fields) + len(NO_SNAPSHOTS)
        if len(values) != 1:  # a commit, or the end
            self._twin.state.check_device()
        if is_vote:
            self._twin.reach("vote")
        found = [max(column) for column in zip(*self.gather(values), strict=True)]
        if is_vote:
            self._twin.reach("voted")
        return found

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        view = self._view
        assert view is not None
        with self._world.changed:
            if view.is_over:
                raise ViewOverError(f"view {view.view} is over")
            rows = view.rows.setdefault(self._done, {})
            self._done += 1
            rows[self._rank] = list(values)
            self._world.changed.notify_all()
            is_there = lambda: len(rows) == view.size or view.is_over  # noqa: E731
            assert self._world.changed.wait_for(is_there, TIMEOUT_S), f"not all ranks came: {rows}"
            if len(rows) < view.size:
                raise ViewOverError(f"view {view.view} is over")
            return [rows[rank] for rank in range(view.size)]


class SimulatedUndo:
    """A copy of the number before an update."""

    cost_s = 0.0

    def __init__(self, state: SimulatedState) -> None:
        self._state, self._saved = state, 0

    def before_update(self) -> None:
        self._saved = self._state.value

    def restore(self, with_others: bool = True) -> None:
        self._state.value = self._saved

    def release(self) -> None: ...


class SimulatedState:
    """A state that is one number."""

    shard_map = ShardMap()
    built_for = None
    runs_on_device = copies_at_end = False
    replica_check_due = Due.NOT
    values_mark = update_mark = 0
    local_since = -1

    def __init__(self, twin: Twin, page: ProgressPage) -> None:
        self._twin, self._page = twin, page
        self.value = 0
        self.can_be_saved_alone = True
        self.saved_alone: list[tuple[int, int]] = []
        """Step and value of what was saved for lack of other holders."""
        self.transaction: StepTransaction | None = None
        self.is_device_behind = False
        """Whether the device was told something that it has not been waited for."""

    def check_device(self) -> None:
        assert not self.is_device_behind, "a rank agrees to what its device has not done yet"

    def begin(self, *, has_session: bool) -> None:
        self.transaction = StepTransaction(Tracked(), self._page, SimulatedUndo(self))

    def restore(self, found: Assignment | None) -> RestorePoint | None:
        if self._twin.world.checkpoint is None:
            return None
        step, self.value = self._twin.world.checkpoint
        return RestorePoint(step, 7, 2, is_recalled=False)

    def add_to(self, status: RankStatus) -> RankStatus:
        return status

    def fill(self, resume: ResumePoint, found: Assignment) -> None:
        self._twin.reach("fill")
        self.is_device_behind = True
        rows = self._twin.collectives.gather((self.value,))
        if found.rank in resume.newcomers:
            (self.value,) = rows[resume.holders[0]]

    def undo(self, next_step: int) -> None:
        assert self.transaction is not None
        self.transaction.undo()

    def save_alone(self, found: Assignment, step: int) -> None:
        self.saved_alone.append((step, self.value))

    def snapshot_vote(self, step: int) -> tuple[int, ...]:
        return NO_SNAPSHOTS

    def prepare_commit(self, step: int, found: Assignment) -> bool:
        self.check_device()  # it reads from the device, without a deadline
        self.is_device_behind = True
        return False

    def end(self, step: int) -> None:
        self._twin.reach("close")

    def tensors(self) -> Sequence[torch.Tensor]:
        return ()

    def audited(self) -> dict[str, Any]:
        return {}

    def data_sources(self) -> tuple[DataSource, ...]:
        return ()

    def stream_reports(self, view: int, step: int) -> Iterator[StreamReportedMessage]:
        return iter(())

    def positions(self) -> dict[str, str]:
        return {}

    def session_info(self) -> SessionInfo:
        return SessionInfo()

    def measure(self, *, is_alone: bool, expected: ShardMap | None) -> None: ...

    def begin_session(self, describe_run: Any) -> None: ...

    def rebuild(self, tracked: Tracked, next_step: int) -> None: ...

    def prepare(self, resume: ResumePoint, found: Assignment) -> None: ...

    def protect(self, resume: ResumePoint, found: Assignment, seed: int) -> None: ...

    def complete_join(self) -> None: ...

    def dump(self, directory: str, step: int, seed: int, found: Assignment) -> None: ...

    def begin_attempts(self, step: int) -> None: ...

    def check_outside(self) -> None: ...

    def before_update(self, optimizer: Any) -> None: ...

    def finish_step(self) -> None: ...

    def send_replicas(self, step: int) -> None: ...

    def complete_commit(self) -> None: ...

    def expect_replica_check(self) -> None: ...

    def record_join(self, step: int) -> None: ...

    def check_replicas(self, due: int) -> None: ...

    def check_at_end(self) -> None: ...

    def align_buffers(self) -> None: ...

    def snapshot_agreed(self, step: int, votes: Sequence[int]) -> None: ...

    def distrust_snapshots(self, after: int) -> None: ...

    def wait_for_device(self, timeout_s: float) -> None:
        self.is_device_behind = False

    def settle_device(self) -> None: ...


class Twin:
    """One simulated worker."""

    def __init__(self, world: World, name: str, total: int, *, is_newcomer: bool) -> None:
        self.world, self.name, self._total = world, name, total
        self.agent, self.collectives = SimulatedAgent(world, name), SimulatedCollectives(world, self)
        page = ProgressPage.private()
        self.page, self.state = page, SimulatedState(self, page)
        first = world.assignments[name]
        self.membership = Membership(
            self.agent,
            page,
            first,
            timedelta(seconds=TIMEOUT_S),
            is_newcomer=is_newcomer,
            collectives=self.collectives,
            connect_to=lambda *_: cast(Store, SimulatedStore()),
        )
        self.engine = Engine(
            self.state,
            page,
            7,
            agent=self.agent,
            membership=self.membership,
            collectives=cast(EngineCollectives, self.collectives),
            is_newcomer=is_newcomer,
        )
        self._is_newcomer, self._first = is_newcomer, first
        self.at: dict[tuple[str, int], Callable[[], None]] = {}
        self.keeps_copy: bool | None = None
        """Whether the barrier comes after the update; None: as the engine decides."""
        self.trace: list[str] = []
        """What became of each attempt: `3` committed, `3!` repeated."""
        self.error: BaseException | None = None
        self.started = threading.Event()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def reach(self, point: str) -> None:
        """Have the fault of this point and step, if there is one left."""
        action = self.at.pop((point, self.engine.next_step), None)
        if action is not None:
            action()

    def _run(self) -> None:
        try:
            if not self._is_newcomer:
                self.collectives.switch(None, self._first.rank, self._first.world_size, view=self._first.view)
            self._train()
        except (Killed, SystemExit) as error:
            self._end(error)
        except BaseException as error:  # for the test to look at
            self._end(error)
            if self.world.assignments[self.name].view == self.world.newest:
                self.world.end_view()

    def _end(self, error: BaseException) -> None:
        """Record how this twin ended, and wake the ones that wait for it."""
        with self.world.changed:
            self.error = error
            self.world.changed.notify_all()

    def _train(self) -> None:
        engine = self.engine
        engine.restore()
        engine.begin()
        engine.enter_view()
        while engine.next_step < self._total:
            engine.remember()
            engine.begin_step()
            number, error = engine.next_step, None
            if self.keeps_copy is not None:
                engine.transaction.keeps_copy = self.keeps_copy
            try:
                self._body(number)
            except Killed:
                raise
            except BaseException as raised:
                error = raised
            is_repeated = engine.end_step(error)
            self.trace.append(f"{number}!" if is_repeated else f"{number}")
            if error is not None and not is_repeated:
                raise error
            engine.leave_outside()
            engine.enter_view()
        engine.close()

    def _body(self, number: int) -> None:
        self.reach("body")
        self.state.is_device_behind = True
        self.collectives.gather((number,))  # the script's gradients are averaged
        self.engine.before_update(object())
        self.reach("update")
        self.state.is_device_behind = True
        self.state.value += number + 1
        self.reach("tail")


class SimulatedStore:
    """A view's store, in which no newcomer looks for anything."""

    def add(self, key: str, amount: int) -> int:
        return 2

    def set(self, key: str, value: bytes) -> None:
        return None
