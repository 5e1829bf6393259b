"""What the console shows of the master's records: the lines, word for word."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core import records as r
from holdfast.core.notices import notice
from holdfast.core.strategies import Strategy
from support.world import World


def closed(kind: r.IncidentKind = "worker", **fields: Any) -> r.IncidentClosed:
    given: dict[str, Any] = {
        "at": 100.4,
        "number": 1,
        "kind": kind,
        "cause": "rank 1 on a killed by SIGKILL",
        "strategy": Strategy.RECOVER_IN_PLACE,
        "happened_at": 100.0,
        "detected_at": 100.1,
        "decided_at": 100.1,
        "rebuilt_at": 100.2,
        "view_before": 1,
        "view_after": 2,
        "restarts_used": 0,
        "collateral": 0,
        "step": 86,
    }
    return r.IncidentClosed(**(given | fields))


@pytest.fixture
def world() -> World:
    world = World(nodes=(2, 2), workers=2)
    world.do(world.hello("a"), world.hello("b"))
    world.start_all()
    return world


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (
            closed(),
            "incident 1: rank 1 on a killed by SIGKILL; only what had failed was started again; training again after"
            " 0.4 s, at step 86",
        ),
        (
            closed(strategy=Strategy.RECOVER),
            "incident 1: rank 1 on a killed by SIGKILL; a spare took over; training again after 0.4 s, at step 86",
        ),
        (
            closed(strategy=Strategy.RESTART, step=-1, restarts_used=1, at=165.0),
            "incident 1: rank 1 on a killed by SIGKILL; all workers were restarted; training again after 1 min 5 s,"
            " 1 of 3 restarts used",
        ),
        (
            closed("planned", number=2, cause="node b joined", strategy=Strategy.ELASTIC_TRAINING),
            "change 2: node b joined; now 4 ranks on 2 nodes",
        ),
        (
            r.TrainingResumed(at=1.0, view=1, step=86, source="/runs/step-86"),
            "resumed at step 86 from /runs/step-86",
        ),
        (
            r.StragglerFound(at=1.0, view=1, node_id="a", rank=3, local_rank=1, own_s=0.2, usual_s=0.1, score=9.0),
            "rank 3 on a is a straggler: 200.0 ms a step before its first collective, 2.0 times as long as the others"
            " (100.0 ms)",
        ),
    ],
)
def test_what_a_person_wants_to_know_is_one_line(world: World, record: r.Record, line: str) -> None:
    assert notice(world.job, record) == line


def test_the_rest_is_not_for_the_console(world: World) -> None:
    shown = [notice(world.job, record) for record in world.history]
    assert len(shown) > 5 and not any(shown), "a start is a line of the agent"
