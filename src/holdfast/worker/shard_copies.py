"""What copies of shards in other ranks' memory ask of a node, before they are made."""

from __future__ import annotations

import os

from holdfast.core.memory_plan import gib, host_memory, shortage
from holdfast.errors import ScriptError
from holdfast.state.state_size import expected_bytes
from holdfast.state.tracked import Tracked
from holdfast.util.cgroups import memory_headroom
from holdfast.util.logs import get_logger

log = get_logger(__name__)


def say_not_copied(tracked: Tracked) -> None:
    """Tell what the loss of a rank costs where shards on a device are not copied."""
    log.info(
        "shards-not-copied",
        f"shards of {gib(expected_bytes(tracked))} are on a device: they are not copied to other ranks before each"
        " commit (--replicas 1 does that; `holdfast plan` says what it costs). If a rank is lost, all ranks go back to"
        " the newest snapshot in the agents' memory and repeat the steps since",
    )


def check_memory(tracked: Tracked, copies: int, is_alone: bool, is_on_device: bool, has_snapshots: bool) -> None:
    """Refuse copies of shards that the node has no memory for: the kernel would kill a process for them. `is_alone`:
    other ranks train already."""
    size_bytes = expected_bytes(tracked)
    memory = host_memory(size_bytes, size_bytes, copies=copies, is_on_device=is_on_device, has_snapshots=has_snapshots)
    free = memory_headroom()
    # Those that start together have allocated nothing yet; a newcomer's neighbours have, and are in what is free.
    ranks = 1 if is_alone else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if why := shortage(memory, ranks, free.free_bytes, free.where):
        raise ScriptError(f"{why}: use --replicas 0, with which a lost shard comes from snapshots, or more nodes")
