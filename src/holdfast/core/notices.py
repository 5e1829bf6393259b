"""What the console of a job shows of the master's records: one line for each thing that a person wants to know while
the job runs. Everything else is in `holdfast events`, and on the console with -v.

    an incident        one line, when it is over: what happened, what was done, how long it took
    a planned change   the same; a node that joins, leaves or is added is no incident
    a finding          a slow rank, an odd number, a node that is evicted or cannot be reached, data that is left out

The start and the end of the job are shown by the agents, which know where the output is and how many steps were made.
"""

from __future__ import annotations

from holdfast.core import records as r
from holdfast.core.sentences import sentence
from holdfast.core.state import JobState
from holdfast.core.strategies import Strategy
from holdfast.core.wording import counted, duration

HOW = {
    Strategy.RETRY: "all processes stayed and the step was repeated",
    Strategy.RECOVER_IN_PLACE: "only what had failed was started again",
    Strategy.RECOVER: "a spare took over",
    Strategy.ELASTIC_TRAINING: "the others went on",
    Strategy.RESTART: "all workers were restarted",
    Strategy.WAIT: "all workers were restarted",
}
"""What was done, by the strategy that ended an incident."""
FINDINGS = (
    r.TrainingResumed,
    r.NodeCordoned,
    r.NodeCleared,
    r.NodeAdmitted,
    r.NodesAwaited,
    r.NodeSuspected,
    r.NodeReadmitted,
    r.StragglerFound,
    r.AnomalyFound,
    r.CountersReadRecord,
    r.ShardQuarantined,
    r.DataSkippedRecord,
    r.PeerLinksJudged,
    r.PeerLinkSlowedRecord,
    r.CheckConcluded,
)
"""Records that are shown as `holdfast events` shows them."""


def notice(job: JobState, record: r.Record) -> str:
    """Return the line for the console, in the state that the record led to; empty if it is not for the console."""
    match record:
        case r.IncidentClosed(kind="planned"):
            return change_line(job, record)
        case r.IncidentClosed():
            return incident_line(job, record)
        case r.PeerLinksJudged(links=()) | r.AnomalyFound(outcome="passed"):
            return ""
        case _:
            return sentence(record) if isinstance(record, FINDINGS) else ""


def incident_line(job: JobState, record: r.IncidentClosed) -> str:
    """Return an incident in one line."""
    after = f"training again after {duration(record.at - record.happened_at)}"
    if record.step >= 0:
        after += f", at step {record.step}"
    elif record.strategy is Strategy.RESTART and job.settings.restarts_max:
        after += f", {record.restarts_used} of {counted(job.settings.restarts_max, 'restart')} used"
    how = HOW.get(record.strategy, record.strategy.value)
    return f"incident {record.number}: {record.cause}; {how}; {after}"


def change_line(job: JobState, record: r.IncidentClosed) -> str:
    """Return a planned change in one line: what changed, and how many ranks there are now."""
    assert job.view is not None
    size = f"{counted(job.view.world_size, 'rank')} on {counted(len(job.view.members), 'node')}"
    return f"change {record.number}: {record.cause}; now {size}"
