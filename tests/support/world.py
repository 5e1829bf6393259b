"""A master for tests: the core, a clock that only the test moves, and a journal kept as bytes.

A `World` does what the contract in transact.py asks of a driver, and after every step what a test would want to
ask: all invariants hold, the journal alone tells the same story, and the job will be woken if it waits.

Nodes have short ids; the lives of node `a` are `a.1`, `a.2`, ... An event is made by a method and taken in by `do`:

    world = World(nodes=(2, 2))
    world.do(world.hello("a"), world.hello("b"))
    world.do(world.failed("a"))
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import msgspec

from holdfast.core import events as e
from holdfast.core import orders as o
from holdfast.core import records as r
from holdfast.core.durability import ImageReport
from holdfast.core.evolve import evolve
from holdfast.core.faults.failures import End, Exited, Failure
from holdfast.core.faults.fault_table import typed
from holdfast.core.health.findings import CheckResult
from holdfast.core.invariants import check_all
from holdfast.core.policy import next_deadline
from holdfast.core.settings import Settings
from holdfast.core.state import Finished, Gathering, JobState, Node, Present, Serving
from holdfast.core.strategies import FailoverStrategy
from holdfast.core.transact import Turn, begin, replay, transact

START = 100.0
EXITED = Exited(1)
SOFT_FIELDS = {"link", "store_port", "parked", "parked_at"}
"""What a node's records of connections say; a journal does not hold it."""
OWN_FIELDS = {"nodes", "sets", "held", "recorded_at"}
"""What is compared by itself, follows from the rest, or is the time of soft records too."""
SOFT_JOB_FIELDS = {
    "progress": {"link_probe", "echoes", "failing", "waiting", "step_times", "step_time_norm", "slow_reports"},
    "state": {"images", "images_heard", "snapshot_stats_by_node"},
    "data": set[str](),
    "checks": {"checkup", "started"},
    "incidents": set[str](),
}
"""By struct of the job: what a journal does not hold, as it is known again soon after a restart of the master."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(r.DurableRecord).decode


class World:
    """One job, its master's terms, and what was said to its nodes."""

    def __init__(
        self,
        *,
        nodes: tuple[int, int] = (2, 2),
        restarts: int = 3,
        workers: int = 1,
        session: e.SessionInfo | None = None,
        **settings: Any,
    ) -> None:
        nodes_min, nodes_max = nodes
        self.settings = Settings(nodes_min=nodes_min, nodes_max=nodes_max, restarts_max=restarts, **settings)
        self.workers = workers
        self.session = session
        """What the workers say of their state; None: they do not speak to Holdfast."""
        self.careful = True
        """Whether the journal is compared with the job after every step, not only when the master restarts."""
        self.now = START
        self.job = JobState()
        self.shadow = JobState()
        """The job as the journal tells it, kept up to date record by record."""
        self.journal: list[bytes] = []
        self.history: list[r.Record] = []
        self.said: list[o.Addressed] = []
        """All orders that left the master."""
        self.told: dict[str, o.Order] = {}
        """By life: the last order that left the master."""
        self.incarnations: dict[str, int] = {}
        self.ports = 0
        self._commit(begin(self.job, "job", self.settings, self.now))

    # --- driving

    def do(self, *events: e.Event) -> Turn:
        """Take events in as one batch; everything that follows is journaled, then said."""
        over = self.job.phase if isinstance(self.job.phase, Finished) else None
        return self._commit(transact(self.job, events, self.now), over)

    def wait(self, seconds: float) -> list[r.Record]:
        """Let time pass, waking the job at each of its deadlines."""
        until, happened = self.now + seconds, []
        while (deadline := next_deadline(self.job)) is not None and deadline <= until:
            self.now = max(self.now, deadline)
            happened += self.do().records
        self.now = until
        return happened

    def wake(self) -> list[r.Record]:
        """Go to the next deadline, which must be there."""
        deadline = next_deadline(self.job)
        assert deadline is not None, "nothing will ever wake the job"
        self.now = deadline
        return self.do().records

    def restart_master(self, down_s: float = 0.0) -> list[r.Record]:
        """Kill the master, and start the next one from the journal alone."""
        replayed = self.replayed()
        assert durable(replayed) == durable(self.job), "the journal tells another story"
        self.job = replayed
        self.now += down_s
        self._commit(begin(self.job, "job", self.settings, self.now))
        return self.do().records

    def lose_batch(self, *events: e.Event) -> None:
        """Kill the master after it decided and before its journal had it: nothing was said, nothing is kept."""
        transact(self.job, events, self.now)
        self.job = self.replayed()
        self.restart_master()

    def replayed(self) -> JobState:
        """The job as a new master would find it."""
        return replay(_decode(line) for line in self.journal)

    def _commit(self, done: Turn, over: Finished | None = None) -> Turn:
        for record in done.records:
            if r.is_durable(record):
                line = _encode(record)
                self.journal.append(line)
                if self.careful:
                    evolve(self.shadow, _decode(line))
        self.history += done.records
        self.said += done.orders
        for addressed in done.orders:
            self.told[addressed.incarnation] = addressed.order
        self._check(done, over)
        return done

    def _check(self, done: Turn, over: Finished | None) -> None:
        check_all(self.job)
        assert not self.careful or durable(self.shadow) == durable(self.job), "the journal tells another story"
        assert over is None or self.job.phase == over, "a finished job changed its mind"
        deadline = next_deadline(self.job)
        assert deadline is None or deadline > self.now, "a deadline that is over: the driver would spin"
        assert deadline is not None or not isinstance(self.job.phase, Gathering), "gathering without an end"
        if any(isinstance(record, r.ViewFormed) for record in done.records) and self.serving:
            self._check_members()

    def _check_members(self) -> None:
        """Who is in a new view may be. Of those to be examined, only who was in the one before and works on."""
        formed = [record.view for record in self.history if isinstance(record, r.ViewFormed)]
        before = {(m.node_id, m.incarnation) for m in formed[-2].members} if formed[-1].keeps_workers else set()
        for member in formed[-1].members:
            node = self.job.nodes[member.node_id]
            stays = (member.node_id, member.incarnation) in before and self.job.is_suspect(node)
            assert node.eligible or stays, f"a view was formed with {member.node_id}, which cannot serve"

    # --- events

    def life(self, node_id: str) -> str:
        """The current incarnation of a node."""
        return f"{node_id}.{self.incarnations.setdefault(node_id, 1)}"

    def next_life(self, node_id: str) -> str:
        """From now on, speak for the node's next incarnation."""
        self.incarnations[node_id] = self.incarnations.get(node_id, 0) + 1
        return self.life(node_id)

    def port(self) -> int:
        """A port nobody had before."""
        self.ports += 1
        return 29_000 + self.ports

    def hello(
        self,
        node_id: str,
        *,
        life: str = "",
        store_port: int | None = None,
        dead_incarnations: Iterable[str] = (),
        spec: e.JobSpec | None = None,
        term: int = 0,
        parked: int = 0,
        **info: Any,
    ) -> e.Hello:
        s = self.settings
        told = e.JobSpec(run_id="", nodes_min=s.nodes_min, nodes_max=s.nodes_max, restarts_max=s.restarts_max)
        itself: dict[str, Any] = {
            "host": f"host-{node_id}",
            "address": f"10.0.0.{node_id}",
            "machine_id": f"machine-{node_id}",
            "boot_id": f"boot-1-of-{node_id}",
            "pid": 1000,
            "workers": self.workers,
        }
        return e.Hello(
            node_id=node_id,
            incarnation=life or self.life(node_id),
            info=e.NodeInfo(**itself | info),
            spec=spec or told,
            store_port=self.port() if store_port is None else store_port,
            dead_incarnations=tuple(dead_incarnations),
            term=term,
            parked=parked,
        )

    def started(self, node_id: str, *, view: int | None = None, life: str = "") -> e.WorkersStarted:
        return e.WorkersStarted(
            node_id=node_id, incarnation=life or self.life(node_id), view=self._view(view), pids=(1,)
        )

    def succeeded(self, node_id: str, local_rank: int = 0, *, view: int | None = None, life: str = "") -> e.Event:
        return e.WorkerSucceeded(
            node_id=node_id, incarnation=life or self.life(node_id), view=self._view(view), local_rank=local_rank
        )

    def failed(
        self,
        node_id: str,
        local_rank: int = 0,
        *,
        view: int | None = None,
        life: str = "",
        end: End = EXITED,
        collateral: bool = False,
        failed_at: float | None = None,
        advice: FailoverStrategy = FailoverStrategy.NORMAL_FAILOVER,
        exception: str = "",
    ) -> e.WorkerFailed:
        failure = Failure(
            node_id=node_id,
            view=self._view(view),
            rank=self._rank(node_id, local_rank),
            local_rank=local_rank,
            pid=1,
            end=end,
            failed_at=self.now if failed_at is None else failed_at,
            exception="DistNetworkError" if collateral else exception,
            message="Connection reset by peer" if collateral else "",
            advice=advice,
        )
        return e.WorkerFailed(
            node_id=node_id, incarnation=life or self.life(node_id), view=self._view(view), failure=typed(failure)
        )

    def settled(
        self, node_id: str, session: e.SessionInfo | None = None, *, view: int | None = None, life: str = ""
    ) -> e.ViewJoined:
        return e.ViewJoined(
            node_id=node_id,
            incarnation=life or self.life(node_id),
            view=self._view(view),
            session=session or self.session or e.SessionInfo(),
        )

    def revised(self, node_id: str, session: e.SessionInfo, *, view: int | None = None) -> e.SessionRevised:
        return e.SessionRevised(node_id=node_id, incarnation=self.life(node_id), view=self._view(view), session=session)

    def stumbled(
        self, node_id: str, local_rank: int = 0, *, view: int | None = None, life: str = "", error: str = ""
    ) -> e.StepInterrupted:
        """A worker's step failed: by another's doing, or by an error of its own."""
        step_error = e.StepError(
            rank=self._rank(node_id, local_rank),
            local_rank=local_rank,
            step=7,
            at=self.now,
            exception=error or "RuntimeError",
            message="" if error else "Connection reset by peer",
            traceback="",
            collateral=not error,
        )
        return e.StepInterrupted(
            node_id=node_id, incarnation=life or self.life(node_id), view=self._view(view), step_error=step_error
        )

    def failing(
        self, node_id: str, local_rank: int = 0, *, view: int | None = None, life: str = "", message: str = ""
    ) -> e.WorkerFailing:
        """A worker's script has failed; its process has not ended yet."""
        return e.WorkerFailing(
            node_id=node_id,
            incarnation=life or self.life(node_id),
            view=self._view(view),
            local_rank=local_rank,
            exception=message.partition(":")[0],
            message=message,
        )

    def stalled(
        self,
        node_id: str,
        *steps: int,
        view: int | None = None,
        life: str = "",
        joining: bool = False,
        collectives: tuple[int, ...] = (),
        idle: tuple[int, ...] = (),
        asleep: tuple[int, ...] = (),
        views: tuple[int, ...] = (),
        stalled_s: float = 12.0,
        is_overdue: bool = True,
    ) -> e.WorkersStalled:
        """Nothing moves; how far each of the node's workers has come. All wait for other ranks, except the local ranks
        in `idle` and `asleep`."""
        worker_progress = tuple(
            e.WorkerProgress(
                rank=self._rank(node_id, i),
                local_rank=i,
                step=step,
                phase=1,
                collectives=collectives[i] if collectives else 3,
                waiting=i not in (*idle, *asleep),
                joining=joining,
                asleep=i in asleep,
                view=views[i] if views else 0,
            )
            for i, step in enumerate(steps)
        )
        return e.WorkersStalled(
            node_id=node_id,
            incarnation=life or self.life(node_id),
            view=self._view(view),
            stalled_s=stalled_s,
            worker_progress=worker_progress,
            is_overdue=is_overdue,
        )

    def probed(self, node_id: str, *unreachable: str, view: int | None = None) -> e.PeerLinksProbed:
        """Whom the node cannot reach."""
        return e.PeerLinksProbed(
            node_id=node_id, incarnation=self.life(node_id), view=self._view(view), unreachable=unreachable
        )

    def waiting(self, node_id: str, *, view: int | None = None, life: str = "") -> e.WorkersWaiting:
        """All of the node's workers wait for other ranks."""
        return e.WorkersWaiting(
            node_id=node_id, incarnation=life or self.life(node_id), view=self._view(view), waiting_s=1.0
        )

    def moved(self, node_id: str, *, view: int | None = None, life: str = "") -> e.WorkersMoved:
        """Something moves on the node again."""
        return e.WorkersMoved(node_id=node_id, incarnation=life or self.life(node_id), view=self._view(view))

    def committed(self, node_id: str, step: int = 8, *, view: int | None = None, life: str = "") -> e.StepCommitted:
        return e.StepCommitted(
            node_id=node_id, incarnation=life or self.life(node_id), view=self._view(view), step=step
        )

    def kept(self, node_id: str, *images: ImageReport) -> e.ImagesReported:
        return e.ImagesReported(node_id=node_id, incarnation=self.life(node_id), images=images)

    def parked(self, node_id: str, parked: int, *, life: str = "") -> e.SparesChanged:
        return e.SparesChanged(node_id=node_id, incarnation=life or self.life(node_id), parked=parked)

    def examined(self, node_id: str, result: CheckResult, *, life: str = "") -> e.NodeChecked:
        """What came of the task that the node was last told."""
        life = life or self.life(node_id)
        order = self.told[life]
        assert isinstance(order, o.Hold) and order.check is not None, f"{node_id} has no task"
        task = order.check
        return e.NodeChecked(node_id=node_id, incarnation=life, checkup=task.checkup, round=task.round, result=result)

    def _rank(self, node_id: str, local_rank: int) -> int:
        member = self.job.members.get(node_id)
        return (member.first_rank if member else 0) + local_rank

    def broke(self, node_id: str, *, life: str = "") -> e.LinkBroke:
        return e.LinkBroke(node_id=node_id, incarnation=life or self.life(node_id))

    def silent(self, node_id: str, *, life: str = "") -> e.NodeSilent:
        silent_s = self.settings.silence_timeout_s
        return e.NodeSilent(node_id=node_id, incarnation=life or self.life(node_id), silent_s=silent_s)

    def offered(self, node_id: str, port: int | None = None, *, life: str = "") -> e.StoreOffered:
        port = self.port() if port is None else port
        return e.StoreOffered(node_id=node_id, incarnation=life or self.life(node_id), port=port)

    def leaving(self, node_id: str, signal: int = 15, *, life: str = "") -> e.NodeLeaving:
        return e.NodeLeaving(node_id=node_id, incarnation=life or self.life(node_id), signal=signal, why="told to stop")

    def gone(self, node_id: str, *, life: str = "") -> e.NodeLeft:
        return e.NodeLeft(node_id=node_id, incarnation=life or self.life(node_id))

    def _view(self, number: int | None) -> int:
        if number is not None:
            return number
        return self.job.view.number if self.job.view else 0

    # --- shorthands

    def gather(self, *node_ids: str, **info: Any) -> World:
        """These nodes join, and the view they make is formed."""
        self.do(*(self.hello(node_id, **info) for node_id in node_ids))
        self.wait(self.settings.settle_s)
        assert self.serving
        return self

    def run(self, *node_ids: str, **info: Any) -> World:
        """These nodes join and all their workers run."""
        self.gather(*node_ids, **info)
        self.start_all()
        return self

    def start_all(self) -> list[r.Record]:
        """Every member starts its workers; the store's host offers its next one."""
        assert self.job.view is not None and self.serving
        offer = self.offered(self.job.view.store_node_id)
        return self.do(offer, *(self.started(node_id) for node_id in self.members)).records

    def settle_all(self) -> list[r.Record]:
        """Every member starts its workers, which come into the view with their state."""
        records = self.start_all()
        return records + self.do(*(self.settled(node_id) for node_id in self.members)).records

    def prove(self, step: int = 8) -> list[r.Record]:
        """The view settles and commits a step."""
        return self.settle_all() + self.do(self.committed(self.members[0], step)).records

    def train(self, *node_ids: str, **info: Any) -> World:
        """These nodes join, and their workers, which speak to Holdfast, train."""
        self.gather(*node_ids, **info)
        self.prove()
        return self

    def reconnect_all(self) -> list[r.Record]:
        """Every living node says hello again, as after a restart of the master."""
        present = [n.node_id for n in self.job.nodes.values() if isinstance(n.standing, Present)]
        return self.do(*(self.hello(node_id) for node_id in present)).records

    # --- questions

    @property
    def serving(self) -> bool:
        return isinstance(self.job.phase, Serving)

    @property
    def gathering(self) -> bool:
        return isinstance(self.job.phase, Gathering)

    @property
    def finished(self) -> r.JobFinished | None:
        return self.job.phase.record if isinstance(self.job.phase, Finished) else None

    @property
    def view_number(self) -> int:
        return self.job.view.number if self.job.view else 0

    @property
    def members(self) -> list[str]:
        """The nodes of the view in the order of their ranks."""
        return [m.node_id for m in self.job.view.members] if self.job.view else []

    def order_to(self, node_id: str) -> o.Order | None:
        """What the node's current life was last told."""
        return self.told.get(self.life(node_id))


def durable(job: JobState) -> dict[str, Any]:
    """Return all that a journal must be able to rebuild."""
    found = {f.name: getattr(job, f.name) for f in fields(job) if f.name not in {*OWN_FIELDS, *SOFT_JOB_FIELDS}}
    for name, soft in SOFT_JOB_FIELDS.items():
        part = getattr(job, name)
        found |= {f"{name}.{f.name}": getattr(part, f.name) for f in fields(part) if f.name not in soft}
    return found | {"nodes": {node_id: _durable_node(node) for node_id, node in job.nodes.items()}}


def _durable_node(node: Node) -> dict[str, Any]:
    return {key: value for key, value in vars(node).items() if key not in SOFT_FIELDS}


def tags(records: Iterable[r.Record]) -> list[str]:
    """The kinds of records, for comparing at a glance."""
    return [str(record.__struct_config__.tag) for record in records]


def only(records: Iterable[r.Record], kind: type[Any]) -> Any:
    """The one record of its kind."""
    found = [record for record in records if isinstance(record, kind)]
    assert len(found) == 1, f"{len(found)} records of {kind.__name__}"
    return found[0]
