"""What operators ask of a master, and what they are told. Pure: whether a request can be met is read from the job as
it was before, what became of it from the job as it is afterwards.

    drain a node       unknown or gone: refused; on its way out already: fine, nothing changes
    resize to N nodes  less than the least of --nnodes, or the workers cannot: refused
    anything           another job is meant, or this one is over: refused
"""

from __future__ import annotations

from holdfast.core.events import DrainAsked, ResizeAsked
from holdfast.core.ladder import Strategy
from holdfast.core.state import Draining, Finished, Job, Lost
from holdfast.wire.messages import Ask

NODES_SHOWN_MAX = 10
NODES_MAX = 100_000


def objection(job: Job, ask: Ask) -> str:
    """Why the request cannot be met; empty if it can."""
    if ask.job_id and _directory_name(job.job_id) != _directory_name(ask.job_id):
        return f"this master runs job {job.job_id}, not {ask.job_id}"
    if isinstance(job.phase, Finished):
        return f"job {job.job_id} is over, it has {job.phase.record.outcome.value}: {job.phase.record.why}"
    match ask.request:
        case DrainAsked(node_id=node_id):
            return _cannot_drain(job, node_id)
        case ResizeAsked(nodes=nodes):
            return _cannot_resize(job, nodes)


def _cannot_drain(job: Job, node_id: str) -> str:
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


def _cannot_resize(job: Job, nodes: int) -> str:
    least = job.settings.nodes_min
    if not least <= nodes <= NODES_MAX:
        return f"job {job.job_id} has {least} to {NODES_MAX} nodes, by the least of its --nnodes: not {nodes}"
    if job.session is not None and not job.session.resizable:
        return f"the workers of job {job.job_id} cannot go on in a world of another size"
    if job.session is not None and Strategy.ELASTIC_TRAINING not in job.settings.recovery:
        return f"the --recovery of job {job.job_id} leaves out elastic-training, which changes the number of ranks"
    return ""


def outcome(job: Job, ask: Ask) -> tuple[bool, str]:
    """What became of a request to which there was no objection: whether it is met, and in words."""
    match ask.request:
        case DrainAsked(node_id=node_id):
            return _drained(job, node_id)
        case ResizeAsked(nodes=nodes):
            return _resized(job, nodes)


def _drained(job: Job, node_id: str) -> tuple[bool, str]:
    node = job.nodes[node_id]
    if node.alive and not isinstance(node.standing, Draining):
        return False, f"node {node_id} stays: the job cannot do without it now"
    staying = len(job.able)
    return True, f"node {node_id} leaves the job{_shortage(job, staying)}"


def _resized(job: Job, nodes: int) -> tuple[bool, str]:
    staying = len(job.able)
    return True, f"job {job.job_id} is to have {nodes} nodes, {staying} are here"


def _shortage(job: Job, staying: int) -> str:
    if staying >= job.settings.nodes_min:
        return ""
    return f"; with {staying} of at least {job.settings.nodes_min} nodes left it waits for others"


def _directory_name(job_id: str) -> str:
    """An id as the name of its directory shows it: either is meant."""
    return job_id.replace("/", "_")
