"""Strategies of recovery: how an incident may be handled, the cheapest first.

    retry               new view, same processes, same step                           nothing is restarted
    recover-in-place    the dead processes start again on their node                  the others wait for them
    recover             spares take the dead ones' ranks, on their node or another    the others hardly notice
    elastic-training    fewer ranks own the same data; grows back later               nothing is restarted
    dump                the survivors write a checkpoint, then the job ends           the next start goes on from it
    exit                the job ends, with the cause

These need workers that speak to Holdfast (`hf.init`). Two more are for those that do not, or when no live copy of the
state is left: `restart` (all workers start again) and `wait` (too few nodes: workers stop until enough are back).
"""

from __future__ import annotations

from enum import StrEnum


class Strategy(StrEnum):
    """How an incident is handled."""

    RETRY = "retry"
    RECOVER_IN_PLACE = "recover-in-place"
    RECOVER = "recover"
    ELASTIC_TRAINING = "elastic-training"
    DUMP = "dump"
    EXIT = "exit"
    RESTART = "restart"
    WAIT = "wait"


LADDER = (
    Strategy.RETRY,
    Strategy.RECOVER_IN_PLACE,
    Strategy.RECOVER,
    Strategy.ELASTIC_TRAINING,
    Strategy.DUMP,
    Strategy.EXIT,
)
"""What `--recovery` may name, in the order in which the rungs are tried."""


class FailoverStrategy(StrEnum):
    """What a user's failover extension may answer."""

    NORMAL_FAILOVER = "normal"
    """The ladder decides."""
    NODE_FAILOVER = "node"
    """The node is to blame: replace it, do not start anything on it again."""
    GLOBAL_FAILOVER = "global"
    """Restart all workers, from the last checkpoint."""
    ABORTION_FAILOVER = "abortion"
    """End the job now."""


class Verdict(StrEnum):
    """What a user's error monitor may answer about a node on which a fault happened."""

    NORMAL = "normal"
    """The tables decide."""
    CORDON = "cordon"
    """The node is to blame: it leaves the job, and no job may use it until a person lets it back."""
    PARDON = "pardon"
    """The node is not to blame, whatever the tables say."""
