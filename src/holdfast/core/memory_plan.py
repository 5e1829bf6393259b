"""How much host memory the protection of a state takes, and what it costs each step and each recovery. Pure arithmetic.

Per rank, for a state of S bytes on this rank, of which I bytes are in its own image (all of it if the model is fully
sharded, a share of it where several ranks hold the same):

    ring          two copies of our own shard, to be sent (pinned, from a device), and two of each that we keep
    slots         two images in shared memory, which the agent owns
    staging       pinned memory through which a device's image passes; none on the CPU
    undo          a copy from before the update, for scripts that communicate after it; on the device if it fits there

torch's allocator of pinned memory rounds each allocation up to a power of two.
"""

from __future__ import annotations

import msgspec

SLOTS = 2
ARENAS = 2
"""Of a ring, for each copy: the one that counts, and the one that is being made."""


def pinned_bytes(size_bytes: int) -> int:
    """Return what a pinned allocation takes: the next power of two."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes > 0 else 0


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank takes of its node's memory."""

    ring_bytes: int = 0
    slots_bytes: int = 0
    staging_bytes: int = 0
    undo_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """The sum."""
        return self.ring_bytes + self.slots_bytes + self.staging_bytes + self.undo_bytes


def host_memory(
    state_bytes: int,
    image_bytes: int,
    *,
    copies: int,
    is_on_device: bool,
    has_snapshots: bool = True,
    keeps_undo_on_host: bool = False,
) -> HostMemory:
    """Return what one rank takes. `copies`: of its shard, in other ranks' memory."""
    arena_bytes = pinned_bytes(state_bytes) if is_on_device else state_bytes
    return HostMemory(
        ring_bytes=ARENAS * (arena_bytes + copies * state_bytes) if copies else 0,
        slots_bytes=SLOTS * image_bytes if has_snapshots else 0,
        staging_bytes=pinned_bytes(image_bytes) if is_on_device and has_snapshots else 0,
        undo_bytes=arena_bytes if keeps_undo_on_host and not copies else 0,
    )


def copies_by_default(
    asked: int, *, is_default: bool, is_on_device: bool, has_snapshots: bool, is_elastic: bool
) -> int:
    """Return how many copies of its shard a rank keeps in other ranks' memory.

    On the CPU, as many as the flag says. On a device a copy passes through the host's memory and the network before
    each commit, which can take several times as long as the step; so unless the flag was given there is none, and a
    lost shard comes from the newest snapshot in the agents' memory, which is made beside the training as often as it
    costs little. A function that is built again for another number of ranks (`hf.elastic`) needs the copies."""
    if is_default and is_on_device and has_snapshots and not is_elastic:
        return 0
    return asked


def shortage(memory: HostMemory, ranks: int, free_bytes: int, where: str) -> str:
    """Return why the ring of so many ranks of a node does not fit beside the rest; empty if it does."""
    needed_bytes = memory.total_bytes * ranks
    if needed_bytes <= free_bytes:
        return ""
    return (
        f"the protection of the state needs {gib(needed_bytes)} of this node's memory ({gib(memory.ring_bytes * ranks)}"
        f" for copies of shards, {gib(memory.slots_bytes * ranks)} for snapshots,"
        f" {gib((memory.staging_bytes + memory.undo_bytes) * ranks)} for copying), {gib(free_bytes)} are free {where}"
    )


def gib(size_bytes: float) -> str:
    """Return a size for people."""
    return f"{size_bytes / 2**30:.1f} GiB"
