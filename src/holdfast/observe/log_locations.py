"""Where each worker's log files are, by the journal: which rank ran on which node, and that node's log directory.

    <log_dir of the node>/attempt_<view - 1>/<local rank>/{stdout.log,stderr.log}

A worker that survives into a later view keeps the directory it started with; its node reports which one
(WorkersStartedRecord). A node's directory is unique to one incarnation of it, so a directory that is found here is the
right one, also on a shared file system. For files that are not here the sentence names the node that has them.
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
from holdfast.journal import JournalEntry
from holdfast.observe.formatting import format_ranks


class WorkerLog(msgspec.Struct, frozen=True, kw_only=True):
    """The log directory of one rank in one view; None if its node writes no files."""

    view: int
    rank: int
    node_id: str
    host: str
    directory: Path | None


class LogLocations:
    """What the records so far say about workers' log files."""

    def __init__(self) -> None:
        self._views: dict[int, View] = {}
        self._nodes: dict[str, NodeInfo] = {}
        self._started: dict[int, dict[str, tuple[str, ...]]] = {}
        self.finished = False

    def add(self, entries: Iterable[JournalEntry]) -> None:
        """Add further records."""
        for entry in entries:
            match entry.record:
                case r.NodeJoined(incarnation=incarnation, info=info):
                    self._nodes[incarnation] = info
                case r.ViewFormed(view=view):
                    self._views[view.number] = view
                case r.WorkersStartedRecord(node_id=node_id, view=number, logs=logs):
                    self._started.setdefault(number, {})[node_id] = logs
                case r.JobFinished():
                    self.finished = True

    @property
    def newest(self) -> int:
        """Number of the newest view, 0 before the first."""
        return max(self._views, default=0)

    def has_started(self, log: WorkerLog) -> bool:
        """Return whether the files must exist by now, if they will ever exist."""
        is_over = self.finished or self.newest > log.view
        return is_over or log.node_id in self._started.get(log.view, ())

    def is_over(self, view: int) -> bool:
        """Return whether the view's workers write no more, except those that survive into the next view.

        That is known when every node has started the newest view's workers.
        """
        newest = self._views.get(self.newest)
        if newest is None or newest.number <= view:
            return False
        return self._has_started(newest)

    def is_known(self, view: int) -> bool:
        """Return whether the directories of the view's workers are known: for surviving ones their nodes report it."""
        return (
            not self._views[view].keeps_workers
            or self._has_started(self._views[view])
            or self.newest > view
            or self.finished
        )

    def _has_started(self, view: View) -> bool:
        return {m.node_id for m in view.members} <= self._started.get(view.number, {}).keys()

    def find(self, view_number: int, rank: int | None) -> list[WorkerLog]:
        """Return the logs of a view by rank, or of one rank of it."""
        view = self._views.get(view_number)
        if view is None:
            so_far = f"the newest is view {self.newest}" if self.newest else "no workers have been started yet"
            raise UsageError(f"there is no view {view_number}: {so_far}")
        if rank is not None and not 0 <= rank < view.world_size:
            raise UsageError(f"view {view_number} has no rank {rank}: its ranks are 0 to {view.world_size - 1}")
        logs = [self._log(view, m, i) for m in view.members for i in range(m.workers)]
        return logs if rank is None else [logs[rank]]

    def _log(self, view: View, member: Member, local_rank: int) -> WorkerLog:
        info = self._nodes[member.incarnation]
        has_files = info.log_dir not in ("", os.devnull)
        reported = self._started.get(view.number, {}).get(member.node_id, ())
        own = reported[local_rank] if local_rank < len(reported) else f"attempt_{view.number - 1}/{local_rank}"
        return WorkerLog(
            view=view.number,
            rank=member.first_rank + local_rank,
            node_id=member.node_id,
            host=info.host,
            directory=Path(info.log_dir) / own if has_files else None,
        )


def missing_sentences(logs: list[WorkerLog]) -> list[str]:
    """Return a sentence for each node whose workers' logs are not here."""
    by_node: dict[str, list[WorkerLog]] = {}
    for log in logs:
        by_node.setdefault(log.node_id, []).append(log)
    return [_missing_sentence(missing) for missing in by_node.values()]


def _missing_sentence(missing: list[WorkerLog]) -> str:
    first, ranks = missing[0], format_ranks([log.rank for log in missing])
    subject = f"the output of {'ranks' if len(missing) > 1 else 'rank'} {ranks} in view {first.view}"
    if first.directory is None:
        return f"{subject} is in no file: node {first.node_id} ({first.host}) writes none"
    return f"{subject} is not on this machine: node {first.node_id} ({first.host}) has it in {first.directory.parent}"
