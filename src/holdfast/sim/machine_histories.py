"""What is known of each machine, by the rules of master/machine_registry.py without its book and its platform.

A machine joins with the grade that `core.health.reputation` gives its history. After the core has made its records:

    a worker failed by the machine's fault   noted; taken back where several machines show the same at once
    a machine fell silent                    the same, counted half
    a machine that had failed joins          it is back
    the history asks for a ban               a mark that runs out, within the limit of marks a day
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core import blame
from holdfast.core import records as r
from holdfast.core.faults.fault_table import fault_of
from holdfast.core.faults.fault_types import Fault
from holdfast.core.health import reputation
from holdfast.core.health.reputation import BY_JOB, DAY_S, CordonMark, MachineEventKind, NodeEvent, Reputation
from holdfast.core.state import JobState

HISTORY_MAX = 200
"""Events of one machine that are kept, as in the book of a master."""
ONE_FAULT_S = 60.0


class MachineHistories:
    """The histories and marks of all machines. They outlive jobs."""

    def __init__(self) -> None:
        self._events: dict[str, list[NodeEvent]] = {}
        self._marks: dict[str, CordonMark] = {}

    def reputation(self, machine: str, now: float) -> Reputation:
        """Return what a machine that joins is known for."""
        events = self._events.get(machine)
        return reputation.judge_newcomer(events, now, self._marks.get(machine)) if events else Reputation()

    def learn(self, records: Iterable[r.Record], job: JobState, now: float) -> None:
        """Note what the records say of machines."""
        for record in records:
            match record:
                case r.WorkerFailedRecord(failure=failure) if failure.fault:
                    self._take_back(job, failure.fault.name)
                    if blame.is_evidence(job, failure) and reputation.weight_of(failure.fault) > 0:
                        self._fault(job, failure.node_id, failure.fault, now)
                case r.NodeLost(node_id=node_id, certain=False):
                    if not self._take_back(job, blame.LOSS):
                        self._fault(job, node_id, fault_of(blame.LOSS), now)
                case r.NodeJoined(info=info):
                    machine = info.machine or info.host
                    if reputation.has_to_return(self._events.get(machine, ())):
                        self._note(machine, NodeEvent(at=now, kind=MachineEventKind.RETURNED))
                case r.NodeCleared(machine=machine, fault=fault):
                    self._clear(job, machine, fault, now)
                case _:
                    pass

    def _fault(self, job: JobState, node_id: str, fault: Fault, now: float) -> None:
        """Note the heaviest of what befalls a machine at once."""
        machine, weight = blame.machine_of(job, node_id), reputation.weight_of(fault) or 1.0
        lately = [one for one in self._faults(machine) if one.at >= now - ONE_FAULT_S]
        if any(one.weight >= weight for one in lately):
            return
        for one in lately:
            self._note(machine, NodeEvent(at=now, kind=MachineEventKind.CLEARED, fault=one.fault, job_id=one.job_id))
        noted = NodeEvent(at=now, kind=MachineEventKind.FAULT, fault=fault.name, weight=weight, job_id=job.job_id)
        self._note(machine, noted)
        mark = reputation.ban(machine, self._events[machine], now, f"{BY_JOB}{job.job_id}")
        if mark and self._may_mark(job, now):
            self._marks[machine] = mark

    def _may_mark(self, job: JobState, now: float) -> bool:
        lately = sum(mark.at > now - DAY_S for mark in self._marks.values())
        return lately < blame.cordon_limit(job)

    def _take_back(self, job: JobState, fault: str) -> bool:
        """Take back what was noted of a fault if several machines show it; return whether they do."""
        if not blame.is_widespread(job, fault):
            return False
        since = blame.seen_since(job, fault)
        for machine in sorted(blame.machines_with(job, fault)):
            if any(one.fault == fault and one.at >= since for one in self._faults(machine)):
                self._clear(job, machine, fault, since)
        return True

    def _clear(self, job: JobState, machine: str, fault: str, now: float) -> None:
        since = blame.seen_since(job, fault)
        for one in [one for one in self._faults(machine) if one.fault == fault and one.at >= since]:
            self._note(machine, NodeEvent(at=now, kind=MachineEventKind.CLEARED, fault=fault, job_id=one.job_id))
        mark = self._marks.get(machine)
        if mark and mark.at >= since:
            del self._marks[machine]

    def _faults(self, machine: str) -> list[NodeEvent]:
        events = reputation.uncleared(self._events.get(machine, ()))
        return [one for one in events if one.kind is MachineEventKind.FAULT]

    def _note(self, machine: str, event: NodeEvent) -> None:
        events = self._events.setdefault(machine, [])
        events.append(event)
        del events[:-HISTORY_MAX]
