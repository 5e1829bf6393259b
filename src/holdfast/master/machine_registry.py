"""The reputation of machines: what is known of them goes into events, what happens to them into the machine book.

Before the core hears of it:
    a node introduces itself      what its machine is known for; what the agent says of itself does not count
    a worker failed               what the user's error monitors say of the node

After the journal has it:
    a fault that is a node's      into the machine's history; if that makes it a lemon it is kept from jobs for a while
    a node falls silent           the same, counted half: the node may have been taken away, or the network
    a worker is replaced          as it hangs: the same, counted a tenth
    a fault is everybody's        what was counted of it a moment before is taken back; so with nodes that fall silent
    a node joins after a fault    it is back: from now on it is on probation
    a node is cordoned            for good: the platform is told
    a node is cleared             all of it is taken back
    a check is over               passed, or failed: then it is on probation until another one is passed. What is the
                                  hardware's counts as a fault, once until then, unless other machines failed alike. To
                                  be slow is no failure: the others of the next job may be as slow, and it is checked
                                  again

Jobs mark machines on the platform, for good or for a while, `--cordon-limit` of them within a day. A mark of a person's
is not theirs to change.

The book and the platform may fail or be slow: then it is logged, and the job goes on as if nothing were known.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from msgspec.structs import replace

from holdfast import monitors
from holdfast.core import blame
from holdfast.core.events import Event, Hello, WorkerFailed
from holdfast.core.faults.failures import Failure
from holdfast.core.faults.fault_table import fault_of
from holdfast.core.faults.fault_types import Fault
from holdfast.core.health import reputation
from holdfast.core.health.reputation import BY_JOB, DAY_S, CordonMark, MachineEventKind, NodeEvent, Reputation
from holdfast.core.records import (
    CheckConcluded,
    NodeCleared,
    NodeCordoned,
    NodeJoined,
    NodeLost,
    Record,
    ViewFormed,
    WorkerFailedRecord,
)
from holdfast.core.state import JobState
from holdfast.core.strategies import Strategy, Verdict
from holdfast.core.wording import listed
from holdfast.errors import HoldfastError, UserCodeError
from holdfast.journal import MachineBook
from holdfast.monitors import ErrorMonitor, MonitorPanel, NodeFacts
from holdfast.util.logs import get_logger
from holdfast.util.user_code import UserCode

if TYPE_CHECKING:
    from holdfast.platforms.platform import Platform

PLATFORM_LIMIT_S = 30.0
LOOKUP_LIMIT_S = 3.0
"""A node that sends its Hello waits for the lookup."""
ONE_FAULT_S = 60.0
"""What befalls a machine in one job within this time is one fault: all of its workers may die of it, then its agent."""
WHY_CHARS_MAX = 500

TOLD = (MachineEventKind.CORDONED, MachineEventKind.UNCORDONED)

_Found = TypeVar("_Found")
Judge = Callable[[list[NodeEvent], float, CordonMark | None], Reputation]

log = get_logger(__name__)


class MachineRegistry:
    """The registry of one job's master. Without a book nothing is known and nothing is stored."""

    def __init__(
        self,
        book: MachineBook | None = None,
        platform: Platform | None = None,
        error_monitors: Sequence[ErrorMonitor] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._book, self._platform, self._clock = book, platform, clock
        self._monitors = MonitorPanel(error_monitors)
        self._lookups, self._changes = UserCode("platform"), UserCode("platform")
        self._calls: set[asyncio.Task[None]] = set()

    # --- before

    async def introduced(self, events: list[Event]) -> list[Event]:
        """Return the same events, each Hello with what its machine is known for."""
        machines = {_machine(event) for event in events if isinstance(event, Hello)}
        if not machines:
            return events
        found = await self._looked_up(lambda: self._reputations(machines, reputation.judge_newcomer), LOOKUP_LIMIT_S)
        known = found or {}
        return [
            replace(event, reputation=known.get(_machine(event), Reputation())) if isinstance(event, Hello) else event
            for event in events
        ]

    def has_to_say(self, event: Event) -> bool:
        """Return whether the monitors are to be asked about this."""
        return len(self._monitors) > 0 and isinstance(event, WorkerFailed) and event.failure.fault is not None

    async def judged(self, events: Sequence[Event], job: JobState) -> list[Event]:
        """Return the same events, each failure with the verdict of the user's monitors, all within one time limit."""
        until, judged = time.monotonic() + monitors.TIME_LIMIT_S, []
        for event in events:
            left_s = until - time.monotonic()
            judged.append(await self._judged(event, job, left_s) if self.has_to_say(event) and left_s > 0 else event)
        return judged

    async def _judged(self, event: Event, job: JobState, limit_s: float) -> Event:
        assert isinstance(event, WorkerFailed) and event.failure.fault is not None
        until = time.monotonic() + limit_s
        facts = await self._facts(job, event.node_id, limit_s / 3)
        verdict = await self._monitors.ask(event.failure.fault, facts, until - time.monotonic())
        if verdict is Verdict.NORMAL:
            return event
        return replace(event, failure=replace(event.failure, verdict=verdict))

    async def _facts(self, job: JobState, node_id: str, limit_s: float) -> NodeFacts:
        """Return the Hello with what is known of its machine, as far as that can be had in time."""
        node = job.nodes.get(node_id)
        machine = blame.machine_of(job, node_id)
        known = await self._looked_up(lambda: (self._reputation(machine), tuple(self._history(machine))), limit_s)
        reputation, history = known or (Reputation(), ())
        host = node.info.host if node else ""
        return NodeFacts(node_id=node_id, machine=machine, host=host, reputation=reputation, history=history)

    async def _looked_up(self, work: Callable[[], _Found], limit_s: float) -> _Found | None:
        """Look machines up in the book and on the platform, in a thread; the job goes on if that fails."""
        try:
            return cast("_Found", await self._lookups.ask(work, limit_s))
        except UserCodeError as error:
            log.error("machine-lookup-failed", f"what machines are known for could not be looked up: {error}")
            return None

    # --- after

    def learn(self, records: Iterable[Record], job: JobState) -> None:
        """Store what the records say of machines. The journal has them."""
        for record in records:
            match record:
                case WorkerFailedRecord(failure=failure) if failure.fault:
                    self._failed(job, failure, failure.fault)
                case NodeLost(node_id=node_id, certain=False, why=why):  # else its process died, which proves nothing
                    if not self._take_back(job, blame.LOSS):
                        self._fault(job, node_id, fault_of(blame.LOSS), why)
                case ViewFormed(view=view) if view.replaced and view.strategy is not Strategy.DUMP:
                    for node_id in {node_id for node_id, _ in view.replaced}:
                        self._fault(job, node_id, fault_of("hang"), "a worker on it did not move any more")
                case NodeJoined(info=info):
                    self._returned(job, info.machine or info.host)
                case NodeCordoned(lasting=True, machine=machine, why=why):
                    self._cordon(job, CordonMark(machine=machine, at=self._clock(), by=_by(job), why=why))
                case NodeCleared(machine=machine, fault=fault, why=why):
                    self._clear(job, machine, fault, why)
                case CheckConcluded():
                    self._checked(job, record)

    def reconcile(self, job: JobState) -> None:
        """Do, as a new master, what the last one may not have finished."""
        for cordoned in job.incidents.cordons:
            is_recent = (
                cordoned.lasting
                and cordoned.at > self._clock() - DAY_S
                and cordoned.incarnation not in job.incidents.cleared
            )
            later = [e.kind for e in self._history(cordoned.machine) if e.at >= cordoned.at and e.kind in TOLD]
            if is_recent and not later:
                self._cordon(job, CordonMark(machine=cordoned.machine, at=cordoned.at, by=_by(job), why=cordoned.why))

    async def close(self) -> None:
        """Wait until what was asked of the platform is done, or give it up."""
        if self._calls:
            await asyncio.wait(self._calls, timeout=PLATFORM_LIMIT_S)

    def _failed(self, job: JobState, failure: Failure, fault: Fault) -> None:
        self._take_back(job, fault.name)
        is_asked = failure.verdict is Verdict.CORDON
        if blame.is_evidence(job, failure) and (is_asked or reputation.weight_of(fault) > 0):
            self._fault(job, failure.node_id, fault, failure.message)

    def _fault(self, job: JobState, node_id: str, fault: Fault, why: str) -> None:
        """Count the heaviest of what befalls a machine at once."""
        machine, now = blame.machine_of(job, node_id), self._clock()
        weight = reputation.weight_of(fault) or 1.0
        lately = self._faults_since(job, machine, now - ONE_FAULT_S)
        if any(one.weight >= weight for one in lately):
            return
        for one in lately:
            self._note(
                machine, MachineEventKind.CLEARED, job, fault=one.fault, weight=one.weight, why=f"part of {fault.name}"
            )
        self._note(machine, MachineEventKind.FAULT, job, fault=fault.name, weight=weight, why=why or fault.meaning)
        self._ban(job, machine)

    def _take_back(self, job: JobState, fault: str) -> bool:
        """Take back what was counted of a fault if several machines have it; return whether they have."""
        if not blame.is_widespread(job, fault):
            return False
        since = blame.seen_since(job, fault)
        for machine in sorted(blame.machines_with(job, fault)):
            if any(one.fault == fault for one in self._faults_since(job, machine, since)):
                self._clear(job, machine, fault, "it came to several machines at once")
        return True

    def _faults_since(self, job: JobState, machine: str, since: float) -> list[NodeEvent]:
        """Return the events of this job, without those that were taken back."""
        history = reputation.uncleared(self._history(machine))
        return [e for e in history if e.kind is MachineEventKind.FAULT and e.job_id == job.job_id and e.at >= since]

    def _checked(self, job: JobState, record: CheckConcluded) -> None:
        """Record checks. The worst of the nodes of one machine counts; a machine that fails again before it has passed
        is no news."""
        worst = {
            blame.machine_of(job, verdict.node_id): verdict
            for verdict in sorted(record.nodes, key=lambda one: one.fitness == "unfit")
        }
        unfit = {machine: verdict.problems for machine, verdict in worst.items() if verdict.fitness == "unfit"}
        weights = reputation.check_weights(unfit)
        lines = []
        for machine, verdict in worst.items():
            if machine in unfit and not self._is_news(machine, weights[machine]):
                continue
            event = NodeEvent(
                at=self._clock(),
                kind=MachineEventKind.CHECK_FAILED if machine in unfit else MachineEventKind.CHECK_PASSED,
                fault="check-failed" if machine in unfit else "",
                weight=weights.get(machine, 0.0),
                job_id=job.job_id,
                why=f"{verdict.why or 'all stages'} ({record.why})"[:WHY_CHARS_MAX],
            )
            lines.append((machine, event))
        self._write(lines)
        for machine, _ in lines:
            if weights.get(machine):
                self._ban(job, machine)

    def _is_news(self, machine: str, weight: float) -> bool:
        """Return whether a failed check is to be recorded: the first since one was passed, or the first that counts."""
        failed = reputation.add_up(self._history(machine), self._clock()).failed_check
        return failed is None or weight > failed.weight

    def _returned(self, job: JobState, machine: str) -> None:
        if reputation.has_to_return(self._history(machine)):
            self._note(machine, MachineEventKind.RETURNED, job, why="it joined a job after a fault")

    def _ban(self, job: JobState, machine: str) -> None:
        """Cordon a machine if its history demands it."""
        mark = reputation.ban(machine, self._history(machine), self._clock(), _by(job))
        if mark:
            self._cordon(job, mark)

    def _cordon(self, job: JobState, mark: CordonMark) -> None:
        platform = self._platform
        if platform is None:
            return
        limit = blame.cordon_limit(job)

        def work() -> None:
            marks = platform.unschedulable()
            there = marks.pop(mark.machine, None)
            if there and not reputation.may_replace(there, mark):
                return
            lately = [other for other in marks.values() if other.at > mark.at - DAY_S and other.is_of_job]
            if len(lately) >= limit:
                text = f"machine {mark.machine} is not cordoned: {limit} were within a day (--cordon-limit)"
                log.error("cordon-limit-reached", text)
                return
            platform.mark_unschedulable(mark)
            text = f"machine {mark.machine} is cordoned: {mark.why}; `holdfast nodes uncordon` lets it back"
            log.warning("machine-cordoned", text)
            self._note(mark.machine, MachineEventKind.CORDONED, job, why=mark.why)

        self._call(work, f"cordon machine {mark.machine}")

    def _clear(self, job: JobState, machine: str, fault: str, why: str) -> None:
        since = blame.seen_since(job, fault)
        for one in self._faults_since(job, machine, since):
            if one.fault == fault:
                self._note(machine, MachineEventKind.CLEARED, job, fault=fault, weight=one.weight, why=why)
        platform = self._platform
        if platform is None:
            return

        def work() -> None:
            mark = platform.unschedulable().get(machine)
            if mark and mark.by == _by(job) and mark.at >= since:  # any other is not ours, or for something else
                platform.mark_schedulable(machine)

        self._call(work, f"let machine {machine} back")

    def _call(self, work: Callable[[], None], what: str) -> None:
        """Ask something of the platform, in the background and in order."""
        before = list(self._calls)

        async def run() -> None:
            if before:
                await asyncio.wait(before)
            try:
                await self._changes.ask(work, PLATFORM_LIMIT_S)
            except UserCodeError as error:  # no job ends for it
                log.error("platform-failed", f"the platform could not {what}: {error}")

        task = asyncio.get_running_loop().create_task(run())
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    # --- the book

    def _note(self, machine: str, kind: MachineEventKind, job: JobState, **facts: Any) -> None:
        facts["why"] = facts["why"][:WHY_CHARS_MAX]
        self._write([(machine, NodeEvent(at=self._clock(), kind=kind, job_id=job.job_id, **facts))])

    def _write(self, lines: Collection[tuple[str, NodeEvent]]) -> None:
        if self._book is None:
            return
        try:
            self._book.note_all(lines)
        except HoldfastError as error:
            machines = listed([machine for machine, _ in lines])
            log.error("machine-history-not-written", f"the history of machine {machines} was not written: {error}")

    def _history(self, machine: str) -> list[NodeEvent]:
        try:
            return self._book.history(machine) if self._book else []
        except HoldfastError as error:
            log.error("machine-history-not-read", f"the history of machine {machine} cannot be read: {error}")
            return []

    def _reputation(self, machine: str) -> Reputation:
        return self._reputations({machine}, reputation.judge)[machine]

    def _reputations(self, machines: set[str], judge: Judge) -> dict[str, Reputation]:
        """Return what is known, by machine. Most are unknown, so a thousand nodes at once cost two queries."""
        try:
            marks = self._platform.unschedulable() if self._platform else {}
            known = {*marks, *(self._book.machines() if self._book else ())}
        except Exception as error:  # a platform's library may raise anything
            log.error("machine-lookup-failed", f"what machines are known for could not be looked up: {error}")
            return dict.fromkeys(machines, Reputation())
        now = self._clock()
        return {
            name: judge(self._history(name), now, marks.get(name)) if name in known else Reputation()
            for name in machines
        }


def _by(job: JobState) -> str:
    return f"{BY_JOB}{job.job_id}"


def _machine(hello: Hello) -> str:
    return hello.info.machine or hello.info.host
