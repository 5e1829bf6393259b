"""A world whose nodes are checked: they do what they are told, as well as the test wants them to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.core import orders as o
from holdfast.core import records as r
from holdfast.core.health.findings import ALONE, PAIRED, CheckProblem, CheckResult, CheckTask, Timing
from support.world import World

WRONG = (CheckProblem("matmul", "wrong-result", "the product is wrong", 0),)
PIECE_S = 0.01


class Clinic(World):
    """A world whose nodes do what they are told in a check: `times` as slow as others, or with a wrong result."""

    def __init__(self, *, nodes: tuple[int, int], **settings: Any) -> None:
        super().__init__(nodes=nodes, node_check=True, **settings)
        self.times: dict[str, float] = {}
        self.links: dict[frozenset[str], float] = {}
        self.wrong: set[str] = set()
        self.kinds: dict[str, str] = {}
        """The processors of those that do not have the usual ones."""
        self.mute: set[str] = set()
        """Nodes that never answer."""
        self.killed: set[str] = set()
        """Nodes whose process dies in their next pair, once."""
        self.deaths: set[tuple[str, int]] = set()
        """Those, and in which rounds."""
        self.fails_alone: dict[str, list[CheckProblem]] = {}
        """By node: with what it fails alone, one after the other, until there is no more."""
        self.stores: dict[str, int] = {}
        """Of the stores of processes that live."""
        self.stores_made = 29_900
        self.answered: set[tuple[str, str, int]] = set()
        self.tasks: list[tuple[str, CheckTask]] = []

    def open_tasks(self) -> list[tuple[str, CheckTask]]:
        found = []
        for node_id in self.incarnations:
            order = self.told.get(self.life(node_id))
            task = order.check if isinstance(order, o.Hold) and node_id not in self.mute else None
            if task and (self.life(node_id), task.checkup, task.round) not in self.answered:
                found.append((node_id, task))
        return found

    def play(self) -> list[r.Record]:
        """Until nobody has anything to do."""
        happened: list[r.Record] = []
        while tasks := self.open_tasks():
            for node_id, task in tasks:
                self.tasks.append((node_id, task))
                self.answered.add((self.life(node_id), task.checkup, task.round))
                happened += self.do(self.examined(node_id, self.result(node_id, task))).records
        return happened

    def store_of(self, node_id: str) -> int:
        """Of the process of this life of the node, which is made if there is none."""
        if self.life(node_id) not in self.stores:
            self.stores_made += 1
            self.stores[self.life(node_id)] = self.stores_made
        return self.stores[self.life(node_id)]

    def result(self, node_id: str, task: CheckTask) -> CheckResult:
        """As its agent would tell it: who has no process any more has no store."""
        if task.kind == "pair" and node_id in self.killed:
            self.killed.remove(node_id)
            self.deaths.add((node_id, task.round))
            self.stores.pop(self.life(node_id), None)
            return CheckResult(
                problems=(CheckProblem("all-reduce", "check-failed", "its process was killed by SIGKILL"),)
            )
        if task.kind == "alone" and (failures := self.fails_alone.get(node_id)):
            return CheckResult(problems=(failures.pop(0),), store_port=self.store_of(node_id))
        port = self.store_of(node_id)
        return msgspec.structs.replace(self._done(node_id, task), store_port=port)

    def _done(self, node_id: str, task: CheckTask) -> CheckResult:
        kind = self.kinds.get(node_id, "cuda")
        if task.kind == "pair":
            host = node_id if task.rank == 0 else task.partner
            is_gone = task.partner in self.killed or (task.partner, task.round) in self.deaths
            if is_gone or task.store_port != self.stores.get(self.life(host)):
                return CheckResult(problems=(CheckProblem("all-reduce", "check-failed", "the partner did not come"),))
            link = self.links.get(frozenset((node_id, task.partner)), 1.0)
            if link == float("inf"):
                return CheckResult(problems=(CheckProblem("all-reduce", "check-failed", "no route"),))
            times = max(self.times.get(node_id, 1.0), self.times.get(task.partner, 1.0)) * link
            return CheckResult(timings=tuple(Timing(stage, times * PIECE_S, 0.001) for stage in PAIRED))
        if task.kind == "ready":
            return CheckResult(accelerator=kind)
        timings = tuple(Timing(stage, self.times.get(node_id, 1.0) * PIECE_S, 0.001) for stage in ALONE)
        problems = WRONG if node_id in self.wrong else ()
        return CheckResult(timings=timings, problems=problems, accelerator=kind)

    def come(self, *node_ids: str, **info: Any) -> list[r.Record]:
        """They join, and what follows is played to its end."""
        happened = self.do(*(self.hello(node_id, **info) for node_id in node_ids)).records
        happened += self.play()
        happened += self.wait(self.settings.settle_s)
        return happened + self.play()

    def health(self) -> dict[str, type]:
        return {node_id: type(node.health) for node_id, node in self.job.nodes.items()}

    def checked(self) -> list[r.CheckConcluded]:
        return [record for record in self.history if isinstance(record, r.CheckConcluded)]


def clinic(least: int, most: int = 0, *, times: Mapping[str, float] | None = None, **settings: Any) -> Clinic:
    made = Clinic(nodes=(least, most or least), **settings)
    made.times = dict(times or {})
    return made
