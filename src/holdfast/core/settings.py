"""What a job's owner may choose, with the reason for each default. Seconds and counts."""

from __future__ import annotations

import msgspec

from holdfast.core.ladder import LADDER, Strategy


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Fixed for the life of a job, but for `nodes_max` (JobResized), and kept in its journal."""

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

    park_timeout_s: float = 30.0
    """How long a node that is to be taken in may take to park its workers. Until then the others train on without it;
    after it, it is taken in as it is, and they wait for it at the step boundary."""

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
    """How often an agent says that it lives. 1,000 agents at this rate cost the master a sixth of a core."""

    silence_timeout_s: float = 5.0
    """A node unheard for this long is lost. Five missed heartbeats: long for a stalled scheduler, short for a
    person. A node whose process dies is noticed at once, by its broken connection."""

    reconnect_grace_s: float = 0.3
    """How long a broken connection may take to come back. An agent that lives reconnects in tens of
    milliseconds; a dead one must not hold the job up for longer than a blink."""

    guard_window_s: float = 30.0
    """How long an id stays reserved for a life that fell silent and may still be alive behind a partition."""

    stall_window_s: float = 10.0
    """Reports of nodes on which nothing moves belong to one stall if they came within this time. An older one is of a
    stall that has dissolved."""

    collect_window_s: float = 0.5
    """When all that is known are the collateral errors of other ranks, how long to wait for the cause."""

    same_fault_window_s: float = 30.0
    """The same fault on several machines within this time is not their hardware's."""

    cordon_limit: int = 3
    """Nodes that may be sent away within a day because a fault is blamed on them. More than a few a day of any cluster
    is no longer about nodes; at 4 faults a day of 1,000 nodes it is not reached by hardware."""

    straggler_action: str = "report"
    """What to do about a rank that is slower than the others: `report`, `shift` a part of its share of the global batch
    to the others, or `swap` its node for one that stands by."""
