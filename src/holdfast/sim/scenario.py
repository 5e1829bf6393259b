"""What is simulated. A scenario and a seed determine a run completely."""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

from holdfast.core.settings import Settings
from holdfast.core.strategies import LADDER, Strategy
from holdfast.sim.fault_models import FaultModel, generate
from holdfast.sim.outages import DAY_S, Outage, Trace, lay_out
from holdfast.sim.phase_times import PhaseTimes

NODES_LEAST = 0.8
"""Of the machines with ranks, how many an elastic job goes on with."""
CHECKPOINT_EVERY_S = 1_800.0
NO_LIMIT = 1_000_000_000
PATIENCE_S = 1e9
"""Jobs wait for machines as long as it takes: the platform repairs or replaces them."""


class RecoveryPlan(StrEnum):
    """How a job answers faults."""

    RESTART = "restart"
    """All workers start again from the last checkpoint, on a fixed number of machines."""
    RESTART_ELASTIC = "restart-elastic"
    """The same, on as many machines as there are."""
    RECOVER_FIXED = "recover-fixed"
    """Workers are kept; spares take the lost ones' ranks; without one the survivors wait, with their state."""
    RECOVER = "recover"
    """Workers are kept; without a spare the others go on with fewer ranks."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet of machines, a job on it, and what befalls them."""

    nodes: int
    """All machines, spares included."""
    spares: int = 0
    """Those of them that stand by."""
    gpus_per_node: int = 8
    workers_per_node: int = 1
    """Workers as the core counts them. One stands for all devices of a machine: a fault of one device stops all of them
    in any case, and a view of fewer workers is made faster."""
    nodes_min: int = 0
    """How many machines the job can work with; 0: what the plan says."""
    plan: RecoveryPlan = RecoveryPlan.RECOVER
    days: float = 30.0
    shards: int = 1
    """Into how many parts the state is cut. 1: every machine has a copy of it."""
    replicas: int = 1
    """Copies of each part in other machines' memory, if the state is cut into as many parts as there are workers."""
    cordon_limit: int | None = None
    """None: the job's default."""
    checkpoint_every_s: float = CHECKPOINT_EVERY_S
    times: PhaseTimes = PhaseTimes()
    trace: Trace | None = None
    model: FaultModel | None = None

    @property
    def working_nodes(self) -> int:
        """Return how many machines have ranks when all is well."""
        return self.nodes - self.spares

    @property
    def span_s(self) -> float:
        return self.days * DAY_S

    @property
    def keeps_workers(self) -> bool:
        """Return whether the script speaks to Holdfast, so that its workers outlive faults."""
        return self.plan in (RecoveryPlan.RECOVER, RecoveryPlan.RECOVER_FIXED)

    @property
    def least_nodes(self) -> int:
        """Return the smallest number of machines that the job works with."""
        if self.plan in (RecoveryPlan.RESTART, RecoveryPlan.RECOVER_FIXED):
            return self.working_nodes
        return self.nodes_min or max(math.ceil(NODES_LEAST * self.working_nodes), 1)

    def settings(self) -> Settings:
        """Return the job's settings, as its owner would have given them."""
        ladder = tuple(s for s in LADDER if s is not Strategy.ELASTIC_TRAINING)
        settings = Settings(
            nodes_min=self.least_nodes,
            nodes_max=self.working_nodes,
            restarts_max=NO_LIMIT,
            spare_nodes=self.spares,
            replicas=self.replicas,
            recovery=ladder if self.plan is RecoveryPlan.RECOVER_FIXED else LADDER,
            join_timeout_s=PATIENCE_S,
            wait_for_nodes_s=PATIENCE_S,
        )
        if self.cordon_limit is None:
            return settings
        return msgspec.structs.replace(settings, cordon_limit=self.cordon_limit)

    def outages(self, seed: int) -> list[Outage]:
        """Return what befalls the machines."""
        if self.trace is not None:
            return lay_out(self.trace, self.nodes, self.span_s, seed)
        return generate(self.model, self.nodes, self.span_s, seed) if self.model else []
