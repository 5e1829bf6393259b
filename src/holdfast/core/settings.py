"""What a job's owner may choose, with the reason for each default. Seconds and counts."""

from __future__ import annotations

import msgspec

from holdfast.core.strategies import LADDER, Strategy

HEARTBEATS_PER_S_MAX = 1_000
"""Of all agents together: they cost the master a sixth of a core. Where there are more nodes, each sends fewer."""
HEARTBEAT_INTERVAL_MAX_S = 10.0
"""A machine that is gone is noticed by TCP itself after 20 s (wire/frame_stream.py): silence must be noticed before."""
RECONNECTS_AT_ONCE = 16
RECONNECT_S = 0.01
"""How long a master may take for one agent that connects again: a millisecond, or ten under heavy load. What agents
beyond RECONNECTS_AT_ONCE may need is added to every broken link's time to come back."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Fixed for a job, except `nodes_max` (JobResized), and stored in its journal."""

    nodes_min: int = 1
    nodes_max: int = 1
    restarts_max: int = 0
    """Restarts after failures of workers. As with torchrun, changes of membership do not count."""

    recovery: tuple[Strategy, ...] = LADDER
    """The rungs that may be used, in the ladder's order."""

    spares: int = 0
    """Parked workers that each node keeps beside those that have ranks."""

    spare_nodes: int = 0
    """Nodes beyond the maximum that may join, with all their workers parked, to take a lost node's place."""

    replicas: int = 1
    """Copies of each shard in other ranks' memory, where the state is sharded and has no copy by itself; and on how
    many other nodes the agents keep a node's snapshots."""

    replica_parity: int = 0
    """Snapshots are kept as parity in groups of so many nodes, instead of as copies: any one node's follow from the
    others', for 1/(K-1) of the memory. 0: as copies, which outlive more and are quicker to have."""

    rung_tries_max: int = 3
    """How often one rung may be tried in one incident. A fault during a recovery is no reason to give the rung up; the
    same failure of the same worker is, at once."""

    wait_for_nodes_s: float = 0.0
    """How long survivors hold their state and wait for a replacement when too few nodes are left, before they dump it:
    worth it where a platform starts nodes again. 0: they do not, as idle nodes cost money and not all platforms do."""

    park_timeout_s: float = 30.0
    """How long it takes to start the workers of a node that cannot park them: so long all others would wait for it at
    the step boundary. They train on without it until it has waited for as long as that costs all of them together."""

    node_check: bool = False
    """Whether nodes are checked before they take part: at the start, when one joins or comes back, while it stands by,
    and after a fault that may be its own."""

    exclude_straggler: bool = False
    """Whether slow nodes are left out, as long as the minimum holds without them."""

    check_only: bool = False
    """Whether the job is over once its nodes are checked."""

    spare_check_interval_s: float = 3_600.0
    """How often a node that stands by is checked again; 0: never. A spare that is broken when it is needed is none, and
    a check costs it seconds."""

    settle_s: float = 0.5
    """How long to wait for further nodes once the minimum is there. Nodes of one job start within tens of
    milliseconds of each other; half a second gathers them without being felt."""

    join_timeout_s: float = 600.0
    """How long to wait for the minimum. torchrun's default."""

    heartbeat_interval_s: float = 1.0
    """How often an agent sends a heartbeat. 1,000 agents at this rate cost the master a sixth of a core."""

    silence_timeout_s: float = 5.0
    """A node unheard for this long is lost. Five missed heartbeats: long for a stalled scheduler, short for a
    person. A node whose process dies is noticed at once, by its broken connection."""

    reconnect_grace_s: float = 0.3
    """How long a broken connection may take to come back. A live agent reconnects in tens of
    milliseconds; a dead one must not hold the job up for longer than a blink."""

    farewell_timeout_s: float = 60.0
    """How long the master of a finished job stays for nodes that were lost and may come back, to tell them how it
    ended. Long enough for a cable that is put back or a machine that wakes up; a node lost for good costs this wait."""

    checkpoints_apart: bool = False
    """Whether each machine has a checkpoint directory of its own, because none was named: then only what one machine's
    workers hold can be dumped."""

    guard_window_s: float = 30.0
    """How long an id stays reserved for an incarnation that fell silent and may still be alive behind a partition."""

    joining_stall_s: float = 60.0
    """How long all workers may wait for one another on their way into a view before it is tried again: newcomers may be
    sent much state."""

    collect_window_s: float = 0.5
    """When all that is known are the collateral errors of other ranks, how long to wait for the cause."""

    same_fault_window_s: float = 30.0
    """The same fault on several machines within this time is not their hardware's."""

    cordon_limit: int = 3
    """Nodes that may be sent away within a day because a fault is blamed on them, in a small job. More than a few a day
    are no longer about nodes."""

    cordon_share: float = 0.01
    """As many more as this share of the view's nodes has: at 4 faults a day of 1,000 nodes, of which a quarter is the
    machines', hardware does not reach it."""

    straggler_action: str = "report"
    """What to do about a rank that is slower than the others: `report`, `shift` a part of its share of the global batch
    to the others, or `swap` its node for one that stands by."""


def heartbeat_interval(settings: Settings, nodes: int) -> float:
    """Return how often each of so many agents is to send a heartbeat, in seconds."""
    return max(settings.heartbeat_interval_s, min(nodes / HEARTBEATS_PER_S_MAX, HEARTBEAT_INTERVAL_MAX_S))


def silence_timeout(settings: Settings, heartbeat_interval_s: float) -> float:
    """Return how long an agent that sends heartbeats so often may be unheard, in seconds."""
    return settings.silence_timeout_s + heartbeat_interval_s - settings.heartbeat_interval_s


def reconnect_allowance(broken_links: int) -> float:
    """Return how much longer a broken link may take to come back as others are broken too, in seconds."""
    return RECONNECT_S * max(broken_links - RECONNECTS_AT_ONCE, 0)
