"""Links between nodes of the view: who asks about them, and what follows from a broken or slow one. Pure.

A link between two nodes may be broken while both reach the master. Then every rank waits, none is at fault, and the
one that has made the least progress is healthy. So where nothing else explains what is wrong, the members are asked
whom they cannot reach before a worker is replaced: when nothing moves, and when collectives break again after a retry.
Also, long before that counts as a stall, when all of them wait for one another on their way into a view.
Not where it is proved who hangs (`WorkerProgress.asleep`). An agent probes a few neighbours (agent/link_watch.py): all
others in a small job, otherwise those next to it and two, four and eight places away in the order of group ranks.

    every link works    the cause is looked for elsewhere
    links are broken    one end of each is left out, as long as the minimum of nodes is there without it: that with the
                        most broken links, then that without which the others still have the whole state, then that
                        which joined last. It stands by until it reaches the others again; each time this happens it
                        has to wait twice as long
                        no end can be spared: the step is retried, and the broken link is named as the cause
    a link is slow      named once a view. What the straggler policy says is done: `swap` drains one end, if another
                        node stands by
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.faults.failures import is_collateral
from holdfast.core.state import CutOff, Fit, Health, JobState, LinkProbe, Node, Present, Serving, Unchecked
from holdfast.core.state_coverage import missing_shards
from holdfast.core.strategies import Strategy
from holdfast.core.views import Member
from holdfast.core.wording import counted

TIMEOUT_S = 6.0
"""For the answers; an agent gives up earlier."""
ALL_MAX = 9
"""Up to as many members, each probes all others."""
DISTANCES = (1, 2, 4, 8, -1, -2, -4, -8)
"""Between group ranks. Shorter than ALL_MAX, so that none leads a node of a larger job to itself."""
RESTORED_AFTER_S = 60.0
RESTORED_AFTER_MAX_S = 3600.0


def neighbours(job: JobState, node: Node) -> list[Member]:
    """Return the members of the view whose links a node probes: others than itself, on a port of theirs."""
    return [member for member in near(job, node) if _has_port(job, member)]


def _has_port(job: JobState, member: Member) -> bool:
    node = job.nodes.get(member.node_id)
    return node is not None and node.info.bulk_port > 0


def near(job: JobState, node: Node) -> list[Member]:
    """Return the members of the view that are a node's neighbours if they have a port."""
    if job.view is None or not isinstance(job.phase, Serving):
        return []
    members = job.view.members
    own = job.members.get(node.node_id)
    if len(members) <= ALL_MAX or own is None:
        return [member for member in members[: ALL_MAX + 1] if member.node_id != node.node_id]
    return [members[rank] for rank in sorted({(own.group_rank + distance) % len(members) for distance in DISTANCES})]


def is_asked(job: JobState, node: Node) -> bool:
    """Return whether the node has to report whom it cannot reach."""
    probe = job.progress.link_probe
    is_open = probe is not None and not probe.is_judged and node.node_id in job.members
    return is_open or isinstance(node.health, CutOff)


# --- events


def decide(job: JobState, event: e.PeerLinksProbed | e.PeerLinkSlowed, now: float) -> list[r.Record]:
    """Return the records of an answer, or of a slow link."""
    node = job.live(event.node_id, event.incarnation)
    if node is None or job.view is None:
        return []
    match event:
        case e.PeerLinksProbed(unreachable=unreachable):
            return _probed(job, node, tuple(n for n in unreachable if n in job.members), event.view, now)
        case e.PeerLinkSlowed(peer=peer, view=view, taken_s=taken_s, usual_s=usual_s):
            is_known = {node.node_id, peer} <= set(job.members) and view == job.view.number
            if not is_known or frozenset((node.node_id, peer)) in job.progress.slow_links:
                return []
            return [
                r.PeerLinkSlowedRecord(
                    at=now, view=view, node_id=node.node_id, peer=peer, taken_s=taken_s, usual_s=usual_s
                )
            ]


def _probed(job: JobState, node: Node, unreachable: tuple[str, ...], view: int, now: float) -> list[r.Record]:
    if isinstance(node.health, CutOff) and node.node_id not in job.members:
        is_due = now >= node.health.at + _pause_s(node)
        restored = r.PeerLinksRestored(at=now, node_id=node.node_id, incarnation=node.incarnation)
        return [restored] if is_due and not unreachable and neighbours(job, node) else []
    probe = job.progress.link_probe
    if probe is None or probe.is_judged or node.node_id not in job.members or node.node_id in probe.unreachable:
        return []
    assert job.view is not None
    if view != job.view.number:
        return []
    return [r.PeerLinksProbedRecord(at=now, node_id=node.node_id, view=view, unreachable=unreachable)]


def _pause_s(node: Node) -> float:
    return float(min(RESTORED_AFTER_S * 2 ** (node.cut_offs - 1), RESTORED_AFTER_MAX_S))


# --- what follows


def conclude(job: JobState, now: float) -> r.LinkProbeBegan | r.PeerLinksJudged | None:
    """Return the start of a probe, or what came of it. For a view whose picture is complete otherwise."""
    assert job.view is not None
    probe = job.progress.link_probe
    if probe is None:
        if not is_due(job):
            return None
        return r.LinkProbeBegan(at=now, view=job.view.number, deadline=now + TIMEOUT_S)
    if probe.is_judged or is_pending(job, now):
        return None
    broken = tuple(_broken(probe))
    left_out, why_kept = _left_out(job, broken)
    return r.PeerLinksJudged(at=now, view=job.view.number, links=broken, left_out=left_out, why_kept=why_kept)


def is_due(job: JobState) -> bool:
    """Return whether the members are to be asked: something is wrong that a broken link would explain."""
    assert job.view is not None
    incident, progress = job.incidents.current, job.progress
    if incident is None and not job.joins_slowly:
        return False
    if any(not is_collateral(failure) for failure in progress.failed.values()):
        return False
    if any(not step_error.collateral for step_error in progress.interrupted.values()):
        return False
    if not all(_is_present(job, job.members[node_id]) for node_id in job.sets.off):
        return False
    if any(vector.asleep for stuck in job.stall.values() for vector in stuck.worker_progress):
        return False  # it is proved who hangs
    is_retried = incident is not None and incident.tries.get(Strategy.RETRY, 0) > 0
    is_stuck = bool(job.stall) or job.joins_slowly
    is_explained = is_stuck or bool(progress.failed) or (bool(progress.interrupted) and is_retried)
    return is_explained and len([*islice((m for m in job.view.members if _has_port(job, m)), 2)]) == 2


def is_pending(job: JobState, now: float) -> bool:
    """Return whether answers are still awaited."""
    probe = job.progress.link_probe
    if probe is None or probe.is_judged:
        return False
    return now < probe.deadline and any(node_id not in probe.unreachable for node_id in job.members)


def next_deadline(job: JobState) -> float | None:
    """Return when the last answer must be there; None if none is awaited."""
    probe = job.progress.link_probe
    return None if probe is None or probe.is_judged else probe.deadline


def describe_broken(job: JobState) -> str:
    """Return which links of the view are broken; empty if none is known to be."""
    probe = job.progress.link_probe
    return broken_sentence(probe.broken) if probe else ""


def broken_sentence(broken: tuple[tuple[str, str], ...]) -> str:
    """Return broken links as a sentence; empty if there are none."""
    if not broken:
        return ""
    names = ", ".join(f"{first} – {second}" for first, second in broken[:3])
    more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
    return f"the link{'s' * (len(broken) > 1)} {names}{more} {'is' if len(broken) == 1 else 'are'} broken"


def _is_present(job: JobState, member: Member) -> bool:
    node = job.live(member.node_id, member.incarnation)
    return node is not None and isinstance(node.standing, Present)


def _broken(probe: LinkProbe) -> Iterator[tuple[str, str]]:
    pairs = {frozenset((node_id, peer)) for node_id, peers in probe.unreachable.items() for peer in peers}
    yield from sorted((min(pair), max(pair)) for pair in pairs if len(pair) == 2)


def _left_out(job: JobState, broken: tuple[tuple[str, str], ...]) -> tuple[tuple[str, ...], str]:
    """Return one end of each broken link, and why not if they cannot be spared."""
    left, out = list(broken), list[str]()
    while left:
        ends = sorted({end for pair in left for end in pair})
        worst = max(ends, key=lambda end: (_count(left, end), _is_spared(job, [*out, end]), job.nodes[end].join_order))
        out.append(worst)
        left = [pair for pair in left if worst not in pair]
    remaining = sum(node.node_id not in out for node in job.able)
    if out and remaining < job.settings.nodes_min:
        return (), f"{remaining} of at least {counted(job.settings.nodes_min, 'node')} would remain"
    return tuple(out), ""


def _count(links: list[tuple[str, str]], end: str) -> int:
    return sum(end in pair for pair in links)


def _is_spared(job: JobState, out: list[str]) -> bool:
    """Return whether the others still have the whole state."""
    held = [
        holder
        for node_id, holders in job.progress.holders.items()
        if node_id not in out
        for local_rank, holder in enumerate(holders)
        if holder and (node_id, local_rank) not in job.progress.failed
    ]
    return not missing_shards(held)


# --- evolve

LinkRecord = (
    r.LinkProbeBegan | r.PeerLinksProbedRecord | r.PeerLinksJudged | r.PeerLinksRestored | r.PeerLinkSlowedRecord
)


def evolve(job: JobState, record: LinkRecord) -> None:
    """Apply a record about links between nodes. Only core/evolve.py calls this."""
    match record:
        case r.LinkProbeBegan(deadline=deadline):
            job.progress.link_probe = LinkProbe(deadline)
        case r.PeerLinksProbedRecord(node_id=node_id, unreachable=unreachable):
            assert job.progress.link_probe is not None, "an answer to no question"
            job.progress.link_probe.unreachable[node_id] = unreachable
        case r.PeerLinksJudged(at=at, links=links, left_out=left_out, why_kept=why_kept):
            job.progress.link_probe = LinkProbe(at, is_judged=True, broken=links, why_kept=why_kept)
            for node_id in left_out:
                job.nodes[node_id].cut_offs += 1
                job.nodes[node_id].health = CutOff(at=at, why=broken_sentence(_of(links, node_id)))
        case r.PeerLinksRestored(at=at, node_id=node_id):
            job.nodes[node_id].health = _restored(job, at)
        case r.PeerLinkSlowedRecord(node_id=node_id, peer=peer):
            job.progress.slow_links.add(frozenset((node_id, peer)))


def _of(links: tuple[tuple[str, str], ...], node_id: str) -> tuple[tuple[str, str], ...]:
    return tuple(pair for pair in links if node_id in pair)


def _restored(job: JobState, at: float) -> Health:
    return Fit(at=at) if job.settings.node_check else Unchecked()
