"""What a job's owner may choose, with the reason for each default. Seconds and counts."""

from __future__ import annotations

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Fixed for the life of a job and kept in its journal."""

    nodes_min: int = 1
    nodes_max: int = 1
    restarts_max: int = 0
    """Restarts after failures of workers. As with torchrun, changes of membership do not count."""

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

    collect_window_s: float = 0.5
    """When all that is known are the collateral errors of other ranks, how long to wait for the cause."""
