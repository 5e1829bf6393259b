"""The good name of machines: what is known of them goes into the events, what happens to them into the book of nodes.

Before the core hears of it:
    a node introduces itself      what its machine is known for; what the agent says of itself does not count
    a worker failed               what the user's error monitors say of the node

After the journal has it:
    a fault that is a node's      into the machine's history; if that makes it a lemon it is kept from jobs for a while
    a node falls silent           the same, counted half: the node may have been taken away, or the network
    a worker is replaced          as it hangs: the same, counted a tenth
    a node joins after a fault    it is back: from now on it is on probation
    a node is cordoned            for good: the platform is told, unless too many were within a day
    a node is cleared             all of it is taken back
    a check is over               passed, or failed: then it is on probation until another one is passed. To be slow is
                                  no failure: the others of the next job may be as slow, and it is checked again

The book and the platform may fail or be slow: then it is logged, and the job goes on as if nothing were known.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import structlog
from msgspec.structs import replace

from holdfast import monitors
from holdfast.core import blame
from holdfast.core.events import Event, Hello, WorkerFailed
from holdfast.core.fault_table import fault_of
from holdfast.core.fault_types import Fault
from holdfast.core.health import reputation
from holdfast.core.health.reputation import DAY_S, Kind, Mark, NodeEvent, Repute
from holdfast.core.ladder import Strategy, Verdict
from holdfast.core.records import (
    NodeCleared,
    NodeCordoned,
    NodeJoined,
    NodeLost,
    NodesChecked,
    Record,
    ViewFormed,
    WorkerLost,
)
from holdfast.core.state import Job
from holdfast.core.troubles import listed
from holdfast.errors import HoldfastError
from holdfast.journal import NodeBook
from holdfast.monitors import ErrorMonitor, NodeFacts

if TYPE_CHECKING:
    from holdfast.platforms.base import Platform

PLATFORM_LIMIT_S = 30.0
LOOKUP_LIMIT_S = 3.0
"""A node that introduces itself waits for it."""
ONE_FAULT_S = 60.0
"""What befalls a machine in one job within this time is one fault: all of its workers may die of it, then its agent."""
WHY_CHARS_MAX = 500

TOLD = (Kind.CORDONED, Kind.UNCORDONED)

log = structlog.get_logger("master")


class Steward:
    """Of one job's master. Without a book nothing is known and nothing is kept."""

    def __init__(
        self,
        book: NodeBook | None = None,
        platform: Platform | None = None,
        error_monitors: Sequence[ErrorMonitor] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._book, self._platform, self._monitors, self._clock = book, platform, error_monitors, clock
        self._calls: set[asyncio.Task[None]] = set()

    # --- before

    async def introduced(self, events: list[Event]) -> list[Event]:
        """The same events, introductions with what the machine is known for."""
        machines = {_machine(event) for event in events if isinstance(event, Hello)}
        if not machines:
            return events
        try:
            async with asyncio.timeout(LOOKUP_LIMIT_S):
                known = await asyncio.to_thread(self._reputes, machines)
        except TimeoutError:
            log.error(f"what machines are known for could not be looked up in {LOOKUP_LIMIT_S:.0f} s")
            known = {}
        return [
            replace(event, repute=known.get(_machine(event), Repute())) if isinstance(event, Hello) else event
            for event in events
        ]

    def has_to_say(self, event: Event) -> bool:
        """Whether the monitors are to be asked about this."""
        return bool(self._monitors) and isinstance(event, WorkerFailed) and event.failure.fault is not None

    async def judged(self, events: Sequence[Event], job: Job) -> list[Event]:
        """The same events, each failure with the verdict of the user's monitors; all of them within one time limit."""
        until, judged = time.monotonic() + monitors.TIME_LIMIT_S, []
        for event in events:
            left_s = until - time.monotonic()
            judged.append(await self._judged(event, job, left_s) if self.has_to_say(event) and left_s > 0 else event)
        return judged

    async def _judged(self, event: Event, job: Job, limit_s: float) -> Event:
        assert isinstance(event, WorkerFailed) and event.failure.fault is not None
        facts = self._facts(job, event.node_id)
        verdict = await monitors.ask(self._monitors, event.failure.fault, facts, limit_s=limit_s)
        if verdict is Verdict.NORMAL:
            return event
        return replace(event, failure=replace(event.failure, verdict=verdict))

    def _facts(self, job: Job, node_id: str) -> NodeFacts:
        node = job.nodes.get(node_id)
        machine = blame.machine_of(job, node_id)
        return NodeFacts(
            node_id=node_id,
            machine=machine,
            host=node.info.host if node else "",
            repute=self._repute(machine),
            history=tuple(self._history(machine)),
        )

    # --- after

    def learn(self, records: Iterable[Record], job: Job) -> None:
        """Keep what the records say of machines. The journal has them."""
        for record in records:
            match record:
                case WorkerLost(failure=failure) if failure.fault and self._counts(job, record):
                    self._fault(job, failure.node_id, failure.fault, failure.message)
                case NodeLost(node_id=node_id, certain=False, why=why):  # else its process died, which proves nothing
                    self._fault(job, node_id, fault_of("node-lost"), why)
                case ViewFormed(view=view) if view.replaced and view.strategy is not Strategy.DUMP:
                    for node_id in {node_id for node_id, _ in view.replaced}:
                        self._fault(job, node_id, fault_of("hang"), "a worker on it did not move any more")
                case NodeJoined(info=info):
                    self._returned(job, info.machine or info.host)
                case NodeCordoned(lasting=True, machine=machine, why=why):
                    self._cordon(job, Mark(machine=machine, at=self._clock(), by=f"job {job.job_id}", why=why))
                case NodeCleared(machine=machine, fault=fault, why=why):
                    self._clear(job, machine, fault, why)
                case NodesChecked():
                    self._checked(job, record)

    def reconcile(self, job: Job) -> None:
        """A new master: what the last one may not have got round to."""
        for cordoned in job.cordons:
            is_recent = cordoned.lasting and cordoned.at > self._clock() - DAY_S and cordoned.node_id not in job.cleared
            later = [e.kind for e in self._history(cordoned.machine) if e.at >= cordoned.at and e.kind in TOLD]
            if is_recent and not later:
                by = f"job {job.job_id}"
                self._cordon(job, Mark(machine=cordoned.machine, at=cordoned.at, by=by, why=cordoned.why))

    async def close(self) -> None:
        """What was asked of the platform is done, or given up."""
        if self._calls:
            await asyncio.wait(self._calls, timeout=PLATFORM_LIMIT_S)

    def _counts(self, job: Job, record: WorkerLost) -> bool:
        fault = record.failure.fault
        assert fault is not None
        if record.failure.verdict is Verdict.PARDON or blame.is_widespread(job, fault.name):
            return False
        return reputation.weight_of(fault) > 0 or record.failure.verdict is Verdict.CORDON

    def _fault(self, job: Job, node_id: str, fault: Fault, why: str) -> None:
        machine, now = blame.machine_of(job, node_id), self._clock()
        history = self._history(machine)
        if any(e.kind is Kind.FAULT and e.job_id == job.job_id and e.at > now - ONE_FAULT_S for e in history):
            return
        was_banned = reputation.add_up(history, now).is_banned
        weight = reputation.weight_of(fault) or 1.0
        self._note(machine, Kind.FAULT, job, fault=fault.name, weight=weight, why=why or fault.meaning)
        record = self._record(machine)
        if record.is_banned and not was_banned:
            why = f"it keeps failing: a score of {record.score:.1f} faults, the last one {fault.name}"
            until = now + reputation.banned_for_s(record.score)
            self._cordon(job, Mark(machine=machine, at=now, by=f"job {job.job_id}", why=why, until=until))

    def _checked(self, job: Job, record: NodesChecked) -> None:
        """One that failed counts as a fault, and is no secret until another is passed. Of the nodes of one machine, the
        worst counts."""
        lines: dict[str, NodeEvent] = {}
        for verdict in sorted(record.nodes, key=lambda one: one.fitness == "unfit"):
            is_fit = verdict.fitness != "unfit"
            lines[blame.machine_of(job, verdict.node_id)] = NodeEvent(
                at=self._clock(),
                kind=Kind.CHECK_PASSED if is_fit else Kind.CHECK_FAILED,
                fault="" if is_fit else "check-failed",
                weight=0.0 if is_fit else 1.0,
                job_id=job.job_id,
                why=f"{verdict.why or 'all stages'} ({record.why})"[:WHY_CHARS_MAX],
            )
        self._write(lines.items())

    def _returned(self, job: Job, machine: str) -> None:
        if reputation.has_to_return(self._history(machine)):
            self._note(machine, Kind.RETURNED, job, why="it joined a job after a fault")

    def _cordon(self, job: Job, mark: Mark) -> None:
        platform = self._platform
        if platform is None:
            return
        limit = job.settings.cordon_limit

        def work() -> None:
            others = [other for other in platform.unschedulable().values() if other.machine != mark.machine]
            lately = [other for other in others if other.at > mark.at - DAY_S and other.by.startswith("job ")]
            if len(lately) >= limit:
                log.error(f"machine {mark.machine} is not cordoned: {limit} were within a day (--cordon-limit)")
                return
            platform.mark_unschedulable(mark)
            log.warning(f"machine {mark.machine} is cordoned: {mark.why}; `holdfast nodes uncordon` lets it back")
            self._note(mark.machine, Kind.CORDONED, job, why=mark.why)

        self._call(work, f"cordon machine {mark.machine}")

    def _clear(self, job: Job, machine: str, fault: str, why: str) -> None:
        faults = [e for e in self._history(machine) if (e.kind, e.fault, e.job_id) == (Kind.FAULT, fault, job.job_id)]
        weight = faults[-1].weight if faults else 0.0
        self._note(machine, Kind.CLEARED, job, fault=fault, weight=weight, why=why)
        platform = self._platform
        if platform is not None:

            def work() -> None:
                mark = platform.unschedulable().get(machine)
                if mark and mark.by == f"job {job.job_id}":  # somebody else's is not ours to take back
                    platform.mark_schedulable(machine)

            self._call(work, f"let machine {machine} back")

    def _call(self, work: Callable[[], None], what: str) -> None:
        """Of the platform, beside everything else and in order."""
        before = list(self._calls)

        async def run() -> None:
            if before:
                await asyncio.wait(before)
            try:
                async with asyncio.timeout(PLATFORM_LIMIT_S):
                    await asyncio.to_thread(work)
            except Exception as error:  # a platform's library may raise anything, and no job ends for it
                log.error(f"the platform could not {what}: {error or type(error).__name__}")

        task = asyncio.get_running_loop().create_task(run())
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    # --- the book

    def _note(self, machine: str, kind: Kind, job: Job, **facts: Any) -> None:
        facts["why"] = facts["why"][:WHY_CHARS_MAX]
        self._write([(machine, NodeEvent(at=self._clock(), kind=kind, job_id=job.job_id, **facts))])

    def _write(self, lines: Collection[tuple[str, NodeEvent]]) -> None:
        if self._book is None:
            return
        try:
            self._book.note_all(lines)
        except HoldfastError as error:
            machines = listed([machine for machine, _ in lines])
            log.error(f"not written down about machine {machines}: {error}")

    def _history(self, machine: str) -> list[NodeEvent]:
        try:
            return self._book.history(machine) if self._book else []
        except HoldfastError as error:
            log.error(f"nothing is known about machine {machine}: {error}")
            return []

    def _record(self, machine: str) -> reputation.Record:
        return reputation.add_up(self._history(machine), self._clock())

    def _repute(self, machine: str) -> Repute:
        return self._reputes({machine})[machine]

    def _reputes(self, machines: set[str]) -> dict[str, Repute]:
        """By machine. Most were never heard of, so a thousand nodes that come at once cost two queries."""
        try:
            marks = self._platform.unschedulable() if self._platform else {}
            known = {*marks, *(self._book.machines() if self._book else ())}
        except Exception as error:  # see _call
            log.error(f"what machines are known for could not be looked up: {error}")
            return dict.fromkeys(machines, Repute())
        now = self._clock()
        return {
            name: reputation.judge(self._history(name), now, marks.get(name)) if name in known else Repute()
            for name in machines
        }


def _machine(hello: Hello) -> str:
    return hello.info.machine or hello.info.host
