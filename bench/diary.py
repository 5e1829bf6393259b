"""Reads the diaries of scripts/ddp.py: who reached what, in which life, when."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Entry(NamedTuple):
    """One milestone. A life is a process: whoever has another pid has started anew."""

    event: str
    rank: int
    world: int
    step: int
    pid: int
    at: float


class Diary:
    """All ranks' diaries of one run, read as they grow."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read_bytes: dict[Path, int] = {}
        self.entries: list[Entry] = []

    def read_on(self) -> None:
        """Take in what was written since."""
        for path in self._directory.iterdir():
            with path.open("rb") as file:
                file.seek(self._read_bytes.get(path, 0))
                whole_lines, _, _ = file.read().rpartition(b"\n")
            if whole_lines:
                self._read_bytes[path] = self._read_bytes.get(path, 0) + len(whole_lines) + 1
                self.entries += [parse(line) for line in whole_lines.decode().splitlines()]

    @property
    def pids(self) -> set[int]:
        return {entry.pid for entry in self.entries}

    def running_pid(self, rank: int) -> int:
        """The process that has the rank now."""
        return max((entry.at, entry.pid) for entry in self.entries if entry.rank == rank)[1]

    def all_reached(self, step: int, old_pids: set[int], world: int | None = None) -> float | None:
        """When the last rank of a world finished the step, in lives other than the old ones; None if none has yet."""
        reached: dict[int, dict[int, float]] = {}
        for entry in self.entries:
            if entry.event == "step" and entry.step == step and entry.pid not in old_pids:
                reached.setdefault(entry.world, {})[entry.rank] = entry.at
        whole = [max(ranks.values()) for size, ranks in reached.items() if len(ranks) == size and world in (None, size)]
        return min(whole, default=None)

    def last(self, event: str, old_pids: set[int]) -> float:
        """When the last of the new lives reached a milestone for its first time."""
        first: dict[int, float] = {}
        for entry in self.entries:
            if entry.event == event and entry.pid not in old_pids:
                first.setdefault(entry.pid, entry.at)
        return max(first.values())


def parse(line: str) -> Entry:
    event, rank, world, step, pid, at = line.split()
    return Entry(event, int(rank), int(world), int(step), int(pid), float(at))
