"""Ranks that are slower than the others, and what to do about their node. Pure.

What is compared is a rank's own time in a step: from its beginning to its first collective, before which no rank waits
for anybody. (The rest of a step is as long for all: everybody waits for the slowest.) Each node reports the median over
its last steps every few seconds. A rank is slow in a report if it is beyond THRESHOLD robust deviations of the other
ranks, with a floor of 5 % of their median: by a fifth at least. Slow in WINDOW reports in a row, it is a straggler:
told once a view, and by `--straggler-action`

    report   no more than that
    shift    the others take a part of its share of the global batch, from the next step boundary on (batch_shares.py)
    swap     its node leaves at a step boundary, if one stands by that can take its place; so does the end of a slow
             link (health/peer_links.py) that joined last
"""

from __future__ import annotations

from collections.abc import Collection
from statistics import median

from holdfast.core import records as r
from holdfast.core.rung_plans import find_substitutes, standby
from holdfast.core.state import JobState, Present
from holdfast.core.state_coverage import WorkerKey

WINDOW = 3
THRESHOLD = 4.0
FLOOR = 0.05
FLOOR_S = 0.001
"""What a scheduler may cost any node."""
TO_SIGMA = 1.4826
FEW = 32
"""Of as many ranks, each is compared with all others; of more, with all, as they were a moment ago."""
NORM_EVERY_S = 5.0
ACTIONS = ("report", "shift", "swap")


def norm_of(own_s: Collection[float]) -> tuple[float, float]:
    """Return the median time and how much the ranks differ."""
    middle = median(own_s)
    return middle, max(TO_SIGMA * median(abs(one - middle) for one in own_s), FLOOR * middle, FLOOR_S)


def score(job: JobState, worker: WorkerKey) -> tuple[float, float]:
    """Return by how many deviations a rank is slower than the others, and their median. Among many ranks it makes no
    difference whether it is counted among the others."""
    if len(job.progress.step_times) > FEW:
        middle, sigma = job.progress.step_time_norm[1:]
    else:
        middle, sigma = norm_of(
            [own_s for other, own_s in job.progress.step_times.items() if other != worker]
            or [job.progress.step_times[worker]]
        )
    return (job.progress.step_times[worker] - middle) / sigma, middle


def note(job: JobState, record: r.StepTimesReportedRecord) -> None:
    """Record a node's report. Only evolve calls this."""
    workers = [(record.node_id, pace.local_rank) for pace in record.step_times]
    job.progress.step_times.update(
        (worker, pace.own_s) for worker, pace in zip(workers, record.step_times, strict=True)
    )
    if len(job.progress.step_times) > FEW and record.at >= job.progress.step_time_norm[0] + NORM_EVERY_S:
        job.progress.step_time_norm = (record.at, *norm_of(job.progress.step_times.values()))
    for worker in workers:
        if score(job, worker)[0] > THRESHOLD:
            job.progress.slow_reports[worker] = job.progress.slow_reports.get(worker, 0) + 1
        else:
            job.progress.slow_reports.pop(worker, None)


def conclude(job: JobState, now: float) -> r.StragglerFound | r.NodeDraining | None:
    """Return a straggler that is still to be reported, or whose node is to be swapped."""
    if slow := unreported(job):
        return _found(job, slow[0], now)
    return _swap(job, now) if job.settings.straggler_action == "swap" else None


def unreported(job: JobState) -> list[WorkerKey]:
    """Return the stragglers that no record has named yet."""
    return [
        worker
        for worker, count in job.progress.slow_reports.items()
        if count >= WINDOW and worker not in job.progress.stragglers
    ]


def _found(job: JobState, worker: WorkerKey, now: float) -> r.StragglerFound:
    node_id, local_rank = worker
    deviations, usual_s = score(job, worker)
    return r.StragglerFound(
        at=now,
        view=job.view.number if job.view else 0,
        node_id=node_id,
        rank=job.members[node_id].first_rank + local_rank,
        local_rank=local_rank,
        own_s=job.progress.step_times[worker],
        usual_s=usual_s,
        score=deviations,
    )


def _swap(job: JobState, now: float) -> r.NodeDraining | None:
    slow_ends = [max(link, key=lambda end: job.nodes[end].join_order) for link in job.progress.slow_links]
    slow = dict.fromkeys(node_id for node_id, _ in job.progress.stragglers)
    for node_id in [*slow, *slow_ends]:
        node, member = job.nodes.get(node_id), job.members.get(node_id)
        if node is None or member is None or not isinstance(node.standing, Present) or job.progress.first_committed < 0:
            continue
        if find_substitutes(job, standby(job), [member]):
            reason = "a rank on it is a straggler" if node_id in slow else "a link of it is slow"
            why = f"{reason}, and another node stands by"
            return r.NodeDraining(at=now, node_id=node_id, incarnation=node.incarnation, signal=0, why=why)
    return None
