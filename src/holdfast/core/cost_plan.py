"""What the protection of a model costs on devices, computed from stated bandwidths: memory, each step, each recovery.

Nothing here is measured. The rates are the user's to state; the defaults are round numbers, from data sheets or usual.
"""

from __future__ import annotations

import math

import msgspec

from holdfast.core.memory_plan import HostMemory, host_memory
from holdfast.core.snapshot_interval import advise


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What the hardware does, per device. Bytes a second, and seconds."""

    host_link: float = 50e9
    """Between a device and its host: PCIe 5."""
    host_copy: float = 8e9
    """Within the host's memory, by one thread."""
    gloo: float = 1.6e9
    """Between ranks, by gloo over TCP: how state is sent today."""
    commit_s: float = 0.005
    """The device running empty at the agreement, and the launch of the next kernels."""
    abort_s: float = 1.0
    """Until communicators are aborted and the device is at rest."""
    start_s: float = 2.0
    """A new process with its context on the device."""
    build_s: float = 5.0
    """What the script does before its first step."""
    connect_s: float = 2.0
    """Connecting the communicators of all groups, once."""
    connect_s_per_rank: float = 0.02
    """The same, for each rank of the job."""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model and how it is laid out."""

    state_bytes: float
    """Of parameters and optimizer, all of it."""
    ranks: int
    ranks_per_node: int
    shards: int
    """Into how many parts the state is cut: 1 for DDP, `ranks` for FSDP2 over all ranks, fewer for HSDP."""
    step_s: float

    @property
    def rank_bytes(self) -> int:
        """What each rank has."""
        return math.ceil(self.state_bytes / self.shards)

    @property
    def image_bytes(self) -> int:
        """What each rank writes into its snapshot: ranks that hold the same share the work."""
        return math.ceil(self.state_bytes / self.ranks)

    @property
    def has_twins(self) -> bool:
        """Return whether another rank has the same as any rank."""
        return self.ranks >= 2 * self.shards

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return math.ceil(self.ranks / self.ranks_per_node)


class CostPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, for one number of copies."""

    copies: int
    node_memory_bytes: int
    """Of the host, on each node."""
    rank_memory: HostMemory
    step_cost_s: float
    """What is added to each step."""
    snapshot_every: int
    """How many steps apart snapshots are."""
    recovery: tuple[tuple[str, float], ...]
    """The phases after a worker has died, and the seconds that each takes."""

    @property
    def recovery_s(self) -> float:
        """The sum of the phases."""
        return sum(seconds for _, seconds in self.recovery)


def plan(model: Model, rates: Rates, copies: int = 0) -> CostPlan:
    """Return what the protection costs, with this many copies of shards in other ranks' memory."""
    copies = 0 if model.has_twins else min(copies, model.ranks - 1)
    memory = host_memory(model.rank_bytes, model.image_bytes, copies=copies, is_on_device=True)
    busy_s = model.image_bytes / rates.host_link + model.image_bytes / rates.host_copy
    every = advise(model.step_s, 0.0, model.nodes, busy_s=busy_s).every
    ring_s = _ring_s(model, rates, copies)
    return CostPlan(
        copies=copies,
        node_memory_bytes=memory.total_bytes * min(model.ranks_per_node, model.ranks),
        rank_memory=memory,
        step_cost_s=rates.commit_s + ring_s,
        snapshot_every=every,
        recovery=tuple(_recovery(model, rates, copies, every, ring_s)),
    )


def _ring_s(model: Model, rates: Rates, copies: int) -> float:
    """Return the time of the copies before each commit: to the host, then to other ranks."""
    return model.rank_bytes / rates.host_link + copies * model.rank_bytes / rates.gloo if copies else 0.0


def _recovery(model: Model, rates: Rates, copies: int, every: int, ring_s: float) -> list[tuple[str, float]]:
    connect_s = rates.connect_s + rates.connect_s_per_rank * model.ranks
    begin = [("abort", rates.abort_s), ("new process", rates.start_s), ("build the model", rates.build_s)]
    if not model.has_twins and not copies:
        restore_s = model.image_bytes / min(rates.host_copy, rates.host_link)
        return [
            *begin,
            ("connect", connect_s),
            ("restore from the node's memory", restore_s),
            ("repeat steps, on average", (every / 2 + 0.5) * model.step_s),
        ]
    transfer_s = model.rank_bytes / rates.gloo + model.rank_bytes / min(rates.host_copy, rates.host_link)
    again = [("copy shards again", ring_s)] if copies else []
    end = [*again, ("first step", model.step_s)]
    return [*begin, ("connect", connect_s), ("state from another rank", transfer_s), *end]
