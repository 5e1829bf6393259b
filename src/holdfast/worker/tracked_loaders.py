"""What of the tracked objects hands out data: loaders, samplers and streams, found by what they can do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from holdfast.core.shard_leases import REPORTS_MAX
from holdfast.data.cursor import RankAssignment
from holdfast.data.data_coordinates import DataCoordinates
from holdfast.errors import ScriptError, UsageError
from holdfast.state.tracked import Tracked
from holdfast.wire.worker_messages import StreamReportedMessage
from holdfast.worker import elastic


def loaders(tracked: Tracked) -> list[Any]:
    """Return the loaders whose share depends on the rank, and whose position counts committed steps: hf.Loader."""
    return [thing for thing in tracked.others().values() if hasattr(thing, "set_assignment")]


def audited(tracked: Tracked) -> dict[str, Any]:
    """Return the loaders that say which samples they hand out."""
    return {name: thing for name, thing in tracked.others().items() if hasattr(thing, "watcher")}


def common_coordinates(tracked: Tracked) -> DataCoordinates | None:
    """Return the data coordinates of all tracked loaders; None if each rank has batches of its own. Raises UsageError
    where one loader's batches belong to other ranks than another's."""
    found = {name: one.coordinates for name, one in tracked.others().items() if isinstance(one, RankAssignment)}
    kinds = list(dict.fromkeys(found.values()))
    if len(kinds) > 1:
        one, other = (next(name for name, own in found.items() if own == kind) for kind in kinds[:2])
        raise UsageError(
            f"the loaders {one!r} and {other!r} divide their batches along different dimensions: give both the same"
            " mesh=, that of the data-parallel dimensions"
        )
    return kinds[0] if kinds else None


def positions(tracked: Tracked) -> dict[str, str]:
    """Return the position in the data, for a person."""
    return {name: json.dumps(thing.state_dict(), default=str) for name, thing in audited(tracked).items()}


def stream_reports(tracked: Tracked, view: int, step: int) -> Iterator[StreamReportedMessage]:
    """Yield what the commit of a step has granted, and which shards could not be read."""
    for name, stream in tracked.others().items():
        leases, problems = stream.take_news() if hasattr(stream, "take_news") else ([], [])
        for at in range(0, max(len(leases), len(problems)), REPORTS_MAX):
            part = slice(at, at + REPORTS_MAX)
            yield StreamReportedMessage(
                view=view, stream=name, step=step, leases=tuple(leases[part]), problems=tuple(problems[part])
            )


# --- whether the number of workers may change while they run: only where any number of them can share the data
#
# the script says so                hf.init(resizable=True): it splits its data by rank and world size in every step;
#                                   hf.init(resizable=False): it does not want it
# it says nothing                   yes, if its data comes from hf.Loader and hf.Stream alone, which share a step's
#                                   samples out again. Any other source would go on with the lost rank's part missing
# a loader's mesh                   no, unless the model is cut, and built again for another number (@hf.elastic)
# each rank has state of its own    no: what a rank has for itself is of no use to another world
#
# The same holds for another number of workers that go on from a snapshot or a checkpoint: the n-th batch of a source
# that was divided otherwise has other samples.

NO_SHARED_SOURCE = (
    "no hf.Loader or hf.Stream is tracked, which would share a lost rank's samples out: use one, or say"
    " hf.init(resizable=True) if the script splits its data by job.rank and job.world_size in every step"
)
UNUSED_SOURCE = (
    "the first update used no hf.Loader or hf.Stream, so that a lost rank's samples are not shared out: draw them with"
    " step.batches, or say hf.init(resizable=True) if the script splits its data by job.rank and job.world_size in"
    " every step"
)
MADE_FOR_ITS_MESH = (
    "a loader's mesh is made for this number of ranks: another takes a model that is cut and built again, in a function"
    " with @hf.elastic"
)


class Sizing:
    """One worker's answer. `choice`: what the script said in hf.init."""

    def __init__(self, choice: bool | None = None) -> None:
        self._choice = choice
        self._foreign = ""
        """The kind of a source that only its own rank can read."""
        self._has_drawn = self._is_unused = False
        """Whether a step has drawn from a tracked loader, and whether one has made an update before that."""
        self.divided_for = 0
        """The number of ranks that the script was built for, or that made the steps it goes on from; 0: not known."""

    def saw_shared(self) -> None:
        """Record that a step takes its batches out of an hf.Loader or an hf.Stream."""
        self._has_drawn = True

    def saw_update(self) -> bool:
        """Record that a step has updated the model; return whether that is news: its data, and that of the steps before
        it, came out of no tracked loader."""
        if self._has_drawn or self._is_unused:
            return False
        self._is_unused = True
        return self._choice is None

    def check_size(self, tracked: Tracked, world_size: int) -> None:
        """Raise ScriptError if another number of ranks would go on with data that cannot be divided again."""
        if self.divided_for in (0, world_size) or self._choice or not (why := self._why_undivided(tracked)):
            return
        ranks = f"{self.divided_for} rank{'s' * (self.divided_for != 1)}"
        now = f"there {'is' if world_size == 1 else 'are'} {world_size}"
        raise ScriptError(
            f"the data of the steps so far was divided among {ranks}, and now {now}, which would use other samples:"
            f" start with {ranks} ({why})"
        )

    def saw_source(self, source: Any) -> bool:
        """Record that a step takes its batch out of something that is no hf.Loader; return whether that is news."""
        if self._foreign:
            return False
        self._foreign = type(source).__name__
        return self._choice is None

    def why_fixed(self, tracked: Tracked, *, is_per_rank: bool, is_cut: bool) -> str:
        """Return why the number of workers must stay what it is; empty if it may change. `is_cut`: the model is made
        for one rank of one world."""
        if is_per_rank:
            names = ", ".join(tracked.local_names()) or "gradients that are accumulated over steps"
            if self._choice and tracked.local_names():
                raise ScriptError(
                    f"hf.init(resizable=True), and each rank has state of its own ({names}): another number of ranks"
                    " has no use for it; leave out one of the two"
                )
            return f"each rank has state of its own ({names})"
        if common_coordinates(tracked) and not (elastic.is_inside() and is_cut):
            return MADE_FOR_ITS_MESH
        if self._choice is not None:
            return "" if self._choice else "the script says hf.init(resizable=False)"
        return self._why_undivided(tracked)

    def _why_undivided(self, tracked: Tracked) -> str:
        if self._foreign:
            return (
                f"step.batches is given a {self._foreign}, whose samples are not shared out: use an hf.Loader, or say"
                " hf.init(resizable=True) if it is split by job.rank and job.world_size in every step"
            )
        if not loaders(tracked):
            return NO_SHARED_SOURCE
        return UNUSED_SOURCE if self._is_unused else ""
