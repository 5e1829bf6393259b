"""Where each worker's output is, as the journal tells: which rank ran on which node, and where that node keeps it.

    <log_dir of the node>/attempt_<view - 1>/<local rank>/{stdout.log,stderr.log}

A worker that lives on into a later view stays with the directory it began with: then its node says which (NodeStarted).
A node's directory is unique to one life of it, so a directory that is here is the right one, also on a shared file
system; what is not here is named with its node.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from holdfast.core import records as r
from holdfast.core.events import NodeInfo
from holdfast.core.views import Member, View
from holdfast.errors import UsageError
from holdfast.journal import Entry


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's place in a view, and its directory; None if its node keeps no files."""

    view: int
    rank: int
    node_id: str
    host: str
    directory: Path | None


class Outputs:
    """What the records so far say about workers' output."""

    def __init__(self) -> None:
        self._views: dict[int, View] = {}
        self._nodes: dict[str, NodeInfo] = {}
        self._started: dict[int, dict[str, tuple[str, ...]]] = {}
        self.finished = False

    def take(self, entries: Iterable[Entry]) -> None:
        """Learn from further records."""
        for entry in entries:
            match entry.record:
                case r.NodeJoined(incarnation=incarnation, info=info):
                    self._nodes[incarnation] = info
                case r.ViewFormed(view=view):
                    self._views[view.number] = view
                case r.NodeStarted(node_id=node_id, view=number, logs=logs):
                    self._started.setdefault(number, {})[node_id] = logs
                case r.JobFinished():
                    self.finished = True

    @property
    def newest(self) -> int:
        """Number of the newest view, 0 before the first."""
        return max(self._views, default=0)

    def has_started(self, output: Output) -> bool:
        """Whether its files must be there by now, if they will ever be."""
        is_over = self.finished or self.newest > output.view
        return is_over or output.node_id in self._started.get(output.view, ())

    def is_over(self, view: int) -> bool:
        """Whether no worker of the view writes any more, but for those that live on: on each node, the next one's start
        when those are gone."""
        newest = self._views.get(self.newest)
        if newest is None or newest.number <= view:
            return False
        return self._has_started(newest)

    def is_known(self, view: int) -> bool:
        """Whether it is known where the view's workers write: of those that live on, once their nodes have said so."""
        return not self._views[view].kept or self._has_started(self._views[view]) or self.newest > view or self.finished

    def _has_started(self, view: View) -> bool:
        return {m.node_id for m in view.members} <= self._started.get(view.number, {}).keys()

    def of(self, view_number: int, rank: int | None) -> list[Output]:
        """The outputs of a view by rank, or of one rank of it."""
        view = self._views.get(view_number)
        if view is None:
            so_far = f"the newest is view {self.newest}" if self.newest else "no workers have been started yet"
            raise UsageError(f"there is no view {view_number}: {so_far}")
        if rank is not None and not 0 <= rank < view.world_size:
            raise UsageError(f"view {view_number} has no rank {rank}: its ranks are 0 to {view.world_size - 1}")
        outputs = [self._output(view, m, i) for m in view.members for i in range(m.workers)]
        return outputs if rank is None else [outputs[rank]]

    def _output(self, view: View, member: Member, local_rank: int) -> Output:
        info = self._nodes[member.incarnation]
        kept = info.log_dir not in ("", os.devnull)
        logs = self._started.get(view.number, {}).get(member.node_id, ())
        own = logs[local_rank] if local_rank < len(logs) else f"attempt_{view.number - 1}/{local_rank}"
        directory = Path(info.log_dir) / own
        return Output(
            view=view.number,
            rank=member.first_rank + local_rank,
            node_id=member.node_id,
            host=info.host,
            directory=directory if kept else None,
        )


def absence(outputs: list[Output]) -> list[str]:
    """A sentence for each node whose workers' output is not here."""
    by_node: dict[str, list[Output]] = {}
    for output in outputs:
        by_node.setdefault(output.node_id, []).append(output)
    return [_absence(missing) for missing in by_node.values()]


def _absence(missing: list[Output]) -> str:
    first, ranks = missing[0], listed([output.rank for output in missing])
    whose = f"the output of {'ranks' if len(missing) > 1 else 'rank'} {ranks} in view {first.view}"
    if first.directory is None:
        return f"{whose} is in no file: node {first.node_id} ({first.host}) keeps none"
    return f"{whose} is not on this machine: node {first.node_id} ({first.host}) has it in {first.directory.parent}"


def listed(ranks: list[int]) -> str:
    """Ranks in a few words: 0-3, 5."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
