"""Reads the ledger of scripts/online.py: what every rank tried, and what was committed.

A step's attempt belongs to a view. `tried` is written before the commit barrier, so a step that is committed has one
such line for every rank of the attempt's view, also of those who died in the barrier; `done` is missing for those.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple


class Try(NamedTuple):
    """One rank's part in an attempt at a step."""

    pid: int
    world: int
    loss: str
    samples: tuple[int, ...]


class Done(NamedTuple):
    """A rank's word that the step is committed."""

    step: int
    rank: int
    view: int
    world: int
    pid: int
    at: float


class Ledger:
    """All ranks' lines of one run, read as they grow."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0
        self.tries: dict[int, dict[int, dict[int, Try]]] = defaultdict(lambda: defaultdict(dict))
        """By step, view and rank."""
        self.done: list[Done] = []
        self.last_attempts: dict[int, tuple[int, int]] = {}
        """By process: the view and the rank of its last attempt."""

    def read_on(self) -> None:
        """Take in what was written since."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            whole_lines, _, _ = file.read().rpartition(b"\n")
        if whole_lines:
            self._read_bytes += len(whole_lines) + 1
            for line in whole_lines.decode().splitlines():
                self._take(line.split())

    def _take(self, words: list[str]) -> None:
        step, rank, view, world, pid = map(int, words[1:6])
        if words[0] == "tried":
            samples = tuple(map(int, words[7].split(",")))
            self.tries[step][view][rank] = Try(pid, world, words[6], samples)
            self.last_attempts[pid] = (view, rank)
        else:
            self.done.append(Done(step, rank, view, world, pid, float(words[6])))

    def whole_after(self, at: float, ranks: int) -> int:
        """The first step that all ranks of the full world said to be committed after this moment; -1 if there is none
        yet."""
        said: dict[int, set[int]] = defaultdict(set)
        for line in reversed(self.done):
            if line.at <= at - 5.0:
                break  # lines are nearly in order of time
            if line.at > at and line.world == ranks:
                said[line.step].add(line.rank)
        return min((step for step, who in said.items() if len(who) == ranks), default=-1)

    def processes(self, ranks: int) -> dict[int, int]:
        """The process of each rank, by the last attempts in the newest view."""
        newest = max((view for view, _ in self.last_attempts.values()), default=0)
        return {rank: pid for pid, (view, rank) in self.last_attempts.items() if view == newest and rank < ranks}

    def committed_views(self) -> dict[int, set[int]]:
        """By step: the views in which it is said to be committed. More than one would be two histories."""
        found: dict[int, set[int]] = defaultdict(set)
        for line in self.done:
            found[line.step].add(line.view)
        return found
