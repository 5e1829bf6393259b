"""Which nodes are to be examined after a fault, by what kind of fault it was. Pure.

A node is a suspect when one of its workers ended by a fault that is blamed on the node, or whose kind says that a
broken machine may be behind it (`FaultType.examine`). It is not when the script is to blame, when somebody killed the
process, when the failure is an echo of another's, or when the user's error monitor pardons it. A node that is sent away
for the fault (blame.py) needs no examination: it is gone, and its next life is examined as every newcomer is.

A suspect is *awaited* (checkup.py) from the moment its view is in trouble. Who trains is not disturbed for it:

    all workers start anew                      it is examined before they do
    they are kept, and another node stands by   that one takes its place (plans.recover_from_suspects); it is examined
                                                meanwhile, and stands by if it passes
    they are kept, and none does                it works on (`Job.is_suspect`), and is examined when all start anew or
                                                it has no place any more; in either case before it has one again
"""

from __future__ import annotations

from holdfast.core import records as r
from holdfast.core.fault_types import Blame
from holdfast.core.faults import Failure, describe, is_collateral
from holdfast.core.ladder import Verdict
from holdfast.core.state import Awaited, Fit, Job, Slow


def suspect(job: Job, now: float) -> r.NodeSuspected | None:
    """A node of the view that is to be examined, and is not yet known to be."""
    if not job.settings.node_check:
        return None
    for failure in job.failed.values():
        node = job.nodes.get(failure.node_id)
        if node and node.is_here and isinstance(node.health, Fit | Slow) and is_suspicious(failure):
            return r.NodeSuspected(
                at=now, node_id=node.node_id, incarnation=node.incarnation, why=f"after a fault: {describe(failure)}"
            )
    return None


def is_suspicious(failure: Failure) -> bool:
    """Whether the failure is a reason to examine its node."""
    if failure.fault is None or failure.verdict is Verdict.PARDON or is_collateral(failure):
        return False
    return failure.fault.blame is Blame.NODE or failure.fault.examine


def members_awaited(job: Job) -> list[str]:
    """Nodes of the view in force that are suspected, and here."""
    here = [job.nodes[node_id] for node_id in job.members if node_id in job.nodes]
    return [node.node_id for node in here if node.is_here and isinstance(node.health, Awaited)]
