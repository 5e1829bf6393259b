"""A hang over two nodes, both halves real: each agent's watch says when it tells, and the core is told so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.agent.hangs import BUSY_FLOOR_S, BUSY_TIMES, FLOOR_S, LONGEST_TIMES, HangWatch, ProgressSample
from holdfast.agent.process_activity import Activity, Reading
from holdfast.core import records as r
from holdfast.core.events import SessionInfo, WorkersWaiting
from holdfast.wire.progress_page import WorkerPhase
from support.world import World

READ_EVERY_S = 0.2


class WatchedNode:
    """One worker that made three steps and then stands still, and the watch of its agent."""

    def __init__(self, world: World, node_id: str, step: int, step_s: float, activity: Activity, waits: int) -> None:
        self.world, self.node_id, self.step, self.activity = world, node_id, step, activity
        reports: Any = SimpleNamespace(view=1, report=self.told)
        self.watch = HangWatch(list, reports, None)
        for made in (1, 2, 3):
            self.watch._times.record("w", made, step_s)
        known = dict.fromkeys(ProgressSample._fields, 0)
        self.page = ProgressSample(**known | {"view": 1, "phase": WorkerPhase.BODY, "step": step, "waits": waits})

    def told(self, kind: type, **_: Any) -> None:
        self.world.do((self.world.waiting if kind is WorkersWaiting else self.world.moved)(self.node_id))

    def look(self, now: float) -> None:
        is_busy, is_asleep = self.activity is Activity.RUNNABLE, self.activity is Activity.ASLEEP
        stalled_s = self.watch.look(
            {"w": self.page}, now, lambda _: now if is_busy else 0.0, lambda _: Reading(self.activity, 0, is_asleep)
        )
        if stalled_s is not None:
            seat = (0,)
            event = self.world.stalled(
                self.node_id,
                self.step,
                asleep=seat if is_asleep else (),
                idle=() if is_asleep or self.page.waits else seat,
                stalled_s=stalled_s,
                is_overdue=self.watch._is_overdue,
            )
            self.world.do(event)


def found_after(first: tuple[float, Activity, int], second: tuple[float, Activity, int], limit_s: float) -> float:
    """How long it takes until an incident is decided about two nodes that stand still."""
    world = World(nodes=(2, 2), session=SessionInfo(), restarts=3).train("a", "b")
    nodes = [WatchedNode(world, "a", 5, *first), WatchedNode(world, "b", 4, *second)]
    began_at, start, pause_s = 0.0, world.now, max(READ_EVERY_S, min(first[0], second[0]) / 10)
    while began_at <= limit_s:
        world.wait(max(start + began_at - world.now, 0.0))
        for node in nodes:
            if not decided(world):
                node.look(began_at)
        if decided(world):
            assert decided(world)[0].kind == "worker"
            return began_at
        began_at += pause_s
    raise AssertionError(f"nothing was decided within {limit_s:.0f} s")


def decided(world: World) -> list[r.IncidentDecided]:
    return [record for record in world.history if isinstance(record, r.IncidentDecided)]


WAITS, LOOPS, SLEEPS = (Activity.IDLE, 1), (Activity.RUNNABLE, 0), (Activity.ASLEEP, 0)


@pytest.mark.parametrize("step_s", [0.1, 1.0, 20.0])
@pytest.mark.parametrize("other_s", [1.0, 1.075, 0.5], ids=["alike", "slower", "faster"])
@pytest.mark.parametrize("what", [WAITS, LOOPS, SLEEPS], ids=["waits", "loops", "sleeps"])
def test_members_that_stand_still_beyond_any_limit_lead_to_an_incident(
    what: tuple[Activity, int], other_s: float, step_s: float
) -> None:
    longest_s = max(step_s, other_s * step_s)
    limit_s = max(BUSY_FLOOR_S, BUSY_TIMES * max(FLOOR_S, LONGEST_TIMES * longest_s))
    found_after((step_s, *WAITS), (other_s * step_s, *what), limit_s + 5.0)


@pytest.mark.parametrize("step_s", [0.01, 0.1, 0.3, 1.0, 5.0])
def test_a_sleeper_that_others_wait_for_is_found_within_ten_steps_or_two_seconds(step_s: float) -> None:
    """From the third step on: that is all that the watches have seen."""
    limit_s = max(10 * step_s, 2.0)
    assert found_after((step_s, *WAITS), (step_s, *SLEEPS), limit_s) <= limit_s
