"""What of the tracked objects hands out data: loaders, samplers and streams, found by what they can do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from holdfast.core.leases import NEWS_MAX
from holdfast.state.tracked import Tracked
from holdfast.wire.session import Shards


def loaders(tracked: Tracked) -> list[Any]:
    """Those whose share depends on the rank, and whose position counts committed steps: hf.Loader."""
    return [thing for thing in tracked.others().values() if hasattr(thing, "set_place")]


def witnessed(tracked: Tracked) -> dict[str, Any]:
    """Those that say what they hand out."""
    return {name: thing for name, thing in tracked.others().items() if hasattr(thing, "watcher")}


def positions(tracked: Tracked) -> dict[str, str]:
    """Where in the data we are, for a person."""
    return {name: json.dumps(thing.state_dict(), default=str) for name, thing in witnessed(tracked).items()}


def shard_news(tracked: Tracked, view: int, step: int) -> Iterator[Shards]:
    """What the commit of a step has granted, and which shards could not be read."""
    for name, stream in tracked.others().items():
        leases, troubles = stream.take_news() if hasattr(stream, "take_news") else ([], [])
        for at in range(0, max(len(leases), len(troubles)), NEWS_MAX):
            part = slice(at, at + NEWS_MAX)
            yield Shards(
                view=view, stream=name, step=step, leases=tuple(leases[part]), troubles=tuple(troubles[part])
            )
