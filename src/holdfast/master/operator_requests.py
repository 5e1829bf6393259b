"""What operators ask of a master, and what they are told. Pure: whether a request can be met is read from the job as
it was before, what became of it from the job as it is afterwards.

    drain a node       unknown or gone: refused; on its way out already: fine, nothing changes
    resize to N nodes  less than the least of --nnodes, or the workers cannot: refused
    anything           another job is meant, or this one is over: refused
"""

from __future__ import annotations

from holdfast.core.events import DrainRequested, ResizeRequested
from holdfast.core.state import Draining, Finished, JobState, Lost
from holdfast.core.strategies import Strategy
from holdfast.core.wording import counted
from holdfast.wire.control_messages import OperatorRequest

NODES_SHOWN_MAX = 10
NODES_MAX = 100_000


def objection(job: JobState, ask: OperatorRequest) -> str:
    """Return why the request cannot be met; empty if it can."""
    if why := other_job_or_over(job, ask.job_id):
        return why
    match ask.request:
        case DrainRequested(node_id=node_id):
            return _cannot_drain(job, node_id)
        case ResizeRequested(nodes=nodes):
            return _cannot_resize(job, nodes)


def other_job_or_over(job: JobState, wanted: str) -> str:
    """Return why nothing can be asked of this master: it has another job than the wanted one, or the job is over."""
    if wanted and _directory_name(job.job_id) != _directory_name(wanted):
        return f"this master runs job {job.job_id}, not {wanted}"
    if isinstance(job.phase, Finished):
        return f"job {job.job_id} is over, it has {job.phase.record.outcome.value}: {job.phase.record.why}"
    return ""


def _cannot_drain(job: JobState, node_id: str) -> str:
    node = job.nodes.get(node_id)
    if node is not None and node.alive:
        return ""
    alive = [other.node_id for other in job.nodes.values() if other.alive]
    more = f" and {len(alive) - NODES_SHOWN_MAX} more" if len(alive) > NODES_SHOWN_MAX else ""
    known = f"its nodes are {', '.join(alive[:NODES_SHOWN_MAX])}{more}" if alive else "it has no nodes now"
    if node is None:
        return f"job {job.job_id} has no node {node_id}: {known}"
    fate = f"was lost ({node.standing.why})" if isinstance(node.standing, Lost) else "has left"
    return f"node {node_id} {fate}: {known}"


def _cannot_resize(job: JobState, nodes: int) -> str:
    least = job.settings.nodes_min
    if not least <= nodes <= NODES_MAX:
        return f"job {job.job_id} has {least} to {NODES_MAX} nodes, by the least of its --nnodes: not {nodes}"
    if job.state.session is not None and not job.state.session.resizable:
        why = f": {job.state.session.why_fixed}" if job.state.session.why_fixed else ""
        return f"the workers of job {job.job_id} cannot go on in a world of another size{why}"
    if job.state.session is not None and Strategy.ELASTIC_TRAINING not in job.settings.recovery:
        return f"the --recovery of job {job.job_id} leaves out elastic-training, which changes the number of ranks"
    return ""


def outcome(job: JobState, ask: OperatorRequest) -> tuple[bool, str]:
    """Return whether a request to which there was no objection is met, and a sentence about it."""
    match ask.request:
        case DrainRequested(node_id=node_id):
            return _drained(job, node_id)
        case ResizeRequested(nodes=nodes):
            return _resized(job, nodes)


def _drained(job: JobState, node_id: str) -> tuple[bool, str]:
    node = job.nodes[node_id]
    if node.alive and not isinstance(node.standing, Draining):
        return False, f"node {node_id} stays: the job cannot do without it now"
    staying = len(job.able)
    return True, f"node {node_id} leaves the job{_shortage(job, staying)}"


def _resized(job: JobState, nodes: int) -> tuple[bool, str]:
    staying = len(job.able)
    return True, f"job {job.job_id} is to have {counted(nodes, 'node')}, {staying} are here"


def _shortage(job: JobState, staying: int) -> str:
    if staying >= job.settings.nodes_min:
        return ""
    return f"; with {staying} of at least {counted(job.settings.nodes_min, 'node')} left it waits for others"


def _directory_name(job_id: str) -> str:
    """An id as the name of its directory shows it: either is meant."""
    return job_id.replace("/", "_")
